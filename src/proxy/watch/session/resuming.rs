//! The wait of a stream over several mirrors for one that has lost its feed.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Instant;

use crate::mirror::Mirrors;

/// Time after which the mirror is looked at again.
const FEED_TIMEOUT: Duration = Duration::from_secs(10);

/// Waits until one mirror has a feed, or for [`FEED_TIMEOUT`].
pub(super) struct Resuming(Pin<Box<dyn Future<Output = ()> + Send>>);

impl fmt::Debug for Resuming {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resuming").finish_non_exhaustive()
    }
}

impl Resuming {
    /// Waits for the mirror at this position.
    pub(super) fn of(mirrors: Arc<Mirrors>, position: usize) -> Resuming {
        Resuming(Box::pin(async move {
            if let Some(mirror) = mirrors.at(position) {
                let _ = mirror.resumed(Instant::now() + FEED_TIMEOUT).await;
            }
        }))
    }

    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        self.0.as_mut().poll(cx)
    }
}
