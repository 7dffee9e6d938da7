//! The current tree and what came before it: the state at any revision of a bounded window.
//!
//! History is a row of segments. A segment is a checkpoint (a snapshot of the tree at some revision) and the changes from
//! there to the next segment's checkpoint. The state at a revision is the last checkpoint at or below it, with the changes
//! up to it applied. What a checkpoint costs is what changed since, not what exists: it shares all other nodes with the
//! current tree.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use super::{
    entry::Entry,
    memory::{ARC_HEADER_BYTES, class_bytes},
    tree::Tree,
};

/// Reconstructed snapshots kept for the next page of the same series.
const REVISITED_MAX: usize = 16;

/// The open segment gets a successor when it has this share of the window's bytes or age, so that trimming, which drops
/// whole segments, never has to drop much more than it must. Reconstructed snapshots together may take as much.
const SEGMENT_SHARE: u32 = 8;

/// One event of etcd's watch.
#[derive(Clone, Debug)]
pub enum Change {
    /// A key got this entry.
    Put(Entry),
    /// A key was deleted.
    Delete {
        /// Which one.
        key: Arc<[u8]>,
        /// The revision that deleted it.
        mod_revision: i64,
    },
}

impl Change {
    /// The revision that made the change.
    pub fn revision(&self) -> i64 {
        match self {
            Change::Put(entry) => entry.mod_revision(),
            Change::Delete { mod_revision, .. } => *mod_revision,
        }
    }

    /// The key that was changed.
    pub fn key(&self) -> &[u8] {
        match self {
            Change::Put(entry) => entry.key(),
            Change::Delete { key, .. } => key,
        }
    }

    /// What the log keeps of it; the entry of a put is in the tree, too, until something takes its place.
    fn log_bytes(&self) -> u64 {
        let key = match self {
            Change::Put(_) => 0,
            Change::Delete { key, .. } => class_bytes(ARC_HEADER_BYTES + key.len()),
        };
        (size_of::<Change>() + key) as u64
    }

    fn apply_to(&self, tree: &mut Tree) -> Option<Entry> {
        match self {
            Change::Put(entry) => tree.insert(entry.clone()),
            Change::Delete { key, .. } => tree.remove(key),
        }
    }
}

/// How much history is kept: both bounds hold at once.
#[derive(Clone, Copy, Debug)]
pub struct HistoryLimits {
    /// Revisions that were current within this time can be read; older ones go when they can.
    pub max_age: Duration,
    /// What history may take in memory beside the current tree.
    pub max_bytes: u64,
    /// Changes between two checkpoints: more of them is less memory and slower reads of old revisions. At least 1.
    pub checkpoint_every_events: usize,
}

impl Default for HistoryLimits {
    /// Five minutes, as kube-apiserver compacts etcd, and 256 MiB.
    fn default() -> Self {
        HistoryLimits {
            max_age: Duration::from_secs(300),
            max_bytes: 256 << 20,
            checkpoint_every_events: 128,
        }
    }
}

/// What became of a batch of changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Applied {
    /// Changes that took effect.
    pub applied: usize,
    /// Changes at or below the revision the store already had: dropped.
    pub fenced: usize,
}

/// Why there is no snapshot at a revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AtError {
    /// Below a compaction that the mirror has learned of: etcd would refuse it, too.
    #[error("revision {revision} is below the compaction at {compacted}")]
    Compacted {
        /// The revision asked for.
        revision: i64,
        /// The lowest revision that etcd may still have.
        compacted: i64,
    },
    /// Beyond what the store has seen.
    #[error("revision {revision} is beyond {current}")]
    Future {
        /// The revision asked for.
        revision: i64,
        /// The store's revision.
        current: i64,
    },
    /// Older than the window: etcd may well have it.
    #[error("revision {revision} is older than the window, which starts at {oldest}")]
    Gone {
        /// The revision asked for.
        revision: i64,
        /// The oldest revision of the window.
        oldest: i64,
    },
}

struct Segment {
    /// The state at `revision`.
    checkpoint: Tree,
    revision: i64,
    /// When the checkpoint was made: from then on, what this segment tells was no longer the whole truth.
    since: Duration,
    /// Changes after `revision` and at or below the next segment's.
    log: Vec<Change>,
    /// What goes when this segment goes: its log records, the entries that its changes replaced, and the nodes that were
    /// copied because the checkpoint holds the old ones.
    bytes: u64,
}

