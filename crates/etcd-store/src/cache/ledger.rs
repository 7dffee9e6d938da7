//! Memory of a tree, as modifications count it.

use super::entry::Entry;

/// Memory accounting of a tree.
#[derive(Clone, Copy, Default)]
pub(super) struct Ledger {
    pub(super) epoch: u64,
    /// Memory of all entries of this tree, shared or not, in bytes.
    pub(super) entry_bytes: u64,
    /// Memory of all nodes of this tree, shared or not, in bytes, and of blocks beyond their entries.
    pub(super) node_bytes: u64,
    /// Running total of the memory of nodes that were copied because the last checkpoint holds them, in bytes.
    pub(super) copied_bytes: u64,
    /// Running total of the bytes of entries in blocks that the last checkpoint holds and this tree no longer does.
    pub(super) left_bytes: u64,
    /// Running total of the bytes of entries that were moved into blocks.
    pub(super) packed_bytes: u64,
    /// Running total of the memory of nodes that were copied for another reason: a reader holds them.
    pub(super) copied_for_readers_bytes: u64,
}

impl Ledger {
    /// Records that `entry` is no longer in a block of the tree. The last checkpoint may hold it there.
    pub(super) fn leave_block(&mut self, entry: &Entry) {
        if let Some((block, _)) = entry.block()
            && block.born < self.epoch
        {
            self.left_bytes += entry.memory_bytes();
        }
    }
}
