//! The runtime of the watchers.

use std::io::Write as _;

use anyhow::Result;
use tokio::runtime::{Builder, Handle, Runtime};

/// Niceness of the threads that receive events.
const NICENESS: i32 = 10;

/// A runtime apart from the one of the puts, of the reads and of the links between rangecache and etcd, at a lower
/// priority. Watchers of production are other machines: decoding what they receive must not delay the calls that are
/// measured, nor the servers.
pub(super) struct Background {
    handle: Handle,
    /// `None` once it is being shut down.
    runtime: Option<Runtime>,
}

impl Background {
    pub(super) fn start() -> Result<Background> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("watchers")
            .on_thread_start(|| {
                // On Linux this concerns the calling thread alone.
                if let Err(error) = rustix::process::nice(NICENESS) {
                    let _ = writeln!(
                        std::io::stderr(),
                        "cannot lower the priority of the watchers: {error}"
                    );
                }
            })
            .enable_all()
            .build()?;
        Ok(Background {
            handle: runtime.handle().clone(),
            runtime: Some(runtime),
        })
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Dropping a runtime inside another waits for it, which is not allowed there.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}
