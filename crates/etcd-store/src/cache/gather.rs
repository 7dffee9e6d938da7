//! Key-values of a load, and gathering: the small entries of a leaf are moved into blocks.

use std::{ops::Range, sync::Arc};

use bytes::Bytes;

use super::entry::{self, Entry, KeyHead, MalformedKeyValue, Pieces, put_kvs_head};
use super::ledger::Ledger;
use super::memory::{BLOCK_HEADER_BYTES, BLOCK_MAX_BYTES, Block, ENTRY_MAX_BYTES, class_bytes};
use super::stored::{EntryReader, StoredEntry, without_values};

/// Copies key-values into the blocks of a new leaf, or, if they are large, on their own. Returns the memory of the blocks
/// beyond the entries' own bytes, too.
pub(super) fn fill(arrived: &[Arrived], born: u64) -> (Vec<StoredEntry>, u64) {
    let mut entries: Vec<Option<StoredEntry>> = vec![None; arrived.len()];
    let mut small = Vec::with_capacity(arrived.len());
    for (index, key_value) in arrived.iter().enumerate() {
        if key_value.encoded_len() < ENTRY_MAX_BYTES {
            small.push(index);
        }
    }
    let mut beyond = 0;
    let mut rest = &small[..];
    while !rest.is_empty() {
        let lengths = rest.iter().map(|index| arrived[*index].encoded_len());
        let (taken, length) = fitting(lengths);
        let (group, others) = rest.split_at(taken);
        if group.len() > 1 {
            let moved = in_new_block(group, length, born, |index, bytes| {
                let key_value = &arrived[index].key_value;
                put_kvs_head(key_value.len(), bytes);
                bytes.extend_from_slice(key_value);
            });
            for (index, entry) in group.iter().zip(moved) {
                entries[*index] = Some(entry.into());
            }
            beyond += beyond_bytes(length);
        }
        rest = others;
    }
    let whole = entries
        .into_iter()
        .zip(arrived)
        .map(|(entry, arrived)| entry.unwrap_or_else(|| arrived.alone().into()))
        .collect();
    (whole, beyond)
}

/// The entries at `indexes` in a new block of `length` bytes, in their order; `write` appends the encoded entry at an index.
fn in_new_block(
    indexes: &[usize],
    length: usize,
    born: u64,
    write: impl Fn(usize, &mut Vec<u8>),
) -> Vec<Entry> {
    // With its final capacity: nothing is copied twice.
    let mut bytes = Vec::with_capacity(length);
    let mut ends = Vec::with_capacity(indexes.len());
    for index in indexes {
        write(*index, &mut bytes);
        ends.push(bytes.len());
    }
    let bytes = bytes.into_boxed_slice();
    let block = Arc::new(Block { born, bytes });
    let starts = std::iter::once(0).chain(ends.iter().copied());
    starts
        .zip(&ends)
        .map(|(start, end)| Entry::in_block(&block, start, *end))
        .collect()
}

/// Number of the first entries, of these lengths in bytes, that share a block, and their length together.
fn fitting(lengths: impl Iterator<Item = usize>) -> (usize, usize) {
    let (mut taken, mut length) = (0, 0);
    for more in lengths {
        if taken > 0 && length + more > BLOCK_MAX_BYTES {
            break;
        }
        length += more;
        taken += 1;
    }
    (taken, length)
}

/// Memory of a block of `length` bytes beyond them.
fn beyond_bytes(length: usize) -> u64 {
    (class_bytes(length) - length + BLOCK_HEADER_BYTES) as u64
}

/// Moves the entries that can be moved into new blocks: those of blocks, and small ones that nothing else holds. What is
/// left of a packed block is decompressed first; a whole one stays. Returns the memory of the blocks beyond the entries'
/// own bytes.
pub(super) fn gather(entries: &mut [StoredEntry], ledger: &mut Ledger) -> u64 {
    unpack_rests(entries, ledger);
    let mut movable: Vec<usize> = (0..entries.len())
        .filter(|index| entries[*index].plain().is_some_and(Entry::is_movable))
        .collect();
    let mut beyond = 0;
    while let [first, ..] = movable[..] {
        let (taken, length) = fitting(movable.iter().map(|index| entries[*index].encoded_len()));
        if taken == 1 {
            if let Some(entry) = entries[first].plain() {
                let detached = entry.detached();
                exchange(&mut entries[first], detached, ledger);
            }
        } else {
            let moved = in_new_block(&movable[..taken], length, ledger.epoch, |index, bytes| {
                let encoded = entries[index].plain().map(Entry::encoded);
                for piece in encoded.into_iter().flat_map(Pieces::as_slices) {
                    bytes.extend_from_slice(piece);
                }
            });
            ledger.gathered_bytes += length as u64;
            for (index, entry) in movable[..taken].iter().zip(moved) {
                exchange(&mut entries[*index], entry, ledger);
            }
            beyond += beyond_bytes(length);
        }
        movable.drain(..taken);
    }
    beyond
}

