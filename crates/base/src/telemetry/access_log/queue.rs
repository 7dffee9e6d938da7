//! The queue of entries, whose senders never wait.

use std::sync::Arc;

use crate::telemetry::metrics::Counter;
use http::HeaderMap;
use tokio::sync::mpsc;

use super::entry::LogEntry;
use super::sample::CallSample;

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