struct Revisited {
    revision: i64,
    tree: Tree,
    bytes: u64,
}

/// The current tree with its history.
pub struct Store {
    tree: Tree,
    revision: i64,
    /// Everything below it is gone, says etcd.
    compacted: i64,
    limits: HistoryLimits,
    /// Oldest first.
    closed: VecDeque<Segment>,
    open: Segment,
    /// Reconstructed by `snapshot_at`, least recently used first.
    revisited: VecDeque<Revisited>,
    /// The sum over all segments.
    segment_bytes: u64,
    /// The sum over all of `revisited`.
    revisited_bytes: u64,
}

impl Store {
    /// A store that starts with the state at `revision`, and knows nothing older.
    pub fn new(mut tree: Tree, revision: i64, limits: HistoryLimits, now: Duration) -> Store {
        let open = Segment {
            checkpoint: tree.checkpoint(),
            revision,
            since: now,
            log: Vec::new(),
            bytes: 0,
        };
        Store {
            tree,
            revision,
            compacted: 0,
            limits,
            closed: VecDeque::new(),
            open,
            revisited: VecDeque::new(),
            segment_bytes: 0,
            revisited_bytes: 0,
        }
    }

    /// The revision of the current tree: every change at or below it has been applied.
    pub fn revision(&self) -> i64 {
        self.revision
    }

    /// The current tree.
    pub fn tree(&self) -> &Tree {
        &self.tree
    }

    /// Applies the changes of whole revisions, in the order of revisions; `revision` is the store's revision after them, at
    /// least that of the last one. Changes at or below the current revision are fenced.
    pub fn apply(&mut self, changes: Vec<Change>, revision: i64, now: Duration) -> Applied {
        let mut outcome = Applied::default();
        let copied_before = self.tree.node_bytes_copied();
        let mut bytes = 0;
        let mut last = revision;
        for change in changes {
            let of_change = change.revision();
            if of_change <= self.revision {
                outcome.fenced += 1;
                continue;
            }
            last = last.max(of_change);
            let replaced = change.apply_to(&mut self.tree);
            bytes += change.log_bytes() + replaced.map_or(0, |entry| entry.memory_bytes());
            self.open.log.push(change);
            outcome.applied += 1;
        }
        bytes += self.tree.node_bytes_copied() - copied_before;
        self.open.bytes += bytes;
        self.segment_bytes += bytes;
        self.advance(last, now);
        outcome
    }

    /// Notes that nothing changed up to `revision`; a lower one is ignored.
    pub fn advance(&mut self, revision: i64, now: Duration) {
        self.revision = self.revision.max(revision);
        let log = self.open.log.len();
        let ripe = log >= self.limits.checkpoint_every_events.max(1)
            || self.open.bytes > self.share_bytes()
            || now.saturating_sub(self.open.since) > self.limits.max_age / SEGMENT_SHARE;
        if log > 0 && ripe {
            self.close_segment(now);
        }
        self.trim(now);
    }

    /// Learns that etcd has compacted `revision`: whatever is below it can no longer be read, here neither.
    pub fn compact(&mut self, revision: i64) {
        self.compacted = self.compacted.max(revision);
        while self
            .second_revision()
            .is_some_and(|second| second <= self.compacted)
        {
            self.drop_oldest();
        }
    }

    /// The oldest revision that [`Store::snapshot_at`] can still give.
    pub fn oldest_revision(&self) -> i64 {
        self.closed
            .front()
            .unwrap_or(&self.open)
            .revision
            .max(self.compacted)
    }

