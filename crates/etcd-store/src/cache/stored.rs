//! An entry as a leaf keeps it: plain, or in a packed block, there with its value or without.
//!
//! Everything but the value is read in the same way from all; a packed value has to be decompressed, which fails if the
//! memory was damaged.

use std::{fmt, sync::Arc};

use super::entry::{Entry, KeyHead, write_keys_only};
use super::memory::{Block, ENTRY_MAX_BYTES};
use super::packed::{BlockValues, PackedBlock, digest};

const CACHE_LINE_BYTES: usize = 64;
/// Bytes of the entries of a packed block at most, unless it has one entry. A read of one entry decompresses all.
const PACKED_MAX_BYTES: usize = 16 << 10;

/// A key-value pair of one revision, in a tree. A clone counts a reference.
#[derive(Clone)]
pub struct StoredEntry(Place);

#[derive(Clone)]
enum Place {
    Plain(Entry),
    Packed { block: Arc<PackedBlock>, index: u8 },
}

impl StoredEntry {
    /// The entry at `index`, which is below 256, of a packed block.
    pub(super) fn packed(block: &Arc<PackedBlock>, index: usize) -> StoredEntry {
        StoredEntry(Place::Packed {
            block: Arc::clone(block),
            index: u8::try_from(index).unwrap_or(u8::MAX),
        })
    }

    /// The entry, unless it is packed.
    pub(super) fn plain(&self) -> Option<&Entry> {
        self.parts().ok()
    }

    /// The entry, or its packed block and its index there.
    pub(super) fn parts(&self) -> Result<&Entry, (&Arc<PackedBlock>, usize)> {
        match &self.0 {
            Place::Plain(entry) => Ok(entry),
            Place::Packed { block, index } => Err((block, usize::from(*index))),
        }
    }

    /// Whether it has to be decompressed to be read.
    pub fn is_packed(&self) -> bool {
        self.parts().is_err_and(|(block, _)| block.has_values())
    }

    /// Whether its value is held; otherwise only etcd has it.
    pub fn has_value(&self) -> bool {
        self.parts()
            .map_or_else(|(block, _)| block.has_values(), |_| true)
    }

    /// Digest of an entry whose value is not held.
    pub(super) fn digest(&self) -> Option<u64> {
        self.parts().err().and_then(|(block, index)| block.digest(index))
    }

    /// Whether other entries share its allocation.
    pub(super) fn is_in_block(&self) -> bool {
        self.plain().is_none_or(|entry| entry.block().is_some())
    }

    /// Whether this is the KeyValue message `key_value`, byte for byte. A damaged entry is none.
    pub fn is_message(&self, key_value: &[u8]) -> bool {
        EntryReader::default().is_message(self, key_value)
    }

    /// Whether this is `entry`, byte for byte; by its digest if its value is not held. A damaged entry is none.
    pub fn is_same(&self, entry: &Entry) -> bool {
        EntryReader::default().is_same(self, entry)
    }

    /// Whether `theirs`, but for its value, is this one. etcd may leave out the lease: only a write changes it.
    pub fn is_as_old_as(&self, theirs: &Entry) -> bool {
        let (ours, theirs) = (self.head(), theirs.fields());
        (ours.create_revision, ours.mod_revision, ours.version)
            == (theirs.create_revision, theirs.mod_revision, theirs.version)
    }

    /// The entry, plain, decompressed if necessary. It must have its value.
    ///
    /// # Errors
    /// The packed block is damaged.
    pub fn read(&self) -> Result<Entry, MemoryError> {
        EntryReader::default().read(self)
    }

    /// The entry outside of blocks: what outlives its leaf must not keep a block.
    ///
    /// # Errors
    /// The packed block is damaged.
    pub(super) fn detached(&self) -> Result<Entry, MemoryError> {
        self.read().map(|entry| entry.detached())
    }

    /// The key; never empty.
    pub fn key(&self) -> &[u8] {
        match self.parts() {
            Ok(entry) => entry.key(),
            Err(_) => self.head().key,
        }
    }

