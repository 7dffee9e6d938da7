//! The nodes of the tree, and what changes inside one of them.
//!
//! A node is shared by every tree (snapshot) that has not changed below it since, and is never changed while shared:
//! [`writable`] copies it first. What a copy costs decides the sizes below: it touches the reference count of every
//! entry (or child) in the node, each in a cache line of its own, so that small nodes are cheap to update and large
//! ones cheap to walk.

use std::{
    ops::{AddAssign, SubAssign},
    sync::Arc,
};

use super::{
    entry::{Entry, touch},
    leaf::{LEAF_MIN, Leaf, RightHalf},
    memory::{ARC_HEADER_BYTES, class_bytes},
    separator::Separators,
};

/// Children of an inner node at most. Chosen by measurement.
pub(super) const INNER_MAX: usize = 32;
/// Below this an inner node takes from its neighbour or merges with it, as leaves do.
pub(super) const INNER_MIN: usize = INNER_MAX / 4;

/// What is below a place in the tree, or between two.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub struct Summary {
    /// Entries.
    pub count: u64,
    /// Bytes of the fields `kvs` as stored.
    pub encoded_bytes: u64,
    /// Bytes of the fields `kvs` without value and lease.
    pub keys_only_bytes: u64,
    /// What keeping the leases adds to `keys_only_bytes`.
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
    /// The epoch of the tree in which this node was made or last copied: older than the tree's current epoch means
    /// that the last checkpoint holds it.
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
    /// One fewer than slots: number i is above every key below slot i and not above any key below slot i + 1.
    pub(super) separators: Separators,
}

#[derive(Clone)]
pub(super) struct Slot {
    pub(super) summary: Summary,
    pub(super) node: Arc<Node>,
}

/// The right half of a node that had grown too large.
pub(super) struct Split {
    pub(super) separator: Box<[u8]>,
    pub(super) right: Slot,
}

/// What a tree keeps account of while its nodes change.
#[derive(Clone, Copy, Default)]
pub(super) struct Ledger {
    pub(super) epoch: u64,
    /// Bytes of all nodes of this tree, shared or not.
    pub(super) node_bytes: u64,
    /// Running total of the bytes of nodes copied because the last checkpoint holds them.
    pub(super) copied_bytes: u64,
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

    /// What the node itself takes in memory, without what it points to.
    pub(super) fn memory_bytes(&self) -> u64 {
        let lists = match &self.body {
            Body::Leaf(leaf) => leaf.list_bytes(),
            Body::Inner(inner) => {
                class_bytes(inner.slots.capacity() * size_of::<Slot>()) + inner.separators.memory_bytes()
            }
        };
        (class_bytes(ARC_HEADER_BYTES + size_of::<Node>()) + lists) as u64
    }

    /// Brings what a copy counts references to into the cache.
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

    pub(super) fn is_thin(&self) -> bool {
        match &self.body {
            Body::Leaf(leaf) => leaf.len() < LEAF_MIN,
            Body::Inner(inner) => inner.slots.len() < INNER_MIN,
        }
    }
}

impl Split {
    /// A new leaf beside the one that it was cut from.
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
    /// The slot below which `key` is or would be.
    pub(super) fn slot_of(&self, key: &[u8]) -> usize {
        self.separators.not_above(key)
    }

    /// Cuts the right half off if there are too many children.
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

    /// Puts the right half of slot `index` beside it.
    pub(super) fn adopt(&mut self, index: usize, split: Split) {
        self.slots[index].summary -= split.right.summary;
        self.slots.insert(index + 1, split.right);
        self.separators.insert(index, &split.separator);
    }
}

/// The node for changing: itself if nobody else holds it, else a copy in its place.
pub(super) fn writable<'a>(node: &'a mut Arc<Node>, ledger: &mut Ledger) -> &'a mut Node {
    let before = node.memory_bytes();
    if Arc::strong_count(node) > 1 {
        if node.born < ledger.epoch {
            ledger.copied_bytes += before;
        }
        node.touch_below();
    }
    let node = Arc::make_mut(node);
    node.born = ledger.epoch;
    ledger.node_bytes = ledger.node_bytes + node.memory_bytes() - before;
    node
}
