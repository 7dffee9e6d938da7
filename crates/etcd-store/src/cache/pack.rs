//! Packing: the small entries of a leaf are moved into blocks.

use std::sync::Arc;

use super::block::{BLOCK_HEADER_BYTES, BLOCK_MAX_BYTES, Block};
use super::entry::Entry;
use super::ledger::Ledger;
use super::memory::class_bytes;

/// Moves the entries that can be moved into new blocks: those of blocks, and small ones that nothing else holds. Returns the
/// memory of the blocks beyond the entries' own bytes.
pub(super) fn pack(entries: &mut [Entry], ledger: &mut Ledger) -> u64 {
    let mut movable: Vec<usize> = (0..entries.len())
        .filter(|index| entries[*index].is_movable())
        .collect();
    let mut beyond = 0;
    while let [first, ..] = movable[..] {
        let (mut taken, mut length) = (0, 0);
        for index in &movable {
            let more = entries[*index].encoded_len();
            if taken > 0 && length + more > BLOCK_MAX_BYTES {
                break;
            }
            length += more;
            taken += 1;
        }
        if taken == 1 {
            entries[first] = entries[first].detached();
        } else {
            // With its final capacity: nothing is copied twice.
            let mut bytes = Vec::with_capacity(length);
            for index in &movable[..taken] {
                let pieces = entries[*index].encoded().as_slices();
                pieces
                    .into_iter()
                    .for_each(|piece| bytes.extend_from_slice(piece));
            }
            let bytes = bytes.into_boxed_slice();
            let born = ledger.epoch;
            ledger.packed_bytes += length as u64;
            let block = Arc::new(Block { born, bytes });
            let mut start = 0;
            for index in &movable[..taken] {
                let end = start + entries[*index].encoded_len();
                entries[*index] = Entry::in_block(&block, start, end);
                start = end;
            }
            beyond += class_bytes(length) - length + BLOCK_HEADER_BYTES;
        }
        movable.drain(..taken);
    }
    beyond as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::block::ENTRY_MAX_BYTES;
    use crate::cache::memory::ARC_HEADER_BYTES;
    use crate::cache::testing::KeyValue;

    /// Entries `00`, `01` and so on, with values of these sizes.
    fn entries(sizes: &[usize]) -> Vec<Entry> {
        let entry = |(index, size): (usize, &usize)| {
            KeyValue::new(format!("{index:02}"), 1, vec![b'v'; *size]).entry()
        };
        sizes.iter().enumerate().map(entry).collect()
    }

    /// Index of each entry's block, in the order of the blocks.
    fn blocks_of(entries: &[Entry]) -> Vec<Option<usize>> {
        let mut seen: Vec<*const Block> = Vec::new();
        let number = |entry: &Entry| {
            let block = Arc::as_ptr(entry.block()?.0);
            let known = seen.iter().position(|other| *other == block);
            Some(known.unwrap_or_else(|| {
                seen.push(block);
                seen.len() - 1
            }))
        };
        entries.iter().map(number).collect()
    }

    #[test]
    fn neighbours_follow_one_another_in_one_block() {
        let mut packed = entries(&[10, 0, 3000, 200]);
        let plain: Vec<_> = packed
            .iter()
            .map(|entry| entry.encoded().contiguous().into_owned())
            .collect();
        let mut ledger = Ledger::default();
        let beyond = pack(&mut packed, &mut ledger);
        let (block, _) = packed[0].block().unwrap();
        assert_eq!(
            &*block.bytes,
            plain.concat(),
            "the bytes of a response, without a gap"
        );
        for (entry, plain) in packed.iter().zip(&plain) {
            assert_eq!(entry.encoded().contiguous(), &plain[..]);
            assert_eq!(entry.memory_bytes(), plain.len() as u64);
        }
        let length = plain.concat().len();
        assert_eq!(ledger.packed_bytes, length as u64);
        assert!(beyond as usize >= class_bytes(length) - length && beyond < 1 << 10);
    }

    #[test]
    fn entries_that_are_large_or_held_elsewhere_stay_where_they_are() {
        let mut packed = entries(&[10, ENTRY_MAX_BYTES, 10, 10]);
        let held = packed[2].clone();
        pack(&mut packed, &mut Ledger::default());
        assert_eq!(blocks_of(&packed), [Some(0), None, None, Some(0)]);
        drop(held);
        pack(&mut packed, &mut Ledger::default());
        assert_eq!(blocks_of(&packed), [Some(0), None, Some(0), Some(0)]);
    }

    #[test]
    fn block_is_bounded_and_an_entry_alone_has_none() {
        let mut packed = entries(&[3000; 21]);
        pack(&mut packed, &mut Ledger::default());
        let of = blocks_of(&packed);
        assert_eq!((of[9], of[10], of[19], of[20]), (Some(0), Some(1), Some(1), None));
        for (block, _) in packed.iter().filter_map(Entry::block) {
            assert!(block.bytes.len() <= BLOCK_MAX_BYTES);
        }
        // What is left of a block when its neighbours are gone leaves it, too.
        packed.drain(1..);
        pack(&mut packed, &mut Ledger::default());
        assert_eq!(blocks_of(&packed), [None]);
    }

    #[test]
    fn header_of_a_block_is_counted_as_it_is() {
        assert_eq!(
            BLOCK_HEADER_BYTES,
            class_bytes(ARC_HEADER_BYTES + size_of::<Block>())
        );
    }
}
