//! Relay of a stream that etcd serves: which requests go to etcd, and which of etcd's responses reach the client. A pure
//! state machine.
//!
//! Watchers come from memory with what the client has of them ([`Relay::new`]). etcd creates them again; the `created`
//! of these are not the client's. What the client has already, a member that is behind may send again: it is dropped.
//! They return to memory at a *barrier*: a progress notification for the whole stream, before which etcd has sent every
//! event up to its revision ([`Relay::await_barrier`], [`Relay::carried`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use etcd_wire::etcdserverpb::WatchCreateRequest;
use tokio::time::Instant;

use super::request::{Carried, Create, Ids, NO_WATCHER, WATCHER_BYTES, WatchRequest};
use super::tap::Head;

/// Decision about a response of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum RelayAction {
    /// The client gets it, byte for byte.
    Pass,
    /// The client does not get it.
    Drop,
    /// The client does not get it if its last event is at or below this revision, which the client has; otherwise the
    /// stream ends.
    DropThrough(i64),
    /// The client gets a cancel of this watcher, with this reason and compaction revision, in its place.
    Cancel {
        id: i64,
        reason: String,
        compact_revision: i64,
    },
    /// Everything at or below this revision was sent before it, for every watcher. The client gets it if `is_owed`.
    Barrier { revision: i64, is_owed: bool },
    /// etcd did what no etcd does, or refused what it had granted: the stream ends with `Unavailable`.
    End,
}

/// Creates that etcd may have to answer at once.
const MAX_PENDING: usize = 1000;

/// A create that etcd has not answered.
#[derive(Clone, Debug)]
struct Pending {
    /// Id of a watcher that came from memory; `None` for a create of the client.
    carried: Option<i64>,
    watcher: Relayed,
}

/// Progress requests that etcd got before a create, and may still answer: in its own time, and without having seen the
/// watcher's events.
#[derive(Clone, Copy, Debug, Default)]
struct EarlierRequests {
    /// The client's, and those of returns.
    requests: u32,
    /// The client's: etcd itself answers them like that.
    owed: u32,
}

impl EarlierRequests {
    /// Records a response to a progress request; `is_passed` is whether the client gets it.
    fn answered(&mut self, is_passed: bool) {
        self.requests = self.requests.saturating_sub(1);
        self.owed = self.owed.saturating_sub(u32::from(is_passed)).min(self.requests);
    }
}

/// A watcher that etcd serves.
#[derive(Clone, Debug)]
struct Relayed {
    create: Create,
    /// The client has everything up to this revision from memory; 0 once etcd has sent what follows.
    fence: i64,
    /// Revision in the header of its `created`; 0 if it came from memory.
    created_at: i64,
    /// Progress requests before its create that etcd may still answer. One of them has a revision of at most `created_at`.
    before: EarlierRequests,
    /// Time of the last event or notification that the client got, or of the creation; only of a watcher that asked for
    /// notifications.
    quiet_since: Option<Instant>,
    /// Memory served it before.
    is_from_memory: bool,
    /// etcd has cancelled it for a compaction, and keeps its id.
    is_compacted: bool,
}

impl Relayed {
    /// Whether a progress notification of `revision` may be a response to a request before the watcher, and events up to that
    /// revision may still come.
    fn may_lack_events(&self, revision: i64) -> bool {
        self.before.requests > 0 && self.create.start_revision <= revision && revision <= self.created_at
    }

    /// Whether the client may get a progress notification of `revision`, as far as this watcher goes: one of an earlier request
    /// may also be below the start of a watcher, and etcd answers none behind it like that.
    fn lets_pass(&self, revision: i64) -> bool {
        let is_of_earlier = self.before.requests > 0 && revision < self.create.start_revision;
        self.create.start_revision == 0
            || self.before.owed > 0
            || !(is_of_earlier || self.may_lack_events(revision))
    }

    /// Whether memory may continue the watcher behind a progress notification of `revision`. Events up to `created_at` are
    /// not those of a watcher that began with its `created`.
    fn may_return_at(&self, revision: i64) -> bool {
        match self.create.start_revision {
            0 => revision >= self.created_at,
            _ => !self.may_lack_events(revision),
        }
    }
}

