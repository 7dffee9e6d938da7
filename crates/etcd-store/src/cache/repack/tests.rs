use std::time::Duration;

use super::Repacking::{PackAll, PackCold, UnpackHot};
use super::*;
use crate::cache::leaf::LEAF_MAX;
use crate::cache::testing::{KeyValue, key};
use crate::cache::{Change as Event, HistoryLimits, Packing, Store};

const LEAVES: usize = 40;

fn object(index: usize, revision: i64) -> KeyValue {
    KeyValue::new(key(index), revision, vec![b'v'; 300])
}

fn loaded(packing: Packing) -> Store {
    let entries = (0..LEAVES * LEAF_MAX).map(|index| object(index, 1).entry());
    let tree = Tree::load(entries, packing);
    Store::new(tree, 1, HistoryLimits::default(), Duration::ZERO)
}

/// Packs or unpacks leaves in the whole store; returns the length of their entries.
fn repack(store: &mut Store, what: Repacking<'_>) -> u64 {
    let repacked = store.tree().clone().repack((b"", b""), what, u64::MAX).unwrap();
    store.put_repacked(&repacked);
    repacked.encoded_bytes()
}

/// Length of the entries of one leaf.
fn leaf_bytes(store: &Store) -> u64 {
    store.tree().summary().encoded_bytes / LEAVES as u64
}

fn is_packed(tree: &Tree, index: usize) -> bool {
    tree.get(&key(index)).unwrap().is_packed()
}

fn put(store: &mut Store, index: usize, revision: i64) {
    let put = Event::put(object(index, revision).entry());
    store.apply(vec![put], revision, Duration::ZERO).unwrap();
}

#[test]
fn leaf_that_was_read_is_packed_at_the_second_look_and_with_all_at_once() {
    let mut store = loaded(Packing::Never);
    let plain = store.memory_bytes();
    let all = store.tree().summary().encoded_bytes;
    store.tree().get(&key(0));
    assert_eq!(repack(&mut store, PackCold), all - leaf_bytes(&store));
    assert!(!is_packed(store.tree(), 0) && is_packed(store.tree(), LEAF_MAX));
    // Both leaves were read by the line above.
    assert_eq!(repack(&mut store, PackCold), 0);
    assert_eq!(repack(&mut store, PackCold), leaf_bytes(&store));
    let packed = store.tree().memory();
    assert_eq!(packed.packed_encoded, all);
    assert_eq!(store.memory_bytes(), packed.packed + packed.nodes);
    assert!(store.memory_bytes() * 2 < plain);
    assert_eq!(
        repack(&mut store, PackAll),
        0,
        "what is packed is not packed again"
    );

    let mut store = loaded(Packing::Never);
    store.tree().get(&key(0));
    assert_eq!(repack(&mut store, PackAll), all);
}

#[test]
fn leaf_that_was_written_meanwhile_stays_as_it_was_written() {
    let mut store = loaded(Packing::Never);
    let repacked = store
        .tree()
        .clone()
        .repack((b"", b""), PackAll, u64::MAX)
        .unwrap();
    put(&mut store, 0, 2);
    store.put_repacked(&repacked);
    assert!(!is_packed(store.tree(), 1) && is_packed(store.tree(), LEAF_MAX));
    let entry = store.tree().get(&key(0)).unwrap();
    assert_eq!(KeyValue::from(entry), object(0, 2));
}

#[test]
fn every_state_of_the_history_has_the_same_leaves() {
    let mut store = loaded(Packing::Never);
    put(&mut store, 0, 2);
    store.advance(3, Duration::from_secs(250));
    put(&mut store, 0, 4);
    let history = store.history_bytes();
    let plain = store.memory_bytes();
    assert_eq!(
        repack(&mut store, PackAll),
        store.tree().summary().encoded_bytes - leaf_bytes(&store)
    );
    assert_eq!(store.history_bytes(), history);
    assert!(store.memory_bytes() * 2 < plain);
    for revision in 1..=4 {
        let state = store.snapshot_at(revision).unwrap().into_tree();
        assert!(is_packed(&state, LEAF_MAX), "at {revision}");
        let entry = state.get(&key(0)).unwrap();
        let expected = [1, 2, 2, 4][revision as usize - 1];
        assert_eq!(KeyValue::from(entry), object(0, expected), "at {revision}");
    }
}

