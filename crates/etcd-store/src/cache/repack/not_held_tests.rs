use std::time::Duration;

use super::*;
use crate::cache::testing::{KeyValue, key};
use crate::cache::{
    Change, Dialect, HistoryLimits, NotApplied, Packing, RangeQuery, Repacking, Selected, Selection, Store,
    select,
};
use crate::cache::{leaf::LEAF_MAX, tree::model};

const LEAVES: usize = 20;
const ALL: usize = LEAVES * LEAF_MAX;

fn object(index: usize, revision: i64) -> KeyValue {
    KeyValue::new(key(index), revision, vec![b'v'; 300])
}

fn loaded(packing: Packing) -> Store {
    let entries = (0..ALL).map(|index| object(index, 1).entry());
    Store::new(
        Tree::load(entries, packing),
        1,
        HistoryLimits::default(),
        Duration::ZERO,
    )
}

/// Leaves out the values of these keys.
fn leave_out(store: &mut Store, from: usize, to: usize) -> u64 {
    let (start, end) = (key(from), key(to));
    let tree = store.tree().clone();
    let repacked = tree
        .repack((&start, &end), Repacking::LeaveOut, u64::MAX)
        .unwrap();
    drop(tree);
    store.put_repacked(&repacked);
    repacked.encoded_bytes()
}

fn hold(store: &mut Store, values: &[KeyValue]) -> u64 {
    let entries: Vec<_> = values.iter().map(KeyValue::entry).collect();
    let tree = store.tree().clone();
    let repacked = tree
        .repack((b"", b""), Repacking::Hold(&entries), u64::MAX)
        .unwrap();
    drop(tree);
    store.put_repacked(&repacked);
    repacked.encoded_bytes()
}

fn put(store: &mut Store, change: Change) {
    let revision = change.revision();
    store.apply(vec![change], revision, Duration::ZERO).unwrap();
}

/// Checks the tree, which has the objects as loaded, but for these.
fn check(tree: &Tree, changed: &[(usize, Option<KeyValue>)]) {
    let mut expected: model::Model = (0..ALL).map(|index| (key(index), object(index, 1))).collect();
    for (index, now) in changed {
        match now {
            Some(now) => expected.insert(key(*index), now.clone()),
            None => expected.remove(&key(*index)),
        };
    }
    model::check(tree, &expected);
}

/// Length of these objects as fields `kvs`.
fn length(objects: std::ops::Range<usize>) -> u64 {
    objects.map(|index| object(index, 1).field().len() as u64).sum()
}

fn has_value(tree: &Tree, index: usize) -> bool {
    tree.get(&key(index)).unwrap().has_value()
}

fn selected(tree: &Tree, from: usize, to: usize, ask: impl FnOnce(&mut RangeQuery)) -> Option<Selection> {
    let mut query = RangeQuery {
        key: key(from).into(),
        range_end: key(to).into(),
        ..RangeQuery::default()
    };
    ask(&mut query);
    match select(tree, &query, &Dialect::of_version(3, 7)) {
        Selected::Answer(selection) => Some(selection),
        Selected::ValuesNotHeld => None,
        _ => panic!("nothing is sorted by value"),
    }
}

