//! Leaves of a tree in use are packed, coldest first, and unpacked again; and others are made of them (`residency`).
//!
//! The work is done on a snapshot, without the lock on the store. What it has made then takes the place of the leaves that
//! it was made from, in the current state and in every state of the history that has them: a leaf that was written
//! meanwhile is another one, and stays as it is. The states do not change by this, nor does what history counts: it counts
//! what it does not share with the current state. Old leaves live on in the snapshots that readers have.

use std::{collections::HashMap, ops::ControlFlow, sync::Arc};

use super::{
    leaf::Leaf,
    ledger::Ledger,
    node::{Body, Inner, Node, Summary},
    packed::CorruptBlock,
    stored::StoredEntry,
    tree::Tree,
};

/// Most leaves that one step looks at: without anything to do, that takes a millisecond.
const MAX_LOOKED_AT: usize = 1 << 12;

/// Change that is made to leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repacking {
    /// Leaves that were neither read nor written since the last look are packed.
    PackCold,
    /// All are packed.
    PackAll,
    /// Leaves that were read since the last look are unpacked.
    UnpackHot,
}

type Key = Box<[u8]>;

/// Other leaves with the entries of a snapshot, packed, unpacked or without values, and what they replace.
pub struct Repacked {
    /// By the address of the leaf that each replaces.
    leaves: HashMap<usize, Replacement>,
    /// First key of the first leaf, and last key of the last one.
    range: Option<(Key, Key)>,
    next: Option<Key>,
    bytes: u64,
}

/// A node, and the one that takes its place.
struct Replacement {
    /// Kept, so that no other node gets its address.
    _old: Arc<Node>,
    new: Arc<Node>,
    change: MemoryDelta,
}

/// By what the memory of a tree changes, in bytes.
#[derive(Clone, Copy, Default)]
struct MemoryDelta {
    added: ByteSums,
    removed: ByteSums,
}

#[derive(Clone, Copy, Default)]
struct ByteSums {
    entries: u64,
    packed: u64,
    packed_encoded: u64,
    /// Of entries whose values are not held; see [`Summary`].
    not_held: u64,
    nodes: u64,
}

/// Nodes that were looked at, with their replacement, or with themselves to keep their address; see [`Replacement`].
#[derive(Default)]
pub(super) struct Seen(HashMap<usize, Result<Replacement, Arc<Node>>>);

impl Repacked {
    /// A key of the first leaf that was not looked at; `None` at the end of the tree.
    pub fn next(&self) -> Option<&[u8]> {
        self.next.as_deref()
    }

    /// Whether there is no other leaf.
    pub fn is_empty(&self) -> bool {
        self.leaves.is_empty()
    }

    /// Length of the entries in the other leaves, as fields `kvs`, in bytes.
    pub fn encoded_bytes(&self) -> u64 {
        self.bytes
    }
}

impl Tree {
    /// Packs or unpacks leaves from the one that has `from` on, until their entries have `max_bytes` together. This tree does
    /// not change; the result is for [`Store::put_repacked`](super::Store::put_repacked).
    ///
    /// Leaves of which something else has an entry are left alone: that would only take more memory.
    ///
    /// # Errors
    /// A packed block is damaged.
    pub fn repack(&self, from: &[u8], what: Repacking, max_bytes: u64) -> Result<Repacked, CorruptBlock> {
        self.remake(from, max_bytes, |node, leaf| {
            repacked_leaf(leaf, what, node.born).map(ControlFlow::Continue)
        })
    }

