//! The current tree and its history: the state at any revision of a bounded window.
//!
//! History is a row of segments. A segment is a checkpoint (a snapshot of the tree at some revision) with the events
//! from there to the next segment's checkpoint. The state at a revision is the last checkpoint at or below it, with
//! the events up to it applied ([`Rebuild`]). A checkpoint costs the nodes that changed since, not the keys that
//! exist: it shares all other nodes with the current tree.

use std::collections::{HashMap, HashSet, VecDeque};
use std::time::Duration;

use super::event_log::{Batch, Change, EventLog, Missed};
use super::repack::{Repacked, Replacements};
use super::{entry::Entry, stored::MemoryError, tree::Tree};

/// etcd's revision before the first write: it has no event.
const EMPTY_REVISION: i64 = 1;

/// Divisor of the window's bytes and age: once a segment takes that part of either, the next one begins. Trimming drops
/// whole segments, and should not drop much more than it must. Rebuilt past revisions together may take as many bytes.
const SEGMENT_FRACTION: u32 = 8;

/// Bounds on history; all of them hold at once.
#[derive(Clone, Copy, Debug)]
pub struct HistoryLimits {
    /// Revisions that were current within this time can be read; older ones are dropped segment by segment.
    pub max_age: Duration,
    /// Memory of history in addition to the current tree, in bytes.
    pub max_bytes: u64,
    /// Events between two checkpoints, at least 1. More events take less memory and make reads of past revisions
    /// slower.
    pub checkpoint_every_events: usize,
}

impl HistoryLimits {
    /// Bytes that one segment, and all rebuilt past revisions together, may take. Rebuilt revisions have a bound of
    /// their own: a read must not shorten the window, and a full window must not make each page rebuild its revision
    /// again.
    pub fn fraction_bytes(&self) -> u64 {
        self.max_bytes / u64::from(SEGMENT_FRACTION)
    }
}

impl Default for HistoryLimits {
    /// Five minutes, which is kube-apiserver's interval between compactions of etcd, and 256 MiB.
    fn default() -> Self {
        HistoryLimits {
            max_age: Duration::from_secs(300),
            max_bytes: 256 << 20,
            checkpoint_every_events: 128,
        }
    }
}

/// Result of [`Store::apply`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Changes that took effect.
    pub applied: usize,
    /// Changes that were dropped because they were at or below the store's revision.
    pub fenced: usize,
}

/// Why changes that replace values that are not held are not applied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotApplied {
    /// A change lacks the value that it replaces.
    NotBrought,
    /// A change brings another value than the one that was left out.
    Differs,
}

/// Reason why the store has no state for a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AtError {
    /// The revision is below a known compaction: etcd would refuse it, too.
    #[error("revision {revision} is below the compaction at {compacted}")]
    Compacted {
        /// The requested revision.
        revision: i64,
        /// The lowest revision that etcd may still have.
        compacted: i64,
    },
    /// The revision is above the store's.
    #[error("revision {revision} is above {current}")]
    Future {
        /// The requested revision.
        revision: i64,
        /// The store's revision.
        current: i64,
    },
    /// The revision is older than the window; etcd may still have it.
    #[error("revision {revision} is older than the window, which starts at {oldest}")]
    Gone {
        /// The requested revision.
        revision: i64,
        /// The oldest revision of the window.
        oldest: i64,
    },
}

/// The state at a revision, or the parts from which to rebuild it.
#[derive(Clone, Debug)]
pub enum Snapshot {
    /// The state itself: that of a checkpoint, or the current one.
    Ready(Tree),
    /// A state between two checkpoints.
    Rebuild(Rebuild),
}

impl Snapshot {
    /// The state, rebuilt if necessary.
    pub fn into_tree(self) -> Tree {
        match self {
            Snapshot::Ready(tree) => tree,
            Snapshot::Rebuild(rebuild) => rebuild.run().tree,
        }
    }
}

/// A checkpoint and the events to apply to it. Immutable and independent of the store: rebuilding needs no lock on it.
#[derive(Clone, Debug)]
pub struct Rebuild {
    checkpoint: Tree,
    batches: Vec<Batch>,
    revision: i64,
}

/// A past state and its memory.
#[derive(Clone, Debug)]
pub struct Rebuilt {
    /// Keys at the revision.
    pub tree: Tree,
    /// Memory of the nodes and blocks that the state does not share with its checkpoint, in bytes.
    pub bytes: u64,
}