/// Watchers and open requests of a stream that has left etcd.
#[derive(Debug, Default)]
pub(super) struct Abandoned {
    /// Ids and creates of the watchers.
    pub(super) watchers: Vec<(i64, Create)>,
    /// Watchers that the client has cancelled, without a response so far.
    pub(super) cancelled: BTreeSet<i64>,
    /// Create without a response so far.
    pub(super) unanswered: Option<Create>,
}

/// Side that decides about the client's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Mode {
    /// The relay knows them all, and the stream may return to memory.
    Tapped,
    /// A progress request was sent in order to return, and its response has not been handled. The client's requests wait.
    AwaitsBarrier,
    /// etcd gets every request of the client unchanged, and the stream never returns: etcd has sent an event whose key is too long,
    /// or there is no room for another watcher. etcd has not seen every create, and keeps no account of ids that were free again:
    /// whether it may give the next watcher another id than the client expects.
    Pinned { ids_may_differ: bool },
    /// The stream is pinned, and no request need be read: etcd has seen every create, or there was a request that rangecache does not
    /// understand.
    Unread,
}

/// State of a relayed stream.
#[derive(Debug)]
pub(super) struct Relay {
    ids: Ids,
    pending: VecDeque<Pending>,
    watchers: BTreeMap<i64, Relayed>,
    /// Ids that etcd would keep and does not know, of watchers that memory has cancelled for a compaction.
    taken: BTreeSet<i64>,
    /// Watcher of which only the first fragments of a response have been sent.
    fragment: Option<i64>,
    /// Watchers whose cancel etcd has not answered.
    cancels: BTreeSet<i64>,
    /// Progress requests of the client without a response.
    owed_progress: u32,
    /// Progress requests without a response, the client's and those of returns. etcd does not answer all of them.
    unanswered_progress: u32,
    /// Revision of the highest first event of a response that the client got.
    seen: i64,
    /// Progress below this is older than what the client has.
    fence: i64,
    /// etcd has seen every create of the stream, and so allocates the ids that the client expects.
    has_all_creates: bool,
    mode: Mode,
    /// Memory served a watcher that was forgotten when the stream was pinned.
    had_watchers_of_memory: bool,
    /// Memory of `pending` and `watchers`, in bytes.
    held_bytes: u64,
}

impl Relay {
    /// State of a stream whose watchers etcd continues. `taken` are the ids of watchers that memory has cancelled for a
    /// compaction, and `shown` is the highest revision that the client has seen in a progress notification or an event.
    pub(super) fn new(ids: Ids, carried: Vec<Carried>, taken: BTreeSet<i64>, shown: i64) -> Relay {
        let has_all_creates = ids == Ids::default() && carried.is_empty() && taken.is_empty();
        let mut carried = carried;
        // etcd gives id 0 only to the first create that leaves the id to it.
        carried.sort_by_key(|watcher| (watcher.id != 0, watcher.id));
        let held_bytes = carried.iter().map(|watcher| watcher.create.watcher_bytes()).sum();
        let pending = carried.into_iter().map(|carried| Pending {
            carried: Some(carried.id),
            watcher: Relayed {
                create: carried.create,
                fence: carried.through,
                created_at: 0,
                before: EarlierRequests::default(),
                quiet_since: carried.quiet_since,
                is_from_memory: true,
                is_compacted: false,
            },
        });
        Relay {
            ids,
            pending: pending.collect(),
            watchers: BTreeMap::new(),
            taken,
            fragment: None,
            cancels: BTreeSet::new(),
            owed_progress: 0,
            unanswered_progress: 0,
            seen: 0,
            fence: shown,
            has_all_creates,
            mode: Mode::Tapped,
            had_watchers_of_memory: false,
            held_bytes,
        }
    }

    /// Creates that make etcd continue the watchers of memory on a new stream, in the order in which they have to be sent.
    pub(super) fn creates(&self) -> Vec<WatchCreateRequest> {
        let pending = self.pending.iter();
        let carried = pending.filter_map(|pending| Some((pending.carried?, &pending.watcher)));
        let creates =
            carried.map(|(id, watcher)| watcher.create.to_wire(id, watcher.fence.saturating_add(1)));
        creates.collect()
    }

    /// Whether etcd has continued every watcher.
    pub(super) fn has_continued(&self) -> bool {
        self.pending.iter().all(|pending| pending.carried.is_none())
    }