    /// Makes other leaves with the same entries of those from the one that has `from` on, until their entries have
    /// `max_bytes` together, or `remake` breaks; `None` leaves a leaf as it is.
    pub(super) fn remake<E>(
        &self,
        from: &[u8],
        max_bytes: u64,
        mut remake: impl FnMut(&Node, &Leaf) -> Result<ControlFlow<(), Option<Leaf>>, E>,
    ) -> Result<Repacked, E> {
        let mut repacked = Repacked {
            leaves: HashMap::new(),
            range: None,
            next: None,
            bytes: 0,
        };
        let (mut looked_at, mut outcome) = (0, Ok(()));
        if let Some(root) = &self.root {
            let _ = for_each_leaf_from(root, from, &mut |node, leaf| {
                looked_at += 1;
                if looked_at > MAX_LOOKED_AT || repacked.bytes >= max_bytes {
                    repacked.next = leaf.first().map(|first| first.key().into());
                    return ControlFlow::Break(());
                }
                match remake(node, leaf) {
                    Ok(ControlFlow::Continue(new)) => {
                        if let Some(new) = new {
                            repacked.add(node, leaf, new);
                        }
                        ControlFlow::Continue(())
                    }
                    Ok(ControlFlow::Break(())) => ControlFlow::Break(()),
                    Err(corrupt) => {
                        outcome = Err(corrupt);
                        ControlFlow::Break(())
                    }
                }
            });
        }
        outcome.map(|()| repacked)
    }

    /// Replaces leaves by the others that were made of them; returns the memory of the replaced ones, in bytes.
    pub(super) fn put_repacked(&mut self, repacked: &Repacked, seen: &mut Seen) -> u64 {
        let Some(root) = &self.root else { return 0 };
        let Some((new, change)) = replaced(root, repacked, seen) else {
            return 0;
        };
        self.root = Some(new);
        self.ledger.entry_bytes = self.ledger.entry_bytes + change.added.entries - change.removed.entries;
        self.ledger.packed_bytes = self.ledger.packed_bytes + change.added.packed - change.removed.packed;
        self.ledger.packed_encoded_bytes =
            self.ledger.packed_encoded_bytes + change.added.packed_encoded - change.removed.packed_encoded;
        self.ledger.node_bytes = self.ledger.node_bytes + change.added.nodes - change.removed.nodes;
        change.apply_to(&mut self.summary);
        change.removed.entries + change.removed.nodes
    }
}

impl Repacked {
    fn add(&mut self, node: &Arc<Node>, leaf: &Leaf, new: Leaf) {
        let (Some(first), Some(last)) = (leaf.first(), leaf.last()) else {
            return;
        };
        let start = self
            .range
            .take()
            .map_or_else(|| first.key().into(), |(start, _)| start);
        self.range = Some((start, last.key().into()));
        self.bytes += leaf.iter().map(|stored| stored.encoded_len() as u64).sum::<u64>();
        // What has the old leaf has its entries: the age of the new one is the same.
        let new = Node::leaf(new, node.born);
        let change = MemoryDelta {
            added: bytes_of_leaf(&new),
            removed: bytes_of_leaf(node),
        };
        self.leaves.insert(
            address(node),
            Replacement {
                _old: Arc::clone(node),
                new: Arc::new(new),
                change,
            },
        );
    }
}

impl MemoryDelta {
    /// Changes of the totals over the entries: all else stays.
    fn apply_to(self, summary: &mut Summary) {
        summary.not_held_bytes = summary.not_held_bytes + self.added.not_held - self.removed.not_held;
    }

    fn and(self, other: MemoryDelta) -> MemoryDelta {
        MemoryDelta {
            added: self.added.and(other.added),
            removed: self.removed.and(other.removed),
        }
    }
}

impl ByteSums {
    fn and(self, other: ByteSums) -> ByteSums {
        ByteSums {
            entries: self.entries + other.entries,
            packed: self.packed + other.packed,
            packed_encoded: self.packed_encoded + other.packed_encoded,
            not_held: self.not_held + other.not_held,
            nodes: self.nodes + other.nodes,
        }
    }
}

fn address(node: &Arc<Node>) -> usize {
    Arc::as_ptr(node).addr()
}

fn bytes_of_leaf(node: &Node) -> ByteSums {
    let counted = Ledger::of(node.entries());
    ByteSums {
        entries: counted.entry_bytes,
        packed: counted.packed_bytes,
        packed_encoded: counted.packed_encoded_bytes,
        not_held: Summary::of_all(node.entries()).not_held_bytes,
        nodes: node.memory_bytes(),
    }
}

