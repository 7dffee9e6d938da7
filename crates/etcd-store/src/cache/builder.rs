//! Construction of a tree from key-values in key order, while they arrive: leaves are full and built once, and small
//! entries are copied once, from the message that brought them into their block.

use std::{collections::BTreeMap, sync::Arc};

use bytes::Bytes;

use super::entry::{Entry, MalformedKeyValue};
use super::gather::{Arrived, fill};
use super::leaf::{LEAF_MAX, LEAF_MIN, Leaf};
use super::node::{Body, INNER_MAX, Node, Slot, Summary};
use super::separator::{Separators, separator_between};
use super::stored::{MemoryError, StoredEntry};
use super::{ledger::Ledger, repack::Repacking, tree::Tree};
use crate::keyspace::{figure_prefix, prefix_end};

/// Leaves that are packed later with each one that arrives.
const EARLIER_LEAVES: usize = 2;

/// Bytes whose packing takes less than handing them to another thread and back.
const PACKED_AT_ONCE_BYTES: usize = 64 << 10;

/// Bytes of the entries of a leaf that is packed from which on it has no more than it must.
const FILLING_MAX_BYTES: usize = 256 << 10;

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

/// A tree that is being loaded. A clone costs a reference for each leaf.
#[derive(Clone, Default)]
pub struct TreeBuilder {
    packing: Packing,
    /// Nodes of full leaves, each with the separator from its predecessor (empty for the first).
    leaves: Vec<(Box<[u8]>, Slot)>,
    /// Key-values of the next leaf.
    filling: Vec<Arrived>,
    /// Length of their fields `kvs`, in bytes; looked at with each key that arrives.
    filling_bytes: usize,
    /// Entries that were not above all before.
    out_of_order: Vec<Entry>,
    /// Leaves from the start that were packed after they were built.
    packed_leaves: usize,
    /// Prefixes whose values are left out.
    without_values: Vec<Box<[u8]>>,
    keys: u64,
    encoded_bytes: u64,
    ledger: Ledger,
}

impl TreeBuilder {
    /// A builder without keys.
    pub fn new(packing: Packing) -> TreeBuilder {
        TreeBuilder {
            packing,
            ..TreeBuilder::default()
        }
    }

    /// Whether values may be packed.
    pub fn packs(&self) -> bool {
        self.packing != Packing::Never
    }

    /// Whether adding key-values of this many bytes takes milliseconds, because they are packed.
    pub fn is_slow(&self, bytes: usize) -> bool {
        self.packs() && bytes > PACKED_AT_ONCE_BYTES
    }

    /// Adds the body of a KeyValue message. Keys should arrive in order: others are inserted at the end, one by one. Of equal
    /// keys the last one is kept. The message is held until its leaf is full.
    ///
    /// # Errors
    /// The message is not a KeyValue in etcd's canonical encoding.
    pub fn push(&mut self, key_value: Bytes) -> Result<(), MalformedKeyValue> {
        let arrived = Arrived::checked(key_value)?;
        self.keys += 1;
        self.encoded_bytes += arrived.encoded_len() as u64;
        if !self.out_of_order.is_empty() || self.last_key().is_some_and(|last| last >= arrived.key()) {
            self.out_of_order.push(arrived.alone());
            return Ok(());
        }
        if self.filling.len() == LEAF_MAX || self.is_large_enough() {
            self.close_leaf();
        }
        self.filling_bytes += arrived.encoded_len();
        self.filling.push(arrived);
        Ok(())
    }

    /// Number of key-values that have arrived.
    pub fn len(&self) -> u64 {
        self.keys
    }

    /// Whether none has arrived.
    pub fn is_empty(&self) -> bool {
        self.keys == 0
    }

    /// Length of their fields `kvs`, in bytes.
    pub fn encoded_bytes(&self) -> u64 {
        self.encoded_bytes
    }

