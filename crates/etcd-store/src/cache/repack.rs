//! Leaves of a tree in use are made again: packed, coldest first, unpacked, without values once packing is not enough, and with
//! these values again.
//!
//! Of entries without values counts, keys, absence and the bounds of pages are known as before, and only etcd has the values:
//! [`select`](super::select) declines a read of them. A digest shows whether a value that etcd sends is the one that was left out.
//!
//! The work is done on a snapshot, without the lock on the store. What it has made then takes the place of the leaves that
//! it was made from, in the current state and in every state of the history that has them: a leaf that was written
//! meanwhile is another one, and stays as it is. The states do not change by this, nor does what history counts: it counts
//! what it does not share with the current state. Old leaves live on in the snapshots that readers have.

use std::{collections::HashMap, ops::ControlFlow, sync::Arc};

use super::node::{Body, Inner, Node};
use super::stored::{MemoryError, StoredEntry};
use super::{entry::Entry, leaf::Leaf, ledger::TreeMemory, tree::Tree};

/// Most leaves that one step looks at: without anything to do, that takes a millisecond.
const MAX_LOOKED_AT: usize = 1 << 12;

/// Change that is made to leaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Repacking<'a> {
    /// Leaves that were neither read nor written since the last look are packed.
    PackCold,
    /// All are packed.
    PackAll,
    /// Leaves that were read since the last look are unpacked.
    UnpackHot,
    /// Values are left out.
    LeaveOut,
    /// Values are left out, those that something else has included.
    #[cfg(debug_assertions)]
    LeaveOutAll,
    /// The values of these entries, which are in the order of their keys, are put where they are not held, if they are those
    /// that were left out.
    Hold(&'a [Entry]),
}

/// Neighbouring entries, some of whose values are not held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NotHeld {
    /// Key of the first.
    pub first: Box<[u8]>,
    /// Key of the last.
    pub last: Box<[u8]>,
    /// Length of those without values as fields `kvs`, in bytes.
    pub bytes: u64,
}

type Key = Box<[u8]>;

/// Other leaves with the entries of a snapshot, packed, unpacked or without values, and what they replace.
#[derive(Default)]
pub struct Repacked {
    leaves: Replacements,
    /// First key of the first leaf, and last key of the last one.
    range: Option<(Key, Key)>,
    next: Option<Key>,
    bytes: u64,
}

/// By its address, a node and what takes its place, if anything. It is kept, so that no other gets its address.
pub(super) type Replacements = HashMap<usize, (Arc<Node>, Option<Replacement>)>;

/// A node that takes the place of another, and by what the memory of a tree changes.
#[derive(Clone)]
pub(super) struct Replacement {
    new: Arc<Node>,
    added: TreeMemory,
    removed: TreeMemory,
}

impl Repacked {
    /// A key of the first leaf that was not looked at; `None` at the end of the keys.
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
        let replacement = Replacement {
            added: new.memory(),
            removed: node.memory(),
            new: Arc::new(new),
        };
        self.leaves
            .insert(address(node), (Arc::clone(node), Some(replacement)));
    }
}

impl Tree {
    /// Makes other leaves of those that have the entries from `from` on and below `end` (empty: to the last key), until their
    /// entries have `max_bytes` together. This tree does not change; the result is for
    /// [`Store::put_repacked`](super::Store::put_repacked).
    ///
    /// Leaves of which something else has an entry are left alone, unless they get values: that would only take more memory.
    ///
    /// # Errors
    /// A packed block is damaged.
    pub fn repack(
        &self,
        (from, end): (&[u8], &[u8]),
        what: Repacking<'_>,
        max_bytes: u64,
    ) -> Result<Repacked, MemoryError> {
        let (mut repacked, mut looked_at, mut outcome) = (Repacked::default(), 0, Ok(()));
        let Some(root) = &self.root else {
            return Ok(repacked);
        };
        let _ = for_each_leaf_from(root, from, &mut |node, leaf| {
            let first = leaf.first().map_or(&b""[..], StoredEntry::key);
            if !end.is_empty() && first >= end {
                return ControlFlow::Break(());
            }
            looked_at += 1;
            if looked_at > MAX_LOOKED_AT || repacked.bytes >= max_bytes {
                repacked.next = Some(first.into());
                return ControlFlow::Break(());
            }
            match what.of(leaf, (from, end), node.born) {
                Ok(Some(new)) => repacked.add(node, leaf, new),
                Ok(None) => {}
                Err(error) => {
                    outcome = Err(error);
                    return ControlFlow::Break(());
                }
            }
            ControlFlow::Continue(())
        });
        outcome.map(|()| repacked)
    }

