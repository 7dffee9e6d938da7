//! **limits**: bounds on calls in flight, on concurrent reads of etcd, and on buffered bytes. Each is one of two: a number of
//! [`Slots`], or bytes of the [`BytesLedger`]; calls in flight are bounded by their count alone ([`Admission`], `--max-calls`).
//!
//! | file | bound |
//! |---|---|
//! | `slots` | calls at once, and calls that wait: reads of etcd (`--forward-max-large`, `--forward-max-small`, `--forward-max-waiting`), costly calls, scans, handovers of watches |
//! | `bytes` | bytes of `--buffer-max-bytes` and `--watch-max-bytes`, by kind, client and connection |
//! | `policy` | the rules by which bytes are given |
//! | `line` | waiting calls by client and by connection, which take turns; the deadline of a call, and why it gets nothing |
//! | `intake` | requests that one connection has read |
//! | `flags` | the flags |
//!
//! `metrics` declares what this room counts.

mod bytes;
mod flags;
mod intake;
mod line;
mod metrics;
mod policy;
mod slots;

use std::sync::atomic::{AtomicUsize, Ordering};

use rangecache_base::telemetry::metrics::Gauge;
use tokio_util::task::TaskTracker;

pub use bytes::{BytesLedger, ClientAccount, HeldBytes};
pub use flags::{
    ClientsConfig, FIXED_BYTES, LimitsConfig, MIN_BUFFER_BYTES, connections_memory, default_buffer_bytes,
    default_connections, default_handshakes,
};
pub use intake::{Intake, Unhandled};
pub use line::{Deadline, Exceeded};
pub use metrics::{
    BufferKindMetrics, BufferMetrics, OpenConnections, ShareMetrics, SlotMetrics, SlotsMetrics,
};
pub use policy::ByteKind;
pub use slots::{Gate, Slot, SlotPolicy, Slots, Waiting};

/// Decides whether another call is accepted.
#[derive(Debug)]
pub struct Admission {
    max_calls: AtomicUsize,
    /// Tracker of one task per open connection and one per call in flight.
    tasks: TaskTracker,
    /// Open connections.
    connections: Gauge,
}

impl Admission {
    /// Accepts at most `max_calls` calls at once. `tasks` tracks one task per open connection, which `connections`
    /// counts, and one per call.
    #[must_use]
    pub fn new(max_calls: usize, tasks: &TaskTracker, connections: &Gauge) -> Admission {
        Admission {
            max_calls: AtomicUsize::new(max_calls),
            tasks: tasks.clone(),
            connections: connections.clone(),
        }
    }

    /// Accepts at most `max_calls` calls from now on.
    pub fn set_max_calls(&self, max_calls: usize) {
        self.max_calls.store(max_calls, Ordering::Relaxed);
    }

    /// Whether more than `max_calls` calls are in flight, including the one that is being accepted.
    #[must_use]
    pub fn is_full(&self) -> bool {
        // hyper runs each HTTP/2 call in a task until the last byte of its response is sent, so that the difference
        // of two loads counts the calls: no counter has to be updated per call.
        let connections = usize::try_from(self.connections.get()).unwrap_or(0);
        self.tasks.len().saturating_sub(connections) > self.max_calls.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tasks_beyond_open_connections_count_as_calls() {
        let (tasks, connections) = (TaskTracker::new(), Gauge::default());
        let admission = Admission::new(2, &tasks, &connections);
        let mut tokens: Vec<_> = (0..3).map(|_| tasks.token()).collect();
        assert!(admission.is_full(), "three calls");
        connections.inc();
        assert!(!admission.is_full(), "one of the tasks belongs to a connection");
        tokens.push(tasks.token());
        assert!(admission.is_full());
        tokens.truncate(3);
        assert!(!admission.is_full(), "one call has completed");
        admission.set_max_calls(1);
        assert!(admission.is_full(), "the bound was lowered");
    }
}