    /// Memory of the tree so far, without its inner nodes, in bytes.
    pub fn memory_bytes(&self) -> u64 {
        let filling = self.filling_bytes + self.filling.len() * size_of::<StoredEntry>();
        let others: u64 = self.out_of_order.iter().map(Entry::memory_bytes).sum();
        self.ledger.memory.bytes() + filling as u64 + others
    }

    /// Leaves out values until the tree takes no more memory than `max_bytes`, if that can be: prefix after prefix of those
    /// that have arrived, first the one whose memory costs most by `cost`, which gets the prefix and the length of its values.
    /// What arrives of them later has no values either. Returns the prefixes.
    ///
    /// # Errors
    /// A packed block is damaged.
    pub fn make_room(
        &mut self,
        max_bytes: u64,
        cost: impl Fn(&[u8], u64) -> u64,
    ) -> Result<Vec<Box<[u8]>>, MemoryError> {
        let mut left_out = Vec::new();
        while self.memory_bytes() > max_bytes {
            let held = self.held_bytes_by_prefix();
            let Some((prefix, _)) = held.iter().max_by_key(|(prefix, bytes)| cost(prefix, **bytes)) else {
                break;
            };
            let prefix: Box<[u8]> = prefix.as_slice().into();
            for index in 0..self.leaves.len() {
                self.repack(index, &prefix, Repacking::LeaveOut)?;
            }
            self.without_values.push(prefix.clone());
            left_out.push(prefix);
        }
        Ok(left_out)
    }

    /// Length of the values that are held in full leaves, by prefix; keys without one are left alone.
    fn held_bytes_by_prefix(&self) -> BTreeMap<Vec<u8>, u64> {
        let mut held: BTreeMap<Vec<u8>, u64> = BTreeMap::new();
        let mut add = |prefix: Option<&[u8]>, bytes: u64| {
            if let Some(prefix) = prefix.filter(|_| bytes > 0) {
                match held.get_mut(prefix) {
                    Some(sum) => *sum += bytes,
                    None => drop(held.insert(prefix.to_vec(), bytes)),
                }
            }
        };
        for (_, slot) in &self.leaves {
            let entries = slot.node.entries();
            let (Some(first), Some(last)) = (entries.first(), entries.last()) else {
                continue;
            };
            let prefix = figure_prefix(first.key());
            if prefix.is_some() && prefix == figure_prefix(last.key()) {
                add(prefix, slot.summary.held_bytes());
            } else {
                for stored in entries.iter().filter(|stored| stored.has_value()) {
                    add(figure_prefix(stored.key()), stored.encoded_len() as u64);
                }
            }
        }
        held
    }

    /// Makes a full leaf again, as far as its keys have a prefix.
    fn repack(&mut self, index: usize, prefix: &[u8], what: Repacking<'_>) -> Result<(), MemoryError> {
        let Some((_, slot)) = self.leaves.get_mut(index) else {
            return Ok(());
        };
        let Body::Leaf(leaf) = &slot.node.body else {
            return Ok(());
        };
        let end = prefix_end(prefix).unwrap_or_default();
        if let Some(leaf) = what.of(leaf, (prefix, &end), slot.node.born)? {
            let new = Node::leaf(leaf, slot.node.born);
            self.ledger.memory -= slot.node.memory();
            self.ledger.memory += new.memory();
            slot.summary = Summary::of_all(new.entries());
            slot.node = Arc::new(new);
        }
        Ok(())
    }

    /// The key that arrived last.
    pub fn last_key(&self) -> Option<&[u8]> {
        if let Some(last) = self.out_of_order.last() {
            return Some(last.key());
        }
        match self.filling.last() {
            Some(last) => Some(last.key()),
            None => self.last_of_leaves(),
        }
    }

