//! Checks of a whole tree against an ordered map: for property tests and fuzz targets.

use std::{collections::BTreeMap, ops::ControlFlow, sync::Arc};

use super::{Ledger, Node, StoredEntry, Summary, Tree};
use crate::cache::leaf::{LEAF_MAX, LEAF_MIN};
use crate::cache::node::{Body, INNER_MAX, INNER_MIN};
use crate::cache::{memory::class_bytes, testing::KeyValue};

/// The keys of a tree.
pub(in crate::cache) type Model = BTreeMap<Vec<u8>, KeyValue>;

/// Totals of a subtree whose shape has been checked.
pub(super) struct Checked {
    depth: usize,
    summary: Summary,
    node_bytes: u64,
    /// Addresses of the blocks of each leaf.
    blocks: Vec<usize>,
    keys: Vec<Vec<u8>>,
}

/// Checks the shape of a subtree, its totals and the order of its keys.
pub(super) fn check_node(node: &Node, is_root: bool) -> Checked {
    match &node.body {
        Body::Leaf(entries) => {
            let least = if is_root { 1 } else { LEAF_MIN };
            assert!(entries.is_marked(), "marks belong to their entries");
            assert!(
                (least..=LEAF_MAX).contains(&entries.len()),
                "a leaf of {}",
                entries.len()
            );
            let keys: Vec<_> = entries.iter().map(|entry| entry.key().to_vec()).collect();
            assert!(
                keys.is_sorted_by(|left, right| left < right),
                "keys of a leaf in order"
            );
            let mut blocks = BTreeMap::new();
            let mut in_blocks = 0_u64;
            for stored in entries.iter() {
                let (address, bytes) = match stored.parts() {
                    Ok(entry) => match entry.block() {
                        Some((block, _)) => (Arc::as_ptr(block).addr(), class_bytes(block.bytes.len())),
                        None => continue,
                    },
                    Err((packed, _)) => (Arc::as_ptr(packed).addr(), packed.memory_bytes()),
                };
                in_blocks += stored.memory_bytes();
                blocks.insert(address, bytes);
            }
            assert!(
                entries.block_waste_bytes() + in_blocks >= blocks.values().sum::<usize>() as u64,
                "a leaf counts its blocks"
            );
            let blocks = blocks.into_keys().collect();
            let mut summary = Summary::default();
            for entry in entries.iter() {
                if !entry.has_value() {
                    // `check` compares the lengths.
                    summary += Summary::of(entry);
                    continue;
                }
                summary.count += 1;
                summary.encoded_bytes += KeyValue::from(entry).field().len() as u64;
                let keys_only = KeyValue {
                    value: Vec::new(),
                    lease: 0,
                    ..KeyValue::from(entry)
                }
                .field()
                .len() as u64;
                let leased = KeyValue {
                    value: Vec::new(),
                    ..KeyValue::from(entry)
                }
                .field()
                .len() as u64;
                summary.keys_only_bytes += keys_only;
                summary.lease_bytes += leased - keys_only;
            }
            Checked {
                depth: 1,
                summary,
                node_bytes: node.memory_bytes(),
                blocks,
                keys,
            }
        }
        Body::Inner(inner) => {
            let least = if is_root { 2 } else { INNER_MIN };
            assert!(
                (least..=INNER_MAX).contains(&inner.slots.len()),
                "an inner node of {}",
                inner.slots.len()
            );
            assert_eq!(inner.separators.len() + 1, inner.slots.len());
            let mut all = Checked {
                depth: 0,
                summary: Summary::default(),
                node_bytes: node.memory_bytes(),
                blocks: Vec::new(),
                keys: Vec::new(),
            };
            for (index, slot) in inner.slots.iter().enumerate() {
                let below = check_node(&slot.node, false);
                assert_eq!(
                    below.summary, slot.summary,
                    "a slot has the totals of its subtree"
                );
                if let Some(before) = index.checked_sub(1) {
                    assert_eq!(below.depth, all.depth, "all leaves at one depth");
                    let separator = inner.separators.get(before);
                    assert!(all.keys.last().is_some_and(|last| last.as_slice() < separator));
                    assert!(
                        below
                            .keys
                            .first()
                            .is_some_and(|first| separator <= first.as_slice())
                    );
                }
                all.depth = below.depth;
                all.summary += below.summary;
                all.node_bytes += below.node_bytes;
                all.blocks.extend(below.blocks);
                all.keys.extend(below.keys);
            }
            all.depth += 1;
            all
        }
    }
}

/// Checks the tree against the model, down to the bytes that it counts.
pub(in crate::cache) fn check(tree: &Tree, model: &Model) {
    assert!(holds(tree, model), "the tree holds what the model holds");
    assert_eq!(tree.len(), model.len() as u64);
    let encoded: usize = model.values().map(|kv| kv.field().len()).sum();
    assert_eq!(tree.summary().encoded_bytes, encoded as u64);
    assert_eq!(tree.is_empty(), model.is_empty());
    let Some(root) = tree.root.as_deref() else {
        assert!(model.is_empty());
        assert_eq!((tree.summary(), tree.memory_bytes()), (Summary::default(), 0));
        return;
    };
    let checked = check_node(root, true);
    assert_eq!(tree.summary(), checked.summary);
    let mut blocks = checked.blocks.clone();
    blocks.sort_unstable();
    blocks.dedup();
    assert_eq!(
        blocks.len(),
        checked.blocks.len(),
        "a block has entries of one leaf"
    );
    let mut counted = Ledger::default();
    tree.for_each_from(0, |entry| {
        counted.add(entry);
        ControlFlow::Continue(())
    });
    counted.memory.nodes = checked.node_bytes;
    assert_eq!(tree.memory(), counted.memory);
}

/// Whether the tree has the entries of the model, in the same order.
pub(in crate::cache) fn holds(tree: &Tree, model: &Model) -> bool {
    let mut expected = model.values();
    let mut is_same = true;
    tree.for_each_from(0, |entry| {
        is_same = expected.next().is_some_and(|kv| kv.is(entry));
        if is_same {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    });
    is_same && expected.next().is_none()
}

/// Whether one is the other, or there is neither.
pub(in crate::cache) fn is_same(stored: Option<&StoredEntry>, expected: Option<&KeyValue>) -> bool {
    match (stored, expected) {
        (Some(stored), Some(expected)) => expected.is(stored),
        (stored, expected) => stored.is_none() && expected.is_none(),
    }
}
