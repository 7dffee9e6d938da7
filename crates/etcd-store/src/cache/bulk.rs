//! Construction of a tree from entries in key order: leaves are full and built once.

use std::sync::Arc;

use super::{
    entry::Entry,
    leaf::{LEAF_MAX, LEAF_MIN, Leaf},
    ledger::Ledger,
    node::{INNER_MAX, Node, Slot, Summary},
    separator::{Separators, separator_between},
};

/// Collects entries in ascending key order.
#[derive(Default)]
pub(super) struct Loader {
    /// Full leaves, each with the separator from its predecessor (empty for the first).
    leaves: Vec<(Box<[u8]>, Leaf)>,
    filling: Vec<Entry>,
    ledger: Ledger,
}

impl Loader {
    /// Adds an entry; returns it if its key is not above all keys so far.
    pub(super) fn push(&mut self, entry: Entry) -> Option<Entry> {
        if self.last().is_some_and(|last| last.key() >= entry.key()) {
            return Some(entry);
        }
        if self.filling.len() == LEAF_MAX {
            self.close_leaf();
        }
        if self.filling.is_empty() {
            self.filling.reserve_exact(LEAF_MAX);
        }
        self.ledger.entry_bytes += entry.memory_bytes();
        self.filling.push(entry);
        None
    }

    /// Builds the nodes; `None` if there was no entry. Returns the memory of all, too.
    pub(super) fn finish(mut self) -> (Option<Slot>, Ledger) {
        if self.filling.len() < LEAF_MIN
            && let Some((separator, mut before)) = self.leaves.pop()
        {
            // The last leaf would be too small: the last two share their entries evenly.
            let filling = Leaf::new(std::mem::take(&mut self.filling));
            let right = before.append(filling, &mut self.ledger);
            self.leaves.push((separator, before));
            self.leaves
                .extend(right.map(|right| (right.separator, right.leaf)));
        }
        self.close_leaf();
        let mut ledger = self.ledger;
        let mut level = Vec::with_capacity(self.leaves.len());
        for (separator, leaf) in self.leaves {
            let summary = Summary::of_all(&leaf);
            let node = Node::leaf(leaf, ledger.epoch);
            ledger.node_bytes += node.memory_bytes();
            level.push((
                separator,
                Slot {
                    summary,
                    node: Arc::new(node),
                },
            ));
        }
        while level.len() > 1 {
            level = parents_of(level, &mut ledger);
        }
        (level.pop().map(|(_, root)| root), ledger)
    }

    fn last(&self) -> Option<&Entry> {
        self.filling
            .last()
            .or_else(|| self.leaves.last().and_then(|(_, leaf)| leaf.last()))
    }

    fn close_leaf(&mut self) {
        let Some(first) = self.filling.first() else { return };
        let separator = match self.leaves.last().and_then(|(_, leaf)| leaf.last()) {
            Some(last) => separator_between(last.key(), first.key()).into(),
            None => Box::default(),
        };
        let mut leaf = Leaf::new(std::mem::take(&mut self.filling));
        leaf.pack(&mut self.ledger);
        self.leaves.push((separator, leaf));
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
        ledger.node_bytes += node.memory_bytes();
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
