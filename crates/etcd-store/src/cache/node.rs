//! The nodes of the tree, and modifications of a single node.
//!
//! A node is shared by every tree (snapshot) that has not changed below it since, and is never changed while shared:
//! [`writable`] copies it first. The cost of a copy determines the sizes below: a copy increments the reference count
//! of every entry (or child) in the node, each in a cache line of its own, so that small nodes are cheap to update and
//! large ones cheap to traverse.

use std::{
    ops::{AddAssign, SubAssign},
    sync::Arc,
};

use super::{
    entry::{Entry, touch},
    leaf::{LEAF_MIN, Leaf, RightHalf},
    ledger::Ledger,
    memory::{ARC_HEADER_BYTES, class_bytes},
    separator::Separators,
};

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
}

impl Summary {
    pub(super) fn of(entry: &Entry) -> Summary {
        let (encoded_bytes, keys_only_bytes, lease_bytes) = entry.lengths();
        Summary {
            count: 1,
            encoded_bytes,
            keys_only_bytes,
            lease_bytes,
        }
    }

    pub(super) fn of_all(entries: &[Entry]) -> Summary {
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
    }
}

impl SubAssign for Summary {
    fn sub_assign(&mut self, other: Summary) {
        self.count -= other.count;
        self.encoded_bytes -= other.encoded_bytes;
        self.keys_only_bytes -= other.keys_only_bytes;
        self.lease_bytes -= other.lease_bytes;
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
    ledger.node_bytes = ledger.node_bytes + node.memory_bytes() - before;
    node
}