/// Decompresses the entries whose packed block has others that are not in the leaf; those without values move into a block
/// of their own. Those of a damaged block stay: a read of them reports the damage.
pub(super) fn unpack_rests(entries: &mut [StoredEntry], ledger: &mut Ledger) {
    let mut reader = EntryReader::default();
    let mut from = 0;
    while let Some(first) = entries.get(from) {
        let Err((block, _)) = first.parts() else {
            from += 1;
            continue;
        };
        let block = Arc::clone(block);
        let of_block =
            |stored: &&StoredEntry| stored.parts().is_err_and(|(other, _)| Arc::ptr_eq(other, &block));
        // A key that was inserted since may lie between entries of the block.
        let (all, together) = (
            entries.iter().filter(of_block).count(),
            entries[from..].iter().take_while(of_block).count(),
        );
        if all < block.len() && !block.has_values() {
            let rest: Vec<usize> = (from..entries.len())
                .filter(|index| of_block(&&entries[*index]))
                .collect();
            put_without_values(entries, &rest, ledger);
        } else if all < block.len() {
            for stored in &mut entries[from..from + together] {
                if let Ok(entry) = reader.read_for_leaf(stored) {
                    exchange(stored, entry, ledger);
                }
            }
        }
        from += together;
    }
}

/// Moves the entries at `indexes` into one block without values. Entries of a damaged block, or too large ones, stay.
fn put_without_values(entries: &mut [StoredEntry], indexes: &[usize], ledger: &mut Ledger) {
    let all: Vec<&StoredEntry> = indexes.iter().map(|index| &entries[*index]).collect();
    let Ok(Some(block)) = without_values(&all, ledger.epoch) else {
        return;
    };
    for (position, index) in indexes.iter().enumerate() {
        exchange(
            &mut entries[*index],
            StoredEntry::packed(&block, position),
            ledger,
        );
    }
}

/// Puts the same entry, from another place, where `stored` is.
fn exchange(stored: &mut StoredEntry, entry: impl Into<StoredEntry>, ledger: &mut Ledger) {
    ledger.leave_block(stored);
    ledger.remove(stored);
    *stored = entry.into();
    ledger.add(stored);
}

/// The body of a KeyValue message that was checked.
#[derive(Clone)]
pub(super) struct Arrived {
    pub(super) key_value: Bytes,
    /// Range of its value; empty without one.
    value: Range<usize>,
}

impl Arrived {
    /// Checks the body of a KeyValue message.
    pub(super) fn checked(key_value: Bytes) -> Result<Arrived, MalformedKeyValue> {
        let value = entry::check(&key_value)?;
        Ok(Arrived { key_value, value })
    }

    /// The entry in an allocation of its own.
    pub(super) fn alone(&self) -> Entry {
        Entry::alone(&self.key_value, self.value.clone())
    }

    /// Length of the field `kvs` with it, in bytes.
    pub(super) fn encoded_len(&self) -> usize {
        entry::field_len(self.key_value.len())
    }