#[test]
fn only_reads_of_values_that_are_not_held_are_declined() {
    for packing in [Packing::Never, Packing::Always] {
        let mut store = loaded(packing);
        // Both ends lie within a leaf.
        let (from, to) = (LEAF_MAX / 2, 3 * LEAF_MAX + 1);
        leave_out(&mut store, from, to);
        let tree = store.tree();
        check(tree, &[]);
        assert_eq!(tree.summary().not_held_bytes, length(from..to));
        for index in [0, from - 1, to, ALL - 1] {
            assert!(has_value(tree, index), "{index}");
        }
        for index in [from, LEAF_MAX, to - 1] {
            assert!(!has_value(tree, index), "{index}");
        }
        let is_answered = |from, to| selected(tree, from, to, |_| {}).is_some();
        assert!(is_answered(0, from) && is_answered(to, ALL));
        assert!(!is_answered(0, from + 1) && !is_answered(to - 1, ALL) && !is_answered(0, ALL));
        // What etcd would not send is not needed.
        assert!(selected(tree, 0, ALL, |query| query.limit = from as i64).is_some());
        assert!(selected(tree, 0, ALL, |query| query.limit = from as i64 + 1).is_none());
        let count = selected(tree, 0, ALL, |query| query.count_only = true).unwrap();
        assert_eq!(count.count, ALL as u64);
        let keys = selected(tree, 0, ALL, |query| query.keys_only = true).unwrap();
        assert_eq!(keys.len(), ALL as u64);
        let alone = |index| selected(tree, index, 0, |query| query.range_end = Default::default());
        assert!(alone(from).is_none() && alone(0).is_some() && alone(ALL).is_some());
        // Filtered and sorted: the entries are picked one by one.
        assert!(selected(tree, 0, ALL, |query| query.min_mod_revision = 1).is_none());
        assert!(selected(tree, 0, ALL, |query| query.min_mod_revision = 2).is_some());
        let last = |query: &mut RangeQuery| (query.sort_order, query.limit) = (2, 1);
        assert!(selected(tree, 0, ALL, last).is_some() && selected(tree, 0, to, last).is_none());
    }
}

#[test]
fn values_that_are_not_held_take_no_memory_in_any_state() {
    let mut store = loaded(Packing::Never);
    put(&mut store, Change::put(object(ALL - 1, 2).entry()));
    store.advance(3, Duration::from_secs(250));
    put(&mut store, Change::put(object(ALL - 1, 4).entry()));
    let plain = store.memory_bytes();
    let past = store.snapshot_at(1).unwrap().into_tree();
    let history = store.history_bytes();
    drop(past);
    leave_out(&mut store, 0, ALL);
    assert_eq!(store.history_bytes(), history);
    // One leaf is in the window.
    let bare = store.tree().memory_bytes() / ALL as u64;
    assert!(bare < 130, "{bare} B for each key");
    assert!(
        store.memory_bytes() * 2 < plain,
        "{} of {plain}",
        store.memory_bytes()
    );
    for revision in [1, 3, 4] {
        let state = store.snapshot_at(revision).unwrap().into_tree();
        let last = [1, 1, 2, 2, 4][revision as usize];
        check(&state, &[(ALL - 1, Some(object(ALL - 1, last)))]);
        assert!(!has_value(&state, 0), "at {revision}");
        assert!(has_value(&state, ALL - 1), "its event is in the window");
    }
}

#[test]
fn leaf_of_which_a_response_has_an_entry_keeps_its_values() {
    let mut store = loaded(Packing::Never);
    let response = store.tree().get(&key(0)).cloned();
    leave_out(&mut store, 0, 2 * LEAF_MAX);
    assert!(has_value(store.tree(), 0) && !has_value(store.tree(), LEAF_MAX));
    drop(response);
    leave_out(&mut store, 0, 2 * LEAF_MAX);
    assert!(!has_value(store.tree(), 0));
    assert_eq!(leave_out(&mut store, 0, 2 * LEAF_MAX), 0, "nothing is left");
}

#[test]
fn values_are_held_again_if_they_are_those_that_were_left_out() {
    let mut store = loaded(Packing::Never);
    let plain = store.memory_bytes();
    leave_out(&mut store, 0, ALL);
    let other = KeyValue::new(key(1), 1, vec![b'w'; 300]);
    let newer = object(2, 2);
    assert_eq!(hold(&mut store, &[other, newer]), 0);
    assert_eq!(
        store.tree().summary().not_held_bytes,
        store.tree().summary().encoded_bytes
    );
    let all: Vec<_> = (0..ALL).map(|index| object(index, 1)).collect();
    hold(&mut store, &all[..LEAF_MAX + 1]);
    let tree = store.tree();
    check(tree, &[]);
    assert!(has_value(tree, 0) && has_value(tree, LEAF_MAX) && !has_value(tree, LEAF_MAX + 1));
    hold(&mut store, &all);
    assert_eq!(store.tree().summary().not_held_bytes, 0);
    assert!(store.memory_bytes() < plain + plain / 50);
    for index in [0, LEAF_MAX, ALL - 1] {
        assert_eq!(
            KeyValue::from(store.tree().get(&key(index)).unwrap()),
            object(index, 1)
        );
    }
    assert_eq!(hold(&mut store, &[]), 0);
}

