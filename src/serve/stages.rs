//! The tasks of the process, and the three stages of its stop.

use std::time::Duration;

use tokio::time::{Instant, timeout_at};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

/// Time for background tasks to stop, even if calls have used up all of --shutdown-timeout.
pub(super) const BACKGROUND_TIMEOUT: Duration = Duration::from_millis(500);

/// For each stage of a stop, the token that begins it and the tasks that end by it.
#[derive(Debug, Default)]
pub struct Stages {
    /// Accept no more connections.
    pub closing: CancellationToken,
    /// Tasks that accept connections of clients.
    pub listeners: TaskTracker,
    /// Accept no more calls, and end those that never end by themselves.
    pub drain: CancellationToken,
    /// Connections and calls of clients.
    pub calls: TaskTracker,
    /// Stop the mirrors and every other background task.
    pub stop: CancellationToken,
    /// Every other task.
    pub background: TaskTracker,
}

impl Stages {
    /// Stops connections, then calls, for which it waits up to `timeout`, then background tasks.
    pub async fn end(&self, timeout: Duration) {
        tracing::info!(?timeout, "stopping: no new calls; calls in flight may complete");
        let deadline = Instant::now() + timeout;
        // The port is closed before clients are told to leave, so that a client that connects again reaches the next
        // process on that port.
        self.closing.cancel();
        self.listeners.close();
        self.listeners.wait().await;
        self.drain.cancel();
        self.calls.close();
        if timeout_at(deadline, self.calls.wait()).await.is_err() {
            tracing::warn!(
                tasks = self.calls.len(),
                "calls were still in flight at the end of --shutdown-timeout and are aborted"
            );
        }
        self.stop.cancel();
        self.background.close();
        let deadline = deadline.max(Instant::now() + BACKGROUND_TIMEOUT);
        let _ = timeout_at(deadline, self.background.wait()).await;
        tracing::info!("stopped");
    }
}