    pub(super) fn key(&self) -> &[u8] {
        KeyHead::key_of(&self.key_value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{memory::ARC_HEADER_BYTES, stored::pack, testing::KeyValue};

    /// Entries `00`, `01` and so on, with values of these sizes.
    fn entries(sizes: &[usize]) -> Vec<StoredEntry> {
        let entry = |(index, size): (usize, &usize)| {
            KeyValue::new(format!("{index:02}"), 1, vec![b'v'; *size])
                .entry()
                .into()
        };
        sizes.iter().enumerate().map(entry).collect()
    }

    /// Index of each entry's block, in the order of the blocks.
    fn blocks_of(entries: &[StoredEntry]) -> Vec<Option<usize>> {
        let mut seen: Vec<*const Block> = Vec::new();
        let number = |stored: &StoredEntry| {
            let block = Arc::as_ptr(stored.plain()?.block()?.0);
            let known = seen.iter().position(|other| *other == block);
            Some(known.unwrap_or_else(|| {
                seen.push(block);
                seen.len() - 1
            }))
        };
        entries.iter().map(number).collect()
    }

    /// Returns the memory of the blocks beyond their entries.
    fn gather_all(entries: &mut [StoredEntry]) -> u64 {
        let mut ledger = Ledger::of(entries);
        let beyond = gather(entries, &mut ledger);
        assert_eq!(ledger.memory.entries, Ledger::of(entries).memory.entries);
        beyond
    }

    #[test]
    fn neighbours_follow_one_another_in_one_block() {
        let mut gathered = entries(&[10, 0, 3000, 200]);
        let plain: Vec<_> = gathered
            .iter()
            .map(|stored| stored.read().unwrap().encoded().contiguous().into_owned())
            .collect();
        let mut ledger = Ledger::of(&gathered);
        let beyond = gather(&mut gathered, &mut ledger);
        let (block, _) = gathered[0].plain().unwrap().block().unwrap();
        assert_eq!(
            &*block.bytes,
            plain.concat(),
            "the bytes of a response, without a gap"
        );
        for (entry, plain) in gathered.iter().zip(&plain) {
            assert_eq!(entry.read().unwrap().encoded().contiguous(), &plain[..]);
            assert_eq!(entry.memory_bytes(), plain.len() as u64);
        }
        let length = plain.concat().len();
        assert_eq!(ledger.gathered_bytes, length as u64);
        assert!(beyond as usize >= class_bytes(length) - length && beyond < 1 << 10);
    }

    #[test]
    fn entries_that_are_large_or_held_elsewhere_stay_where_they_are() {
        let mut gathered = entries(&[10, ENTRY_MAX_BYTES, 10, 10]);
        let held = gathered[2].clone();
        gather_all(&mut gathered);
        assert_eq!(blocks_of(&gathered), [Some(0), None, None, Some(0)]);
        drop(held);
        gather_all(&mut gathered);
        assert_eq!(blocks_of(&gathered), [Some(0), None, Some(0), Some(0)]);
    }

    #[test]
    fn block_is_bounded_and_an_entry_alone_has_none() {
        let mut gathered = entries(&[3000; 21]);
        gather_all(&mut gathered);
        let of = blocks_of(&gathered);
        assert_eq!((of[9], of[10], of[19], of[20]), (Some(0), Some(1), Some(1), None));
        for (block, _) in gathered.iter().filter_map(|stored| stored.plain()?.block()) {
            assert!(block.bytes.len() <= BLOCK_MAX_BYTES);
        }
        // What is left of a block when its neighbours are gone leaves it, too.
        gathered.drain(1..);
        gather_all(&mut gathered);
        assert_eq!(blocks_of(&gathered), [None]);
    }

    #[test]
    fn rest_of_a_packed_block_is_decompressed_and_a_whole_one_stays() {
        let plain = entries(&[300; 20]);
        let mut stored = plain.clone();
        let (first, second) = stored.split_at_mut(10);
        pack(first, 0);
        pack(second, 0);
        assert!(stored.iter().all(StoredEntry::is_packed));
        gather_all(&mut stored);
        assert!(stored.iter().all(StoredEntry::is_packed));
        // A rest in the middle of the leaf, as after a removal.
        stored.remove(3);
        let mut ledger = Ledger {
            epoch: 1,
            ..Ledger::of(&stored)
        };
        let left_bytes: u64 = stored[..9].iter().map(StoredEntry::memory_bytes).sum();
        gather(&mut stored, &mut ledger);
        assert_eq!(
            ledger.left_bytes, left_bytes,
            "what a checkpoint still holds, once"
        );
        assert_eq!(
            blocks_of(&stored),
            [[Some(0); 9].as_slice(), &[None; 10]].concat()
        );
        assert!(stored[9..].iter().all(StoredEntry::is_packed));
        let left = plain[..3].iter().chain(&plain[4..]);
        for (stored, plain) in stored.iter().zip(left) {
            assert_eq!(stored.read(), plain.read());
        }
    }

    #[test]
    fn whole_packed_block_stays_though_another_entry_lies_between_its_own() {
        let mut stored = entries(&[300; 10]);
        pack(&mut stored, 0);
        stored.insert(4, entries(&[10])[0].clone());
        let mut ledger = Ledger::of(&stored);
        gather(&mut stored, &mut ledger);
        let packed: Vec<_> = stored.iter().map(StoredEntry::is_packed).collect();
        assert_eq!(packed, [[true; 4].as_slice(), &[false], &[true; 6]].concat());
    }

    #[test]
    fn header_of_a_block_is_counted_as_it_is() {
        assert_eq!(
            BLOCK_HEADER_BYTES,
            class_bytes(ARC_HEADER_BYTES + size_of::<Block>())
        );
    }
}
