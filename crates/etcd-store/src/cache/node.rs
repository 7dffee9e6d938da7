//! The nodes of the tree, and modifications of a single node.
//!
//! A node is shared by every tree (snapshot) that has not changed below it since, and is never changed while shared:
//! [`writable`] copies it first. The cost of a copy determines the sizes below: a copy increments the reference count
//! of every entry (or child) in the node, each in a cache line of its own, so that small nodes are cheap to update and
//! large ones cheap to traverse.

use std::ops::{AddAssign, SubAssign};
use std::sync::Arc;

use super::leaf::{LEAF_MIN, Leaf, RightHalf};
use super::ledger::{Ledger, TreeMemory};
use super::memory::{ARC_HEADER_BYTES, class_bytes};
use super::stored::{StoredEntry, touch};
use super::{entry::field_len, separator::Separators};

/// Largest number of children of an inner node. Chosen by measurement (`benches/micro.rs`).
pub(super) const INNER_MAX: usize = 32;
/// Smallest number of children, below which an inner node is merged with its neighbour or filled from it, like a leaf.
pub(super) const INNER_MIN: usize = INNER_MAX / 4;

/// Totals over the entries of a part of the tree.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Summary {
    /// Number of entries.
    pub count: u64,
    /// Length of their fields `kvs`, in bytes.
    pub encoded_bytes: u64,
    /// Length of their fields `kvs` without value and lease, in bytes.
    pub keys_only_bytes: u64,
    /// Bytes to add to `keys_only_bytes` if leases are kept.
    pub lease_bytes: u64,
    /// The part of `encoded_bytes` of entries whose values are not held.
    pub not_held_bytes: u64,
}

impl Summary {
    /// Of one entry: no value is read.
    pub(super) fn of(entry: &StoredEntry) -> Summary {
        let (prelude, lease) = entry.head_parts();
        let keys_only_bytes = field_len(prelude.len()) as u64;
        let encoded_bytes = entry.encoded_len() as u64;
        Summary {
            count: 1,
            encoded_bytes,
            not_held_bytes: if entry.has_value() { 0 } else { encoded_bytes },
            keys_only_bytes,
            lease_bytes: field_len(prelude.len() + lease.len()) as u64 - keys_only_bytes,
        }
    }

    /// Whether every value is held.
    pub fn has_all_values(&self) -> bool {
        self.not_held_bytes == 0
    }

    /// The part of `encoded_bytes` of entries whose values are held.
    pub fn held_bytes(&self) -> u64 {
        self.encoded_bytes - self.not_held_bytes
    }

    pub(super) fn of_all(entries: &[StoredEntry]) -> Summary {
        let mut sum = Summary::default();
        for entry in entries {
            sum += Summary::of(entry);
        }
        sum
    }

    pub(super) fn of_slots(slots: &[Slot]) -> Summary {
        let mut sum = Summary::default();
        for slot in slots {
            sum += slot.summary;
        }
        sum
    }
}

impl AddAssign for Summary {
    fn add_assign(&mut self, other: Summary) {
        self.count += other.count;
        self.encoded_bytes += other.encoded_bytes;
        self.keys_only_bytes += other.keys_only_bytes;
        self.lease_bytes += other.lease_bytes;
        self.not_held_bytes += other.not_held_bytes;
    }
}

impl SubAssign for Summary {
    fn sub_assign(&mut self, other: Summary) {
        self.count -= other.count;
        self.encoded_bytes -= other.encoded_bytes;
        self.keys_only_bytes -= other.keys_only_bytes;
        self.lease_bytes -= other.lease_bytes;
        self.not_held_bytes -= other.not_held_bytes;
    }
}

#[derive(Clone)]
pub(super) struct Node {
    /// Epoch of the tree in which this node was made or last copied. If it is older than the tree's current epoch, the
    /// last checkpoint holds the node.
    pub(super) born: u64,
    pub(super) body: Body,
}

#[derive(Clone)]
pub(super) enum Body {
    Leaf(Leaf),
    Inner(Inner),
}