#[test]
fn leaf_of_which_something_else_has_an_entry_is_left_alone() {
    let mut store = loaded(Packing::Never);
    // Its event is in the window.
    put(&mut store, 0, 2);
    // A response has another, until it is sent.
    let response = store.tree().get(&key(LEAF_MAX)).cloned();
    repack(&mut store, PackAll);
    assert!(!is_packed(store.tree(), 1) && !is_packed(store.tree(), LEAF_MAX + 1));
    assert!(is_packed(store.tree(), 2 * LEAF_MAX));
    drop(response);
    assert_eq!(repack(&mut store, PackAll), leaf_bytes(&store));
}

#[test]
fn leaf_with_updates_is_packed_again_and_only_one_that_was_read_is_unpacked() {
    let mut store = loaded(Packing::Always);
    let packed = store.memory_bytes();
    put(&mut store, 0, 2);
    // Segment after segment is closed, until none has the event.
    for second in 0..20 {
        put(&mut store, LEAVES * LEAF_MAX - 1, 3 + second);
        store.advance(3 + second, Duration::from_secs(60 * second.unsigned_abs()));
    }
    assert!(!is_packed(store.tree(), 0) && is_packed(store.tree(), 1));
    repack(&mut store, PackAll);
    assert!(is_packed(store.tree(), 0));
    let block = store.tree().get(&key(0)).unwrap().memory_bytes();
    assert_eq!(block, store.tree().get(&key(LEAF_MAX)).unwrap().memory_bytes());
    assert!(store.tree().memory_bytes() < packed + packed / 10);
    assert_eq!(
        repack(&mut store, UnpackHot),
        2 * leaf_bytes(&store),
        "both were read here"
    );
    assert!(!is_packed(store.tree(), 0) && is_packed(store.tree(), 2 * LEAF_MAX));
    store.tree().get(&key(0));
    assert_eq!(repack(&mut store, UnpackHot), leaf_bytes(&store));
}

#[test]
fn leaf_whose_values_do_not_shrink_is_tried_once_until_it_is_written() {
    let mut state = 1_u64;
    let mut random = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    };
    let noise = (0..LEAF_MAX).map(|index| {
        let value: Vec<_> = (0..300).map(|_| random()).collect();
        KeyValue::new(key(index), 1, value).entry()
    });
    let mut tree = Tree::load(noise, Packing::Never);
    let is_settled = |tree: &Tree| match &tree.root.as_ref().unwrap().body {
        Body::Leaf(leaf) => leaf.heat.is_settled(),
        Body::Inner(_) => panic!("one leaf"),
    };
    assert!(!is_settled(&tree));
    assert!(tree.repack((b"", b""), PackAll, u64::MAX).unwrap().is_empty());
    assert!(is_settled(&tree));
    tree.insert(object(0, 2).entry());
    assert!(!is_settled(&tree));
}

#[test]
fn steps_continue_where_the_last_one_ended() {
    let mut store = loaded(Packing::Never);
    let (mut from, mut steps) = (Vec::new(), 0);
    loop {
        let repacked = store.tree().clone().repack((&from, b""), PackAll, 1).unwrap();
        store.put_repacked(&repacked);
        assert_eq!(
            repacked.encoded_bytes(),
            leaf_bytes(&store),
            "a leaf in each step"
        );
        steps += 1;
        match repacked.next() {
            Some(next) => from = next.to_vec(),
            None => break,
        }
    }
    assert_eq!(steps, LEAVES);
    assert_eq!(
        store.tree().memory().packed_encoded,
        store.tree().summary().encoded_bytes
    );
}

#[test]
fn damaged_block_is_not_unpacked() {
    let entries = (0..2 * LEAF_MAX).map(|index| object(index, 1).entry());
    let mut tree = Tree::load(entries, Packing::Always);
    tree.damage();
    tree.get(&key(0));
    assert_eq!(
        tree.repack((b"", b""), UnpackHot, u64::MAX).err(),
        Some(MemoryError)
    );
}