    /// Builds the nodes.
    pub fn finish(mut self) -> Tree {
        let filling = self.filling.len();
        self.close_leaf();
        if filling < LEAF_MIN
            && filling > 0
            && self.leaves.len() > 1
            && let Some((_, last)) = self.pop_leaf()
            && let Some((separator, mut before)) = self.pop_leaf()
        {
            // The last leaf would be too small: the last two share their entries evenly.
            let right = before.append(last, &mut self.ledger);
            self.push_leaf(separator, before);
            if let Some(right) = right {
                self.push_leaf(right.separator, right.leaf);
            }
        }
        let (mut level, mut ledger) = (self.leaves, self.ledger);
        while level.len() > 1 {
            level = parents_of(level, &mut ledger);
        }
        let mut tree = Tree::of_root(level.pop().map(|(_, root)| root), ledger);
        for entry in self.out_of_order {
            tree.insert(entry);
        }
        tree
    }

    /// Whether the next leaf is to be closed before it is full: until then its entries cannot be packed.
    fn is_large_enough(&self) -> bool {
        self.packs() && self.filling.len() >= LEAF_MIN && self.filling_bytes > FILLING_MAX_BYTES
    }

    fn last_of_leaves(&self) -> Option<&[u8]> {
        let (_, slot) = self.leaves.last()?;
        match &slot.node.body {
            Body::Leaf(leaf) => leaf.last().map(StoredEntry::key),
            Body::Inner(_) => None,
        }
    }

    fn close_leaf(&mut self) {
        let Some(first) = self.filling.first() else { return };
        let separator = match self.last_of_leaves() {
            Some(last) => separator_between(last, first.key()).into(),
            None => Box::default(),
        };
        let (entries, block_waste_bytes) = fill(&self.filling, self.ledger.epoch);
        self.filling.clear();
        self.filling_bytes = 0;
        let leaf = Leaf::loaded(entries, block_waste_bytes);
        let packs = match self.packing {
            Packing::Never => false,
            Packing::Always => true,
            Packing::Above(bytes) => self.ledger.memory.bytes() > bytes,
        };
        leaf.iter().for_each(|stored| self.ledger.add(stored));
        self.push_leaf(separator, leaf);
        let last = self.leaves.len() - 1;
        // What has just arrived, or was just packed, is not damaged.
        if packs {
            let _ = self.repack(last, b"", Repacking::PackAll);
            // More than arrive, so that the tree becomes smaller, and not so many that the load stops.
            for _ in 0..EARLIER_LEAVES {
                let _ = self.repack(self.packed_leaves, b"", Repacking::PackAll);
                self.packed_leaves = self.leaves.len().min(self.packed_leaves + 1);
            }
        }
        for prefix in std::mem::take(&mut self.without_values) {
            let _ = self.repack(last, &prefix, Repacking::LeaveOut);
            self.without_values.push(prefix);
        }
    }

    fn push_leaf(&mut self, separator: Box<[u8]>, leaf: Leaf) {
        // Summed up while the entries are in the CPU's cache.
        let summary = Summary::of_all(&leaf);
        let node = Node::leaf(leaf, self.ledger.epoch);
        self.ledger.memory.nodes += node.memory_bytes();
        let node = Arc::new(node);
        self.leaves.push((separator, Slot { summary, node }));
    }

    fn pop_leaf(&mut self) -> Option<(Box<[u8]>, Leaf)> {
        let (separator, slot) = self.leaves.pop()?;
        self.ledger.memory.nodes -= slot.node.memory_bytes();
        match Arc::unwrap_or_clone(slot.node).body {
            Body::Leaf(leaf) => Some((separator, leaf)),
            Body::Inner(_) => None,
        }
    }
}

impl std::fmt::Debug for TreeBuilder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TreeBuilder")
            .field("keys", &self.keys)
            .field("encoded_bytes", &self.encoded_bytes)
            .finish_non_exhaustive()
    }
}

impl Tree {
    /// Builds a tree with full leaves from entries in key order. From the first entry out of order on, entries are
    /// inserted one by one. Of equal keys the last one is kept.
    pub fn from_sorted(entries: impl IntoIterator<Item = Entry>) -> Tree {
        Tree::load(entries, Packing::Never)
    }

