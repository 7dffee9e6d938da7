//! Packed blocks: neighbouring entries of a leaf, compressed together.
//!
//! What a plan needs stays plain: the fields before the value, the lease, and the lengths. A read of values decompresses
//! the block into one that the response keeps, and changes nothing here. Neighbours are alike, so that no dictionary is
//! needed. The codec is LZ4, in safe Rust (decision 47).

use std::{fmt, ops::Range, sync::Arc};

use super::block::Block;
use super::entry::Entry;
use super::memory::{ARC_HEADER_BYTES, class_bytes};

/// Most of its entries' memory, in percent, that a packed block may take. Otherwise they stay plain.
const WORTHWHILE_PERCENT: usize = 80;

/// Entries in key order, compressed together.
pub(super) struct PackedBlock {
    /// Epoch of the tree in which it was made, as of a [`Block`].
    pub(super) born: u64,
    /// Of each entry: the fields before the value, and the lease.
    heads: Box<[u8]>,
    places: Box<[Place]>,
    /// The encoded entries, compressed.
    compressed: Box<[u8]>,
    /// CRC-32 of the encoded entries.
    checksum: u32,
}

/// Where an entry of a packed block is; it begins where the one before ends.
#[derive(Clone, Copy)]
struct Place {
    /// End of its head.
    head_end: u32,
    /// Length of the encoded field `lease`, the last part of its head; 0 without a lease.
    lease_bytes: u32,
    /// End of the encoded entry.
    end: u32,
}

/// A packed block whose bytes are not those that were packed: memory was damaged. None of its entries can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a packed block does not have the checksum of what was packed: memory is damaged")]
pub struct CorruptBlock;

impl PackedBlock {
    /// Compresses `entries`; `None` if they are too large, or if that would not save enough.
    pub(super) fn new(entries: &[&Entry], born: u64) -> Option<PackedBlock> {
        let (mut heads, mut plain) = (Vec::new(), Vec::new());
        let mut places = Vec::with_capacity(entries.len());
        for entry in entries {
            let (prelude, lease) = entry.head_parts();
            heads.extend_from_slice(prelude);
            heads.extend_from_slice(lease);
            for piece in entry.encoded().as_slices() {
                plain.extend_from_slice(piece);
            }
            places.push(Place {
                head_end: u32::try_from(heads.len()).ok()?,
                lease_bytes: u32::try_from(lease.len()).ok()?,
                end: u32::try_from(plain.len()).ok()?,
            });
        }
        let packed = PackedBlock {
            born,
            heads: heads.into_boxed_slice(),
            places: places.into_boxed_slice(),
            compressed: lz4_flex::block::compress(&plain).into_boxed_slice(),
            checksum: crc32fast::hash(&plain),
        };
        (packed.memory_bytes() * 100 <= plain.len() * WORTHWHILE_PERCENT).then_some(packed)
    }

    /// Number of entries that were packed.
    pub(super) fn len(&self) -> usize {
        self.places.len()
    }

    /// The fields of an entry before its value, and the encoded field `lease`, or nothing.
    pub(super) fn head_parts(&self, index: usize) -> (&[u8], &[u8]) {
        let place = self.places[index];
        let start = self.before(index).map_or(0, |before| before.head_end as usize);
        let head = &self.heads[start..place.head_end as usize];
        head.split_at(head.len() - place.lease_bytes as usize)
    }

    /// Where the encoded entry is in the decompressed block.
    pub(super) fn range(&self, index: usize) -> Range<usize> {
        let start = self.before(index).map_or(0, |before| before.end as usize);
        start..self.places[index].end as usize
    }

    fn before(&self, index: usize) -> Option<&Place> {
        self.places.get(index.checked_sub(1)?)
    }

    /// The entries in a plain block of the caller's own.
    pub(super) fn unpack(&self) -> Result<Arc<Block>, CorruptBlock> {
        let length = self.places.last().map_or(0, |last| last.end as usize);
        let bytes = lz4_flex::block::decompress(&self.compressed, length).map_err(|_| CorruptBlock)?;
        if bytes.len() != length || crc32fast::hash(&bytes) != self.checksum {
            return Err(CorruptBlock);
        }
        let bytes = bytes.into_boxed_slice();
        // No checkpoint of any tree holds it.
        let born = u64::MAX;
        Ok(Arc::new(Block { born, bytes }))
    }

    /// Memory of the block, the allocator's rounding included, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        class_bytes(ARC_HEADER_BYTES + size_of::<PackedBlock>())
            + class_bytes(self.heads.len())
            + class_bytes(size_of_val(&*self.places))
            + class_bytes(self.compressed.len())
    }

    /// Part of the memory that is counted for an entry, in bytes. The sum over all entries is the block's memory.
    pub(super) fn share_bytes(&self, index: usize) -> usize {
        let (whole, all) = (self.memory_bytes(), self.len());
        let upto = |entries: usize| whole * entries / all;
        upto(index + 1) - upto(index)
    }

    /// A copy with a byte changed, as faulty memory would.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn damaged(&self) -> PackedBlock {
        let mut compressed = self.compressed.clone();
        if let Some(byte) = compressed.last_mut() {
            *byte ^= 1;
        }
        PackedBlock {
            born: self.born,
            heads: self.heads.clone(),
            places: self.places.clone(),
            compressed,
            checksum: self.checksum,
        }
    }
}

impl fmt::Debug for PackedBlock {
    /// Shows lengths only: values must not be logged (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "packed block of {} entries in {} bytes",
            self.len(),
            self.memory_bytes()
        )
    }
}
