//! The tree: a persistent B+tree of entries in key order.
//!
//! A clone is a snapshot and costs one reference. A modification copies only those nodes on its path that a snapshot
//! holds, and changes the others in place. Each slot of an inner node has the [`Summary`] of its subtree, so that
//! ranks, counts and sizes of any range cost O(log n).

use std::ops::ControlFlow;
use std::sync::{Arc, Weak};

use bytes::Bytes;
use etcd_wire::protobuf::to_usize;

use super::ledger::{Ledger, TreeMemory};
use super::node::{Body, Inner, Node, Slot, Split, Summary, writable};
use super::stored::{EntryReader, MemoryError, StoredEntry};
use super::{entry::Entry, leaf::Leaf, separator::Separators};

/// Entries in key order. Cloning it is O(1).
#[derive(Clone, Default)]
pub struct Tree {
    pub(super) root: Option<Arc<Node>>,
    pub(super) summary: Summary,
    pub(super) ledger: Ledger,
}

/// Observer of a tree, which does not keep it.
#[derive(Clone, Debug, Default)]
pub struct WeakTree(Weak<Node>);

impl WeakTree {
    /// Whether a clone of the tree exists. Always false of an empty one.
    pub fn is_held(&self) -> bool {
        self.0.strong_count() > 0
    }
}

impl Tree {
    /// An empty tree.
    pub fn new() -> Tree {
        Tree::default()
    }

    /// A tree with these nodes, whose memory the ledger has.
    pub(super) fn of_root(root: Option<Slot>, ledger: Ledger) -> Tree {
        Tree {
            summary: root.as_ref().map(|slot| slot.summary).unwrap_or_default(),
            root: root.map(|slot| slot.node),
            ledger,
        }
    }

    /// An observer of this tree.
    pub fn downgrade(&self) -> WeakTree {
        WeakTree(self.root.as_ref().map(Arc::downgrade).unwrap_or_default())
    }

    /// Mean length of the entries, in bytes.
    pub fn mean_encoded_bytes(&self) -> u64 {
        self.summary.encoded_bytes / self.len().max(1)
    }

    /// Number of entries.
    pub fn len(&self) -> u64 {
        self.summary.count
    }

    /// Whether the tree has no entry.
    pub fn is_empty(&self) -> bool {
        self.root.is_none()
    }

    /// Totals over the whole tree. O(1).
    pub fn summary(&self) -> Summary {
        self.summary
    }

    /// Entry of a key. O(log n).
    pub fn get(&self, key: &[u8]) -> Option<&StoredEntry> {
        let mut node = self.root.as_ref()?;
        loop {
            match &node.body {
                Body::Inner(inner) => node = &inner.slots[inner.slot_of(key)].node,
                Body::Leaf(leaf) => {
                    leaf.record_read();
                    return leaf.get(leaf.find(key)?);
                }
            }
        }
    }

    /// Inserts an entry; returns the previous one of its key.
    pub fn insert(&mut self, entry: Entry) -> Option<StoredEntry> {
        let entry = StoredEntry::from(entry);
        let added = Summary::of(&entry);
        self.summary += added;
        self.ledger.add(&entry);
        let Some(root) = &mut self.root else {
            let root = Node::leaf(Leaf::new(vec![entry]), self.ledger.epoch);
            self.ledger.memory.nodes += root.memory_bytes();
            self.root = Some(Arc::new(root));
            return None;
        };
        let inserted = insert(root, entry, added, &mut self.ledger);
        if let Some((replaced, summary)) = &inserted.replaced {
            self.summary -= *summary;
            self.ledger.remove(replaced);
        }
        if let Some(split) = inserted.split {
            let mut left = self.summary;
            left -= split.right.summary;
            let slots = vec![
                Slot {
                    summary: left,
                    node: Arc::clone(root),
                },
                split.right,
            ];
            let mut separators = Separators::default();
            separators.push(&split.separator);
            let grown = Node::inner(slots, separators, self.ledger.epoch);
            self.ledger.memory.nodes += grown.memory_bytes();
            *root = Arc::new(grown);
        }
        inserted.replaced.map(|(replaced, _)| replaced)
    }

    /// Removes and returns the entry of a key.
    pub fn remove(&mut self, key: &[u8]) -> Option<StoredEntry> {
        self.get(key)?; // an absent key must not copy nodes
        let root = self.root.as_mut()?;
        let (removed, summary) = remove(root, key, &mut self.ledger)?;
        self.summary -= summary;
        self.ledger.remove(&removed);
        self.shrink();
        Some(removed)
    }