    /// The fields before the value.
    pub fn head(&self) -> KeyHead<'_> {
        KeyHead::of_prelude(self.head_parts().0)
    }

    /// Revision that wrote this entry.
    pub fn mod_revision(&self) -> i64 {
        self.head().mod_revision
    }

    /// Length of the entry as a field `kvs`, in bytes.
    pub fn encoded_len(&self) -> usize {
        match self.parts() {
            Ok(entry) => entry.encoded_len(),
            Err((block, index)) => block.range(index).len(),
        }
    }

    /// Appends the entry as a field `kvs` to `out` without its value, and without its lease unless `keep_lease`.
    pub(super) fn encode_keys_only(&self, keep_lease: bool, out: &mut Vec<u8>) {
        write_keys_only(self.head_parts(), keep_lease, out);
    }

    /// Memory of this entry in bytes, the allocator's rounding included; of a block, its part of it.
    pub fn memory_bytes(&self) -> u64 {
        match self.parts() {
            Ok(entry) => entry.memory_bytes(),
            Err((block, index)) => block.share_bytes(index) as u64,
        }
    }

    /// Address of what has the entry: its own allocation, or its block.
    fn place(&self) -> usize {
        match self.parts() {
            Ok(entry) => entry.place(),
            Err((block, _)) => Arc::as_ptr(block).addr(),
        }
    }

    /// Number of references to what has the entry.
    fn holders(&self) -> usize {
        match self.parts() {
            Ok(entry) => entry.holders(),
            Err((block, _)) => Arc::strong_count(block),
        }
    }

    /// The fields before the value, and the encoded field `lease`, or nothing.
    pub(super) fn head_parts(&self) -> (&[u8], &[u8]) {
        match self.parts() {
            Ok(entry) => entry.head_parts(),
            Err((block, index)) => block.head_parts(index),
        }
    }
}

impl From<Entry> for StoredEntry {
    fn from(entry: Entry) -> StoredEntry {
        StoredEntry(Place::Plain(entry))
    }
}

impl fmt::Debug for StoredEntry {
    /// Omits the value: values must not be logged (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = self.head();
        f.debug_struct("StoredEntry")
            .field("key", &head.key.escape_ascii().to_string())
            .field("mod_revision", &head.mod_revision)
            .field("is_packed", &self.is_packed())
            .finish_non_exhaustive()
    }
}

/// An entry is not the one that was stored: memory is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a packed block does not have the checksum of what was packed: memory is damaged")]
pub struct MemoryError;

/// Reads stored entries one after the other. Keeps the last block that was decompressed, as neighbours share it.
#[derive(Debug, Default)]
pub(super) struct EntryReader {
    last: Option<(Arc<PackedBlock>, Arc<Block>)>,
}

impl EntryReader {
    /// The plain entry of `stored`, which must have its value.
    ///
    /// # Errors
    /// The packed block is damaged.
    pub(super) fn read(&mut self, stored: &StoredEntry) -> Result<Entry, MemoryError> {
        let (packed, index) = match stored.parts() {
            Ok(entry) => return Ok(entry.clone()),
            Err(packed) => packed,
        };
        let block = match &self.last {
            Some((last, block)) if Arc::ptr_eq(last, packed) => block,
            _ => {
                let block = packed.unpack().ok_or(MemoryError)?;
                &self.last.insert((Arc::clone(packed), block)).1
            }
        };
        let range = packed.range(index);
        Ok(Entry::in_block(block, range.start, range.end))
    }

    /// Reads an entry for a leaf, whose small entries move into its own blocks; the block of a response must not be kept.
    ///
    /// # Errors
    /// The packed block is damaged.
    pub(super) fn read_for_leaf(&mut self, stored: &StoredEntry) -> Result<Entry, MemoryError> {
        let entry = self.read(stored)?;
        let is_small = entry.encoded_len() < ENTRY_MAX_BYTES;
        Ok(if is_small { entry } else { entry.detached() })
    }

    /// See [`StoredEntry::is_message`].
    pub(super) fn is_message(&mut self, stored: &StoredEntry, key_value: &[u8]) -> bool {
        Entry::from_key_value(key_value).is_ok_and(|theirs| self.is_same(stored, &theirs))
    }

