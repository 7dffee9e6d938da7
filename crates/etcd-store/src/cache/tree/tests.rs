use proptest::prelude::*;

use super::model::{Model, check, check_node, is_same};
use super::*;
use crate::cache::testing::{KeyValue, Remaking, key, packing, remaking};
use crate::cache::{Packing, leaf::LEAF_MAX, repack::Replacements};

const KEYS: usize = 4000;

fn summary_of(model: &Model, from: usize, to: usize) -> Summary {
    let mut sum = Summary::default();
    for kv in model.values().take(to).skip(from) {
        sum += Summary::of(&kv.entry().into());
    }
    sum
}

#[derive(Clone, Debug)]
enum Op {
    Insert {
        index: usize,
        value_bytes: usize,
        lease: i64,
    },
    Remove {
        index: usize,
    },
    InsertRun {
        index: usize,
        length: usize,
    },
    RemoveRun {
        index: usize,
        length: usize,
    },
    Snapshot,
    Checkpoint,
    DropSnapshots,
    /// Continue with a snapshot.
    Swap,
    /// Continue with a tree that was loaded from the same entries.
    Reload(Packing),
    /// Make other leaves of the same entries, in all trees.
    Remake {
        from: usize,
        what: Remaking,
        max_bytes: u64,
    },
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        20 => (0..KEYS, 0..200_usize, prop_oneof![Just(0), 1..i64::MAX])
            .prop_map(|(index, value_bytes, lease)| Op::Insert { index, value_bytes, lease }),
        20 => (0..KEYS).prop_map(|index| Op::Remove { index }),
        3 => (0..KEYS, 1..400_usize).prop_map(|(index, length)| Op::InsertRun { index, length }),
        5 => (0..KEYS, 1..700_usize).prop_map(|(index, length)| Op::RemoveRun { index, length }),
        3 => Just(Op::Snapshot),
        2 => Just(Op::Checkpoint),
        1 => Just(Op::DropSnapshots),
        1 => Just(Op::Swap),
        1 => packing().prop_map(Op::Reload),
        4 => (0..KEYS, remaking(KEYS), 0..60_000_u64)
            .prop_map(|(from, what, max_bytes)| Op::Remake { from, what, max_bytes }),
    ]
}

struct Pair {
    tree: Tree,
    model: Model,
}

impl Pair {
    fn insert(&mut self, kv: KeyValue) {
        let replaced = self.tree.insert(kv.entry());
        let expected = self.model.insert(kv.key.clone(), kv);
        assert!(is_same(replaced.as_ref(), expected.as_ref()));
    }

    fn remove(&mut self, index: usize) {
        let removed = self.tree.remove(&key(index));
        assert!(is_same(removed.as_ref(), self.model.remove(&key(index)).as_ref()));
    }

