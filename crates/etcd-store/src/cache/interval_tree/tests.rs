use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

/// An interval that owns its keys.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Owned {
    Single(Vec<u8>),
    Range(Vec<u8>, Vec<u8>),
    From(Vec<u8>),
}

impl Owned {
    fn interval(&self) -> Interval<'_> {
        match self {
            Owned::Single(key) => Interval::Single(key),
            Owned::Range(start, end) => Interval::Range(start, end),
            Owned::From(start) => Interval::From(start),
        }
    }

    fn contains(&self, key: &[u8]) -> bool {
        match self {
            Owned::Single(single) => single == key,
            Owned::Range(start, end) => start.as_slice() <= key && key < end.as_slice(),
            Owned::From(start) => start.as_slice() <= key,
        }
    }
}

/// Short keys of few letters: intervals are often equal, nested, adjacent, or empty.
fn key() -> impl Strategy<Value = Vec<u8>> {
    prop::collection::vec(prop::sample::select(vec![0_u8, 1, b'a', b'b', b'c', 0xff]), 0..4)
}

fn interval() -> impl Strategy<Value = Owned> {
    prop_oneof![
        2 => key().prop_map(Owned::Single),
        6 => (key(), key()).prop_map(|(start, end)| Owned::Range(start, end)),
        1 => key().prop_map(|start| {
            let end = [start.as_slice(), b"\0"].concat();
            Owned::Range(start, end)
        }),
        1 => key().prop_map(Owned::From),
        1 => Just(Owned::From(b"\0".to_vec())),
    ]
}

fn found(tree: &IntervalTree<u32>, key: &[u8]) -> Vec<u32> {
    let mut values = Vec::new();
    tree.stab(key, |value| values.push(value));
    values.sort_unstable();
    values
}

fn expected(model: &BTreeMap<Owned, u32>, key: &[u8]) -> Vec<u32> {
    let containing = model.iter().filter(|(interval, _)| interval.contains(key));
    let mut values: Vec<_> = containing.map(|(_, value)| *value).collect();
    values.sort_unstable();
    values
}

/// Asserts order, heap, and largest ends of the subtree at `at`; returns its depth and its number of nodes.
fn check(tree: &IntervalTree<u32>, at: u32) -> (usize, usize) {
    if at == NONE {
        return (0, 0);
    }
    let node = tree.node(at);
    let mut largest = node.end();
    let mut totals = (0, 1);
    for (child, side) in [(node.left, Ordering::Less), (node.right, Ordering::Greater)] {
        let (depth, nodes) = check(tree, child);
        totals = (totals.0.max(depth), totals.1 + nodes);
        if child != NONE {
            let child = tree.node(child);
            assert_eq!(child.bounds().cmp(&node.bounds()), side, "order");
            assert!(child.priority <= node.priority, "heap");
            largest = largest.max(tree.node(child.largest).end());
        }
    }
    assert_eq!(tree.node(node.largest).end(), largest, "largest end below");
    (totals.0 + 1, totals.1)
}

proptest! {
    #[test]
    fn stab_under_churn_equals_a_scan(
        seed in any::<u64>(),
        steps in prop::collection::vec((any::<bool>(), interval(), any::<prop::sample::Index>(), key()), 1..300),
    ) {
        let mut tree = IntervalTree::new(seed);
        let mut model: BTreeMap<Owned, u32> = BTreeMap::new();
        for (value, (removes, new, index, key)) in (0_u32..).zip(steps) {
            if removes && !model.is_empty() {
                let old: Owned = model.keys().nth(index.index(model.len())).cloned().unwrap();
                prop_assert_eq!(tree.remove(&old.interval()), model.remove(&old));
                prop_assert_eq!(tree.remove(&old.interval()), None);
                prop_assert_eq!(tree.get(&old.interval()), None);
            } else {
                prop_assert_eq!(tree.insert(&new.interval(), value), model.insert(new.clone(), value));
                prop_assert_eq!(tree.get(&new.interval()), Some(value));
            }
            prop_assert_eq!(tree.len(), model.len());
            prop_assert_eq!(tree.is_empty(), model.is_empty());
            prop_assert_eq!(check(&tree, tree.root).1, tree.ranges);
            prop_assert_eq!(found(&tree, &key), expected(&model, &key));
            for (interval, value) in &model {
                prop_assert_eq!(tree.get(&interval.interval()), Some(*value));
            }
        }
    }
}

#[test]
fn stab_at_the_bounds_of_an_interval_finds_its_start_only() {
    let mut tree = IntervalTree::new(1);
    let intervals = [
        Interval::Single(b"a"),
        Interval::Range(b"a", b"a\0"),
        Interval::Range(b"a", b"b"),
        Interval::Range(b"a", b"a"),
        Interval::Range(b"b", b"a"),
        Interval::From(b"a"),
        Interval::From(b"\0"),
    ];
    for (value, interval) in (0..).zip(&intervals) {
        assert_eq!(tree.insert(interval, value), None);
    }
    assert_eq!(found(&tree, b"\0"), [6]);
    assert_eq!(found(&tree, b"Z\xff"), [6]);
    assert_eq!(found(&tree, b"a"), [0, 1, 2, 5, 6]);
    assert_eq!(found(&tree, b"a\0"), [2, 5, 6]);
    assert_eq!(found(&tree, b"b"), [5, 6]);
    assert_eq!(found(&tree, b"\xff\xff"), [5, 6]);
}

#[test]
fn nested_ranges_in_key_order_make_a_shallow_tree() {
    let mut tree = IntervalTree::new(7);
    let name = |number: u32| format!("/registry/{number:08}").into_bytes();
    for number in 0..20_000 {
        tree.insert(&Interval::Range(&name(number), &name(40_000 - number)), number);
    }
    let (depth, nodes) = check(&tree, tree.root);
    assert_eq!(nodes, 20_000);
    assert!(depth < 64, "a depth of {depth}");
    assert_eq!(found(&tree, &name(3)), [0, 1, 2, 3]);
    assert_eq!(found(&tree, &name(39_998)), [0, 1]);
}

#[test]
fn churn_reuses_nodes_and_an_empty_tree_keeps_none() {
    let mut tree = IntervalTree::new(7);
    let name = |number: u32| format!("/registry/{number:08}").into_bytes();
    let insert = |tree: &mut IntervalTree<u32>, number| {
        tree.insert(&Interval::Range(&name(number), &name(number + 5)), number)
    };
    for number in 0..100 {
        insert(&mut tree, number);
    }
    for number in 100..10_000 {
        insert(&mut tree, number);
        let oldest = number - 100;
        let removed = tree.remove(&Interval::Range(&name(oldest), &name(oldest + 5)));
        assert_eq!(removed, Some(oldest));
    }
    assert_eq!((tree.len(), tree.nodes.len()), (100, 101));
    for number in 9_900..10_000 {
        tree.remove(&Interval::Range(&name(number), &name(number + 5)));
    }
    assert_eq!((tree.len(), tree.nodes.capacity()), (0, 0));
}