/// The leaf packed or unpacked, if there is a reason.
fn repacked_leaf(leaf: &Leaf, what: Repacking, born: u64) -> Result<Option<Leaf>, CorruptBlock> {
    match what {
        Repacking::PackCold | Repacking::PackAll => {
            let is_hot = leaf.heat.take_hot();
            let is_due = !is_hot || what == Repacking::PackAll;
            if !is_due || leaf.heat.is_settled() || !leaf.has_its_entries_alone() {
                return Ok(None);
            }
            let packed = leaf.packed(born);
            if packed.is_none() {
                // It is not tried again before the leaf is written.
                leaf.heat.set_settled();
            }
            Ok(packed)
        }
        Repacking::UnpackHot => {
            let has_packed = leaf.iter().any(StoredEntry::is_packed);
            if !has_packed || !leaf.heat.take_hot() || !leaf.has_its_entries_alone() {
                return Ok(None);
            }
            leaf.unpacked(born).map(Some)
        }
    }
}

/// Calls `visit` for the leaf that has `key`, or would have it, and those after it, until it breaks.
fn for_each_leaf_from<'a>(
    node: &'a Arc<Node>,
    key: &[u8],
    visit: &mut impl FnMut(&'a Arc<Node>, &'a Leaf) -> ControlFlow<()>,
) -> ControlFlow<()> {
    match &node.body {
        Body::Leaf(leaf) => visit(node, leaf),
        // In all children but the first, every key is above it.
        Body::Inner(inner) => inner.slots[inner.slot_of(key)..]
            .iter()
            .try_for_each(|slot| for_each_leaf_from(&slot.node, key, visit)),
    }
}

/// Replacement of a node: a leaf that was packed or unpacked, or a copy of the node with such a leaf below; `None` if nothing does.
fn replaced(node: &Arc<Node>, repacked: &Repacked, seen: &mut Seen) -> Option<(Arc<Node>, MemoryDelta)> {
    let inner = match &node.body {
        Body::Leaf(_) => {
            let leaf = repacked.leaves.get(&address(node))?;
            return Some((Arc::clone(&leaf.new), leaf.change));
        }
        Body::Inner(inner) => inner,
    };
    // States of the history share most nodes, and must share what takes their place.
    let made = seen.0.get(&address(node));
    if let Some(made) = made {
        let made = made.as_ref().ok()?;
        return Some((Arc::clone(&made.new), made.change));
    }
    let made = with_replaced_children(inner, repacked, seen).map(|(inner, below)| {
        let new = Node {
            born: node.born,
            body: Body::Inner(inner),
        };
        let nodes = |node: &Node| ByteSums {
            nodes: node.memory_bytes(),
            ..ByteSums::default()
        };
        let change = MemoryDelta {
            added: nodes(&new),
            removed: nodes(node),
        };
        (Arc::new(new), change.and(below))
    });
    let kept = match &made {
        Some((new, change)) => Ok(Replacement {
            _old: Arc::clone(node),
            new: Arc::clone(new),
            change: *change,
        }),
        None => Err(Arc::clone(node)),
    };
    seen.0.insert(address(node), kept);
    made
}

fn with_replaced_children(
    inner: &Inner,
    repacked: &Repacked,
    seen: &mut Seen,
) -> Option<(Inner, MemoryDelta)> {
    let (first, last) = repacked.range.as_ref()?;
    let (mut copy, mut change) = (None, MemoryDelta::default());
    for index in inner.slot_of(first)..=inner.slot_of(last) {
        if let Some((node, below)) = replaced(&inner.slots[index].node, repacked, seen) {
            let slot = &mut copy.get_or_insert_with(|| inner.clone()).slots[index];
            slot.node = node;
            below.apply_to(&mut slot.summary);
            change = change.and(below);
        }
    }
    copy.map(|copy| (copy, change))
}

impl std::fmt::Debug for Repacked {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Repacked")
            .field("leaves", &self.leaves.len())
            .field("encoded_bytes", &self.bytes)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
