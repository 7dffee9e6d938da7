//! Selection of the calls that are logged, and the queue of their entries, whose senders never wait.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use http::HeaderMap;
use tokio::sync::mpsc;

use super::entry::LogEntry;
use crate::telemetry::{metrics::Counter, trace::trace_id_of};

/// Entries that wait to be written.
const QUEUE_ENTRIES: usize = 4096;

/// Queues entries of calls. The default one logs nothing.
#[derive(Clone, Debug, Default)]
pub struct AccessLog(Option<Arc<EntryQueue>>);

#[derive(Debug)]
struct EntryQueue {
    sample: CallSample,
    has_keys: bool,
    entries: mpsc::Sender<LogEntry>,
    dropped: Counter,
}

impl AccessLog {
    /// A log of this share of the calls, and the queue of its entries. Entries that find it full are counted as
    /// `dropped`.
    pub(super) fn new(share: f64, has_keys: bool, dropped: Counter) -> (AccessLog, mpsc::Receiver<LogEntry>) {
        let (entries, queue) = mpsc::channel(QUEUE_ENTRIES);
        let log = EntryQueue {
            sample: CallSample::new(share),
            has_keys,
            entries,
            dropped,
        };
        (AccessLog(Some(Arc::new(log))), queue)
    }

    /// Whether the call with these headers is logged.
    #[inline]
    #[must_use]
    pub fn takes(&self, headers: &HeaderMap) -> bool {
        self.0.as_ref().is_some_and(|log| log.sample.takes(headers))
    }

    /// Logs this share of the calls from now on.
    pub fn set_share(&self, share: f64) {
        if let Some(log) = &self.0 {
            log.sample.set(share);
        }
    }

    /// Whether entries contain keys.
    #[must_use]
    pub fn has_keys(&self) -> bool {
        self.0.as_ref().is_some_and(|log| log.has_keys)
    }

    /// Queues the entry of a call that has ended.
    pub fn queue(&self, entry: LogEntry) {
        if let Some(log) = &self.0
            && log.entries.try_send(entry).is_err()
        {
            log.dropped.inc();
        }
    }
}

/// 2^64 divided by the golden ratio: its multiples are spread evenly over all numbers, without a period that calls
/// could have as well.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// A share of all calls. Calls of one trace are all in it, or none of them.
#[derive(Debug)]
pub(super) struct CallSample {
    /// Numbers below it are in the share; all are if it is the highest number.
    below: AtomicU64,
    /// Number of the last call without a trace.
    last: AtomicU64,
}

impl CallSample {
    /// A share from 0 to 1.
    pub(super) fn new(share: f64) -> CallSample {
        CallSample {
            below: AtomicU64::new(threshold(share)),
            last: AtomicU64::new(0),
        }
    }

    /// Takes another share from now on.
    pub(super) fn set(&self, share: f64) {
        self.below.store(threshold(share), Ordering::Relaxed);
    }

    /// Whether the call with these headers is in the share.
    pub(super) fn takes(&self, headers: &HeaderMap) -> bool {
        let below = self.below.load(Ordering::Relaxed);
        if below == u64::MAX {
            return true;
        }
        let number = match trace_id_of(headers) {
            // The last bytes of a trace id are random.
            Some(trace_id) => {
                let [.., a, b, c, d, e, f, g, h] = trace_id.to_bytes();
                u64::from_be_bytes([a, b, c, d, e, f, g, h])
            }
            None => self.last.fetch_add(STEP, Ordering::Relaxed),
        };
        number < below
    }
}

/// The number below which calls of a share from 0 to 1 are.
#[allow(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a share of 2^64; a conversion from floating point saturates"
)]
fn threshold(share: f64) -> u64 {
    (share * u64::MAX as f64) as u64
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;
    use crate::telemetry::trace::TRACEPARENT;

    #[test]
    fn share_of_calls_without_a_trace_is_exact() {
        for (share, expected) in [
            (0.0, 0..=0),
            (0.01, 98..=102),
            (0.5, 4990..=5010),
            (1.0, 10_000..=10_000),
        ] {
            let sample = CallSample::new(share);
            let headers = HeaderMap::new();
            let taken = (0..10_000).filter(|_| sample.takes(&headers)).count();
            assert!(expected.contains(&taken), "{share}: {taken}");
        }
    }

    #[test]
    fn calls_of_one_trace_are_logged_together() {
        let sample = CallSample::new(0.5);
        let with_trace = |id: u128| {
            let value = HeaderValue::from_str(&format!("00-{id:032x}-00000000000000aa-00")).unwrap();
            HeaderMap::from_iter([(TRACEPARENT, value)])
        };
        for (id, taken) in [
            (0x4bf9_2f35_77b3_4da6_0000_0000_0000_0001, true),
            (0x4bf9_2f35_77b3_4da6_f000_0000_0000_0000, false),
        ] {
            for _ in 0..3 {
                assert_eq!(sample.takes(&with_trace(id)), taken, "{id:x}");
            }
        }
    }
}
