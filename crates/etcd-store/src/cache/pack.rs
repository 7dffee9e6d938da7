//! Packing: neighbouring entries of a leaf move into packed blocks, with their values or without.

use std::sync::Arc;

use super::block::ENTRY_MAX_BYTES;
use super::entry::Entry;
use super::packed::{CorruptBlock, PackedBlock, digest};
use super::stored::{StoredEntry, Unpacker};

/// Bytes of the entries of a packed block at most, unless it has one entry. A read of one entry decompresses all.
const PACKED_MAX_BYTES: usize = 16 << 10;

/// Whether the values of a loaded tree are packed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Packing {
    /// All are plain.
    #[default]
    Never,
    /// Each leaf is packed wherever that saves enough. What is written later is plain.
    Always,
    /// From the moment when the tree takes more memory than this, in bytes: the following leaves, and meanwhile those before.
    Above(u64),
}

/// Packs neighbouring entries together wherever that saves enough; returns whether it did. What is packed already stays as
/// it is.
pub(super) fn pack(entries: &mut [StoredEntry], born: u64) -> bool {
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
        if let Some(packed) = packed_block(group, born) {
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

/// Decompresses all.
pub(super) fn unpack(entries: &mut [StoredEntry]) -> Result<(), CorruptBlock> {
    let mut unpacker = Unpacker::default();
    for stored in entries.iter_mut().filter(|stored| stored.is_packed()) {
        let entry = unpacker.read(stored)?;
        // The block of a response is not one of the leaf's.
        *stored = if entry.encoded_len() < ENTRY_MAX_BYTES {
            entry
        } else {
            entry.detached()
        }
        .into();
    }
    Ok(())
}

/// A block of `entries` without their values; `None` if they are too large.
///
/// # Errors
/// The packed block of one of them is damaged.
pub(super) fn without_values(
    entries: &[&StoredEntry],
    born: u64,
) -> Result<Option<Arc<PackedBlock>>, CorruptBlock> {
    let mut unpacker = Unpacker::default();
    let digests = entries.iter().map(|stored| match stored.digest() {
        Some(known) => Ok(known),
        None => unpacker.read(stored).map(|entry| digest(&entry)),
    });
    let digests = digests.collect::<Result<_, _>>()?;
    let heads = entries
        .iter()
        .map(|stored| (stored.head_parts(), stored.encoded_len()));
    Ok(PackedBlock::without_values(heads, digests, born).map(Arc::new))
}

fn packed_block(group: &[StoredEntry], born: u64) -> Option<PackedBlock> {
    let entries: Option<Vec<&Entry>> = group.iter().map(StoredEntry::plain).collect();
    PackedBlock::new(&entries?, born)
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
            pack(&mut packed, 0);
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
        pack(&mut entries, 0);
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
        pack(&mut entries, 0);
        assert_eq!(groups(&entries), [0, 0, 0, 2]);
        let mut entries = stored(&[KeyValue::new("a", 1, "")]);
        pack(&mut entries, 0);
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
        pack(&mut entries, 0);
        let mut unpacker = Unpacker::default();
        let read: Vec<_> = entries
            .iter()
            .map(|stored| unpacker.read(stored).unwrap())
            .collect();
        let block = |entry: &Entry| Arc::as_ptr(entry.block().unwrap().0);
        assert_eq!(block(&read[0]), block(&read[1]));
    }
}
