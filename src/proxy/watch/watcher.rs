//! One watcher of a stream.

use tokio::time::Instant;

use super::request::Create;
use crate::mirror::watch_hub::Reader;

/// One watcher of a stream.
#[derive(Debug)]
pub(super) struct Watcher {
    /// Position in the events of its keys; `None` once it was cancelled. etcd keeps such a watcher, and its id, until
    /// the client cancels it.
    pub(super) reader: Option<Reader>,
    /// Position of its mirror in [`Mirrors::all`](crate::mirror::Mirrors::all); of none if no mirror has fed it.
    pub(super) mirror: usize,
    /// The request that created it.
    pub(super) create: Create,
    /// Progress below this revision must not be reported (W5).
    pub(super) since: i64,
    /// Events up to this revision are sent without the previous key-value pair, which etcd had compacted before.
    pub(super) prev_kv_after: i64,
    /// Revision of the last event that was sent.
    pub(super) last_event: i64,
    /// Revision up to which etcd has sent its events before it returned to memory; 0 if it was created there.
    pub(super) etcd_through: i64,
    /// Whether the next periodic progress notification is sent: not if there were events since the last tick.
    pub(super) progress_due: bool,
    /// Time of the last event or periodic notification that was sent, or of the creation.
    pub(super) quiet_since: Instant,
}

impl Watcher {
    /// A watcher that takes its events from `reader`, of the mirror at this position.
    pub(super) fn new(reader: Reader, mirror: usize, create: Create, since: i64) -> Watcher {
        Watcher {
            reader: Some(reader),
            mirror,
            create,
            since,
            prev_kv_after: 0,
            last_event: 0,
            etcd_through: 0,
            progress_due: true,
            quiet_since: Instant::now(),
        }
    }

    /// A watcher that was cancelled for a compaction.
    pub(super) fn cancelled(create: Create) -> Watcher {
        Watcher {
            reader: None,
            mirror: usize::MAX,
            since: create.start_revision,
            create,
            prev_kv_after: 0,
            last_event: 0,
            etcd_through: 0,
            progress_due: false,
            quiet_since: Instant::now(),
        }
    }

    /// Whether there are events or an end to take.
    pub(super) fn is_pending(&self) -> bool {
        self.reader.as_ref().is_some_and(Reader::is_pending)
    }

    /// Whether there will be no more events from memory.
    pub(super) fn has_ended(&self) -> bool {
        self.reader.as_ref().is_some_and(Reader::has_ended)
    }

    /// Revision of events that etcd has sent, if the mirror has not proven them: after a rollback they may be of a history
    /// that is lost.
    pub(super) fn unproven(&self) -> Option<i64> {
        let is_unproven = |reader: &Reader| reader.is_unproven(self.etcd_through);
        self.reader
            .as_ref()
            .is_some_and(is_unproven)
            .then_some(self.etcd_through)
    }

    /// Revision up to which the client has every event, as far as it may be reported (W5): `None` below the watcher's
    /// start, and for a cancelled watcher.
    pub(super) fn progress(&self) -> Option<i64> {
        let reader = self.reader.as_ref()?;
        // A watcher of the future covers more than its mirror has reached.
        let revision = reader.covered().min(reader.reached());
        (revision >= self.since && revision >= self.last_event).then_some(revision)
    }
}
