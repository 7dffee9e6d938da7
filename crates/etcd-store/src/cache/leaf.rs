//! The entries of a leaf in key order, and one byte of each key's hash (its mark).
//!
//! A binary search among keys reads one cold cache line after another: it was a tenth of the cost of a small read. The
//! marks are stored in the leaf itself, so that an existing key is found by reading one entry, mostly.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};

use super::gather::{gather, unpack_rests};
use super::memory::{BLOCK_MAX_ENTRIES, class_bytes};
use super::stored::{MemoryError, StoredEntry, are_only_here, pack, unpack, without_values};
use super::{entry::Entry, ledger::Ledger, separator::separator_between};

/// Largest number of entries in a leaf. Chosen by measurement (`benches/micro.rs`), and the number of marks in a `u32`
/// bit set.
pub(super) const LEAF_MAX: usize = BLOCK_MAX_ENTRIES;
/// Smallest number of entries: below it a leaf is merged with its neighbour, or filled from it. A quarter, so that
/// alternating puts and deletes do not split and merge a leaf each time.
pub(super) const LEAF_MIN: usize = LEAF_MAX / 4;

/// A leaf is gathered again once more than its blocks' used bytes divided by this are unused.
const WASTE_DIVISOR: u64 = 3;
/// Unused bytes that are not worth it.
const MIN_WASTE_BYTES: u64 = 1 << 10;

/// Up to [`LEAF_MAX`] entries in key order.
#[derive(Clone)]
pub(super) struct Leaf {
    entries: Vec<StoredEntry>,
    /// `marks[i]` belongs to `entries[i]`; marks after the last entry have no meaning.
    marks: [u8; LEAF_MAX],
    /// Memory of the leaf's blocks that is not of its entries: rounding, and bytes of entries that were replaced or removed.
    block_waste_bytes: u64,
    pub(super) heat: Heat,
}

/// Marks of a leaf for the packing of a tree in use. Unlike all else in a leaf, they change while it is shared. They decide nothing but
/// when it is packed, so that no order between them and the entries is needed.
#[derive(Debug, Default)]
pub(super) struct Heat {
    /// Read or written since the packing looked last.
    is_hot: AtomicBool,
    /// Packed as far as that saves enough, and not written since.
    is_settled: AtomicBool,
}