impl Rebuild {
    /// Revision of the last event at or below the requested revision. Requests with the same value have the same state.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// Applies the events; O(events log keys).
    pub fn run(&self) -> Rebuilt {
        let mut tree = self.checkpoint.clone();
        // A checkpoint of its own, so that the nodes copied from here on are counted as the cost of this state.
        drop(tree.checkpoint());
        let own_bytes = |tree: &Tree| tree.node_bytes_copied() + tree.block_bytes_gathered();
        let before = own_bytes(&tree);
        for change in self.batches.iter().flat_map(|batch| batch.up_to(self.revision)) {
            change.apply_to(&mut tree);
        }
        let bytes = own_bytes(&tree) - before;
        Rebuilt { tree, bytes }
    }
}

struct Segment {
    /// The state at `revision`.
    checkpoint: Tree,
    revision: i64,
    /// When the checkpoint was made, which is when the state at `revision` was the current one.
    since: Duration,
    /// Number of events after `revision`, up to the next segment's.
    events: usize,
    /// Memory that is freed with this segment: its part of the log, the entries that its events replaced, and the
    /// nodes that were copied because the checkpoint holds the old ones.
    bytes: u64,
}

impl Segment {
    fn new(tree: &mut Tree, revision: i64, now: Duration) -> Segment {
        Segment {
            checkpoint: tree.checkpoint(),
            revision,
            since: now,
            events: 0,
            bytes: 0,
        }
    }
}

/// The current tree with its history. Rebuilt past states are not kept here.
pub struct Store {
    tree: Tree,
    revision: i64,
    /// Highest known compaction: lower revisions cannot be read.
    compacted: i64,
    limits: HistoryLimits,
    /// Oldest first.
    closed: VecDeque<Segment>,
    open: Segment,
    /// Events of all segments.
    log: EventLog,
    /// Sum over all segments.
    segment_bytes: u64,
    /// Running total of the segments that were dropped.
    dropped_bytes: u64,
    /// States and events below this revision are not known to be etcd's any more.
    forgotten: i64,
}

/// An event of a key that an earlier event of the same revision has changed.
struct Repeated {
    index: usize,
    /// Index of the first event of the key in this revision.
    first: usize,
}

/// The events that are not the first of their key in their revision, in order. Nested transactions make them (etcd 16380).
fn repeated_in_a_revision(changes: &[Change]) -> Vec<Repeated> {
    let mut repeated = Vec::new();
    let mut begin = 0;
    for of_revision in changes.chunk_by(|a, b| a.revision() == b.revision()) {
        // Most revisions have one event, and deletes of a range come in the order of keys.
        if !of_revision.is_sorted_by(|a, b| a.key() < b.key()) {
            let mut firsts = HashMap::new();
            for (index, change) in (begin..).zip(of_revision) {
                let first = *firsts.entry(change.key()).or_insert(index);
                if first != index {
                    repeated.push(Repeated { index, first });
                }
            }
        }
        begin += of_revision.len();
    }
    repeated
}

impl Store {
    /// A store that starts with the state at `revision` and has no older one.
    pub fn new(mut tree: Tree, revision: i64, limits: HistoryLimits, now: Duration) -> Store {
        let open = Segment::new(&mut tree, revision, now);
        Store {
            tree,
            revision,
            compacted: 0,
            limits,
            closed: VecDeque::new(),
            open,
            log: EventLog::default(),
            segment_bytes: 0,
            dropped_bytes: 0,
            forgotten: 0,
        }
    }

    /// Revision of the current tree: every change at or below it has been applied.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The current tree.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Fails unless each of `changes` that replaces a value that is not held brings it, or etcd was asked for it in vain
    /// (`are_brought`): what etcd itself leaves out, it has compacted.
    ///
    /// # Errors
    /// [`NotApplied`]; the changes must not be applied.
    pub fn check_replaced(&self, changes: &[Change], are_brought: bool) -> Result<(), NotApplied> {
        if self.tree.summary().has_all_values() {
            return Ok(());
        }
        let mut seen = HashSet::new();
        for change in changes.iter().filter(|change| change.revision() > self.revision) {
            let old = self.tree.get(change.key()).filter(|old| !old.has_value());
            // What a later change of the key replaces is the first one.
            let Some(old) = old.filter(|_| seen.insert(change.key())) else {
                continue;
            };
            match &change.replaced {
                None if !are_brought => return Err(NotApplied::NotBrought),
                Some(brought) if !old.is_same(brought) => return Err(NotApplied::Differs),
                _ => {}
            }
        }
        Ok(())
    }