    /// Drops an empty root, and roots with a single child.
    fn shrink(&mut self) {
        loop {
            let below = match self.root.as_ref().map(|root| &root.body) {
                Some(Body::Leaf(leaf)) if leaf.is_empty() => None,
                Some(Body::Inner(inner)) if inner.slots.len() == 1 => {
                    inner.slots.first().map(|slot| Arc::clone(&slot.node))
                }
                _ => return,
            };
            if let Some(root) = &self.root {
                self.ledger.memory.nodes -= root.memory_bytes();
            }
            self.root = below;
        }
    }

    /// Number of keys below `key`. O(log n).
    pub fn rank(&self, key: &[u8]) -> u64 {
        let mut rank = 0;
        let mut next = self.root.as_ref();
        while let Some(node) = next {
            next = match &node.body {
                Body::Inner(inner) => {
                    let (before, from) = inner.slots.split_at(inner.slot_of(key));
                    rank += before.iter().map(|slot| slot.summary.count).sum::<u64>();
                    from.first().map(|slot| &slot.node)
                }
                Body::Leaf(leaf) => {
                    let (Ok(position) | Err(position)) = leaf.position(key);
                    rank += position as u64;
                    None
                }
            };
        }
        rank
    }

    /// Entry at `rank`, counted from 0. O(log n).
    pub fn at(&self, rank: u64) -> Option<&StoredEntry> {
        let mut found = None;
        self.for_each_from(rank, |entry| {
            found = Some(entry);
            ControlFlow::Break(())
        });
        found
    }

    /// Totals over the ranks `from..to`; ranks beyond the end count nothing. O(log n).
    pub fn summary_of_ranks(&self, from: u64, to: u64) -> Summary {
        if from >= to {
            return Summary::default();
        }
        let mut summary = self.summary_below(to);
        summary -= self.summary_below(from);
        summary
    }

    fn summary_below(&self, rank: u64) -> Summary {
        if rank >= self.summary.count {
            return self.summary;
        }
        let mut summary = Summary::default();
        let mut rest = rank;
        let mut whole = self.summary;
        let mut next = self.root.as_ref();
        while let Some(node) = next {
            next = None;
            match &node.body {
                Body::Inner(inner) => {
                    for slot in &inner.slots {
                        if rest < slot.summary.count {
                            (next, whole) = (Some(&slot.node), slot.summary);
                            break;
                        }
                        rest -= slot.summary.count;
                        summary += slot.summary;
                    }
                }
                Body::Leaf(leaf) => {
                    let (before, from) = leaf.split_at(to_usize(rest));
                    // The shorter side is summed up: each entry may be a cache miss.
                    if before.len() <= from.len() {
                        summary += Summary::of_all(before);
                    } else {
                        summary += whole;
                        summary -= Summary::of_all(from);
                    }
                }
            }
        }
        summary
    }

    /// Calls `visit` for each entry in key order, starting at `rank`, until it breaks.
    pub fn for_each_from<'a>(&'a self, rank: u64, mut visit: impl FnMut(&'a StoredEntry) -> ControlFlow<()>) {
        self.for_each_leaf_from(rank, |_, run| run.iter().try_for_each(&mut visit));
    }

    /// Calls `visit` for each entry, with its value, in key order, starting at `rank`, until it breaks.
    ///
    /// # Errors
    /// A packed block is damaged.
    pub fn read_from(
        &self,
        rank: u64,
        mut visit: impl FnMut(&Entry) -> ControlFlow<()>,
    ) -> Result<(), MemoryError> {
        let (mut reader, mut outcome) = (EntryReader::default(), Ok(()));
        self.for_each_from(rank, |stored| match reader.read(stored) {
            Ok(entry) => visit(&entry),
            Err(corrupt) => {
                outcome = Err(corrupt);
                ControlFlow::Break(())
            }
        });
        outcome
    }

    /// Number of the first of `messages`, which are KeyValues in key order, that are the entries from `rank` on.
    pub fn matching(&self, rank: u64, messages: &[Bytes]) -> u64 {
        let (mut reader, mut theirs, mut same) = (EntryReader::default(), messages.iter(), 0);
        self.for_each_from(rank, |ours| match theirs.next() {
            Some(theirs) if reader.is_message(ours, theirs) => {
                same += 1;
                ControlFlow::Continue(())
            }
            _ => ControlFlow::Break(()),
        });
        same
    }

