//! One stream while etcd serves it: which requests go to etcd, and which of etcd's responses reach the client. A pure
//! state machine.
//!
//! Watchers come from memory with what the client has of them ([`Relay::new`]). etcd creates them again; the `created`
//! of these are not the client's. What the client has already, a member that is behind may send again: it is dropped.
//! They return to memory at a *barrier*: a progress notification for the whole stream, before which etcd has sent every
//! event up to its revision ([`Relay::await_barrier`], [`Relay::carried`]).

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use tokio::time::Instant;

use super::handover::Carried;
use super::request::{Create, Ids, NO_WATCHER, WATCHER_BYTES, WatchRequest};
use super::tap::Head;

mod returning;

/// What happens to one response of etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
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
enum Pending {
    /// A watcher that came from memory.
    Carried(Carried),
    /// A create of the client.
    Client(Create),
}

/// A watcher that etcd serves.
#[derive(Clone, Debug)]
struct Relayed {
    create: Create,
    /// The client has everything up to this revision from memory.
    fence: i64,
    /// Lowest revision of a barrier. If the watcher began with its `created`, the revision in its header: events up to it
    /// are not the watcher's. If it began before, the next one as long as a response to an earlier progress request may
    /// still come: etcd sends that in its own time, and has not seen the watcher's events by then. Otherwise 0.
    since: i64,
    /// Time of the last event or notification that the client got, or of the creation; only of a watcher that asked for
    /// notifications.
    quiet_since: Option<Instant>,
    /// Memory served it before.
    is_from_memory: bool,
    /// etcd has cancelled it for a compaction, and keeps its id.
    is_compacted: bool,
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
    /// A progress request was sent in order to return to memory, and its response has not been handled.
    awaits_barrier: bool,
    /// etcd has seen every create of the stream, and so allocates the ids that the client expects.
    has_all_creates: bool,
    /// etcd gets every request of the client unchanged, and the stream never returns: the client has sent a request that
    /// rangecache does not understand, or etcd an event whose key is too long, or there is no room for another watcher.
    is_pinned: bool,
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
        // In the order of `handover::creates`.
        carried.sort_by_key(|watcher| (watcher.id != 0, watcher.id));
        let held_bytes = carried.iter().map(|watcher| watcher.create.watcher_bytes()).sum();
        Relay {
            ids,
            held_bytes,
            had_watchers_of_memory: false,
            pending: carried.into_iter().map(Pending::Carried).collect(),
            watchers: BTreeMap::new(),
            taken,
            fragment: None,
            cancels: BTreeSet::new(),
            owed_progress: 0,
            unanswered_progress: 0,
            seen: 0,
            fence: shown,
            awaits_barrier: false,
            has_all_creates,
            is_pinned: false,
        }
    }

    /// The watchers that etcd has not continued yet.
    pub(super) fn carried_from_memory(&self) -> impl Iterator<Item = &Carried> {
        self.pending.iter().filter_map(|pending| match pending {
            Pending::Carried(watcher) => Some(watcher),
            Pending::Client(_) => None,
        })
    }

    /// Whether etcd has continued every watcher.
    pub(super) fn has_continued(&self) -> bool {
        self.carried_from_memory().next().is_none()
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
        self.pending.len() < max_pending && !self.awaits_barrier
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
    /// memory. Only once etcd has continued every watcher; creates of the client that it has not answered need an id that
    /// etcd itself chooses.
    pub(super) fn pin(&mut self) {
        self.is_pinned = true;
        self.awaits_barrier = false;
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
        self.is_pinned
    }

    /// Whether etcd itself gives the next watcher the id that the client expects: its stream has every create of the client's,
    /// or no lower id is free.
    pub(super) fn chooses_expected_id(&self) -> bool {
        let is_lowest = |next| (0..next).all(|id| self.is_taken(id));
        self.has_all_creates || self.next_id().is_some_and(is_lowest)
    }

    /// Notes a request of the client, and returns the id with which a create has to be sent: etcd must give it the id
    /// that the client expects. `None` for the id in the request.
    pub(super) fn request(&mut self, request: &WatchRequest) -> Option<i64> {
        if self.is_pinned {
            return None;
        }
        match request {
            WatchRequest::Create(create) => {
                let id = match create.watch_id {
                    0 if !self.has_all_creates => self.next_id().unwrap_or(0),
                    id => id,
                };
                self.held_bytes += create.watcher_bytes();
                self.pending.push_back(Pending::Client(create.clone()));
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

    /// Id that the next create without an id gets.
    fn next_id(&self) -> Option<i64> {
        let mut ids = self.ids.clone();
        ids.allocate(0, |id| self.is_taken(id))
    }

    /// Decides about a response by its head.
    pub(super) fn response(&mut self, head: &Head) -> Verdict {
        let continues = self.fragment.take();
        if continues.is_some_and(|id| id != head.watch_id || head.first_event.is_none()) {
            return Verdict::End;
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
    pub(super) fn long_key(&mut self, head: &Head) -> Verdict {
        let fence = self
            .watchers
            .get(&head.watch_id)
            .map_or(0, |watcher| watcher.fence);
        if fence > 0 || !self.has_continued() {
            // The client may have the event.
            return Verdict::End;
        }
        self.pin();
        self.fragment = head.fragment.then_some(head.watch_id);
        Verdict::Pass
    }

    /// Records that the client got a response about the watcher `id` at the time `now`.
    pub(super) fn record_sent(&mut self, id: i64, now: Instant) {
        if let Some(watcher) = self.watchers.get_mut(&id)
            && watcher.create.options.progress_notify
        {
            watcher.quiet_since = Some(now);
        }
    }

    fn created(&mut self, head: &Head) -> Verdict {
        if self.is_pinned {
            return Verdict::Pass;
        }
        match self.pending.pop_front() {
            // clientv3 matches `created` to its requests by position: one more would mix up its watchers.
            None => Verdict::End,
            Some(Pending::Client(create)) if head.canceled => {
                self.release_bytes(&create);
                Verdict::Pass
            }
            Some(Pending::Client(create)) => {
                let requested = create.watch_id;
                let (watchers, taken) = (&self.watchers, &self.taken);
                let is_taken = |id| watchers.contains_key(&id) || taken.contains(&id);
                let id = self.ids.allocate(requested, is_taken);
                if id != Some(head.watch_id) {
                    return Verdict::End;
                }
                let since = match create.start_revision {
                    0 => head.revision,
                    start if start <= head.revision && self.unanswered_progress > 0 => head.revision + 1,
                    _ => 0,
                };
                let relayed = Relayed {
                    create,
                    fence: 0,
                    since,
                    quiet_since: None,
                    is_from_memory: false,
                    is_compacted: false,
                };
                self.watchers.insert(head.watch_id, relayed);
                Verdict::Pass
            }
            Some(Pending::Carried(watcher)) if head.canceled => {
                self.release_bytes(&watcher.create);
                refused(watcher.id, head)
            }
            Some(Pending::Carried(watcher)) if head.watch_id == watcher.id => {
                let relayed = Relayed {
                    create: watcher.create,
                    fence: watcher.through,
                    since: 0,
                    quiet_since: watcher.quiet_since,
                    is_from_memory: true,
                    is_compacted: false,
                };
                self.watchers.insert(watcher.id, relayed);
                Verdict::Drop
            }
            Some(Pending::Carried(_)) => Verdict::End,
        }
    }

    fn release_bytes(&mut self, create: &Create) {
        self.held_bytes = self.held_bytes.saturating_sub(create.watcher_bytes());
    }

    fn canceled(&mut self, head: &Head) -> Verdict {
        self.cancels.remove(&head.watch_id);
        if head.compact_revision == 0 {
            if let Some(watcher) = self.watchers.remove(&head.watch_id) {
                self.release_bytes(&watcher.create);
            }
        } else if let Some(watcher) = self.watchers.get_mut(&head.watch_id) {
            watcher.is_compacted = true;
        }
        Verdict::Pass
    }

    fn progress(&mut self, head: &Head) -> Verdict {
        if head.watch_id != NO_WATCHER {
            let fence = self
                .watchers
                .get(&head.watch_id)
                .map_or(0, |watcher| watcher.fence);
            return if head.revision < fence.max(self.fence) {
                Verdict::Drop
            } else {
                Verdict::Pass
            };
        }
        let fences = self.watchers.values().map(|watcher| watcher.fence);
        let fence = fences.fold(self.fence, i64::max);
        // Of a request that was sent in order to return, or of one that the client is owed.
        let is_owed = self.owed_progress > 0 || self.is_pinned;
        self.owed_progress = self.owed_progress.saturating_sub(1);
        self.unanswered_progress = self.unanswered_progress.saturating_sub(1);
        if head.revision < fence || !self.has_continued() {
            return Verdict::Drop;
        }
        // etcd is silent while one of the watchers is cancelled for a compaction.
        let is_owed = is_owed && self.taken.is_empty();
        if self.is_barrier(head.revision) {
            let revision = head.revision;
            return Verdict::Barrier { revision, is_owed };
        }
        if is_owed { Verdict::Pass } else { Verdict::Drop }
    }

    fn events(&mut self, head: &Head) -> Verdict {
        if head.fragment {
            self.fragment = Some(head.watch_id);
        }
        let (Some(watcher), Some(first)) = (self.watchers.get_mut(&head.watch_id), head.first_event) else {
            return if self.is_pinned {
                Verdict::Pass
            } else {
                Verdict::End
            };
        };
        if first > watcher.fence {
            // From here on etcd sends revisions in their order.
            watcher.fence = 0;
            self.seen = self.seen.max(first);
            return Verdict::Pass;
        }
        Verdict::DropThrough(watcher.fence)
    }
}

/// Verdict on etcd's refusal to continue a watcher. After a refusal for rights clients connect again, with a new token
/// if theirs has expired, whereas a cancel would be final.
fn refused(id: i64, head: &Head) -> Verdict {
    let is_for_rights = ["permission", "auth", "token", "user name"]
        .iter()
        .any(|word| head.cancel_reason.contains(word));
    if is_for_rights {
        return Verdict::End;
    }
    Verdict::Cancel {
        id,
        reason: head.cancel_reason.clone(),
        compact_revision: head.compact_revision,
    }
}

#[cfg(test)]
mod tests;
