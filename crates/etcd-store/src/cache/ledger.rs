//! Memory of a tree, as modifications count it.

use std::ops::{AddAssign, SubAssign};

use super::stored::StoredEntry;

/// Memory of a tree, or of a part of it, shared or not, by what takes it, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeMemory {
    /// Memory of all entries.
    pub entries: u64,
    /// The part of it that packed entries take.
    pub packed: u64,
    /// Length of the packed entries as fields `kvs`.
    pub packed_encoded: u64,
    /// Length of the entries whose values are not held as fields `kvs`.
    pub not_held: u64,
    /// Memory of all nodes, and of blocks beyond their entries.
    pub nodes: u64,
}

impl TreeMemory {
    /// Of one entry: no value is read.
    pub(super) fn of(stored: &StoredEntry) -> TreeMemory {
        let entries = stored.memory_bytes();
        let (is_packed, encoded) = (stored.is_packed(), stored.encoded_len() as u64);
        TreeMemory {
            entries,
            packed: if is_packed { entries } else { 0 },
            packed_encoded: if is_packed { encoded } else { 0 },
            not_held: if stored.has_value() { 0 } else { encoded },
            nodes: 0,
        }
    }

    /// Memory of entries and nodes.
    pub(super) fn bytes(&self) -> u64 {
        self.entries + self.nodes
    }

    fn each(self, other: TreeMemory, with: fn(u64, u64) -> u64) -> TreeMemory {
        TreeMemory {
            entries: with(self.entries, other.entries),
            packed: with(self.packed, other.packed),
            packed_encoded: with(self.packed_encoded, other.packed_encoded),
            not_held: with(self.not_held, other.not_held),
            nodes: with(self.nodes, other.nodes),
        }
    }
}

impl AddAssign for TreeMemory {
    fn add_assign(&mut self, other: TreeMemory) {
        *self = self.each(other, |a, b| a + b);
    }
}

impl SubAssign for TreeMemory {
    fn sub_assign(&mut self, other: TreeMemory) {
        *self = self.each(other, |a, b| a - b);
    }
}

/// Memory accounting of a tree.
#[derive(Clone, Copy, Default)]
pub(super) struct Ledger {
    pub(super) epoch: u64,
    pub(super) memory: TreeMemory,
    /// Running total of the memory of nodes that were copied because the last checkpoint holds them, in bytes.
    pub(super) copied_bytes: u64,
    /// Running total of the bytes of entries in blocks that the last checkpoint holds and this tree no longer does.
    pub(super) left_bytes: u64,
    /// Running total of the bytes of entries that were moved into blocks.
    pub(super) gathered_bytes: u64,
    /// Running total of the memory of nodes that were copied for another reason: a reader holds them.
    pub(super) copied_for_readers_bytes: u64,
}

impl Ledger {
    /// Of a tree with these entries, without nodes.
    pub(super) fn of(entries: &[StoredEntry]) -> Ledger {
        let mut ledger = Ledger::default();
        for stored in entries {
            ledger.add(stored);
        }
        ledger
    }

    /// Counts an entry of the tree.
    pub(super) fn add(&mut self, stored: &StoredEntry) {
        self.memory += TreeMemory::of(stored);
    }

    /// Counts an entry no longer.
    pub(super) fn remove(&mut self, stored: &StoredEntry) {
        self.memory -= TreeMemory::of(stored);
    }

    /// Records that `entry` is no longer in a block of the tree. The last checkpoint may hold it there.
    pub(super) fn leave_block(&mut self, stored: &StoredEntry) {
        let born = match stored.parts() {
            Ok(entry) => entry.block().map(|(block, _)| block.born),
            Err((packed, _)) => Some(packed.born),
        };
        if born.is_some_and(|born| born < self.epoch) {
            self.left_bytes += stored.memory_bytes();
        }
    }
}
