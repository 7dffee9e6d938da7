//! The log of events: immutable batches of whole revisions, found by revision.
//!
//! Batches are shared by reference. A reader clones those it needs and works on them while the log grows and is
//! trimmed.

use std::{collections::VecDeque, sync::Arc};

use super::memory::{ARC_HEADER_BYTES, class_bytes};
use super::{entry::Entry, stored::StoredEntry, tree::Tree};

/// Type of an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    /// A put.
    Put,
    /// A delete.
    Delete,
}

/// Event of etcd's watch.
#[derive(Clone, Debug)]
pub struct Change {
    /// Whether the key was put or deleted.
    pub kind: ChangeKind,
    /// The event's `kv` exactly as etcd sent it. A delete's has only the key and the revision that deleted it.
    pub entry: Entry,
    /// The key's entry before the event's *revision*, `prev_kv` of a watch that asks for it: none for an event that creates
    /// the key, also where the same revision has deleted it before. Set by [`Store::apply`](super::Store::apply).
    pub replaced: Option<Entry>,
}

impl Change {
    /// A put of `entry`; what it replaced is not known yet.
    pub fn put(entry: Entry) -> Change {
        Change {
            kind: ChangeKind::Put,
            entry,
            replaced: None,
        }
    }

    /// The delete with the `kv` of `entry`; what it deleted is not known yet.
    pub fn delete(entry: Entry) -> Change {
        Change {
            kind: ChangeKind::Delete,
            entry,
            replaced: None,
        }
    }

    /// Revision that made the change.
    pub fn revision(&self) -> i64 {
        self.entry.mod_revision()
    }

    /// Key that was put or deleted.
    pub fn key(&self) -> &[u8] {
        self.entry.key()
    }

    /// Whether the event creates its key.
    pub(super) fn is_creation(&self) -> bool {
        self.kind == ChangeKind::Put && self.entry.fields().create_revision == self.revision()
    }

    /// Makes the change in `tree`; returns the entry that it replaced or deleted.
    pub(super) fn apply_to(&self, tree: &mut Tree) -> Option<StoredEntry> {
        match self.kind {
            ChangeKind::Put => tree.insert(self.entry.clone()),
            ChangeKind::Delete => tree.remove(self.key()),
        }
    }
}

/// The events of one or more whole revisions, in order of revision; never empty. Cloning counts a reference.
#[derive(Clone, Debug)]
pub struct Batch(Arc<[Change]>);

impl Batch {
    /// Events of the batch, in order of revision.
    pub fn changes(&self) -> &[Change] {
        &self.0
    }

    /// Revision of the last event.
    pub fn last_revision(&self) -> i64 {
        self.0.last().map_or(0, Change::revision)
    }

    /// Events at or below `revision`.
    pub(super) fn up_to(&self, revision: i64) -> &[Change] {
        let end = self.0.partition_point(|change| change.revision() <= revision);
        &self.0[..end]
    }

    /// Memory that the log takes for the batch, in bytes. The entries of puts are not included: they belong to the
    /// tree until they are replaced there. Nor are replaced ones, which history counts when they are replaced.
    pub(super) fn log_bytes(&self) -> u64 {
        let deletes = self.0.iter().filter(|change| change.kind == ChangeKind::Delete);
        let list = class_bytes(ARC_HEADER_BYTES + size_of_val(&*self.0));
        (size_of::<Batch>() + list) as u64 + deletes.map(|change| change.entry.memory_bytes()).sum::<u64>()
    }
}

/// The events of the window, oldest first.
#[derive(Debug, Default)]
pub struct EventLog {
    batches: VecDeque<Batch>,
    follower: Option<Follower>,
}

/// Reader that takes every event of the log.
#[derive(Debug)]
struct Follower {
    /// Revision up to which the events were taken.
    taken: i64,
    missed: Missed,
}

impl EventLog {
    /// Appends the events of whole revisions, all of them above [`EventLog::last_revision`], in order of revision.
    /// Returns the bytes that the log takes for them; no events, no batch.
    pub(super) fn push(&mut self, changes: Vec<Change>) -> u64 {
        if changes.is_empty() {
            return 0;
        }
        let batch = Batch(changes.into());
        debug_assert!(batch.0.is_sorted_by_key(Change::revision));
        let bytes = batch.log_bytes();
        self.batches.push_back(batch);
        bytes
    }

    /// Revision of the newest event; `None` for an empty log.
    pub fn last_revision(&self) -> Option<i64> {
        self.batches.back().map(Batch::last_revision)
    }

    /// Batches with events above `revision`, oldest first. The first one may also hold events at or below it. O(log n).
    pub fn batches_after(&self, revision: i64) -> impl Iterator<Item = &Batch> {
        let first = self
            .batches
            .partition_point(|batch| batch.last_revision() <= revision);
        self.batches.range(first..)
    }

    /// Records that the follower takes the events up to `revision` now, or that there is none. Returns the events that
    /// were dropped since it had taken those up to `after`; `None` if that is not known.
    pub(super) fn follow(&mut self, after: i64, revision: Option<i64>) -> Option<Missed> {
        let follower = revision.map(|taken| Follower {
            taken,
            missed: Missed::default(),
        });
        let before = std::mem::replace(&mut self.follower, follower)?;
        (before.taken == after).then_some(before.missed)
    }