#[test]
fn neighbours_without_values_are_found_in_pieces() {
    let mut store = loaded(Packing::Never);
    assert_eq!(store.tree().next_not_held(b"", u64::MAX), None);
    leave_out(&mut store, 5, 3 * LEAF_MAX);
    leave_out(&mut store, 10 * LEAF_MAX, 11 * LEAF_MAX);
    let one = object(1, 1).field().len() as u64;
    let tree = store.tree();
    let piece = |from: usize, to: usize| NotHeld {
        first: key(from).into(),
        last: key(to).into(),
        bytes: length(from..to + 1),
    };
    assert_eq!(
        tree.next_not_held(b"", u64::MAX),
        Some(piece(5, 3 * LEAF_MAX - 1))
    );
    assert_eq!(tree.next_not_held(b"", 0), Some(piece(5, 5)), "at least one");
    assert_eq!(tree.next_not_held(b"", 3 * one), Some(piece(5, 7)));
    assert_eq!(tree.next_not_held(&key(8), 3 * one), Some(piece(8, 10)));
    assert_eq!(
        tree.next_not_held(&key(3 * LEAF_MAX), u64::MAX),
        Some(piece(10 * LEAF_MAX, 11 * LEAF_MAX - 1))
    );
    assert_eq!(tree.next_not_held(&key(11 * LEAF_MAX), u64::MAX), None);
}

#[test]
fn change_brings_the_value_that_it_replaces_or_its_event_has_none() {
    let mut store = loaded(Packing::Never);
    leave_out(&mut store, 0, ALL);
    let changes = [
        Change::put(object(7, 2).entry()),
        Change::put(object(7, 3).entry()),
        Change::delete(KeyValue::deleted(key(9), 3).entry()),
        Change::put(KeyValue::new("new", 3, "").entry()),
    ];
    let check = |changes: &[Change], are_brought| store.check_replaced(changes, are_brought);
    for lacking in [&changes[..1], &changes[2..3]] {
        assert_eq!(check(lacking, false), Err(NotApplied::NotBrought));
        assert_eq!(check(lacking, true), Ok(()), "etcd has left it out");
    }
    assert_eq!(check(&changes[3..], false), Ok(()), "nothing is replaced");
    let mut brought = changes.to_vec();
    brought[0].replaced = Some(object(7, 1).entry());
    assert_eq!(
        check(&brought[..2], false),
        Ok(()),
        "the second replaces the first"
    );
    assert_eq!(check(&brought, false), Err(NotApplied::NotBrought));
    // Another value than the one that was left out.
    brought[2].replaced = Some(KeyValue::new(key(9), 1, vec![b'w'; 300]).entry());
    assert_eq!(check(&brought, false), Err(NotApplied::Differs));
    store.apply(brought, 3, Duration::ZERO).unwrap();
    let replaced: Vec<_> = store
        .log()
        .events()
        .map(|change| change.replaced.as_ref().map(KeyValue::from))
        .collect();
    assert_eq!(
        replaced,
        [Some(object(7, 1)), Some(object(7, 2)), None, None],
        "what was left out, what the first change wrote, and nothing else"
    );
    assert_eq!(store.check_replaced(&changes, false), Ok(()), "they are applied");
}

#[test]
fn leaf_that_is_written_and_packed_keeps_track_of_what_is_not_held() {
    let mut store = loaded(Packing::Always);
    leave_out(&mut store, 3, 2 * LEAF_MAX);
    let mut changed = Vec::new();
    for revision in 2..40 {
        let index = revision as usize * 7 % (2 * LEAF_MAX);
        if revision % 3 == 0 {
            put(
                &mut store,
                Change::delete(KeyValue::deleted(key(index), revision).entry()),
            );
            changed.push((index, None));
        } else {
            put(&mut store, Change::put(object(index, revision).entry()));
            changed.push((index, Some(object(index, revision))));
        }
        check(store.tree(), &changed);
    }
    let repacked = store
        .tree()
        .clone()
        .repack((b"", b""), Repacking::PackAll, u64::MAX)
        .unwrap();
    store.put_repacked(&repacked);
    check(store.tree(), &changed);
    assert!(store.tree().summary().not_held_bytes > 0);
}
