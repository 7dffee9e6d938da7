//! Packed blocks: neighbouring entries of a leaf, compressed together, or without their values.
//!
//! What a plan needs stays plain: the fields before the value, the lease, and the lengths. A read of values decompresses
//! the block into one that the response keeps, and changes nothing here. Neighbours are alike, so that no dictionary is
//! needed. The codec is LZ4, in safe Rust (decision 47). Of values that are not held a digest is, so that they can be compared
//! with etcd's, and are recognized when they are read again.

use std::hash::{BuildHasher as _, RandomState};
use std::sync::{Arc, LazyLock};
use std::{fmt, ops::Range};

use super::entry::Entry;
use super::memory::{ARC_HEADER_BYTES, Block, class_bytes};

/// Most of its entries' memory, in percent, that a packed block may take. Otherwise they stay plain.
const WORTHWHILE_PERCENT: usize = 80;

/// Entries in key order, compressed together or without their values.
pub(super) struct PackedBlock {
    /// Epoch of the tree in which it was made, as of a [`Block`].
    pub(super) born: u64,
    /// Of each entry: the fields before the value, and the lease.
    heads: Box<[u8]>,
    places: Box<[EntryOffsets]>,
    values: BlockValues,
}

/// Values of the entries of a packed block.
pub(super) enum BlockValues {
    Compressed {
        /// The encoded entries, compressed.
        bytes: Box<[u8]>,
        /// CRC-32 of the encoded entries.
        checksum: u32,
    },
    /// Not held; of each entry, [`digest`] of what is encoded.
    NotHeld(Box<[u64]>),
}

/// Place of an entry in a packed block; it begins where the one before ends.
#[derive(Clone, Copy)]
struct EntryOffsets {
    /// End of its head.
    head_end: u32,
    /// Length of the encoded field `lease`, the last part of its head; 0 without a lease.
    lease_bytes: u32,
    /// End of the encoded entry.
    end: u32,
}

impl PackedBlock {
    /// Compresses `entries`; `None` if they are too large, or if that would not save enough.
    pub(super) fn new(entries: &[&Entry], born: u64) -> Option<PackedBlock> {
        let mut plain = Vec::new();
        for piece in entries.iter().flat_map(|entry| entry.encoded().as_slices()) {
            plain.extend_from_slice(piece);
        }
        let values = BlockValues::Compressed {
            bytes: lz4_flex::block::compress(&plain).into_boxed_slice(),
            checksum: crc32fast::hash(&plain),
        };
        let heads = entries
            .iter()
            .map(|entry| (entry.head_parts(), entry.encoded_len()));
        let packed = PackedBlock::with_heads(heads, values, born)?;
        (packed.memory_bytes() * 100 <= plain.len() * WORTHWHILE_PERCENT).then_some(packed)
    }

    /// A block of entries with these values; `None` if they are too large. `heads` has the fields of each entry before its
    /// value, its lease, and its encoded length in bytes.
    pub(super) fn with_heads<'a>(
        heads: impl Iterator<Item = ((&'a [u8], &'a [u8]), usize)>,
        values: BlockValues,
        born: u64,
    ) -> Option<PackedBlock> {
        let (mut bytes, mut places, mut end) = (Vec::new(), Vec::new(), 0_u32);
        for ((prelude, lease), encoded_len) in heads {
            bytes.extend_from_slice(prelude);
            bytes.extend_from_slice(lease);
            end = end.checked_add(u32::try_from(encoded_len).ok()?)?;
            places.push(EntryOffsets {
                head_end: u32::try_from(bytes.len()).ok()?,
                lease_bytes: u32::try_from(lease.len()).ok()?,
                end,
            });
        }
        Some(PackedBlock {
            born,
            heads: bytes.into_boxed_slice(),
            places: places.into_boxed_slice(),
            values,
        })
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

    /// Range of the encoded entry in the decompressed block.
    pub(super) fn range(&self, index: usize) -> Range<usize> {
        let start = self.before(index).map_or(0, |before| before.end as usize);
        start..self.places[index].end as usize
    }

    fn before(&self, index: usize) -> Option<&EntryOffsets> {
        self.places.get(index.checked_sub(1)?)
    }

    /// Digest of an entry whose value is not held.
    pub(super) fn digest(&self, index: usize) -> Option<u64> {
        match &self.values {
            BlockValues::NotHeld(digests) => digests.get(index).copied(),
            BlockValues::Compressed { .. } => None,
        }
    }

    /// Whether it has the values of its entries.
    pub(super) fn has_values(&self) -> bool {
        matches!(self.values, BlockValues::Compressed { .. })
    }

    /// The entries in a plain block of the caller's own; `None` if its bytes are not those that were packed. Not to be called
    /// without values.
    pub(super) fn unpack(&self) -> Option<Arc<Block>> {
        let BlockValues::Compressed { bytes, checksum } = &self.values else {
            debug_assert!(false, "the value is not held");
            return None;
        };
        let length = self.places.last().map_or(0, |last| last.end as usize);
        let bytes = lz4_flex::block::decompress(bytes, length).ok()?;
        if bytes.len() != length || crc32fast::hash(&bytes) != *checksum {
            return None;
        }
        let bytes = bytes.into_boxed_slice();
        // No checkpoint of any tree holds it.
        let born = u64::MAX;
        Some(Arc::new(Block { born, bytes }))
    }

    /// Memory of the block, the allocator's rounding included, in bytes.
    pub(super) fn memory_bytes(&self) -> usize {
        class_bytes(ARC_HEADER_BYTES + size_of::<PackedBlock>())
            + class_bytes(self.heads.len())
            + class_bytes(size_of_val(&*self.places))
            + match &self.values {
                BlockValues::Compressed { bytes, .. } => class_bytes(bytes.len()),
                BlockValues::NotHeld(digests) => class_bytes(size_of_val(&**digests)),
            }
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
        let values = match &self.values {
            BlockValues::Compressed { bytes, checksum } => {
                let mut bytes = bytes.clone();
                if let Some(byte) = bytes.last_mut() {
                    *byte ^= 1;
                }
                BlockValues::Compressed {
                    bytes,
                    checksum: *checksum,
                }
            }
            BlockValues::NotHeld(digests) => {
                BlockValues::NotHeld(digests.iter().map(|digest| digest ^ 1).collect())
            }
        };
        PackedBlock {
            born: self.born,
            heads: self.heads.clone(),
            places: self.places.clone(),
            values,
        }
    }
}

/// Digest of an encoded entry. Its keys are random for each process, so that no client can choose two values of one digest.
pub(super) fn digest(entry: &Entry) -> u64 {
    static KEYS: LazyLock<RandomState> = LazyLock::new(RandomState::new);
    KEYS.hash_one(&*entry.encoded().contiguous())
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
