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
        let mut reader = EntryReader::default();
        for (stored, key_value) in packed.iter().zip(&key_values) {
            let plain = StoredEntry::from(key_value.entry());
            let read = reader.read(stored).unwrap();
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
        assert_eq!(answer().small(0), Err(MemoryError));
        assert!(answer().next_piece(1 << 20).is_err());
        let mut text = JsonAnswer::new(ResponseHeader::default(), selection(range_end, false));
        assert_eq!(text.next_piece(1 << 20), Err(MemoryError));
    }
    let keys = Answer::new(ResponseHeader::default(), selection(b"9", true));
    assert!(keys.small(0).is_ok(), "what is plain needs no block");
}

#[test]
fn neighbours_are_decompressed_once() {
    let key_values = [1, 2].map(|index| KeyValue::new(format!("{index}"), 1, vec![b'v'; 300]));
    let mut entries = stored(&key_values);
    pack(&mut entries, 0);
    let mut reader = EntryReader::default();
    let read: Vec<_> = entries
        .iter()
        .map(|stored| reader.read(stored).unwrap())
        .collect();
    let block = |entry: &Entry| Arc::as_ptr(entry.block().unwrap().0);
    assert_eq!(block(&read[0]), block(&read[1]));
}