#[derive(Clone)]
pub(super) struct Inner {
    pub(super) slots: Vec<Slot>,
    /// Separator i is above every key of slot i and not above any key of slot i + 1; there is one fewer than slots.
    pub(super) separators: Separators,
}

#[derive(Clone)]
pub(super) struct Slot {
    pub(super) summary: Summary,
    pub(super) node: Arc<Node>,
}

/// The right half of a divided node.
pub(super) struct Split {
    pub(super) separator: Box<[u8]>,
    pub(super) right: Slot,
}

impl Node {
    pub(super) fn leaf(leaf: Leaf, epoch: u64) -> Node {
        Node {
            born: epoch,
            body: Body::Leaf(leaf),
        }
    }

    pub(super) fn inner(slots: Vec<Slot>, separators: Separators, epoch: u64) -> Node {
        Node {
            born: epoch,
            body: Body::Inner(Inner { slots, separators }),
        }
    }

    /// The entries of a leaf; none of an inner node.
    pub(super) fn entries(&self) -> &[StoredEntry] {
        match &self.body {
            Body::Leaf(leaf) => leaf,
            Body::Inner(_) => &[],
        }
    }

    /// Memory of the node without its entries or children, in bytes.
    pub(super) fn memory_bytes(&self) -> u64 {
        let lists = match &self.body {
            Body::Leaf(leaf) => leaf.list_bytes(),
            Body::Inner(inner) => {
                let slots = class_bytes(inner.slots.capacity() * size_of::<Slot>());
                (slots + inner.separators.memory_bytes()) as u64
            }
        };
        class_bytes(ARC_HEADER_BYTES + size_of::<Node>()) as u64 + lists
    }

    /// Memory of the node and its entries, without its children.
    pub(super) fn memory(&self) -> TreeMemory {
        let mut memory = Ledger::of(self.entries()).memory;
        memory.nodes += self.memory_bytes();
        memory
    }

    /// Prefetches the reference counts that a copy increments.
    fn touch_below(&self) {
        match &self.body {
            Body::Leaf(leaf) => touch(leaf, 0),
            Body::Inner(inner) => {
                std::hint::black_box(
                    inner
                        .slots
                        .iter()
                        .fold(0, |touched, slot| touched ^ slot.node.born),
                );
            }
        }
    }

    pub(super) fn is_too_small(&self) -> bool {
        match &self.body {
            Body::Leaf(leaf) => leaf.len() < LEAF_MIN,
            Body::Inner(inner) => inner.slots.len() < INNER_MIN,
        }
    }
}

impl Split {
    /// Makes a node of the right half of a leaf.
    pub(super) fn of_leaf(half: RightHalf, epoch: u64) -> Split {
        Split {
            separator: half.separator,
            right: Slot {
                summary: Summary::of_all(&half.leaf),
                node: Arc::new(Node::leaf(half.leaf, epoch)),
            },
        }
    }
}

impl Inner {
    /// Index of the slot that contains `key`, or would contain it.
    pub(super) fn slot_of(&self, key: &[u8]) -> usize {
        self.separators.not_above(key)
    }

    /// Splits off the right half if there are too many children.
    pub(super) fn split_if_full(&mut self, epoch: u64) -> Option<Split> {
        if self.slots.len() <= INNER_MAX {
            return None;
        }
        let middle = self.slots.len() / 2;
        let slots = self.slots.split_off(middle);
        let (separator, separators) = self.separators.split_off(middle - 1)?;
        let summary = Summary::of_slots(&slots);
        Some(Split {
            separator,
            right: Slot {
                summary,
                node: Arc::new(Node::inner(slots, separators, epoch)),
            },
        })
    }

    /// Inserts the right half of slot `index` after it.
    pub(super) fn adopt(&mut self, index: usize, split: Split) {
        self.slots[index].summary -= split.right.summary;
        self.slots.insert(index + 1, split.right);
        self.separators.insert(index, &split.separator);
    }
}

