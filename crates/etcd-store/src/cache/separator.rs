//! Separators: the keys between the children of an inner node.

use super::memory::class_bytes;

/// Keys in ascending order, in one buffer: a copy of a node copies them at once, and a search reads few cache lines.
/// They own their bytes, so that no separator keeps a deleted entry alive.
#[derive(Clone, Default)]
pub(super) struct Separators {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Separators {
    pub(super) fn push(&mut self, key: &[u8]) {
        self.bytes.extend_from_slice(key);
        self.ends.push(self.bytes.len());
    }

    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    pub(super) fn get(&self, index: usize) -> &[u8] {
        &self.bytes[self.start(index)..self.ends[index]]
    }

    /// Number of separators at or below `key`.
    pub(super) fn not_above(&self, key: &[u8]) -> usize {
        let (mut low, mut high) = (0, self.len());
        while low < high {
            let middle = low.midpoint(high);
            if self.get(middle) <= key {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        low
    }

    pub(super) fn insert(&mut self, index: usize, key: &[u8]) {
        let start = self.start(index);
        self.bytes.splice(start..start, key.iter().copied());
        self.ends.insert(index, start);
        for end in &mut self.ends[index..] {
            *end += key.len();
        }
    }

    pub(super) fn remove(&mut self, index: usize) -> Box<[u8]> {
        let (start, end) = (self.start(index), self.ends.remove(index));
        for later in &mut self.ends[index..] {
            *later -= end - start;
        }
        self.bytes.drain(start..end).collect()
    }

    /// Removes the separator at `index` and all above it; returns that one, and those above it.
    pub(super) fn split_off(&mut self, index: usize) -> Option<(Box<[u8]>, Separators)> {
        let mut right = Separators::default();
        for above in index + 1..self.len() {
            right.push(self.get(above));
        }
        let key = self.get(index).into();
        let start = self.start(index);
        self.bytes.truncate(start);
        self.ends.truncate(index);
        Some((key, right))
    }

    pub(super) fn append(&mut self, between: &[u8], right: &Separators) {
        self.push(between);
        for index in 0..right.len() {
            self.push(right.get(index));
        }
    }

    fn start(&self, index: usize) -> usize {
        if index == 0 { 0 } else { self.ends[index - 1] }
    }

    pub(super) fn memory_bytes(&self) -> usize {
        class_bytes(self.bytes.capacity()) + class_bytes(self.ends.capacity() * size_of::<usize>())
    }
}

/// The shortest key that is above `left` and not above `right`, given `left < right`.
pub(super) fn separator_between<'a>(left: &[u8], right: &'a [u8]) -> &'a [u8] {
    let common = left
        .iter()
        .zip(right)
        .take_while(|(left, right)| left == right)
        .count();
    &right[..(common + 1).min(right.len())]
}