    /// Replaces leaves by the others that were made of them; returns the memory of the replaced ones, in bytes.
    pub(super) fn put_repacked(&mut self, repacked: &Repacked, seen: &mut Replacements) -> u64 {
        let replaced = self.root.as_ref().and_then(|root| replaced(root, repacked, seen));
        let Some(Replacement { new, added, removed }) = replaced else {
            return 0;
        };
        self.root = Some(new);
        self.ledger.memory += added;
        self.ledger.memory -= removed;
        self.summary.not_held_bytes = self.ledger.memory.not_held;
        removed.entries + removed.nodes
    }

    /// The next entries from `from` on of which a value is not held, of one leaf or, as long as they have fewer than `max_bytes`
    /// together, of its neighbours. O(leaves of the result + log n).
    pub fn next_not_held(&self, from: &[u8], max_bytes: u64) -> Option<NotHeld> {
        let mut found = None;
        if let Some(root) = &self.root
            && self.summary().not_held_bytes > 0
        {
            let _ = find_not_held(root, from, max_bytes, &mut found);
        }
        found
    }
}

impl Repacking<'_> {
    /// The leaf after this change of its entries from `from` on and below `end`; `None` if there is no reason for it.
    pub(super) fn of(
        self,
        leaf: &Leaf,
        (from, end): (&[u8], &[u8]),
        born: u64,
    ) -> Result<Option<Leaf>, MemoryError> {
        match self {
            Repacking::PackCold | Repacking::PackAll => {
                let is_hot = leaf.heat.take_hot();
                let is_due = !is_hot || self == Repacking::PackAll;
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
            Repacking::LeaveOut if !leaf.has_its_entries_alone() => Ok(None),
            Repacking::LeaveOut => leaf.without_values(from, end, born),
            #[cfg(debug_assertions)]
            Repacking::LeaveOutAll => leaf.without_values(from, end, born),
            Repacking::Hold(values) => Ok(leaf.with_values(values, born)),
        }
    }
}

fn address(node: &Arc<Node>) -> usize {
    Arc::as_ptr(node).addr()
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

/// Replacement of a node: a leaf that was made again, or a copy of the node with such a leaf below; `None` if nothing does.
fn replaced(node: &Arc<Node>, repacked: &Repacked, seen: &mut Replacements) -> Option<Replacement> {
    let inner = match &node.body {
        Body::Leaf(_) => return repacked.leaves.get(&address(node))?.1.clone(),
        Body::Inner(inner) => inner,
    };
    // States of the history share most nodes, and must share what takes their place.
    if let Some((_, made)) = seen.get(&address(node)) {
        return made.clone();
    }
    let made = with_replaced_children(node, inner, repacked, seen);
    seen.insert(address(node), (Arc::clone(node), made.clone()));
    made
}

fn with_replaced_children(
    node: &Node,
    inner: &Inner,
    repacked: &Repacked,
    seen: &mut Replacements,
) -> Option<Replacement> {
    let (first, last) = repacked.range.as_ref()?;
    let (mut copy, mut added, mut removed) = (None, TreeMemory::default(), node.memory());
    for index in inner.slot_of(first)..=inner.slot_of(last) {
        if let Some(below) = replaced(&inner.slots[index].node, repacked, seen) {
            let slot = &mut copy.get_or_insert_with(|| inner.clone()).slots[index];
            let not_held = &mut slot.summary.not_held_bytes;
            *not_held = *not_held + below.added.not_held - below.removed.not_held;
            slot.node = below.new;
            added += below.added;
            removed += below.removed;
        }
    }
    let new = Node {
        born: node.born,
        body: Body::Inner(copy?),
    };
    added += new.memory();
    Some(Replacement {
        new: Arc::new(new),
        added,
        removed,
    })
}

fn find_not_held(
    node: &Arc<Node>,
    from: &[u8],
    max_bytes: u64,
    found: &mut Option<NotHeld>,
) -> ControlFlow<()> {
    let leaf = match &node.body {
        Body::Leaf(leaf) => leaf,
        Body::Inner(inner) => {
            return inner.slots[inner.slot_of(from)..].iter().try_for_each(|slot| {
                if slot.summary.not_held_bytes > 0 {
                    find_not_held(&slot.node, from, max_bytes, found)
                } else if found.is_some() {
                    // Neighbours only: what lies between is not read in vain.
                    ControlFlow::Break(())
                } else {
                    ControlFlow::Continue(())
                }
            });
        }
    };
    for stored in leaf.iter() {
        if stored.has_value() || stored.key() < from {
            continue;
        }
        let bytes = stored.encoded_len() as u64;
        let range = found.get_or_insert_with(|| NotHeld {
            first: stored.key().into(),
            ..NotHeld::default()
        });
        if range.bytes > 0 && range.bytes + bytes > max_bytes {
            return ControlFlow::Break(());
        }
        range.last = stored.key().into();
        range.bytes += bytes;
    }
    ControlFlow::Continue(())
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
mod not_held_tests;
#[cfg(test)]
mod tests;