    /// Applies the changes of whole revisions, in order of revision. `revision` is the store's revision afterwards,
    /// at least that of the last change. Changes at or below the current revision are fenced. If the value that a change
    /// replaces is not held, the change must bring it, or the event has none.
    ///
    /// # Errors
    /// The entry that a change replaces is in a damaged packed block. The store is of no use afterwards.
    pub fn apply(
        &mut self,
        mut changes: Vec<Change>,
        revision: i64,
        now: Duration,
    ) -> Result<Applied, MemoryError> {
        let all = changes.len();
        changes.retain(|change| change.revision() > self.revision);
        let outcome = Applied {
            applied: changes.len(),
            fenced: all - changes.len(),
        };
        let last = changes.last().map_or(revision, Change::revision).max(revision);
        let held_bytes = |tree: &Tree| tree.node_bytes_copied() + tree.block_bytes_left();
        let held_before = held_bytes(&self.tree);
        let mut bytes = 0;
        let mut repeated = repeated_in_a_revision(&changes).into_iter().peekable();
        for index in 0..changes.len() {
            let change = &mut changes[index];
            let old = match change.apply_to(&mut self.tree) {
                // History must not keep the whole block for one of its entries.
                Some(old) if old.has_value() => Some(old.detached()?),
                Some(old) => change.replaced.take().filter(|brought| old.is_same(brought)),
                None => None,
            };
            bytes += old.as_ref().map_or(0, Entry::memory_bytes);
            let is_creation = change.is_creation();
            changes[index].replaced = match repeated.next_if(|repeated| repeated.index == index) {
                None => old,
                Some(_) if is_creation => None,
                Some(repeated) => changes[repeated.first].replaced.clone(),
            };
        }
        bytes += held_bytes(&self.tree) - held_before;
        bytes += self.log.push(changes);
        self.open.events += outcome.applied;
        self.open.bytes += bytes;
        self.segment_bytes += bytes;
        self.advance(last, now);
        Ok(outcome)
    }

    /// Records that nothing changed up to `revision`, and drops history that exceeds the limits. A lower revision is
    /// ignored.
    pub fn advance(&mut self, revision: i64, now: Duration) {
        self.revision = self.revision.max(revision);
        let is_full = self.open.events >= self.limits.checkpoint_every_events.max(1)
            || self.open.bytes > self.limits.fraction_bytes()
            || now.saturating_sub(self.open.since) > self.limits.max_age / SEGMENT_FRACTION;
        if self.open.events > 0 && is_full {
            self.close_segment(now);
        }
        self.trim(now);
    }

    /// Records that etcd has compacted `revision`: lower revisions can no longer be read here either. The events of that
    /// very revision are kept: a watch may begin there.
    pub fn compact(&mut self, revision: i64) {
        self.compacted = self.compacted.max(revision);
        while self
            .second_revision()
            .is_some_and(|second| second < self.compacted)
        {
            self.drop_oldest();
        }
    }

    /// Returns no state below `revision` any more, and no events up to it: etcd may have others.
    pub fn forget_before(&mut self, revision: i64) {
        self.forgotten = self.forgotten.max(revision);
    }

    /// The oldest state, and its revision; `None` if it is not known to be etcd's.
    pub fn base(&self) -> Option<(&Tree, i64)> {
        let oldest = self.oldest_segment();
        (oldest.revision >= self.forgotten).then_some((&oldest.checkpoint, oldest.revision))
    }

    /// Oldest revision that [`Store::snapshot_at`] can return.
    pub fn oldest_revision(&self) -> i64 {
        self.oldest_checkpoint().max(self.compacted)
    }

    /// Revision after which the log has every event.
    pub fn log_complete_after(&self) -> i64 {
        match self.oldest_checkpoint() {
            EMPTY_REVISION => 0,
            revision => revision,
        }
    }

    /// Revision of the oldest checkpoint, or the one before which everything was forgotten. The log has every later event.
    pub fn oldest_checkpoint(&self) -> i64 {
        self.oldest_segment().revision.max(self.forgotten)
    }

    fn oldest_segment(&self) -> &Segment {
        self.closed.front().unwrap_or(&self.open)
    }

