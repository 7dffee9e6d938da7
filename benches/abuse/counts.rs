//! Counts of the misbehaving client so far, and its pause before it connects again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Pause before a closed connection is replaced.
pub(crate) const RECONNECT_PAUSE: Duration = Duration::from_millis(200);

/// Counts so far.
#[derive(Default)]
pub(crate) struct Counts {
    /// Connections opened.
    pub(crate) connections: AtomicU64,
    /// Connections that the server closed.
    pub(crate) closed: AtomicU64,
    /// Calls, or frames of a flood.
    pub(crate) calls: AtomicU64,
    /// Calls that the server refused, reset or ended.
    pub(crate) refused: AtomicU64,
    /// GOAWAY frames.
    pub(crate) goaway: AtomicU64,
}

/// [`Counts`] as printed.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Counted {
    pub(crate) connections: u64,
    pub(crate) closed: u64,
    pub(crate) calls: u64,
    pub(crate) refused: u64,
    pub(crate) goaway: u64,
}

impl Counts {
    /// The counts now.
    pub(crate) fn read(&self) -> Counted {
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        Counted {
            connections: of(&self.connections),
            closed: of(&self.closed),
            calls: of(&self.calls),
            refused: of(&self.refused),
            goaway: of(&self.goaway),
        }
    }
}