    /// Makes the tree as [`Tree::from_sorted`] does, and packs the leaves as `packing` wants it.
    pub fn load(entries: impl IntoIterator<Item = Entry>, packing: Packing) -> Tree {
        let mut builder = TreeBuilder::new(packing);
        for entry in entries {
            // An entry is a KeyValue that was checked.
            let _ = builder.push(entry.key_value());
        }
        builder.finish()
    }
}

/// Groups the nodes of a level under parents, as evenly as possible.
fn parents_of(level: Vec<(Box<[u8]>, Slot)>, ledger: &mut Ledger) -> Vec<(Box<[u8]>, Slot)> {
    let total = level.len();
    let groups = total.div_ceil(INNER_MAX);
    let mut children = level.into_iter();
    let mut parents = Vec::with_capacity(groups);
    for group in 0..groups {
        let size = (group + 1) * total / groups - group * total / groups;
        let mut slots = Vec::with_capacity(size);
        let mut separators = Separators::default();
        let mut parent_separator = Box::default();
        for (separator, slot) in children.by_ref().take(size) {
            if slots.is_empty() {
                parent_separator = separator;
            } else {
                separators.push(&separator);
            }
            slots.push(slot);
        }
        let summary = Summary::of_slots(&slots);
        let node = Node::inner(slots, separators, ledger.epoch);
        ledger.memory.nodes += node.memory_bytes();
        parents.push((
            parent_separator,
            Slot {
                summary,
                node: Arc::new(node),
            },
        ));
    }
    parents
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::testing::{KeyValue, key};
    use crate::cache::tree::model::check;

    fn message(kv: &KeyValue) -> Bytes {
        kv.entry().key_value()
    }

    fn objects(count: usize) -> Vec<KeyValue> {
        (0..count)
            .map(|index| KeyValue::new(key(index), 1, vec![b'v'; 300]))
            .collect()
    }

    fn filled(objects: &[KeyValue], packing: Packing) -> TreeBuilder {
        let mut builder = TreeBuilder::new(packing);
        for object in objects {
            builder.push(message(object)).unwrap();
        }
        builder
    }

    #[test]
    fn malformed_key_value_is_refused_and_changes_nothing() {
        let mut builder = filled(&objects(3), Packing::Never);
        assert!(builder.push(Bytes::from_static(b"\x0a\x00")).is_err());
        assert_eq!(builder.len(), 3);
        assert_eq!(builder.last_key(), Some(&key(2)[..]));
    }

    #[test]
    fn memory_is_known_while_it_fills() {
        for packing in [Packing::Never, Packing::Always] {
            let builder = filled(&objects(3000), packing);
            let so_far = builder.memory_bytes();
            let tree = builder.finish();
            assert!(so_far <= tree.memory_bytes() && so_far > tree.memory_bytes() * 9 / 10);
        }
        let packed = filled(&objects(3000), Packing::Always).memory_bytes();
        let plain = filled(&objects(3000), Packing::Never).memory_bytes();
        assert!(packed * 2 < plain, "{packed} and {plain} bytes");
    }

    #[test]
    fn load_packs_once_it_is_large_and_then_what_came_before() {
        let objects = objects(3000);
        let plain = filled(&objects, Packing::Never).memory_bytes();
        let packed_bytes = |bytes| {
            let tree = filled(&objects, Packing::Above(bytes)).finish();
            let model = objects.iter().map(|kv| (kv.key.clone(), kv.clone())).collect();
            check(&tree, &model);
            tree.memory().packed_encoded
        };
        assert_eq!(packed_bytes(plain), 0);
        let all = filled(&objects, Packing::Never).encoded_bytes();
        assert!(
            packed_bytes(plain / 3) > all / 5 * 4,
            "those before were packed, too"
        );
        let some = packed_bytes(plain / 10 * 9);
        assert!(some > all / 10 && some < all / 2, "{some} of {all} bytes");
        let mut builder = TreeBuilder::new(Packing::Above(plain / 2));
        for object in &objects {
            builder.push(message(object)).unwrap();
            assert!(builder.memory_bytes() < plain * 6 / 10);
        }
    }

    #[test]
    fn load_leaves_out_the_values_that_cost_most_also_of_what_arrives_later() {
        let of = |prefix: &str, count: usize| -> Vec<KeyValue> {
            (0..count)
                .map(|index| KeyValue::new(format!("/r/{prefix}/{index:05}"), 1, vec![b'v'; 300]))
                .collect()
        };
        let (few, most, some) = (of("few", 100), of("most", 1_500), of("some", 500));
        let later = of("some", 700).split_off(500);
        let mut builder = filled(
            &[few.clone(), most.clone(), some.clone()].concat(),
            Packing::Never,
        );
        let plain = builder.memory_bytes();
        let by_length = |_: &[u8], bytes: u64| bytes;
        assert!(builder.make_room(plain, by_length).unwrap().is_empty());
        // Length alone would choose the other one.
        let by_reads = |prefix: &[u8], bytes: u64| {
            if prefix == b"/r/most/" {
                bytes / 1000
            } else {
                bytes
            }
        };
        let left_out = builder.make_room(plain - 100_000, by_reads).unwrap();
        assert_eq!(left_out, [Box::from(&b"/r/some/"[..])]);
        for object in &later {
            builder.push(message(object)).unwrap();
        }
        assert!(builder.memory_bytes() < plain - 100_000);
        let mut whole = builder.clone();
        assert_eq!(
            whole.make_room(0, by_length).unwrap().len(),
            2,
            "all that there is"
        );
        let model = [few, most, some, later].concat();
        let model = model.into_iter().map(|kv| (kv.key.clone(), kv)).collect();
        for (builder, held) in [(builder, 1_600), (whole, 0)] {
            let tree = builder.finish();
            check(&tree, &model);
            let mut with_values = 0;
            tree.for_each_from(0, |stored| {
                with_values += usize::from(stored.has_value());
                std::ops::ControlFlow::Continue(())
            });
            // The last leaf may have been merged, and is as it arrived.
            assert!(
                (held..=held + 2 * LEAF_MAX).contains(&with_values),
                "{with_values}"
            );
        }
    }

    #[test]
    fn leaf_of_large_values_is_packed_before_it_is_full() {
        let large: Vec<_> = (0..40)
            .map(|index| KeyValue::new(key(index), 1, vec![b'v'; 100_000]))
            .collect();
        for packing in [Packing::Always, Packing::Above(1_000_000)] {
            let mut builder = TreeBuilder::new(packing);
            for object in &large {
                builder.push(message(object)).unwrap();
                assert!(
                    builder.memory_bytes() < 2_500_000,
                    "{packing:?}: {}",
                    builder.memory_bytes()
                );
            }
            let model = large.iter().map(|kv| (kv.key.clone(), kv.clone())).collect();
            check(&builder.finish(), &model);
        }
    }

    #[test]
    fn message_is_released_once_its_leaf_is_full() {
        let mut builder = TreeBuilder::new(Packing::Never);
        let first = message(&objects(1)[0]);
        builder.push(first.clone()).unwrap();
        assert!(!first.is_unique());
        for object in &objects(LEAF_MAX + 1)[1..] {
            builder.push(message(object)).unwrap();
        }
        assert!(first.is_unique());
    }

    #[test]
    fn copy_of_a_builder_is_a_tree_of_what_has_arrived() {
        let (objects, mut builder) = (objects(100), TreeBuilder::new(Packing::Always));
        for object in &objects {
            builder.push(message(object)).unwrap();
            let tree = builder.clone().finish();
            assert_eq!(tree.len(), builder.len());
            assert_eq!(tree.summary().encoded_bytes, builder.encoded_bytes());
        }
        // Out of order, and again: it is inserted, and of equal keys the last is kept.
        let changed = KeyValue::new(key(50), 2, "changed");
        builder.push(message(&changed)).unwrap();
        let tree = builder.finish();
        assert_eq!(tree.len(), 100);
        assert_eq!(tree.get(&key(50)).map(KeyValue::from), Some(changed));
    }
}