impl Heat {
    pub(super) fn record_read(&self) {
        // Read first: most reads find the mark, and must not take the cache line from other processors.
        if !self.is_hot.load(Ordering::Relaxed) {
            self.is_hot.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn record_write(&mut self) {
        *self = Heat {
            is_hot: AtomicBool::new(true),
            is_settled: AtomicBool::new(false),
        };
    }

    /// Whether the leaf was read or written since the last call.
    pub(super) fn take_hot(&self) -> bool {
        self.is_hot.load(Ordering::Relaxed) && self.is_hot.swap(false, Ordering::Relaxed)
    }

    pub(super) fn set_settled(&self) {
        self.is_settled.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_settled(&self) -> bool {
        self.is_settled.load(Ordering::Relaxed)
    }
}

impl Clone for Heat {
    fn clone(&self) -> Heat {
        Heat {
            is_hot: AtomicBool::new(self.is_hot.load(Ordering::Relaxed)),
            is_settled: AtomicBool::new(self.is_settled()),
        }
    }
}

/// Index of a key (`Ok`), or the index at which it would be inserted (`Err`).
pub(super) type KeyIndex = Result<usize, usize>;

/// The right half of a divided leaf, and the shortest key that separates it from the left half.
pub(super) struct RightHalf {
    pub(super) separator: Box<[u8]>,
    pub(super) leaf: Leaf,
}

impl Leaf {
    /// `entries` must be in key order, and at most [`LEAF_MAX`].
    pub(super) fn new(entries: Vec<StoredEntry>) -> Leaf {
        debug_assert!(entries.len() <= LEAF_MAX, "a leaf of {}", entries.len());
        let mut marks = [0; LEAF_MAX];
        for (mark, entry) in marks.iter_mut().zip(&entries) {
            *mark = mark_of(entry.key());
        }
        Leaf {
            entries,
            marks,
            block_waste_bytes: 0,
            heat: Heat::default(),
        }
    }

    /// A leaf with blocks of its own, which take `block_waste_bytes` beyond its entries.
    pub(super) fn loaded(entries: Vec<StoredEntry>, block_waste_bytes: u64) -> Leaf {
        Leaf {
            block_waste_bytes,
            ..Leaf::new(entries)
        }
    }

    /// Records that entries are read, for packing.
    pub(super) fn record_read(&self) {
        self.heat.record_read();
    }

    /// The leaf with its entries packed wherever that saves enough; `None` if it saves nothing.
    pub(super) fn packed(&self, born: u64) -> Option<Leaf> {
        let mut leaf = self.clone();
        let mut ledger = Ledger {
            epoch: born,
            ..Ledger::of(&leaf)
        };
        // A block from which entries were updated is packed again, with them.
        unpack_rests(&mut leaf.entries, &mut ledger);
        leaf.heat.set_settled();
        if !pack(&mut leaf.entries, born) {
            return None;
        }
        leaf.gather(&mut ledger);
        (leaf.memory_bytes() < self.memory_bytes()).then_some(leaf)
    }

    /// The leaf with all its entries plain.
    pub(super) fn unpacked(&self, born: u64) -> Result<Leaf, MemoryError> {
        let mut leaf = self.clone();
        unpack(&mut leaf.entries)?;
        leaf.gather_alone(born);
        leaf.heat = Heat::default();
        Ok(leaf)
    }

    /// The leaf without the values of its entries from `start` on and below `end` (empty: without an end); `None` if none is
    /// held, or they are too large.
    pub(super) fn without_values(
        &self,
        start: &[u8],
        end: &[u8],
        born: u64,
    ) -> Result<Option<Leaf>, MemoryError> {
        let of = |key: &[u8]| key >= start && (end.is_empty() || key < end);
        let within: Vec<&StoredEntry> = self.iter().filter(|stored| of(stored.key())).collect();
        if !within.iter().any(|stored| stored.has_value()) {
            return Ok(None);
        }
        let Some(block) = without_values(&within, born)? else {
            return Ok(None);
        };
        let (mut leaf, mut index) = (self.clone(), 0);
        for stored in leaf.entries.iter_mut().filter(|stored| of(stored.key())) {
            *stored = StoredEntry::packed(&block, index);
            index += 1;
        }
        leaf.gather_alone(born);
        Ok(Some(leaf))
    }

    /// The leaf with these values, which are in the order of their keys, where they are not held; `None` if it holds all that
    /// are its entries'.
    pub(super) fn with_values(&self, values: &[Entry], born: u64) -> Option<Leaf> {
        let mut filled = None;
        for (index, stored) in self.iter().enumerate().filter(|(_, stored)| !stored.has_value()) {
            let found = values.binary_search_by(|value| value.key().cmp(stored.key()));
            if let Ok(found) = found
                && stored.is_same(&values[found])
            {
                let leaf: &mut Leaf = filled.get_or_insert_with(|| self.clone());
                leaf.entries[index] = values[found].clone().into();
            }
        }
        let mut leaf = filled?;
        leaf.gather_alone(born);
        leaf.heat = Heat::default();
        Some(leaf)
    }

    /// Gathers a leaf that is in no tree yet.
    fn gather_alone(&mut self, born: u64) {
        let mut ledger = Ledger {
            epoch: born,
            ..Ledger::of(self)
        };
        self.gather(&mut ledger);
    }

    /// Whether nothing else has one of the entries: no event of the window, no other state of the history, no response.
    /// Otherwise its memory would not be freed by packing it.
    pub(super) fn has_its_entries_alone(&self) -> bool {
        are_only_here(&self.entries)
    }

    /// Memory of the entries, of their list and of the blocks, in bytes.
    fn memory_bytes(&self) -> u64 {
        self.iter().map(StoredEntry::memory_bytes).sum::<u64>() + self.list_bytes()
    }

    /// Gathers the entries that can be moved in blocks of this leaf's own.
    pub(super) fn gather(&mut self, ledger: &mut Ledger) {
        self.block_waste_bytes = gather(&mut self.entries, ledger);
    }

    /// Records that `stored` is no longer one of the leaf's, and gathers the leaf again if too much of its blocks is unused.
    fn release(&mut self, stored: &StoredEntry, ledger: &mut Ledger) {
        if !stored.is_in_block() {
            return;
        }
        ledger.leave_block(stored);
        self.block_waste_bytes += stored.memory_bytes();
        let in_blocks = self.entries.iter().filter(|stored| stored.is_in_block());
        let used_bytes: u64 = in_blocks.map(StoredEntry::memory_bytes).sum();
        if used_bytes == 0 {
            self.block_waste_bytes = 0;
        } else if self.block_waste_bytes > (used_bytes / WASTE_DIVISOR).max(MIN_WASTE_BYTES) {
            self.gather(ledger);
        }
    }

    /// Index of a key, by its mark; `None` if it is absent.
    pub(super) fn find(&self, key: &[u8]) -> Option<usize> {
        let mark = mark_of(key);
        let mut candidates = self
            .marks
            .iter()
            .enumerate()
            .fold(0_u32, |candidates, (index, other)| {
                candidates | (u32::from(*other == mark) << index)
            });
        while candidates != 0 {
            let index = candidates.trailing_zeros() as usize;
            if self.entries.get(index)?.key() == key {
                return Some(index);
            }
            candidates &= candidates - 1;
        }
        None
    }

    /// Position of a key, by binary search.
    pub(super) fn position(&self, key: &[u8]) -> KeyIndex {
        self.entries.binary_search_by(|entry| entry.key().cmp(key))
    }

    /// Replaces the entry at `index` by another one of the same key; returns the old one.
    pub(super) fn replace(&mut self, index: usize, entry: StoredEntry, ledger: &mut Ledger) -> StoredEntry {
        debug_assert_eq!(self.entries[index].key(), entry.key());
        self.heat.record_write();
        let old = std::mem::replace(&mut self.entries[index], entry);
        self.release(&old, ledger);
        old
    }

    /// Inserts a new entry at the index from [`Leaf::position`]. Returns the right half if the leaf had to be divided.
    pub(super) fn insert(
        &mut self,
        index: usize,
        entry: StoredEntry,
        ledger: &mut Ledger,
    ) -> Option<RightHalf> {
        self.heat.record_write();
        if self.entries.len() < LEAF_MAX {
            self.insert_within(index, entry);
            return None;
        }
        // The marks of the left half stay valid.
        let mut right = split_entries(&mut self.entries);
        // Compared with the separator, not by index: the separator may be at or below a key that follows the left half
        // directly.
        if entry.key() < &*right.separator {
            self.insert_within(index, entry);
        } else {
            right.leaf.insert_within(index - self.entries.len(), entry);
        }
        self.gather(ledger);
        right.leaf.gather(ledger);
        Some(right)
    }

    fn insert_within(&mut self, index: usize, entry: StoredEntry) {
        let length = self.entries.len();
        self.marks.copy_within(index..length, index + 1);
        self.marks[index] = mark_of(entry.key());
        make_room(&mut self.entries);
        self.entries.insert(index, entry);
    }

    /// Removes and returns the entry at `index`.
    pub(super) fn remove(&mut self, index: usize, ledger: &mut Ledger) -> StoredEntry {
        self.heat.record_write();
        self.marks.copy_within(index + 1.., index);
        let removed = self.entries.remove(index);
        self.release(&removed, ledger);
        removed
    }

    /// Appends the entries of the leaf to the right. Returns the right half of an even split if they do not fit.
    pub(super) fn append(&mut self, right: Leaf, ledger: &mut Ledger) -> Option<RightHalf> {
        let mut entries = std::mem::take(&mut self.entries);
        entries.reserve_exact(right.entries.len());
        entries.extend(right.entries);
        if entries.len() <= LEAF_MAX {
            *self = Leaf::new(entries);
            self.gather(ledger);
            return None;
        }
        let mut right = split_entries(&mut entries);
        *self = Leaf::new(entries);
        self.gather(ledger);
        right.leaf.gather(ledger);
        Some(right)
    }

    /// Memory of the list of entries in addition to the leaf itself, and of its blocks in addition to its entries, in bytes.
    pub(super) fn list_bytes(&self) -> u64 {
        class_bytes(self.entries.capacity() * size_of::<StoredEntry>()) as u64 + self.block_waste_bytes
    }

    /// Memory of the leaf's blocks that is not of its entries.
    #[cfg(any(test, fuzzing, feature = "testing"))]
    pub(super) fn block_waste_bytes(&self) -> u64 {
        self.block_waste_bytes
    }

    #[cfg(any(test, feature = "testing"))]
    pub(super) fn damage(&mut self) {
        for stored in &mut self.entries {
            if let Err((block, index)) = stored.parts() {
                *stored = StoredEntry::packed(&std::sync::Arc::new(block.damaged()), index);
            }
        }
    }

    /// Whether every mark is that of its entry, which [`Leaf::find`] depends on.
    #[cfg(any(test, fuzzing, feature = "testing"))]
    pub(super) fn is_marked(&self) -> bool {
        self.entries
            .iter()
            .zip(self.marks)
            .all(|(entry, mark)| mark == mark_of(entry.key()))
    }
}

impl Deref for Leaf {
    type Target = [StoredEntry];

    fn deref(&self) -> &[StoredEntry] {
        &self.entries
    }
}

/// Divides a list of at least two entries in the middle.
fn split_entries(entries: &mut Vec<StoredEntry>) -> RightHalf {
    let right = entries.split_off(entries.len() / 2);
    let separator = match (entries.last(), right.first()) {
        (Some(left), Some(right)) => separator_between(left.key(), right.key()).into(),
        _ => Box::default(),
    };
    RightHalf {
        separator,
        leaf: Leaf::new(right),
    }
}

/// Reserves room for one more entry, up to the allocator's size class, so that no part of an allocation is unused.
fn make_room(entries: &mut Vec<StoredEntry>) {
    if entries.len() == entries.capacity() {
        let bytes = class_bytes((entries.len() + 1) * size_of::<StoredEntry>());
        entries.reserve_exact(bytes / size_of::<StoredEntry>() - entries.len());
    }
}

/// A byte of a hash of the key: one in 256 other keys has the same. Keys that differ only in a few letters anywhere
/// must differ here, and who chooses keys gains nothing by making them alike but a slower search of 32 entries.
fn mark_of(key: &[u8]) -> u8 {
    const MULTIPLIER: u64 = 0x9e37_79b9_7f4a_7c15;
    let mix = |hash: u64, word: u64| (hash.rotate_left(29) ^ word).wrapping_mul(MULTIPLIER);
    let (words, rest) = key.as_chunks::<8>();
    let mut hash = words.iter().fold(key.len() as u64, |hash, word| {
        mix(hash, u64::from_le_bytes(*word))
    });
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    hash = mix(hash, u64::from_le_bytes(last));
    hash.to_be_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{ledger::TreeMemory, testing::KeyValue};

    #[test]
    fn similar_keys_have_different_marks() {
        let marks = |keys: &mut dyn Iterator<Item = String>| {
            let mut marks: Vec<u8> = keys.map(|key| mark_of(key.as_bytes())).collect();
            marks.sort_unstable();
            marks.dedup();
            marks.len()
        };
        // Random bytes would have 162 different values among 256 on average.
        assert!(marks(&mut (0..256).map(|n| format!("/registry/pods/default/web-{n:07}"))) > 120);
        assert!(marks(&mut (0..256).map(|n| format!("/registry/secrets/team-{n}/default-token"))) > 120);
        assert!(marks(&mut (0..=255_u8).map(|n| char::from(n).to_string())) > 120);
    }

    #[test]
    fn leaf_is_hot_until_it_was_looked_at_and_settled_until_it_is_written() {
        let mut heat = Heat::default();
        assert!(!heat.take_hot());
        heat.record_read();
        assert!(heat.clone().take_hot(), "a copy of a leaf is as hot");
        assert!(heat.take_hot() && !heat.take_hot());
        heat.set_settled();
        heat.record_read();
        assert!(heat.is_settled(), "reads change no entry");
        heat.take_hot();
        heat.record_write();
        assert!(heat.take_hot() && !heat.is_settled());
    }

    #[test]
    fn list_of_a_growing_leaf_takes_no_more_than_its_entries_need() {
        let mut leaf = Leaf::new(Vec::new());
        for index in 0..LEAF_MAX {
            let entry = KeyValue::new(format!("{index:02}"), 1, "").entry().into();
            assert!(leaf.insert(index, entry, &mut Ledger::default()).is_none());
            assert_eq!(
                leaf.list_bytes(),
                class_bytes((index + 1) * size_of::<StoredEntry>()) as u64,
                "after {index}"
            );
        }
    }

    #[test]
    fn leaf_is_gathered_again_when_a_quarter_of_its_block_is_unused() {
        let key_value = |index: usize, revision| -> StoredEntry {
            KeyValue::new(format!("{index:02}"), revision, vec![b'v'; 200])
                .entry()
                .into()
        };
        let mut leaf = Leaf::new((0..LEAF_MAX).map(|index| key_value(index, 1)).collect());
        let mut ledger = Ledger {
            // Of what is inserted later, too: the tree counts that.
            memory: TreeMemory {
                entries: 1 << 20,
                ..TreeMemory::default()
            },
            ..Ledger::default()
        };
        leaf.gather(&mut ledger);
        let block = |leaf: &Leaf, index: usize| {
            leaf[index]
                .plain()?
                .block()
                .map(|(block, _)| std::sync::Arc::as_ptr(block))
        };
        let first = block(&leaf, LEAF_MAX - 1);
        let fresh = leaf.block_waste_bytes();
        let mut unused = 0;
        for index in 0.. {
            let old = leaf.replace(index, key_value(index, 2), &mut ledger);
            unused += old.memory_bytes();
            if block(&leaf, LEAF_MAX - 1) != first {
                break;
            }
            assert_eq!(leaf.block_waste_bytes(), fresh + unused);
            assert!(
                leaf.block_waste_bytes() <= (LEAF_MAX - index) as u64 * old.memory_bytes() / WASTE_DIVISOR
            );
        }
        assert!(
            block(&leaf, 0).is_some() && leaf.block_waste_bytes() < 1 << 10,
            "all are in one block again"
        );
        for index in 0..LEAF_MAX {
            leaf.replace(index, key_value(index, 3), &mut ledger);
        }
        let kept: Vec<_> = (0..LEAF_MAX)
            .filter(|index| block(&leaf, *index).is_some())
            .collect();
        assert!(kept.len() > LEAF_MAX / 2, "{kept:?}");
    }
}
