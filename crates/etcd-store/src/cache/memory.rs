//! Allocations: their sizes, rounding included, and blocks, which are small entries of a leaf in one of them, one after the other in
//! key order.
//!
//! The binary's allocator, jemalloc, rounds every request up to a size class: multiples of 16 up to 128 bytes, then
//! four classes per doubling (…, 8 KiB, 10 KiB, 12 KiB, 14 KiB, 16 KiB, 20 KiB, …). The cache counts its memory in
//! these classes, and cuts large entries at them: with values of 10 KB a mirror takes 1.05 bytes per encoded byte (case
//! P12 of the benchmark).
//!
//! A list sends neighbours of a block as one slice, where it would read each from a cold place of its own and copy it; and the
//! allocator rounds once, not for each entry. An entry that is written later has an allocation of its own, and its old bytes stay in
//! the block, unused, until the leaf is gathered again. A block has entries of one leaf; snapshots and readers keep it alive.

use std::fmt;

/// Size of an `Arc`'s two reference counts in bytes.
pub(super) const ARC_HEADER_BYTES: usize = 16;

/// Size class of a request of `bytes`; 0 for 0.
pub(super) fn class_bytes(bytes: usize) -> usize {
    match bytes {
        0 => 0,
        1..=128 => bytes.next_multiple_of(16),
        _ => {
            let step = (bytes - 1).ilog2() - 2;
            bytes.next_multiple_of(1 << step)
        }
    }
}

/// Largest size class that is not larger than `bytes`; `bytes` itself up to 128.
pub(super) fn class_bytes_within(bytes: usize) -> usize {
    match bytes {
        0..=128 => bytes,
        _ => {
            let step = bytes.ilog2() - 2;
            (bytes >> step) << step
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_equal_those_of_jemalloc() {
        let expected = [
            (1, 16),
            (16, 16),
            (17, 32),
            (128, 128),
            (129, 160),
            (256, 256),
            (257, 320),
            (1024, 1024),
            (1025, 1280),
            (8193, 10_240),
            (10_300, 12_288),
            (14_337, 16_384),
            (16_385, 20_480),
        ];
        for (bytes, class) in expected {
            assert_eq!(class_bytes(bytes), class, "class of {bytes}");
        }
        for bytes in 129..70_000 {
            let (below, above) = (class_bytes_within(bytes), class_bytes(bytes));
            assert!(below <= bytes && bytes <= above, "{below} {bytes} {above}");
            assert_eq!(class_bytes(below), below, "{below} is itself a class");
            assert!(
                above == bytes || class_bytes(below + 1) == above,
                "nothing between {below} and {above}"
            );
        }
    }
}