    fn apply(&mut self, op: Op, snapshots: &mut Vec<Pair>, revision: i64) {
        match op {
            Op::Insert {
                index,
                value_bytes,
                lease,
            } => {
                self.insert(KeyValue {
                    lease,
                    ..KeyValue::new(key(index), revision, vec![1; value_bytes])
                });
            }
            Op::Remove { index } => self.remove(index),
            Op::InsertRun { index, length } => {
                (index..index + length)
                    .for_each(|index| self.insert(KeyValue::new(key(index), revision, "run")));
            }
            Op::RemoveRun { index, length } => (index..index + length).for_each(|index| self.remove(index)),
            Op::Snapshot => snapshots.push(Pair {
                tree: self.tree.clone(),
                model: self.model.clone(),
            }),
            Op::Checkpoint => snapshots.push(Pair {
                tree: self.tree.checkpoint(),
                model: self.model.clone(),
            }),
            Op::DropSnapshots => snapshots.clear(),
            Op::Reload(packing) => {
                self.tree = Tree::load(self.model.values().map(KeyValue::entry), packing);
            }
            Op::Remake {
                from,
                what,
                max_bytes,
            } => {
                let repacked = what.of(&self.tree, &key(from), max_bytes, self.model.values());
                let mut seen = Replacements::default();
                for pair in snapshots.iter_mut().chain([self]) {
                    pair.tree.put_repacked(&repacked, &mut seen);
                }
            }
            Op::Swap => {
                if let Some(other) = snapshots.first_mut() {
                    std::mem::swap(self, other);
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn tree_is_an_ordered_map_and_snapshots_are_immutable(
        loaded in prop_oneof![Just(0), 0..200_usize, 0..KEYS],
        stride in 1..4_usize,
        packing in packing(),
        ops in prop::collection::vec(op(), 0..120),
    ) {
        let kvs = (0..loaded).step_by(stride).map(|index| KeyValue::new(key(index), 1, vec![0; index % 270]));
        let model: Model = kvs.map(|kv| (kv.key.clone(), kv)).collect();
        let tree = Tree::load(model.values().map(KeyValue::entry), packing);
        check(&tree, &model);
        let mut pair = Pair { tree, model };
        let mut snapshots = Vec::new();
        for (number, op) in ops.into_iter().enumerate() {
            pair.apply(op, &mut snapshots, 2 + number as i64);
            if number % 16 == 0 {
                check(&pair.tree, &pair.model);
            }
        }
        for Pair { tree, model } in snapshots.iter().chain([&pair]) {
            check(tree, model);
        }
    }

    #[test]
    fn ranks_and_sums_equal_those_of_a_list(
        size in prop_oneof![0..80_usize, 0..3000_usize],
        picks in prop::collection::vec((0..KEYS, 0..3200_usize, 0..3200_usize), 1..40),
    ) {
        let kvs = (0..size).map(|index| {
            let lease = if index % 3 == 0 { 1 << (index % 60) } else { 0 };
            KeyValue { lease, ..KeyValue::new(key(index), index as i64 + 1, vec![0; index % 150]) }
        });
        let model: Model = kvs.map(|kv| (kv.key.clone(), kv)).collect();
        let mut tree = Tree::new();
        // Half loaded, half inserted in reverse order, for leaves that differ from those of a load.
        for (index, kv) in model.values().enumerate().collect::<Vec<_>>().into_iter().rev() {
            if index % 2 == 0 {
                tree.insert(kv.entry());
            }
        }
        let mut sorted: Vec<_> = model.values().collect();
        sorted.rotate_left(size / 3);
        for kv in sorted {
            tree.insert(kv.entry());
        }
        check(&tree, &model);
        for (index, from, to) in picks {
            let sought = key(index);
            prop_assert_eq!(tree.rank(&sought), model.range(..sought.clone()).count() as u64);
            prop_assert_eq!(tree.get(&sought).map(KeyValue::from), model.get(&sought).cloned());
            prop_assert_eq!(tree.at(from as u64).map(KeyValue::from), model.values().nth(from).cloned());
            prop_assert_eq!(tree.summary_of_ranks(from as u64, to as u64), summary_of(&model, from, to));
            let mut walked = Vec::new();
            tree.for_each_from(from as u64, |entry| {
                walked.push(KeyValue::from(entry));
                if walked.len() == 40 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
            });
            prop_assert!(walked.iter().eq(model.values().skip(from).take(40)));
        }
    }

    #[test]
    fn loading_accepts_any_order(indices in prop::collection::vec(0..300_usize, 0..400), sorted_part in 0..400_usize) {
        let mut indices = indices;
        let sorted_part = sorted_part.min(indices.len());
        indices[..sorted_part].sort_unstable();
        let kvs: Vec<_> = indices.iter().enumerate().map(|(at, index)| KeyValue::new(key(*index), at as i64 + 1, "")).collect();
        let model: Model = kvs.iter().map(|kv| (kv.key.clone(), kv.clone())).collect();
        check(&Tree::from_sorted(kvs.iter().map(KeyValue::entry)), &model);
    }
}

fn loaded(size: usize) -> Tree {
    Tree::from_sorted((0..size).map(|index| KeyValue::new(key(index), 1, "value").entry()))
}

fn put(tree: &mut Tree, index: usize) {
    tree.insert(KeyValue::new(key(index), 2, "other").entry());
}

#[test]
fn loading_fills_leaves() {
    let tree = loaded(LEAF_MAX * 100);
    let slots = LEAF_MAX as u64 * 100 * size_of::<Entry>() as u64;
    assert!(
        tree.ledger.memory.nodes < slots + slots / 2,
        "{} bytes of nodes for {slots}",
        tree.ledger.memory.nodes
    );
}

#[test]
fn change_copies_one_path_once_per_checkpoint() {
    let mut tree = loaded(3000);
    put(&mut tree, 70);
    assert_eq!(tree.node_bytes_copied(), 0, "no node was shared");
    let checkpoint = tree.checkpoint();
    put(&mut tree, 70);
    let path = tree.node_bytes_copied();
    assert!(
        path > 0 && path < tree.ledger.memory.nodes / 10,
        "{path} of {}",
        tree.ledger.memory.nodes
    );
    put(&mut tree, 70);
    assert_eq!(tree.node_bytes_copied(), path, "the copies are the tree's own");
    let reader = tree.clone();
    put(&mut tree, 70);
    assert_eq!(
        tree.node_bytes_copied(),
        path,
        "a reader's clone is not counted as a cost of the checkpoint"
    );
    drop(checkpoint);
    drop(reader);
    put(&mut tree, 2000);
    assert_eq!(
        tree.node_bytes_copied(),
        path,
        "nothing is copied for a dropped checkpoint"
    );
}

#[test]
fn removing_an_absent_key_copies_nothing() {
    let mut tree = loaded(3000);
    let checkpoint = tree.checkpoint();
    assert!(tree.remove(b"/absent").is_none());
    assert_eq!(tree.node_bytes_copied(), 0);
    drop(checkpoint);
}

#[test]
fn separators_keep_no_deleted_entry_alive() {
    let mut tree = loaded(3000);
    let entries: Vec<_> = (0..3000)
        .filter_map(|index| tree.get(&key(index)).cloned())
        .collect();
    for index in 0..3000 {
        put(&mut tree, index);
    }
    let blocks: Vec<_> = entries
        .iter()
        .filter_map(|entry| entry.plain()?.block().map(|(block, _)| Arc::downgrade(block)))
        .collect();
    assert_eq!(blocks.len(), 3000);
    drop(entries);
    assert!(
        blocks.iter().all(|block| block.strong_count() == 0),
        "only the list held the old entries"
    );
}

#[test]
fn key_between_the_halves_of_a_split_is_found_after_insertion() {
    let named = |name: String| KeyValue::new(name, 1, "");
    let half = LEAF_MAX / 2;
    for between in ["b", "b3", "c", "c3", "c4"] {
        let below = (0..half).map(|index| named(format!("a{index:03}")));
        let above = (0..half).map(|index| named(format!("c5{index:03}")));
        let mut tree = Tree::new();
        below.chain(above).for_each(|kv| drop(tree.insert(kv.entry())));
        assert!(tree.insert(named(between.to_owned()).entry()).is_none());
        assert!(tree.get(between.as_bytes()).is_some(), "{between}");
        assert_eq!(tree.rank(between.as_bytes()), half as u64);
        check_node(tree.root.as_deref().unwrap(), true);
    }
}
