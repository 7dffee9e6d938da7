//! A stream that is about to leave memory.

use std::pin::Pin;
use std::time::Duration;

use tokio::time::Sleep;

use crate::proxy::watch::request::Create;
use crate::telemetry::Reason;

/// Longest wait for a mirror that is behind etcd's compaction, or behind a watcher.
const MIRROR_TIMEOUT: Duration = Duration::from_millis(500);

/// A stream that leaves memory once its mirrors have reached what they must have.
#[derive(Debug)]
pub(super) struct Departure {
    pub(super) reason: Reason,
    /// Request that was not answered.
    pub(super) create: Option<Create>,
    pub(super) expires: Pin<Box<Sleep>>,
}

impl Departure {
    /// A departure that begins to wait.
    pub(super) fn new(reason: Reason, create: Option<Create>) -> Departure {
        Departure {
            reason,
            create,
            expires: Box::pin(tokio::time::sleep(MIRROR_TIMEOUT)),
        }
    }
}