    /// Whether one of `entries` was written at the revisions of the tree's entry of its key, with another value.
    pub fn contradicts<'a>(&self, entries: impl IntoIterator<Item = &'a Entry>) -> bool {
        let mut reader = EntryReader::default();
        entries.into_iter().any(|theirs| {
            let ours = self.get(theirs.key());
            ours.is_some_and(|ours| ours.is_as_old_as(theirs) && !reader.is_same(ours, theirs))
        })
    }

    /// Calls `visit` for each run of consecutive entries in key order, starting at `rank`, until it breaks. For packing,
    /// they were read.
    pub(super) fn for_each_run_from<'a>(
        &'a self,
        rank: u64,
        mut visit: impl FnMut(&'a [StoredEntry]) -> ControlFlow<()>,
    ) {
        self.for_each_leaf_from(rank, |leaf, run| {
            leaf.record_read();
            visit(run)
        });
    }

    fn for_each_leaf_from<'a>(
        &'a self,
        rank: u64,
        mut visit: impl FnMut(&'a Leaf, &'a [StoredEntry]) -> ControlFlow<()>,
    ) {
        let mut skip = rank;
        if skip < self.summary.count
            && let Some(root) = &self.root
        {
            let _ = walk(root, &mut skip, &mut visit);
        }
    }

    /// Returns a clone. From now on, [`Tree::node_bytes_copied`] counts the nodes that modifications of this tree copy
    /// because the clone holds them.
    pub fn checkpoint(&mut self) -> Tree {
        let checkpoint = self.clone();
        self.ledger.epoch += 1;
        checkpoint
    }

    /// Running total of the memory of nodes that were copied because the last checkpoint holds them, in bytes: the cost
    /// of checkpoints.
    pub fn node_bytes_copied(&self) -> u64 {
        self.ledger.copied_bytes
    }

    /// Running total of the bytes of entries that the last checkpoint holds in blocks, and this tree elsewhere or no longer.
    pub(super) fn block_bytes_left(&self) -> u64 {
        self.ledger.left_bytes
    }

    /// Running total of the bytes of entries that were moved into blocks.
    pub(super) fn block_bytes_gathered(&self) -> u64 {
        self.ledger.gathered_bytes
    }

    /// Running total of the memory of nodes that were copied because another clone of the tree holds them, in bytes.
    pub fn node_bytes_copied_for_readers(&self) -> u64 {
        self.ledger.copied_for_readers_bytes
    }

    /// Begins the running totals again, for a store of its own.
    pub fn reset_totals(&mut self) {
        self.ledger = Ledger {
            epoch: self.ledger.epoch,
            memory: self.ledger.memory,
            ..Ledger::default()
        };
    }

    /// Counts bytes that were replaced, as copied for the readers that may keep them.
    pub(super) fn count_kept_by_readers(&mut self, bytes: u64) {
        self.ledger.copied_for_readers_bytes += bytes;
    }

    /// Memory of entries and nodes, shared or not, the allocator's rounding included, in bytes. O(1).
    pub fn memory_bytes(&self) -> u64 {
        self.ledger.memory.bytes()
    }

    /// Memory of the tree by what takes it. O(1).
    pub fn memory(&self) -> TreeMemory {
        self.ledger.memory
    }

    /// Damages the packed blocks of the first leaf, as faulty memory would.
    #[cfg(any(test, feature = "testing"))]
    pub fn damage(&mut self) {
        let mut node = self.root.as_mut().map(Arc::make_mut);
        while let Some(within) = node {
            node = match &mut within.body {
                Body::Inner(inner) => inner.slots.first_mut().map(|slot| Arc::make_mut(&mut slot.node)),
                Body::Leaf(leaf) => {
                    leaf.damage();
                    return;
                }
            };
        }
    }
}

impl std::fmt::Debug for Tree {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tree")
            .field("summary", &self.summary)
            .finish_non_exhaustive()
    }
}

struct Inserted {
    replaced: Option<(StoredEntry, Summary)>,
    split: Option<Split>,
}

fn insert(node: &mut Arc<Node>, entry: StoredEntry, added: Summary, ledger: &mut Ledger) -> Inserted {
    let node = writable(node, ledger);
    let before = node.memory_bytes();
    let inserted = match &mut node.body {
        Body::Leaf(leaf) => insert_into_leaf(leaf, entry, ledger),
        Body::Inner(inner) => {
            let index = inner.slot_of(entry.key());
            let slot = &mut inner.slots[index];
            let Inserted { replaced, split } = insert(&mut slot.node, entry, added, ledger);
            slot.summary += added;
            if let Some((_, summary)) = &replaced {
                slot.summary -= *summary;
            }
            if let Some(split) = split {
                inner.adopt(index, split);
            }
            Inserted {
                replaced,
                split: inner.split_if_full(ledger.epoch),
            }
        }
    };
    ledger.memory.nodes = ledger.memory.nodes + node.memory_bytes() - before;
    if let Some(split) = &inserted.split {
        ledger.memory.nodes += split.right.node.memory_bytes();
    }
    inserted
}