    /// Every event, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &Change> {
        self.batches.iter().flat_map(|batch| batch.changes())
    }

    /// Drops the batches whose events are all at or below `revision`.
    pub(super) fn trim_through(&mut self, revision: i64) {
        let kept_from = self
            .batches
            .partition_point(|batch| batch.last_revision() <= revision);
        for batch in self.batches.drain(..kept_from) {
            if let Some(follower) = &mut self.follower
                && batch.last_revision() > follower.taken
            {
                let changes = batch.changes().iter();
                for change in changes.filter(|change| change.revision() > follower.taken) {
                    follower.missed.add(change.key(), change.revision());
                }
            }
        }
        // A burst of events must not leave its list behind.
        if self.batches.len() < self.batches.capacity() / 4 {
            self.batches.shrink_to(self.batches.len() * 2);
        }
    }
}

/// Events that are remembered. Beyond, the follower has to assume that every key was among them.
const MAX_EVENTS: usize = 10_000;
/// Bytes of their keys.
const MAX_BYTES: usize = 1 << 20;

/// An event that a follower has missed.
#[derive(Debug)]
pub struct MissedEvent {
    /// Its key.
    pub key: Box<[u8]>,
    /// Its revision.
    pub revision: i64,
}

/// Events that a follower has missed.
#[derive(Debug, Default)]
pub struct Missed {
    events: Vec<MissedEvent>,
    bytes: usize,
    is_incomplete: bool,
}

impl Missed {
    /// The events, oldest first; `None` if there were too many.
    pub fn events(&self) -> Option<&[MissedEvent]> {
        (!self.is_incomplete).then_some(&*self.events)
    }

    /// Adds the event of `key` at `revision`.
    pub(super) fn add(&mut self, key: &[u8], revision: i64) {
        if self.is_incomplete {
            return;
        }
        self.bytes += key.len();
        if self.events.len() == MAX_EVENTS || self.bytes > MAX_BYTES {
            self.events = Vec::new();
            self.is_incomplete = true;
        } else {
            let key = key.into();
            self.events.push(MissedEvent { key, revision });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::KeyValue;

    fn delete(mod_revision: i64) -> Change {
        Change::delete(KeyValue::deleted("k", mod_revision).entry())
    }

    /// A log with batches of revisions 2, 3 to 5, and 9.
    fn log() -> EventLog {
        let mut log = EventLog::default();
        for revisions in [&[2][..], &[3, 3, 5], &[], &[9]] {
            log.push(revisions.iter().map(|revision| delete(*revision)).collect());
        }
        log
    }

    #[test]
    fn batches_after_a_revision_start_with_the_first_event_above_it() {
        let log = log();
        let last = |revision| {
            log.batches_after(revision)
                .map(Batch::last_revision)
                .collect::<Vec<_>>()
        };
        assert_eq!(last(0), [2, 5, 9]);
        assert_eq!(last(2), [5, 9]);
        assert_eq!(last(3), [5, 9], "a batch that the revision divides");
        assert_eq!(last(5), [9]);
        assert_eq!(last(8), [9]);
        assert_eq!(last(9), [0; 0]);
        assert_eq!(log.last_revision(), Some(9));
        assert_eq!(EventLog::default().last_revision(), None);
    }

    #[test]
    fn up_to_a_revision_are_the_events_at_or_below_it() {
        let log = log();
        let batch = log.batches_after(2).next().unwrap();
        assert_eq!(
            [2, 3, 4, 5].map(|revision| batch.up_to(revision).len()),
            [0, 2, 2, 3]
        );
    }

    #[test]
    fn trimming_keeps_what_a_reader_has_cloned() {
        let mut log = log();
        let read: Vec<_> = log.batches_after(0).cloned().collect();
        log.trim_through(4);
        assert_eq!(
            log.events().map(Change::revision).collect::<Vec<_>>(),
            [3, 3, 5, 9]
        );
        log.trim_through(9);
        assert_eq!((log.events().count(), log.last_revision()), (0, None));
        assert_eq!(read.iter().map(|batch| batch.changes().len()).sum::<usize>(), 5);
    }

    #[test]
    fn events_are_known_until_there_are_too_many() {
        let mut missed = Missed::default();
        for revision in 1..=MAX_EVENTS as i64 {
            missed.add(b"k", revision);
        }
        let last = missed.events().unwrap().last().unwrap();
        assert_eq!((&*last.key, last.revision), (&b"k"[..], MAX_EVENTS as i64));
        missed.add(b"k", i64::MAX);
        assert!(missed.events().is_none() && missed.events.capacity() == 0);
        missed.add(b"k", i64::MAX);
        assert!(missed.events().is_none());
        let mut missed = Missed::default();
        missed.add(&vec![b'k'; MAX_BYTES], 1);
        assert!(missed.events().is_some());
        missed.add(b"k", 2);
        assert!(missed.events().is_none());
    }
}