    /// The state at a revision.
    ///
    /// What has to be reconstructed is kept, because the next page of the same series asks for it again.
    ///
    /// # Errors
    /// If the revision is compacted, in the future, or older than the window.
    pub fn snapshot_at(&mut self, revision: i64) -> Result<Tree, AtError> {
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
        let later = self
            .closed
            .partition_point(|segment| segment.revision <= revision);
        let segment = if self.open.revision <= revision {
            &self.open
        } else {
            let before = later.checked_sub(1).and_then(|index| self.closed.get(index));
            before.ok_or_else(|| AtError::Gone {
                revision,
                oldest: self.oldest_revision(),
            })?
        };
        let changes = segment
            .log
            .partition_point(|change| change.revision() <= revision);
        if changes == segment.log.len() && segment.revision == self.open.revision {
            return Ok(self.tree.clone());
        }
        let Some(last) = changes.checked_sub(1).and_then(|index| segment.log.get(index)) else {
            return Ok(segment.checkpoint.clone());
        };
        let effective = last.revision();
        if let Some(index) = self
            .revisited
            .iter()
            .position(|known| known.revision == effective)
            && let Some(known) = self.revisited.remove(index)
        {
            let tree = known.tree.clone();
            self.revisited.push_back(known);
            return Ok(tree);
        }
        let mut tree = segment.checkpoint.clone();
        drop(tree.checkpoint()); // so that the copies it makes from here on are counted as its cost
        let copied_before = tree.node_bytes_copied();
        for change in segment.log.iter().take(changes) {
            change.apply_to(&mut tree);
        }
        let bytes = tree.node_bytes_copied() - copied_before;
        self.revisited.push_back(Revisited {
            revision: effective,
            tree: tree.clone(),
            bytes,
        });
        self.revisited_bytes += bytes;
        while self.revisited.len() > REVISITED_MAX || self.revisited_bytes > self.share_bytes() {
            self.forget_revisited();
        }
        Ok(tree)
    }

    /// What history takes in memory beside the current tree: entries that only it keeps, nodes copied for its checkpoints,
    /// and the log.
    pub fn history_bytes(&self) -> u64 {
        self.segment_bytes + self.revisited_bytes
    }

    /// What all of it takes in memory. O(1).
    pub fn memory_bytes(&self) -> u64 {
        self.tree.memory_bytes() + self.history_bytes()
    }

    /// The changes of the window, oldest first.
    pub fn events(&self) -> impl Iterator<Item = &Change> {
        self.closed
            .iter()
            .chain([&self.open])
            .flat_map(|segment| &segment.log)
    }

    /// The checkpoint of the segment after the oldest one.
    fn second_revision(&self) -> Option<i64> {
        self.closed.front()?;
        Some(self.closed.get(1).unwrap_or(&self.open).revision)
    }

    fn close_segment(&mut self, now: Duration) {
        // Not the store's revision: revisions since the last change have this very state, too.
        let revision = self.open.log.last().map_or(self.open.revision, Change::revision);
        let next = Segment {
            checkpoint: self.tree.checkpoint(),
            revision,
            since: now,
            log: Vec::new(),
            bytes: 0,
        };
        let mut closed = std::mem::replace(&mut self.open, next);
        closed.log.shrink_to_fit();
        self.closed.push_back(closed);
    }

    fn trim(&mut self, now: Duration) {
        // A segment is too old when the state that followed it already is.
        while self.closed.front().is_some()
            && now.saturating_sub(self.closed.get(1).unwrap_or(&self.open).since) > self.limits.max_age
        {
            self.drop_oldest();
        }
        while self.segment_bytes > self.limits.max_bytes - self.share_bytes() && self.closed.front().is_some()
        {
            self.drop_oldest();
        }
    }

    /// What one segment, and all that was reconstructed, may take. The latter has a bound of its own: a read must not shorten
    /// the window, and a window that is always full must not make each page reconstruct its revision again.
    fn share_bytes(&self) -> u64 {
        self.limits.max_bytes / u64::from(SEGMENT_SHARE)
    }

    fn drop_oldest(&mut self) {
        if let Some(segment) = self.closed.pop_front() {
            self.segment_bytes -= segment.bytes;
        }
        let oldest = self.closed.front().unwrap_or(&self.open).revision;
        while let Some(index) = self.revisited.iter().position(|known| known.revision < oldest) {
            if let Some(known) = self.revisited.remove(index) {
                self.revisited_bytes -= known.bytes;
            }
        }
    }

    fn forget_revisited(&mut self) {
        if let Some(known) = self.revisited.pop_front() {
            self.revisited_bytes -= known.bytes;
        }
    }
}

#[cfg(test)]
mod tests;
