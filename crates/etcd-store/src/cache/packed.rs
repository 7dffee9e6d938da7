//! Packed blocks: neighbouring entries of a leaf, compressed together.
//!
//! What a plan needs stays plain: the fields before the value, the lease, and the lengths. A read of values decompresses
//! the block into one that the response keeps, and changes nothing here. Neighbours are alike, so that no dictionary is
//! needed. The codec is LZ4, in safe Rust (decision 47).

use std::{fmt, ops::Range, sync::Arc};

use super::block::Block;
use super::entry::Entry;
use super::ledger::Ledger;
use super::memory::{ARC_HEADER_BYTES, class_bytes};
use super::stored::StoredEntry;

/// Bytes of the entries of a packed block at most, unless it has one entry. A read of one entry decompresses all.
const PACKED_MAX_BYTES: usize = 16 << 10;
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
    /// Compresses plain `entries`; `None` if they are too large, or if that would not save enough.
    fn new(entries: &[StoredEntry], born: u64) -> Option<PackedBlock> {
        let (mut heads, mut plain) = (Vec::new(), Vec::new());
        let mut places = Vec::with_capacity(entries.len());
        for stored in entries {
            let entry = stored.plain()?;
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
    fn unpack(&self) -> Result<Arc<Block>, CorruptBlock> {
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
        let upto = |entries: usize| self.memory_bytes() * entries / self.len();
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

/// Packs neighbouring entries together wherever that saves enough; returns whether it did. What is packed already stays as
/// it is.
pub(super) fn pack(entries: &mut [StoredEntry], ledger: &Ledger) -> bool {
    let mut is_packed = false;
    let mut rest = entries;
    while !rest.is_empty() {
        let mut length = 0;
        let mut fitting = |stored: &StoredEntry| {
            length += stored.encoded_len();
            stored.plain().is_some() && length <= PACKED_MAX_BYTES
        };
        // An entry that is larger than a block is packed alone.
        let taken = rest
            .iter()
            .map_while(|stored| fitting(stored).then_some(()))
            .count()
            .max(1);
        let (group, others) = rest.split_at_mut(taken);
        if let Some(packed) = PackedBlock::new(group, ledger.epoch) {
            is_packed = true;
            let packed = Arc::new(packed);
            for (index, stored) in group.iter_mut().enumerate() {
                *stored = StoredEntry::packed(&packed, index);
            }
        }
        rest = others;
    }
    is_packed
}

/// Reads stored entries one after the other. Keeps the last block that was decompressed, as neighbours share it.
#[derive(Debug, Default)]
pub(super) struct Unpacker {
    last: Option<(Arc<PackedBlock>, Arc<Block>)>,
}

impl Unpacker {
    /// The plain entry.
    pub(super) fn read(&mut self, stored: &StoredEntry) -> Result<Entry, CorruptBlock> {
        let (packed, index) = match stored.parts() {
            Ok(entry) => return Ok(entry.clone()),
            Err(packed) => packed,
        };
        let block = match &self.last {
            Some((last, block)) if Arc::ptr_eq(last, packed) => block,
            _ => {
                let block = packed.unpack()?;
                &self.last.insert((Arc::clone(packed), block)).1
            }
        };
        let range = packed.range(index);
        Ok(Entry::in_block(block, range.start, range.end))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::cache::testing::{KeyValue, key_value};
    use crate::cache::{
        Answer, JsonAnswer, Packing, RangeQuery, ResponseHeader, Selected, Selection, Tree, select,
    };

    fn stored(key_values: &[KeyValue]) -> Vec<StoredEntry> {
        key_values.iter().map(|kv| kv.entry().into()).collect()
    }

    /// Numbers of entries in each packed block, and 0 for each plain entry.
    fn groups(entries: &[StoredEntry]) -> Vec<usize> {
        let mut groups = Vec::new();
        for stored in entries {
            match stored.parts() {
                Ok(_) => groups.push(0),
                Err((block, 0)) => groups.push(block.len()),
                Err(_) => {}
            }
        }
        groups
    }

    proptest! {
        #[test]
        fn packed_entries_are_read_as_they_were(key_values in prop::collection::vec(key_value(), 1..32)) {
            let mut packed = stored(&key_values);
            pack(&mut packed, &Ledger::default());
            let mut unpacker = Unpacker::default();
            for (stored, key_value) in packed.iter().zip(&key_values) {
                let plain = StoredEntry::from(key_value.entry());
                let read = unpacker.read(stored).unwrap();
                prop_assert_eq!(read.encoded().contiguous(), key_value.field());
                prop_assert_eq!(KeyValue::from(stored), key_value.clone());
                prop_assert_eq!(stored.key(), &key_value.key);
                prop_assert_eq!(stored.head(), plain.head());
                prop_assert_eq!(stored.head_parts(), plain.head_parts());
                prop_assert_eq!(stored.encoded_len(), plain.encoded_len());
            }
            let of_block = |block: &Arc<PackedBlock>| (0..block.len()).map(|index| block.share_bytes(index)).sum::<usize>();
            for stored in &packed {
                if let Err((block, _)) = stored.parts() {
                    prop_assert_eq!(of_block(block), block.memory_bytes());
                }
            }
        }
    }

    #[test]
    fn blocks_are_bounded_and_a_large_entry_has_its_own() {
        let sizes = [3000, 3000, 3000, 3000, 3000, 3000, 100_000, 3000, 3000];
        let values = sizes.map(|size| KeyValue::new("key", 1, vec![b'v'; size]));
        let mut entries = stored(&values);
        pack(&mut entries, &Ledger::default());
        assert_eq!(groups(&entries), [5, 1, 1, 2]);
    }

    #[test]
    fn values_that_do_not_shrink_stay_plain() {
        let mut state = 1_u64;
        let mut random = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_be_bytes()[0]
        };
        let mut noise = |key| KeyValue::new(key, 1, (0..5400).map(|_| random()).collect::<Vec<_>>());
        let text = |key| KeyValue::new(key, 1, vec![b'v'; 500]);
        let mut entries = stored(&[noise("a"), noise("b"), noise("c"), text("d"), text("e")]);
        pack(&mut entries, &Ledger::default());
        assert_eq!(groups(&entries), [0, 0, 0, 2]);
        let mut entries = stored(&[KeyValue::new("a", 1, "")]);
        pack(&mut entries, &Ledger::default());
        assert_eq!(groups(&entries), [0]);
    }

    #[test]
    fn damaged_block_is_never_answered_from() {
        let key_values: Vec<_> = (0..100)
            .map(|index| KeyValue::new(format!("{index:03}"), 1, vec![b'v'; 300]))
            .collect();
        let mut tree = Tree::load(key_values.iter().map(KeyValue::entry), Packing::Always);
        tree.damage();
        let selection = |range_end: &'static [u8], keys_only| -> Selection {
            let query = RangeQuery {
                key: b"000"[..].into(),
                range_end: range_end.into(),
                keys_only,
                ..RangeQuery::default()
            };
            match select(&tree, &query, &crate::cache::Dialect::of_version(3, 7)) {
                Selected::Answer(selection) => selection,
                _ => panic!("nothing is sorted"),
            }
        };
        for range_end in [&b""[..], b"9"] {
            let answer = || Answer::new(ResponseHeader::default(), selection(range_end, false));
            assert_eq!(answer().small(0), Err(CorruptBlock));
            assert!(answer().next_piece(1 << 20).is_err());
            let mut text = JsonAnswer::new(ResponseHeader::default(), selection(range_end, false));
            assert_eq!(text.next_piece(1 << 20), Err(CorruptBlock));
        }
        let keys = Answer::new(ResponseHeader::default(), selection(b"9", true));
        assert!(keys.small(0).is_ok(), "what is plain needs no block");
    }

    #[test]
    fn neighbours_are_decompressed_once() {
        let key_values = [1, 2].map(|index| KeyValue::new(format!("{index}"), 1, vec![b'v'; 300]));
        let mut entries = stored(&key_values);
        pack(&mut entries, &Ledger::default());
        let mut unpacker = Unpacker::default();
        let read: Vec<_> = entries
            .iter()
            .map(|stored| unpacker.read(stored).unwrap())
            .collect();
        let block = |entry: &Entry| Arc::as_ptr(entry.block().unwrap().0);
        assert_eq!(block(&read[0]), block(&read[1]));
    }
}
