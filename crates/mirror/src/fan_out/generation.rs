//! State shared by all readers of one load of a mirror.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use crate::lineage::HistoryId;
use crate::view::ReaderEnd;

/// Load of the mirror, as changed by the feed since.
#[derive(Debug)]
pub(super) struct Generation {
    /// Number of the load.
    pub(super) number: u64,
    /// Number of etcd's history that the events belong to.
    pub(super) history: HistoryId,
    /// Every event up to this revision is in the topics.
    reached: AtomicI64,
    has_no_leader: AtomicBool,
    is_without_feed: AtomicBool,
    end: OnceLock<ReaderEnd>,
}

impl Generation {
    pub(super) fn new(number: u64, history: HistoryId, reached: i64) -> Generation {
        Generation {
            number,
            history,
            reached: AtomicI64::new(reached),
            has_no_leader: AtomicBool::new(false),
            is_without_feed: AtomicBool::new(false),
            end: OnceLock::new(),
        }
    }

    pub(super) fn reached(&self) -> i64 {
        self.reached.load(Ordering::Acquire)
    }

    /// Records that the topics have every event up to `revision`.
    pub(super) fn reach(&self, revision: i64) {
        self.reached.store(revision, Ordering::Release);
    }

    /// End of the generation: no event is added after it.
    pub(super) fn end(&self) -> Option<ReaderEnd> {
        self.end.get().copied()
    }

    pub(super) fn set_end(&self, end: ReaderEnd) {
        let _ = self.end.set(end);
    }

    pub(super) fn has_no_leader(&self) -> bool {
        self.has_no_leader.load(Ordering::Acquire)
    }

    pub(super) fn is_without_feed(&self) -> bool {
        self.is_without_feed.load(Ordering::Acquire)
    }

    /// Returns the previous value.
    pub(super) fn set_without_feed(&self, is_without_feed: bool) -> bool {
        self.is_without_feed.swap(is_without_feed, Ordering::AcqRel)
    }

    /// Returns the previous value.
    pub(super) fn set_no_leader(&self, has_no_leader: bool) -> bool {
        self.has_no_leader.swap(has_no_leader, Ordering::AcqRel)
    }
}
