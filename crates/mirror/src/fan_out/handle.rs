//! The handle of a fan-out: what streams call.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use rangecache_base::telemetry::Reason;
use tokio::sync::{Notify, oneshot};

use super::join::{Join, Signal};
use super::reader::Reader;
use crate::lineage::HistoryId;

/// Joins that may wait for the fan-out at once. Each open stream has at most one.
const MAX_WAITING_JOINS: usize = 20_000;
/// Timeout of a join.
const JOIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Reason why watchers were not added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JoinRefused {
    /// The mirror is out of service.
    OutOfService(Reason),
    /// The log does not reach back to a watcher's first revision.
    Trimmed,
    /// The mirror is of another history than the caller's.
    Replaced,
    /// Too many streams join at once, or the fan-out did not respond in time.
    Busy,
}

/// Watchers that join together.
pub(super) struct JoinRequest {
    pub(super) signal: Arc<Signal>,
    pub(super) history: Option<HistoryId>,
    pub(super) watchers: Vec<Join>,
    pub(super) reply: oneshot::Sender<Result<Vec<Reader>, JoinRefused>>,
}

/// Distributes the events of one mirror to watchers.
#[derive(Default)]
pub struct FanOut {
    pub(super) joins: Mutex<Vec<JoinRequest>>,
    /// Streams that wait until the fan-out has reached a revision.
    pub(super) waiting: Mutex<Vec<(i64, Arc<Signal>)>>,
    pub(super) held: Mutex<Held>,
    max_unused_bytes: AtomicU64,
    max_list_bytes: AtomicU64,
    /// No watcher may join, and those that have joined continue at etcd.
    is_closed: AtomicBool,
    /// Wakes the fan-out's task for `joins`, `waiting` and `is_closed`.
    pub(super) called: Notify,
}

impl std::fmt::Debug for FanOut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("FanOut").finish_non_exhaustive()
    }
}

/// Bounds of a fan-out on what it holds beyond what each watcher needs, in bytes. Checked every second, and after as much growth as the
/// first one.
#[derive(Clone, Copy, Debug, Default)]
pub struct FanOutBounds {
    /// Topics whose watchers are gone.
    pub max_unused_bytes: u64,
    /// Lists of events of topics with watchers: beyond it first those events go that every watcher has taken, then the longest
    /// lists, whose slow readers continue at etcd.
    pub max_list_bytes: u64,
}

/// Watchers, topics and memory of a fan-out. Determined every second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Watchers.
    pub watchers: u64,
    /// Intervals with events collected.
    pub topics: u64,
    /// Memory in bytes of the lists of events, and of topics without watchers. Without the events, which belong to the
    /// mirror's history, and without what each watcher needs, which its stream counts.
    pub bytes: u64,
    /// Revisions that the slowest watcher with events to take is behind.
    pub behind_revisions: i64,
}

impl FanOut {
    /// Adds the watchers of one stream, all or none; returns a reader for each, in order. `history` is that of the
    /// watchers' first revisions, if it is known. A stream may join again with further watchers.
    ///
    /// # Errors
    /// Why none was added.
    pub async fn join(
        &self,
        signal: &Arc<Signal>,
        history: Option<HistoryId>,
        watchers: Vec<Join>,
    ) -> Result<Vec<Reader>, JoinRefused> {
        let (reply, response) = oneshot::channel();
        {
            let mut joins = self.joins.lock();
            if joins.len() >= MAX_WAITING_JOINS {
                return Err(JoinRefused::Busy);
            }
            joins.push(JoinRequest {
                signal: Arc::clone(signal),
                history,
                watchers,
                reply,
            });
        }
        self.called.notify_one();
        match tokio::time::timeout(JOIN_TIMEOUT, response).await {
            Ok(Ok(joined)) => joined,
            _ => Err(JoinRefused::Busy),
        }
    }

    /// Lets every watcher continue at etcd and none join, or lets watchers join again.
    pub(crate) fn set_closed(&self, is_closed: bool) {
        self.is_closed.store(is_closed, Ordering::SeqCst);
        self.called.notify_one();
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Sets the bounds; without a call they are 0.
    pub fn set_bounds(&self, bounds: FanOutBounds) {
        self.max_unused_bytes
            .store(bounds.max_unused_bytes, Ordering::Relaxed);
        self.max_list_bytes
            .store(bounds.max_list_bytes, Ordering::Relaxed);
    }

    pub(super) fn bounds(&self) -> FanOutBounds {
        FanOutBounds {
            max_unused_bytes: self.max_unused_bytes.load(Ordering::Relaxed),
            max_list_bytes: self.max_list_bytes.load(Ordering::Relaxed),
        }
    }

    /// Watchers, topics and memory of the fan-out, as of a second ago.
    #[must_use]
    pub fn held(&self) -> Held {
        *self.held.lock()
    }

    /// Sets `signal` once the fan-out has reached `revision`, at the latest after a second; the caller looks at
    /// [`Reader::reached`] again after this call. Does not make the mirror reach it
    /// ([`Mirror::want`](crate::view::Mirror::want)).
    pub fn signal_at(&self, revision: i64, signal: &Arc<Signal>) {
        self.waiting.lock().push((revision, Arc::clone(signal)));
        self.called.notify_one();
    }
}
