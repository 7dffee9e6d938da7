//! The watchers of a stream that memory serves.

use std::{collections::BTreeMap, ops::Bound};

use rangecache_base::telemetry::metrics::Counted;
use rangecache_mirror::{fan_out::Reader, lineage::HistoryId};
use tokio::time::Instant;

use super::request::{Carried, Create};
use super::{start::Started, stream::StreamContext};

/// Watcher that memory serves.
#[derive(Debug)]
pub(super) struct Watcher {
    /// Position in the events of its keys.
    pub(super) reader: Reader,
    /// Position of its mirror in [`Mirrors::all`](rangecache_mirror::Mirrors::all).
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
    /// Counts it among those of its mirror.
    _open: Option<Counted>,
}

impl Watcher {
    /// The watcher of `create`, which has joined its fan-out; `open` counts it.
    pub(super) fn started(create: Create, started: Started, open: Option<Counted>) -> Watcher {
        Watcher {
            reader: started.reader,
            mirror: started.mirror,
            create,
            since: started.since,
            prev_kv_after: started.prev_kv_after,
            last_event: 0,
            etcd_through: 0,
            progress_due: true,
            quiet_since: Instant::now(),
            _open: open,
        }
    }

    /// The watcher of `carried`, which continues behind the barrier of `revision` with `reader`, of the mirror at this
    /// position; `open` counts it.
    pub(super) fn returned(
        carried: Carried,
        revision: i64,
        reader: Reader,
        mirror: usize,
        open: Option<Counted>,
    ) -> Watcher {
        Watcher {
            reader,
            mirror,
            since: revision.max(carried.create.start_revision),
            create: carried.create,
            prev_kv_after: 0,
            last_event: 0,
            etcd_through: revision.min(carried.through),
            progress_due: true,
            quiet_since: carried.quiet_since.unwrap_or_else(Instant::now),
            _open: open,
        }
    }

    /// Revision of events that etcd has sent, if the mirror has not proven them: after a rollback they may be of a history
    /// that is lost.
    fn unproven(&self) -> Option<i64> {
        let is_unproven = self.reader.is_unproven(self.etcd_through);
        is_unproven.then_some(self.etcd_through)
    }

    /// Revision up to which the client has every event, as far as it may be reported (W5): `None` below the watcher's
    /// start.
    pub(super) fn progress(&self) -> Option<i64> {
        // A watcher of the future covers more than its mirror has reached.
        let revision = self.reader.covered().min(self.reader.reached());
        (revision >= self.since && revision >= self.last_event).then_some(revision)
    }

    /// Revision up to which its events were sent, or there was none. Not below the revision after which it begins.
    fn sent_through(&self) -> i64 {
        self.reader.covered().max(self.since.saturating_sub(1))
    }

    /// The watcher with the id `id`, for etcd.
    fn carried(&self, id: i64) -> Carried {
        let is_notified = self.create.options.progress_notify;
        Carried {
            id,
            create: self.create.clone(),
            through: self.sent_through(),
            quiet_since: is_notified.then_some(self.quiet_since),
        }
    }
}

/// Watchers by id.
#[derive(Debug, Default)]
pub(super) struct Watchers(BTreeMap<i64, Watcher>);

impl Watchers {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn contains(&self, id: i64) -> bool {
        self.0.contains_key(&id)
    }

    pub(super) fn get(&self, id: i64) -> Option<&Watcher> {
        self.0.get(&id)
    }

    pub(super) fn get_mut(&mut self, id: i64) -> Option<&mut Watcher> {
        self.0.get_mut(&id)
    }

    pub(super) fn insert(&mut self, id: i64, watcher: Watcher) {
        self.0.insert(id, watcher);
    }

    pub(super) fn remove(&mut self, id: i64) -> Option<Watcher> {
        self.0.remove(&id)
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Watcher> {
        self.0.values()
    }

    pub(super) fn all_mut(&mut self) -> impl Iterator<Item = (i64, &mut Watcher)> {
        self.0.iter_mut().map(|(id, watcher)| (*id, watcher))
    }

    /// Id of the first watcher after `last` in turn that `may_go`.
    pub(super) fn next_turn(&self, last: i64, may_go: impl Fn(&Watcher) -> bool) -> Option<i64> {
        let after = self.0.range((Bound::Excluded(last), Bound::Unbounded));
        let before = self.0.range(..=last);
        let mut in_turn = after.chain(before);
        in_turn.find(|(_, watcher)| may_go(watcher)).map(|(id, _)| *id)
    }

    /// Whether the mirror at this position feeds any of them.
    pub(super) fn are_of(&self, position: usize) -> bool {
        self.all().any(|watcher| watcher.mirror == position)
    }

    pub(super) fn have_several_mirrors(&self) -> bool {
        let mut mirrors = self.all().map(|watcher| watcher.mirror);
        let first = mirrors.next();
        mirrors.any(|mirror| Some(mirror) != first)
    }

    /// Revision up to which the client has every event of all of them; `None` if it may not be reported, and without
    /// watchers.
    pub(super) fn progress(&self) -> Option<i64> {
        let lowest = self
            .all()
            .map(Watcher::progress)
            .try_fold(i64::MAX, |lowest, revision| Some(lowest.min(revision?)));
        lowest.filter(|revision| *revision < i64::MAX)
    }

    /// Highest revision of events of etcd that the mirrors have not proven.
    pub(super) fn unproven(&self) -> Option<i64> {
        self.all().filter_map(Watcher::unproven).max()
    }

    /// Whether one of them lacks events that etcd has compacted up to `compacted`.
    pub(super) fn are_behind(&self, compacted: i64) -> bool {
        self.all().any(|watcher| watcher.sent_through() + 1 < compacted)
    }

    /// Removes those whose events were not of `history`.
    pub(super) fn take_replaced(&mut self, history: HistoryId) -> BTreeMap<i64, Watcher> {
        let all = std::mem::take(&mut self.0).into_iter();
        let (replaced, others) = all.partition(|(_, watcher)| watcher.reader.history() != history);
        self.0 = others;
        replaced
    }

    /// Lets the mirrors of those that `want_it` reach `target`, and wake the stream then.
    pub(super) fn want(&self, stream: &StreamContext, target: i64, want_it: impl Fn(&Watcher) -> bool) {
        let mirrors = &stream.client.proxy.mirrors;
        for (position, mirror) in mirrors.positions() {
            let mut watchers = self.all();
            let of_mirror = watchers.find(|watcher| watcher.mirror == position && want_it(watcher));
            let Some(watcher) = of_mirror else { continue };
            if let Some(fan_out) = mirrors.fan_out(mirror) {
                fan_out.signal_at(target, &stream.signal);
            }
            mirror.want(watcher.reader.history(), target);
        }
    }

    /// Makes their mirrors learn etcd's revision, for a client that has read or written around rangecache.
    pub(super) fn nudge(&self, stream: &StreamContext) {
        for (position, mirror) in stream.client.proxy.mirrors.positions() {
            if self.are_of(position) {
                mirror.nudge();
            }
        }
    }

    /// Watchers in the form in which etcd is to continue them.
    pub(super) fn carried(&self) -> Vec<Carried> {
        let watchers = self.0.iter();
        watchers.map(|(id, watcher)| watcher.carried(*id)).collect()
    }
}
