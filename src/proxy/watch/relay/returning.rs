//! Return of a relayed stream to memory: at a barrier, or because its history was replaced.

use std::collections::BTreeSet;

use super::{Mode, Relay, Relayed};
use crate::proxy::watch::request::{Carried, Create, Ids};

/// Watchers and open requests of a stream that has left etcd.
#[derive(Debug, Default)]
pub(in crate::proxy::watch) struct Abandoned {
    /// Ids and creates of the watchers.
    pub(in crate::proxy::watch) watchers: Vec<(i64, Create)>,
    /// Watchers that the client has cancelled, without a response so far.
    pub(in crate::proxy::watch) cancelled: BTreeSet<i64>,
    /// Create without a response so far.
    pub(in crate::proxy::watch) unanswered: Option<Create>,
}

impl Relay {
    /// Whether the stream may return to memory: no response is incomplete, no create is unanswered, and every watcher is
    /// one that memory `can_serve`. etcd sends no progress while one was cancelled for a compaction.
    pub(in crate::proxy::watch) fn may_return(&self, can_serve: impl Fn(&Create) -> bool) -> bool {
        let mut watchers = self.watchers.values();
        self.fragment.is_none()
            && self.mode == Mode::Tapped
            && self.pending.is_empty()
            && self.cancels.is_empty()
            && !self.watchers.is_empty()
            && watchers.all(|watcher| !watcher.is_compacted && can_serve(&watcher.create))
    }

    /// Records that a progress request is sent to etcd in order to return. Requests of the client wait until the
    /// barrier, or [`Relay::stay`].
    pub(in crate::proxy::watch) fn await_barrier(&mut self) {
        self.mode = Mode::AwaitsBarrier;
        self.unanswered_progress = self.unanswered_progress.saturating_add(1);
    }

    /// Ends the wait for a barrier: it was read to its end, and is handled now, or the return is given up, and a response that still
    /// comes is dropped unless the client is owed one. Until then a request of the client would reach etcd behind the barrier, and be
    /// lost with etcd's stream.
    pub(in crate::proxy::watch) fn stay(&mut self) {
        if self.mode == Mode::AwaitsBarrier {
            self.mode = Mode::Tapped;
        }
    }

    /// Watchers at the barrier of `revision`, for memory.
    pub(in crate::proxy::watch) fn carried(&self, revision: i64) -> Vec<Carried> {
        let watchers = self.watchers.iter();
        watchers
            .map(|(id, watcher)| Carried {
                id: *id,
                create: watcher.create.clone(),
                through: revision.max(watcher.create.start_revision.saturating_sub(1)),
                quiet_since: watcher.quiet_since,
            })
            .collect()
    }

    /// Ids that were given, for the source that continues the stream.
    pub(in crate::proxy::watch) fn ids(&self) -> &Ids {
        &self.ids
    }

    /// Whether the client is owed progress.
    pub(in crate::proxy::watch) fn owes_progress(&self) -> bool {
        self.owed_progress > 0
    }

    /// Whether memory has served any of the watchers.
    pub(in crate::proxy::watch) fn has_watchers_of_memory(&self) -> bool {
        let mut watchers = self.watchers.values();
        self.had_watchers_of_memory || !self.has_continued() || watchers.any(|watcher| watcher.is_from_memory)
    }

    /// Gives up etcd's stream if every watcher is memory's, and so none is lost with it; otherwise returns `None`.
    pub(in crate::proxy::watch) fn abandon(&mut self) -> Option<Abandoned> {
        let is_from_memory = |watcher: &Relayed| watcher.is_from_memory && !watcher.is_compacted;
        if self.is_pinned() || !self.watchers.values().all(is_from_memory) {
            return None;
        }
        let mut abandoned = Abandoned::default();
        self.held_bytes = 0;
        for (id, watcher) in std::mem::take(&mut self.watchers) {
            abandoned.watchers.push((id, watcher.create));
        }
        for pending in std::mem::take(&mut self.pending) {
            match pending.carried {
                Some(id) => abandoned.watchers.push((id, pending.watcher.create)),
                None => abandoned.unanswered = Some(pending.watcher.create),
            }
        }
        abandoned.cancelled = std::mem::take(&mut self.cancels);
        Some(abandoned)
    }
}
