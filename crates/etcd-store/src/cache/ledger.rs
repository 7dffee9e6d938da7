//! Memory of a tree, as modifications count it.

use super::stored::StoredEntry;

/// Memory accounting of a tree.
#[derive(Clone, Copy, Default)]
pub(super) struct Ledger {
    pub(super) epoch: u64,
    /// Memory of all entries of this tree, shared or not, in bytes.
    pub(super) entry_bytes: u64,
    /// The part of it that packed entries take.
    pub(super) packed_bytes: u64,
    /// Length of the packed entries as fields `kvs`, in bytes.
    pub(super) packed_encoded_bytes: u64,
    /// Memory of all nodes of this tree, shared or not, in bytes, and of blocks beyond their entries.
    pub(super) node_bytes: u64,
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

    /// Begins the running totals at zero.
    pub(super) fn reset_totals(&mut self) {
        self.copied_bytes = 0;
        self.left_bytes = 0;
        self.gathered_bytes = 0;
        self.copied_for_readers_bytes = 0;
    }

    /// Counts an entry of the tree.
    pub(super) fn add(&mut self, stored: &StoredEntry) {
        self.entry_bytes += stored.memory_bytes();
        if stored.is_packed() {
            self.packed_bytes += stored.memory_bytes();
            self.packed_encoded_bytes += stored.encoded_len() as u64;
        }
    }

    /// Counts an entry no longer.
    pub(super) fn remove(&mut self, stored: &StoredEntry) {
        self.entry_bytes -= stored.memory_bytes();
        if stored.is_packed() {
            self.packed_bytes -= stored.memory_bytes();
            self.packed_encoded_bytes -= stored.encoded_len() as u64;
        }
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