    /// See [`StoredEntry::is_same`].
    pub(super) fn is_same(&mut self, stored: &StoredEntry, entry: &Entry) -> bool {
        stored.head_parts() == entry.head_parts()
            && match stored.digest() {
                Some(known) => known == digest(entry),
                None => self.read(stored).is_ok_and(|ours| ours == *entry),
            }
    }
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
pub(super) fn unpack(entries: &mut [StoredEntry]) -> Result<(), MemoryError> {
    let mut reader = EntryReader::default();
    for stored in entries.iter_mut().filter(|stored| stored.is_packed()) {
        *stored = reader.read_for_leaf(stored)?.into();
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
) -> Result<Option<Arc<PackedBlock>>, MemoryError> {
    let mut reader = EntryReader::default();
    let digests = entries.iter().map(|stored| match stored.digest() {
        Some(known) => Ok(known),
        None => reader.read(stored).map(|entry| digest(&entry)),
    });
    let digests = digests.collect::<Result<_, _>>()?;
    let heads = entries
        .iter()
        .map(|stored| (stored.head_parts(), stored.encoded_len()));
    let values = BlockValues::NotHeld(digests);
    Ok(PackedBlock::with_heads(heads, values, born).map(Arc::new))
}

fn packed_block(group: &[StoredEntry], born: u64) -> Option<PackedBlock> {
    let entries: Option<Vec<&Entry>> = group.iter().map(StoredEntry::plain).collect();
    PackedBlock::new(&entries?, born)
}

/// Whether no one but the holder of `entries` has one of them, or a block of theirs.
pub(super) fn are_only_here(entries: &[StoredEntry]) -> bool {
    let mut from = 0;
    while let Some(first) = entries.get(from) {
        // Entries of one block need not be neighbours: a new key may lie between them.
        let place = first.place();
        let all = entries.iter().filter(|other| other.place() == place).count();
        if first.holders() > all {
            return false;
        }
        from += 1;
    }
    true
}

/// Prefetches entries into the CPU's cache: reads a byte of each, or, of entries shorter than `whole_below_bytes`, a
/// byte of each cache line. The reads are independent, so that the cache misses overlap; in the work that follows they
/// would not. Blocks are sent without being read, and packed ones are read as a whole.
pub(super) fn touch(entries: &[StoredEntry], whole_below_bytes: usize) {
    let mut touched = 0;
    for entry in entries.iter().filter_map(StoredEntry::plain) {
        if entry.block().is_some() {
            continue;
        }
        let head = entry.head();
        let upto = if head.len() < whole_below_bytes {
            head.len()
        } else {
            1
        };
        for line in (0..upto).step_by(CACHE_LINE_BYTES) {
            touched ^= head[line];
        }
    }
    std::hint::black_box(touched);
}

#[cfg(test)]
mod pack_tests;
#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::KeyValue;

    fn stored(count: usize) -> Vec<StoredEntry> {
        let entry = |index| {
            KeyValue::new(format!("{index:02}"), 1, vec![b'v'; 300])
                .entry()
                .into()
        };
        (0..count).map(entry).collect()
    }

    #[test]
    fn entries_are_only_here_unless_something_else_has_one_or_its_block() {
        let plain = stored(4);
        assert!(are_only_here(&plain));
        let held = plain[2].clone();
        assert!(!are_only_here(&plain));
        drop(held);
        let mut packed = plain;
        pack(&mut packed, 0);
        // Another key between those of the block.
        packed.insert(2, stored(1).remove(0));
        assert!(are_only_here(&packed));
        let reader = &mut EntryReader::default();
        reader.read(&packed[0]).unwrap();
        assert!(!are_only_here(&packed), "a response has the block");
        assert!(
            !are_only_here(&packed[1..]),
            "the first of its entries is elsewhere"
        );
    }

    #[test]
    fn entry_is_the_same_only_with_every_field() {
        let mut entries = stored(2);
        let message = |kv: &KeyValue| kv.entry().key_value();
        let same = KeyValue::new("01", 1, vec![b'v'; 300]);
        let leased = KeyValue {
            lease: 5,
            ..same.clone()
        };
        for step in 0..3 {
            match step {
                0 => {}
                1 => assert!(pack(&mut entries, 0)),
                _ => {
                    let all: Vec<&StoredEntry> = entries.iter().collect();
                    let block = without_values(&all, 0).unwrap().unwrap();
                    entries = vec![StoredEntry::packed(&block, 0), StoredEntry::packed(&block, 1)];
                }
            }
            assert_eq!(entries[1].has_value(), step < 2);
            let mut reader = EntryReader::default();
            assert!(reader.is_message(&entries[1], &message(&same)));
            for other in [
                &leased,
                &KeyValue::new("01", 2, vec![b'v'; 300]),
                &KeyValue::new("01", 1, "w"),
            ] {
                assert!(!reader.is_message(&entries[1], &message(other)));
            }
            assert!(!reader.is_message(&entries[0], &message(&same)));
            assert!(!reader.is_message(&entries[1], b"not a message"));
        }
    }

    #[test]
    fn log_of_an_entry_has_its_key_and_not_its_value() {
        let text = format!("{:?}", stored(1)[0]);
        assert!(text.contains("00") && !text.contains("vvv"), "{text}");
    }
}