    /// Frees the id of a watcher that memory has cancelled for a compaction.
    pub(super) fn release(&mut self, id: i64) {
        self.taken.remove(&id);
    }

    fn is_taken(&self, id: i64) -> bool {
        self.watchers.contains_key(&id) || self.taken.contains(&id)
    }

    /// Whether the next request of the client may be sent. One create at a time if its id is chosen here: the id of the
    /// next one depends on whether etcd refuses it.
    pub(super) fn accepts_request(&self) -> bool {
        let max_pending = if self.has_all_creates { MAX_PENDING } else { 1 };
        self.pending.len() < max_pending && self.mode != Mode::AwaitsBarrier
    }

    /// Number of creates that etcd has not answered.
    pub(super) fn unanswered(&self) -> usize {
        self.pending.len()
    }

    /// Memory of the watchers and of the creates that etcd has not answered, in bytes.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// Lets etcd alone understand the client's requests, and forgets the watchers but for what the client has of them from
    /// memory. Only once etcd has continued every watcher.
    pub(super) fn pin(&mut self) {
        if !self.is_pinned() {
            self.mode = match self.has_all_creates {
                true => Mode::Unread,
                false => Mode::Pinned {
                    ids_may_differ: !(self.pending.is_empty() && self.chooses_expected_id()),
                },
            };
        }
        self.had_watchers_of_memory |= self.watchers.values().any(|watcher| watcher.is_from_memory);
        self.watchers.retain(|_, watcher| watcher.fence > 0);
        for watcher in self.watchers.values_mut() {
            watcher.create = Create::default();
        }
        self.pending.clear();
        self.cancels.clear();
        self.held_bytes = self.watchers.len() as u64 * WATCHER_BYTES;
    }

    pub(super) fn is_pinned(&self) -> bool {
        matches!(self.mode, Mode::Pinned { .. } | Mode::Unread)
    }

    /// Pins the stream before a request that cannot be read.
    pub(super) fn pin_unread(&mut self) {
        self.pin();
        self.mode = Mode::Unread;
    }

    /// Whether the client's requests need not be read.
    pub(super) fn is_unread(&self) -> bool {
        self.mode == Mode::Unread
    }

    /// Whether etcd itself gives the next watcher the id that the client expects: its stream has every create of the client's,
    /// or no lower id is free, nor will be once etcd has read a cancel.
    pub(super) fn chooses_expected_id(&self) -> bool {
        let is_lowest = |next| (0..next).all(|id| self.is_taken(id));
        match self.mode {
            Mode::Unread => true,
            Mode::Pinned { ids_may_differ } => !ids_may_differ,
            Mode::Tapped | Mode::AwaitsBarrier => {
                self.has_all_creates || self.cancels.is_empty() && self.next_id().is_some_and(is_lowest)
            }
        }
    }

    /// Notes a request of the client, and returns the id with which a create has to be sent: etcd must give it the id
    /// that the client expects. `None` for the id in the request.
    pub(super) fn request(&mut self, request: &WatchRequest) -> Option<i64> {
        if self.is_pinned() {
            if matches!(request, WatchRequest::Cancel(_)) {
                self.free_id();
            }
            return None;
        }
        match request {
            WatchRequest::Create(create) => {
                let id = match create.watch_id {
                    0 if !self.has_all_creates => self.next_id().unwrap_or(0),
                    id => id,
                };
                self.held_bytes += create.watcher_bytes();
                let watcher = Relayed {
                    create: create.clone(),
                    fence: 0,
                    created_at: 0,
                    before: EarlierRequests {
                        requests: self.unanswered_progress,
                        owed: self.owed_progress,
                    },
                    quiet_since: None,
                    is_from_memory: false,
                    is_compacted: false,
                };
                let carried = None;
                self.pending.push_back(Pending { carried, watcher });
                Some(id)
            }
            WatchRequest::Progress => {
                self.owed_progress = self.owed_progress.saturating_add(1);
                self.unanswered_progress = self.unanswered_progress.saturating_add(1);
                None
            }
            WatchRequest::Cancel(id) => {
                // etcd does not answer one for an unknown id.
                if self.watchers.contains_key(id) {
                    self.cancels.insert(*id);
                }
                None
            }
            WatchRequest::Nothing => None,
        }
    }

    /// Notes that etcd may give an id of a pinned stream again.
    fn free_id(&mut self) {
        if let Mode::Pinned { ids_may_differ } = &mut self.mode {
            *ids_may_differ = true;
        }
    }