fn insert_into_leaf(leaf: &mut Leaf, entry: StoredEntry, ledger: &mut Ledger) -> Inserted {
    // First the cheap search by mark: most puts are updates.
    if let Some(index) = leaf.find(entry.key()) {
        let old = leaf.replace(index, entry, ledger);
        let summary = Summary::of(&old);
        return Inserted {
            replaced: Some((old, summary)),
            split: None,
        };
    }
    let (Ok(index) | Err(index)) = leaf.position(entry.key());
    Inserted {
        replaced: None,
        split: leaf
            .insert(index, entry, ledger)
            .map(|half| Split::of_leaf(half, ledger.epoch)),
    }
}

fn remove(node: &mut Arc<Node>, key: &[u8], ledger: &mut Ledger) -> Option<(StoredEntry, Summary)> {
    let node = writable(node, ledger);
    let before = node.memory_bytes();
    let removed = match &mut node.body {
        Body::Leaf(leaf) => {
            let removed = leaf.remove(leaf.find(key)?, ledger);
            let summary = Summary::of(&removed);
            (removed, summary)
        }
        Body::Inner(inner) => {
            let index = inner.slot_of(key);
            let slot = &mut inner.slots[index];
            let (removed, summary) = remove(&mut slot.node, key, ledger)?;
            slot.summary -= summary;
            if slot.node.is_too_small() && inner.slots.len() > 1 {
                merge_with_right(inner, index.saturating_sub(1), ledger);
            }
            (removed, summary)
        }
    };
    ledger.memory.nodes = ledger.memory.nodes + node.memory_bytes() - before;
    Some(removed)
}

/// Merges slot `left` with the one to its right; divides the result evenly if it is too large.
fn merge_with_right(inner: &mut Inner, left: usize, ledger: &mut Ledger) {
    let right = inner.slots.remove(left + 1);
    let separator = inner.separators.remove(left);
    let right_bytes = right.node.memory_bytes();
    if Arc::strong_count(&right.node) > 1 && right.node.born < ledger.epoch {
        ledger.copied_bytes += right_bytes;
    }
    let slot = &mut inner.slots[left];
    slot.summary += right.summary;
    let node = writable(&mut slot.node, ledger);
    let before = node.memory_bytes() + right_bytes;
    let epoch = ledger.epoch;
    let split = match (&mut node.body, Arc::unwrap_or_clone(right.node).body) {
        (Body::Leaf(leaf), Body::Leaf(more)) => {
            leaf.append(more, ledger).map(|half| Split::of_leaf(half, epoch))
        }
        (Body::Inner(inner), Body::Inner(more)) => {
            inner.slots.extend(more.slots);
            inner.separators.append(&separator, &more.separators);
            inner.split_if_full(epoch)
        }
        // All leaves are at the same depth, so neighbours are of one kind.
        _ => {
            debug_assert!(false, "a leaf next to an inner node");
            None
        }
    };
    let after = node.memory_bytes() + split.as_ref().map_or(0, |split| split.right.node.memory_bytes());
    ledger.memory.nodes = ledger.memory.nodes + after - before;
    if let Some(split) = split {
        inner.adopt(left, split);
    }
}

fn walk<'a>(
    node: &'a Node,
    skip: &mut u64,
    visit: &mut impl FnMut(&'a Leaf, &'a [StoredEntry]) -> ControlFlow<()>,
) -> ControlFlow<()> {
    match &node.body {
        Body::Leaf(leaf) => {
            let from = to_usize(std::mem::take(skip));
            visit(leaf, &leaf[from..])
        }
        Body::Inner(inner) => {
            for slot in &inner.slots {
                if *skip >= slot.summary.count {
                    *skip -= slot.summary.count;
                } else {
                    walk(&slot.node, skip, visit)?;
                }
            }
            ControlFlow::Continue(())
        }
    }
}

#[cfg(any(test, fuzzing, feature = "testing"))]
pub(super) mod model;
#[cfg(test)]
mod tests;
