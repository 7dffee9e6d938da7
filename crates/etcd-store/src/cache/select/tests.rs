//! Queries against a plain reading of etcd's rules over a list, down to the bytes of the answer.

use proptest::prelude::*;

use super::model::{answered, encoded, expected};
use super::*;
use crate::cache::Packing;
use crate::cache::testing::{KeyValue, key, packing};

fn bound() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        6 => (0..1400_usize).prop_map(key),
        2 => (0..1400_usize).prop_map(|index| [key(index), vec![0]].concat()),
        1 => Just(vec![0]),
        1 => Just(vec![0, 0]),
        1 => Just(b"/".to_vec()),
        1 => Just(b"0".to_vec()),
        1 => Just(vec![0xff, 0xff]),
    ]
}

fn limit(size: usize) -> impl Strategy<Value = i64> {
    prop_oneof![
        Just(0),
        Just(1),
        Just(-1),
        Just(i64::MAX),
        Just(i64::MIN),
        2..20_i64,
        1..=size as i64 + 2
    ]
}

fn filter(revisions: i64) -> impl Strategy<Value = i64> {
    prop_oneof![8 => Just(0), 3 => 1..=revisions, 1 => Just(-1), 1 => Just(i64::MAX)]
}

/// Few distinct revisions and values, for many ties; none with `spread`. `padding` makes values longer.
fn store(size: usize, distinct: i64, spread: bool, padding: usize) -> Vec<KeyValue> {
    let number = |index: usize, salt: i64| {
        let mixed = (index as i64 + 1) * 7919 % 10_007 * salt;
        if spread {
            (mixed % 10_007) * 2000 + index as i64 + 1
        } else {
            mixed % distinct + 1
        }
    };
    let kv = |index: usize| KeyValue {
        key: key(index),
        create_revision: number(index, 3),
        mod_revision: number(index, 5),
        version: number(index, 11),
        value: format!("{:0width$}", number(index, 13), width = index % 40 * padding).into_bytes(),
        lease: if index.is_multiple_of(4) { index as i64 } else { 0 },
    };
    (0..size).map(kv).collect()
}