    /// The state at a revision. Costs O(log n) and at most one reference per batch of a segment; the events are
    /// applied only by [`Rebuild::run`].
    ///
    /// # Errors
    /// The revision is compacted, in the future, or older than the window.
    pub fn snapshot_at(&self, revision: i64) -> Result<Snapshot, AtError> {
        if revision < self.compacted {
            return Err(AtError::Compacted {
                revision,
                compacted: self.compacted,
            });
        }
        if revision > self.revision {
            return Err(AtError::Future {
                revision,
                current: self.revision,
            });
        }
        if revision < self.forgotten {
            return Err(AtError::Gone {
                revision,
                oldest: self.oldest_revision(),
            });
        }
        // Every state since the last event is the current one.
        if revision >= self.log.last_revision().unwrap_or(self.open.revision) {
            return Ok(Snapshot::Ready(self.tree.clone()));
        }
        let segment = if self.open.revision <= revision {
            &self.open
        } else {
            let later = self
                .closed
                .partition_point(|segment| segment.revision <= revision);
            let before = later.checked_sub(1).and_then(|index| self.closed.get(index));
            before.ok_or_else(|| AtError::Gone {
                revision,
                oldest: self.oldest_revision(),
            })?
        };
        let mut batches = Vec::new();
        let mut last = None;
        for batch in self.log.batches_after(segment.revision) {
            let Some(change) = batch.up_to(revision).last() else {
                break;
            };
            last = Some(change.revision());
            batches.push(batch.clone());
        }
        Ok(match last {
            None => Snapshot::Ready(segment.checkpoint.clone()),
            Some(last) => Snapshot::Rebuild(Rebuild {
                checkpoint: segment.checkpoint.clone(),
                batches,
                revision: last,
            }),
        })
    }

    /// Puts leaves in the place of those that they were made from, in every state that has them.
    pub fn put_repacked(&mut self, repacked: &Repacked) {
        let mut seen = Replacements::default();
        let bytes = self.tree.put_repacked(repacked, &mut seen);
        self.tree.count_kept_by_readers(bytes);
        for segment in self.closed.iter_mut().chain([&mut self.open]) {
            segment.checkpoint.put_repacked(repacked, &mut seen);
        }
    }

    /// Memory of history in addition to the current tree, in bytes: entries that only history holds, nodes copied for
    /// its checkpoints, and the log. Rebuilt states are not included.
    pub fn history_bytes(&self) -> u64 {
        self.segment_bytes
    }

    /// Running total of the history that was dropped, in bytes. Readers of older states may still hold it.
    pub fn dropped_bytes(&self) -> u64 {
        self.dropped_bytes
    }

    /// Memory of tree and history, in bytes. O(1).
    pub fn memory_bytes(&self) -> u64 {
        self.tree.memory_bytes() + self.history_bytes()
    }

    /// Bounds on history, as given to [`Store::new`].
    pub fn limits(&self) -> &HistoryLimits {
        &self.limits
    }

    /// The events of the window.
    pub fn log(&self) -> &EventLog {
        &self.log
    }

    /// Records what the follower of the log takes; see [`EventLog::follow`].
    pub fn follow_log(&mut self, after: i64, revision: Option<i64>) -> Option<Missed> {
        self.log.follow(after, revision)
    }

    /// Revision of the second oldest checkpoint.
    fn second_revision(&self) -> Option<i64> {
        self.closed.front()?;
        Some(self.closed.get(1).unwrap_or(&self.open).revision)
    }

    fn close_segment(&mut self, now: Duration) {
        // Not the store's revision: the revisions since the last event have the same state.
        let revision = self.log.last_revision().unwrap_or(self.open.revision);
        let next = Segment::new(&mut self.tree, revision, now);
        self.closed.push_back(std::mem::replace(&mut self.open, next));
    }

    fn trim(&mut self, now: Duration) {
        // A segment is too old when the state that followed it is.
        while self.closed.front().is_some()
            && now.saturating_sub(self.closed.get(1).unwrap_or(&self.open).since) > self.limits.max_age
        {
            self.drop_oldest();
        }
        let max_bytes = self.limits.max_bytes - self.limits.fraction_bytes();
        while self.segment_bytes > max_bytes && self.closed.front().is_some() {
            self.drop_oldest();
        }
    }

    fn drop_oldest(&mut self) {
        if let Some(segment) = self.closed.pop_front() {
            self.segment_bytes -= segment.bytes;
            self.dropped_bytes += segment.bytes;
        }
        self.log.trim_through(self.oldest_segment().revision);
    }
}

#[cfg(test)]
mod tests;