    /// Id that the next create without an id gets.
    fn next_id(&self) -> Option<i64> {
        let mut ids = self.ids.clone();
        ids.allocate(0, |id| self.is_taken(id))
    }

    /// Decides about a response by its head.
    pub(super) fn response(&mut self, head: &Head) -> RelayAction {
        let continues = self.fragment.take();
        if continues.is_some_and(|id| id != head.watch_id || head.first_event.is_none()) {
            return RelayAction::End;
        }
        if head.created {
            self.created(head)
        } else if head.canceled {
            self.canceled(head)
        } else if head.is_progress() {
            self.progress(head)
        } else {
            self.events(head)
        }
    }

    /// Decides about a response of which only the key of the first event has arrived, as far as it was read. The stream
    /// stays at etcd from now on, which alone knows the revisions of such events.
    pub(super) fn long_key(&mut self, head: &Head) -> RelayAction {
        let fence = self
            .watchers
            .get(&head.watch_id)
            .map_or(0, |watcher| watcher.fence);
        if fence > 0 || !self.has_continued() {
            // The client may have the event.
            return RelayAction::End;
        }
        self.pin();
        self.fragment = head.fragment.then_some(head.watch_id);
        RelayAction::Pass
    }

    /// Records that the client got a response about the watcher `id` at the time `now`.
    pub(super) fn record_sent(&mut self, id: i64, now: Instant) {
        if let Some(watcher) = self.watchers.get_mut(&id)
            && watcher.create.options.progress_notify
        {
            watcher.quiet_since = Some(now);
        }
    }

    fn created(&mut self, head: &Head) -> RelayAction {
        if self.is_pinned() {
            return RelayAction::Pass;
        }
        // clientv3 matches `created` to its requests by position: one more would mix up its watchers.
        let Some(Pending { carried, mut watcher }) = self.pending.pop_front() else {
            return RelayAction::End;
        };
        if head.canceled {
            self.release_bytes(&watcher.create);
            return carried.map_or(RelayAction::Pass, |id| refused(id, head));
        }
        let (watchers, taken) = (&self.watchers, &self.taken);
        let is_taken = |id| watchers.contains_key(&id) || taken.contains(&id);
        let id = carried.or_else(|| self.ids.allocate(watcher.create.watch_id, is_taken));
        if id != Some(head.watch_id) {
            return RelayAction::End;
        }
        if carried.is_none() {
            watcher.created_at = head.revision;
        }
        self.watchers.insert(head.watch_id, watcher);
        match carried {
            Some(_) => RelayAction::Drop,
            None => RelayAction::Pass,
        }
    }

    fn release_bytes(&mut self, create: &Create) {
        self.held_bytes = self.held_bytes.saturating_sub(create.watcher_bytes());
    }

    fn canceled(&mut self, head: &Head) -> RelayAction {
        self.cancels.remove(&head.watch_id);
        self.free_id();
        if head.compact_revision == 0 {
            if let Some(watcher) = self.watchers.remove(&head.watch_id) {
                self.release_bytes(&watcher.create);
            }
        } else if let Some(watcher) = self.watchers.get_mut(&head.watch_id) {
            watcher.is_compacted = true;
        }
        RelayAction::Pass
    }

    fn progress(&mut self, head: &Head) -> RelayAction {
        if head.watch_id != NO_WATCHER {
            let fence = self
                .watchers
                .get(&head.watch_id)
                .map_or(0, |watcher| watcher.fence);
            return match head.revision < fence.max(self.fence) {
                true => RelayAction::Drop,
                false => RelayAction::Pass,
            };
        }
        let fences = self.watchers.values().map(|watcher| watcher.fence);
        let fence = fences.fold(self.fence, i64::max);
        // Of a request that was sent in order to return, or of one that the client is owed.
        let is_owed = match self.is_pinned() {
            // What the client requested since is not counted.
            true => self.owed_progress > 0 || self.unanswered_progress == 0,
            false => {
                self.owed_progress > 0
                    && self
                        .watchers
                        .values()
                        .all(|watcher| watcher.lets_pass(head.revision))
            }
        };
        // etcd is silent while one of the watchers is cancelled for a compaction.
        let passes = is_owed && self.taken.is_empty();
        let verdict = if head.revision < fence || !self.has_continued() {
            RelayAction::Drop
        } else if self.is_barrier(head.revision) {
            RelayAction::Barrier {
                revision: head.revision,
                is_owed: passes,
            }
        } else if passes {
            RelayAction::Pass
        } else {
            RelayAction::Drop
        };
        self.count_progress(is_owed);
        verdict
    }

