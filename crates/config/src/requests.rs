//! Requests to reload the flags, and their results.

use std::time::Duration;

use serde::Serialize;
use tokio::sync::{mpsc, oneshot};

/// Reloads that may wait.
const MAX_WAITING: usize = 8;
/// Time limit for a reload as its caller sees it.
const REPLY_TIMEOUT: Duration = Duration::from_secs(15);

/// Flags that a reload has changed, each as `flag: old → new`.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Reloaded {
    /// In effect.
    pub changed: Vec<String>,
    /// Differs from what the process runs with, and takes effect with its next start.
    pub needs_restart: Vec<String>,
}

/// For the result of a reload.
pub type ReloadReply = oneshot::Sender<Result<Reloaded, String>>;

/// Requests reloads. Cloning it copies a reference.
#[derive(Clone, Debug)]
pub struct ReloadHandle(mpsc::Sender<Option<ReloadReply>>);

impl ReloadHandle {
    /// Requests a reload whose result goes to the log alone.
    pub fn request(&self) {
        // Otherwise further reloads wait already, and will read the same file.
        let _ = self.0.try_send(None);
    }

    /// Reloads.
    ///
    /// # Errors
    /// Why nothing was changed.
    pub async fn reload(&self) -> Result<Reloaded, String> {
        let (reply, reloaded) = oneshot::channel();
        let busy = || "too many reloads wait; try again".to_owned();
        self.0.try_send(Some(reply)).map_err(|_| busy())?;
        match tokio::time::timeout(REPLY_TIMEOUT, reloaded).await {
            Ok(Ok(reloaded)) => reloaded,
            _ => Err(busy()),
        }
    }
}

/// A handle, and the requests that come by it.
#[must_use]
pub fn reload_channel() -> (ReloadHandle, ReloadRequests) {
    let (sender, receiver) = mpsc::channel(MAX_WAITING);
    (ReloadHandle(sender), ReloadRequests(receiver))
}

/// Requests of reloads.
#[derive(Debug)]
pub struct ReloadRequests(mpsc::Receiver<Option<ReloadReply>>);

impl ReloadRequests {
    /// Waits for the next one, and for whom its result is; `None` once all handles are dropped.
    pub async fn next(&mut self) -> Option<Option<ReloadReply>> {
        self.0.recv().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn reloads_beyond_those_that_may_wait_are_refused_and_late_ones_given_up() {
        let (handle, mut requests) = reload_channel();
        for _ in 0..MAX_WAITING {
            handle.request();
        }
        let busy = Err("too many reloads wait; try again".to_owned());
        assert_eq!(handle.reload().await.map(|_| ()), busy);
        assert!(requests.next().await.unwrap().is_none(), "no caller waits for it");
        assert_eq!(
            handle.reload().await.map(|_| ()),
            busy,
            "it is not performed in time"
        );
    }
}
