//! Blocks: small entries of a leaf in one allocation, one after the other in key order.
//!
//! A list sends neighbours as one slice, where it would read each from a cold place of its own and copy it; and the allocator
//! rounds once, not for each entry. An entry that is written later has an allocation of its own, and its old bytes stay in
//! the block, unused, until the leaf is gathered again. A block has entries of one leaf; snapshots and readers keep it alive.

use std::fmt;

use super::memory::class_bytes;

/// Length from which an entry keeps an allocation of its own, in bytes: it is sent by reference anyway, and its unused bytes
/// would be many.
pub(super) const ENTRY_MAX_BYTES: usize = 4 << 10;
/// Bytes of a block at most.
pub(super) const BLOCK_MAX_BYTES: usize = 32 << 10;

/// Memory of a block beyond its bytes.
pub(super) const BLOCK_HEADER_BYTES: usize = 48;
/// Entries of a block at most.
pub(super) const BLOCK_MAX_ENTRIES: usize = 32;

/// The encoded entries.
pub(super) struct Block {
    /// Epoch of the tree in which it was made. If it is older than the tree's current epoch, the last checkpoint holds it.
    pub(super) born: u64,
    pub(super) bytes: Box<[u8]>,
}

/// Part of an entry of this length in the memory of a block whose entries all have it, in bytes.
pub(super) fn share_bytes(length: usize) -> u64 {
    let entries = (BLOCK_MAX_BYTES / length).clamp(1, BLOCK_MAX_ENTRIES);
    let block_bytes = class_bytes(entries * length) + BLOCK_HEADER_BYTES;
    block_bytes.div_ceil(entries) as u64
}

impl fmt::Debug for Block {
    /// Shows the length only: values must not be logged (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "block of {} bytes", self.bytes.len())
    }
}