    /// Whether the stream may return at a progress notification of `revision`. One of an earlier request may be older
    /// than a watcher that was created since, and overtake the response to a cancel.
    fn is_barrier(&self, revision: i64) -> bool {
        self.mode == Mode::AwaitsBarrier
            && self.cancels.is_empty()
            && revision >= self.seen
            && self
                .watchers
                .values()
                .all(|watcher| watcher.may_return_at(revision))
    }

    /// Counts a response to a progress request; `is_owed` if it was the client's.
    fn count_progress(&mut self, is_owed: bool) {
        self.owed_progress = self.owed_progress.saturating_sub(u32::from(is_owed));
        self.unanswered_progress = self.unanswered_progress.saturating_sub(1);
        let pending = self.pending.iter_mut().map(|pending| &mut pending.watcher);
        for watcher in pending.chain(self.watchers.values_mut()) {
            watcher.before.answered(is_owed);
        }
    }

    fn events(&mut self, head: &Head) -> RelayAction {
        if head.fragment {
            self.fragment = Some(head.watch_id);
        }
        let (Some(watcher), Some(first)) = (self.watchers.get_mut(&head.watch_id), head.first_event) else {
            return match self.is_pinned() {
                true => RelayAction::Pass,
                false => RelayAction::End,
            };
        };
        // etcd sends what it had to tell before the watcher began before the watcher's events.
        watcher.before = EarlierRequests::default();
        if first > watcher.fence {
            // From here on etcd sends revisions in their order.
            watcher.fence = 0;
            self.seen = self.seen.max(first);
            return RelayAction::Pass;
        }
        RelayAction::DropThrough(watcher.fence)
    }

    /// Whether the stream may return to memory: no response is incomplete, no create is unanswered, and every watcher is
    /// one that memory `can_serve`. etcd sends no progress while one was cancelled for a compaction.
    pub(super) fn may_return(&self, can_serve: impl Fn(&Create) -> bool) -> bool {
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
    pub(super) fn await_barrier(&mut self) {
        self.mode = Mode::AwaitsBarrier;
        self.unanswered_progress = self.unanswered_progress.saturating_add(1);
    }

    /// Ends the wait for a barrier: it was read to its end, and is handled now, or the return is given up, and a response that still
    /// comes is dropped unless the client is owed one. Until then a request of the client would reach etcd behind the barrier, and be
    /// lost with etcd's stream.
    pub(super) fn stay(&mut self) {
        if self.mode == Mode::AwaitsBarrier {
            self.mode = Mode::Tapped;
        }
    }

    /// Watchers at the barrier of `revision`, for memory.
    pub(super) fn carried(&self, revision: i64) -> Vec<Carried> {
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
    pub(super) fn ids(&self) -> &Ids {
        &self.ids
    }

    /// Whether the client is owed progress.
    pub(super) fn owes_progress(&self) -> bool {
        self.owed_progress > 0
    }

    /// Whether memory has served any of the watchers.
    pub(super) fn has_watchers_of_memory(&self) -> bool {
        let mut watchers = self.watchers.values();
        self.had_watchers_of_memory || !self.has_continued() || watchers.any(|watcher| watcher.is_from_memory)
    }

    /// Gives up etcd's stream if every watcher is memory's, and so none is lost with it; otherwise returns `None`.
    pub(super) fn abandon(&mut self) -> Option<Abandoned> {
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

/// Verdict on etcd's refusal to continue a watcher. After a refusal for rights clients connect again, with a new token
/// if theirs has expired, whereas a cancel would be final.
fn refused(id: i64, head: &Head) -> RelayAction {
    let is_for_rights = ["permission", "auth", "token", "user name"]
        .iter()
        .any(|word| head.cancel_reason.contains(word));
    if is_for_rights {
        return RelayAction::End;
    }
    RelayAction::Cancel {
        id,
        reason: head.cancel_reason.clone(),
        compact_revision: head.compact_revision,
    }
}

#[cfg(test)]
mod tests;