prop_compose! {
    fn scenario()(
        size in prop_oneof![0..14_usize, 0..60_usize, 0..1300_usize],
        distinct in prop_oneof![1..5_i64, 1..2000_i64],
        spread in any::<bool>(),
        padding in prop_oneof![Just(1), Just(10)],
    )(
        kvs in Just(store(size, distinct, spread, padding)),
        key in bound(),
        range_end in prop_oneof![2 => Just(Vec::new()), 3 => Just(vec![0]), 8 => bound()],
        numbers in (limit(size), filter(distinct), filter(distinct), filter(distinct), filter(distinct)),
        sort_order in prop_oneof![4 => Just(0), 4 => 1..=2, 1 => Just(3), 1 => Just(-1)],
        sort_target in prop_oneof![3 => Just(0), 4 => 1..=4],
        keys_only in any::<bool>(),
        count_only in prop::bool::weighted(0.1),
        filtered in prop::bool::weighted(0.4),
    ) -> (Vec<KeyValue>, RangeQuery) {
        let (limit, min_mod_revision, max_mod_revision, min_create_revision, max_create_revision) = numbers;
        let mut query = RangeQuery {
            key: key.into(), range_end: range_end.into(), limit, sort_order, sort_target, keys_only, count_only,
            ..RangeQuery::default()
        };
        if filtered {
            query = RangeQuery { min_mod_revision, max_mod_revision, min_create_revision, max_create_revision, ..query };
        }
        (kvs, query)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn answers_equal_those_of_etcd_byte_for_byte(
        (kvs, query) in scenario(),
        packing in packing(),
        keys_only_has_lease: bool,
        step in 1..100_u64,
    ) {
        let tree = Tree::load(kvs.iter().map(KeyValue::entry), packing);
        let dialect = Dialect { keys_only_has_lease, unknown_sort_is_refused: false };
        let answered = answered(&tree, &query, &dialect);
        prop_assert_eq!(&answered, &answered_in_steps(&tree, &query, &dialect, step));
        // Packed values are not compared.
        let is_declined = packing != Packing::Never && answered.is_none() && query.sort_target == SortTarget::Value as i32;
        prop_assert!(is_declined || answered == expected(&kvs, &query, dialect));
    }
}

/// The encoded answer from `tree`, found in steps of `step` entries; `None` if it is declined.
fn answered_in_steps(tree: &Tree, query: &RangeQuery, dialect: &Dialect, step: u64) -> Option<Vec<u8>> {
    let selected = match begin_select(tree, query, dialect) {
        Selecting::Done(selected) => selected,
        Selecting::Scan(mut scan) => loop {
            if let Some(selected) = scan.step(step) {
                break selected;
            }
        },
    };
    encoded(selected)
}

fn query(key: &str, range_end: &str) -> RangeQuery {
    RangeQuery {
        key: key.to_owned().into(),
        range_end: range_end.to_owned().into(),
        ..RangeQuery::default()
    }
}

const DIALECT: Dialect = Dialect {
    keys_only_has_lease: false,
    unknown_sort_is_refused: true,
};

#[test]
fn unfiltered_selections_are_lazy() {
    let kvs = store(1000, 5, false, 1);
    let tree = Tree::from_sorted(kvs.iter().map(KeyValue::entry));
    for limit in [0, 10] {
        for (sort_order, keys_only) in [(0, false), (1, false), (0, true)] {
            let query = RangeQuery {
                limit,
                sort_order,
                keys_only,
                ..query("/", "0")
            };
            let Selected::Answer(selection) = select(&tree, &query, &DIALECT) else {
                panic!("declined")
            };
            assert!(matches!(selection.entries, Entries::Ranks { .. }), "{query:?}");
        }
    }
}

#[test]
fn packed_values_are_not_sorted_here_and_anything_else_is() {
    let kvs = store(40, 5, true, 10);
    let tree = Tree::load(kvs.iter().map(KeyValue::entry), Packing::Always);
    for sort_target in 0..=4 {
        let query = RangeQuery {
            sort_order: 2,
            sort_target,
            ..query("/", "0")
        };
        let is_declined = matches!(select(&tree, &query, &DIALECT), Selected::PackedValues);
        assert_eq!(is_declined, sort_target == SortTarget::Value as i32);
    }
}

#[test]
fn sorting_with_a_small_limit_takes_little_memory() {
    let kvs = store(1000, 5, true, 1);
    let tree = Tree::from_sorted(kvs.iter().map(KeyValue::entry));
    let query = RangeQuery {
        limit: 3,
        sort_order: 2,
        sort_target: 3,
        ..query("/", "0")
    };
    let Selecting::Scan(mut scan) = begin_select(&tree, &query, &DIALECT) else {
        panic!("not sorted")
    };
    assert!(scan.memory_bytes() < 1000, "{}", scan.memory_bytes());
    while scan.entries() > 0 {
        assert!(scan.step(100).is_none());
        let Found::Sorted(top) = &scan.found else {
            panic!("not sorted")
        };
        assert!(top.heap.len() <= 4 && top.heap.capacity() == 4);
    }
    let Some(Selected::Answer(selection)) = scan.step(100) else {
        panic!("declined")
    };
    assert_eq!((selection.len(), selection.more), (3, true));
    assert_eq!(selection.order_bytes(), 3 * Order::RUN_BYTES);
}

#[test]
fn filtered_selection_takes_memory_by_its_gaps_and_not_by_its_entries() {
    let kvs: Vec<_> = (0..1000)
        .map(|index| KeyValue::new(key(index), 1 + index as i64, "value"))
        .collect();
    let tree = Tree::from_sorted(kvs.iter().map(KeyValue::entry));
    for (min_mod_revision, max_mod_revision, len) in [(1, 0, 1000), (400, 700, 301), (2000, 0, 0)] {
        let query = RangeQuery {
            min_mod_revision,
            max_mod_revision,
            ..query("/", "0")
        };
        let Selected::Answer(selection) = select(&tree, &query, &DIALECT) else {
            panic!("declined")
        };
        assert_eq!((selection.len(), selection.order_bytes()), (len, 0), "{query:?}");
    }
}

#[test]
fn scan_looks_at_no_more_entries_in_a_step_than_it_may() {
    let kvs = store(1000, 2000, true, 1);
    let tree = Tree::from_sorted(kvs.iter().map(KeyValue::entry));
    let filtered = RangeQuery {
        min_mod_revision: i64::MAX,
        ..query("/", "0")
    };
    let sorted = RangeQuery {
        sort_order: 2,
        sort_target: 3,
        ..query("/", "0")
    };
    for (query, steps) in [(filtered, 10), (sorted, 10 + 1000_usize.div_ceil(100 / 8 + 1))] {
        let Selecting::Scan(mut scan) = begin_select(&tree, &query, &DIALECT) else {
            panic!("no scan: {query:?}")
        };
        let mut taken = 0;
        let selected = loop {
            let before = scan.entries();
            let stepped = scan.step(100);
            assert!(before - scan.entries() <= 100);
            taken += 1;
            if let Some(selected) = stepped {
                break selected;
            }
        };
        assert_eq!(taken, steps, "{query:?}");
        assert!(matches!(selected, Selected::Answer(_)));
    }
}

/// Go sorts up to 12 elements by insertion sort, which is stable.
#[test]
fn ties_are_answered_up_to_twelve_elements_and_in_sorted_input() {
    let kv = |index: usize, version| KeyValue {
        version,
        ..KeyValue::new(key(index), 1, "")
    };
    let by_version = |kvs: &[KeyValue], limit| {
        let tree = Tree::from_sorted(kvs.iter().map(KeyValue::entry));
        let query = RangeQuery {
            limit,
            sort_order: 1,
            sort_target: 1,
            ..query("/", "0")
        };
        matches!(select(&tree, &query, &DIALECT), Selected::Answer(_))
    };
    // The first must be moved to the end; the others are equal.
    let unsorted: Vec<_> = (0..13)
        .map(|index| kv(index, if index == 0 { 2 } else { 1 }))
        .collect();
    assert!(by_version(&unsorted[..12], 0));
    assert!(!by_version(&unsorted, 0));
    let sorted: Vec<_> = (0..100).map(|index| kv(index, index as i64 / 10 + 1)).collect();
    assert!(by_version(&sorted, 0));
    // Distinct up to the limit and for one more element; equal only after that.
    let tied_at_the_end: Vec<_> = (0..100)
        .map(|index| kv(index, (100 - index as i64).min(50)))
        .collect();
    assert!(by_version(&tied_at_the_end, 48));
    assert!(by_version(&tied_at_the_end, 49));
    assert!(
        !by_version(&tied_at_the_end, 50),
        "which of the equal ones is the fiftieth?"
    );
}