/// The node for modification: itself if it is not shared, otherwise a copy that takes its place.
pub(super) fn writable<'a>(node: &'a mut Arc<Node>, ledger: &mut Ledger) -> &'a mut Node {
    let before = node.memory_bytes();
    if Arc::strong_count(node) > 1 {
        if node.born < ledger.epoch {
            ledger.copied_bytes += before;
        } else {
            ledger.copied_for_readers_bytes += before;
        }
        node.touch_below();
    }
    let node = Arc::make_mut(node);
    node.born = ledger.epoch;
    ledger.memory.nodes = ledger.memory.nodes + node.memory_bytes() - before;
    node
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::KeyValue;

    fn slot(key: usize) -> Slot {
        let entry = StoredEntry::from(KeyValue::new(format!("{key:04}"), 5, "value").entry());
        Slot {
            summary: Summary::of(&entry),
            node: Arc::new(Node::leaf(Leaf::new(vec![entry]), 0)),
        }
    }

    /// An inner node whose children have one key each.
    fn inner(children: usize) -> Inner {
        let mut separators = Separators::default();
        for key in 1..children {
            separators.push(format!("{key:04}").as_bytes());
        }
        Inner {
            slots: (0..children).map(slot).collect(),
            separators,
        }
    }

    #[test]
    fn full_inner_node_is_divided_between_two_children() {
        assert!(inner(INNER_MAX).split_if_full(0).is_none());
        let mut left = inner(INNER_MAX + 1);
        let whole = Summary::of_slots(&left.slots);
        let split = left.split_if_full(0).unwrap();
        let first = left.slots.len();
        assert_eq!(&*split.separator, format!("{first:04}").as_bytes());
        let Body::Inner(right) = &split.right.node.body else {
            panic!("the right half is an inner node");
        };
        assert_eq!(first + right.slots.len(), INNER_MAX + 1);
        assert!(first >= INNER_MIN && right.slots.len() >= INNER_MIN);
        // A separator fewer than children on both sides: one went to the parent.
        assert_eq!(left.separators.len(), first - 1);
        assert_eq!(right.separators.len(), right.slots.len() - 1);
        assert_eq!(right.slot_of(format!("{first:04}").as_bytes()), 0);
        let mut halves = Summary::of_slots(&left.slots);
        halves += split.right.summary;
        assert_eq!(halves, whole);
    }

    #[test]
    fn right_half_of_a_child_becomes_the_next_child() {
        let mut parent = inner(2);
        let moved = slot(0).summary;
        parent.slots[0].summary += moved;
        let whole = Summary::of_slots(&parent.slots);
        let split = Split {
            separator: b"0000a".as_slice().into(),
            right: slot(0),
        };
        parent.adopt(0, split);
        assert_eq!(Summary::of_slots(&parent.slots), whole);
        let slots = [&b"0000"[..], b"0000a", b"0000b", b"0001"].map(|key| parent.slot_of(key));
        assert_eq!(slots, [0, 1, 1, 2]);
    }

    #[test]
    fn node_that_is_shared_is_copied_before_it_changes_and_another_is_not() {
        let mut node = slot(0).node;
        let mut ledger = Ledger::default();
        let own = Arc::as_ptr(&node);
        writable(&mut node, &mut ledger);
        assert_eq!(Arc::as_ptr(&node), own);
        let snapshot = Arc::clone(&node);
        writable(&mut node, &mut ledger);
        assert!(!Arc::ptr_eq(&node, &snapshot));
    }

    #[test]
    fn copy_is_counted_for_the_checkpoint_if_that_holds_the_node_and_otherwise_for_readers() {
        let mut node = slot(0).node;
        let bytes = node.memory_bytes();
        let mut ledger = Ledger {
            epoch: 1,
            ..Ledger::default()
        };
        let _checkpoint = Arc::clone(&node);
        writable(&mut node, &mut ledger);
        assert_eq!(node.born, 1);
        let _reader = Arc::clone(&node);
        writable(&mut node, &mut ledger);
        writable(&mut node, &mut ledger);
        assert_eq!(ledger.copied_bytes, bytes);
        assert_eq!(ledger.copied_for_readers_bytes, bytes);
    }
}
