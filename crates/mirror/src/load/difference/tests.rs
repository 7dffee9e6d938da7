//! Differences between trees, which etcd's keys arrive of in chunks.

use std::collections::BTreeMap;

use etcd_store::cache::testing::KeyValue;
use proptest::prelude::*;
use prost::Message as _;

use super::*;

fn tree(of: &[KeyValue]) -> Tree {
    Tree::from_sorted(of.iter().map(KeyValue::entry))
}

/// etcd's KeyValues without values, as 3.7 sends them.
fn keys_only(of: &[KeyValue]) -> Vec<Bytes> {
    let without = |key_value: &KeyValue| KeyValue {
        value: Vec::new(),
        lease: 0,
        ..key_value.clone()
    };
    of.iter()
        .map(|key_value| without(key_value).encode_to_vec().into())
        .collect()
}

fn compare(ours: &[KeyValue], theirs: &[KeyValue], chunk: usize) -> Result<Compared, LoadError> {
    let mut difference = Difference::new(tree(ours), false);
    for keys in keys_only(theirs).chunks(chunk) {
        difference.compare(keys)?;
    }
    difference.finish()
}

fn numbered(count: i64) -> Vec<KeyValue> {
    let number = |n| KeyValue::new(format!("k{n:06}"), n, vec![b'v'; 100]);
    (1..=count).map(number).collect()
}

fn names(keys: &[Bytes]) -> Vec<&str> {
    keys.iter().map(|key| std::str::from_utf8(key).unwrap()).collect()
}

#[test]
fn same_keys_differ_in_nothing_and_the_newest_are_compared() {
    let mut ours = numbered(200);
    ours[0].lease = 7;
    let compared = compare(&ours, &ours, 33).unwrap();
    assert_eq!((compared.removed.len(), compared.spans.len()), (0, 0));
    let revisions: Vec<_> = compared.newest.iter().map(StoredEntry::mod_revision).collect();
    assert_eq!(revisions, (137..=200).rev().collect::<Vec<_>>());
}

#[test]
fn entry_with_another_revision_or_version_is_changed() {
    let ours = numbered(3);
    for change in [
        |entry: &mut KeyValue| entry.mod_revision += 10,
        |entry: &mut KeyValue| entry.create_revision -= 1,
        |entry: &mut KeyValue| entry.version += 1,
    ] {
        let mut theirs = ours.clone();
        change(&mut theirs[1]);
        let compared = compare(&ours, &theirs, 1).unwrap();
        let span = Span {
            first: "k000002".into(),
            last: "k000002".into(),
            keys: 1,
        };
        assert_eq!(compared.spans, [span]);
        assert_eq!(compared.newest.len(), 2);
    }
}

#[test]
fn keys_that_are_gone_and_those_that_are_new_are_found_at_every_place() {
    let all = numbered(6);
    let (ours, theirs) = (&all[..3], &all[3..]);
    for (ours, theirs) in [(ours, theirs), (theirs, ours), (&all[..], ours), (ours, &all[..])] {
        let compared = compare(ours, theirs, 2).unwrap();
        let gone = ours.iter().filter(|one| !theirs.contains(one));
        let gone: Vec<_> = gone.map(|one| std::str::from_utf8(&one.key).unwrap()).collect();
        assert_eq!(names(&compared.removed), gone);
        let new = theirs.iter().filter(|one| !ours.contains(one)).count() as u64;
        assert_eq!(compared.spans.iter().map(|span| span.keys).sum::<u64>(), new);
    }
}

#[test]
fn changed_keys_near_each_other_are_read_together() {
    let ours = numbered(1_000);
    let mut theirs = ours.clone();
    for changed in [10, 50, 900] {
        theirs[changed].mod_revision = 2_000;
    }
    let spans = compare(&ours, &theirs, 100).unwrap().spans;
    let bounds: Vec<_> = spans
        .iter()
        .map(|span| (&span.first[..], &span.last[..], span.keys))
        .collect();
    assert_eq!(
        bounds,
        [
            (&b"k000011"[..], &b"k000051"[..], 41),
            (b"k000901", b"k000901", 1)
        ]
    );
}

#[test]
fn too_many_differences_end_the_comparison() {
    let ours = numbered(4_000);
    let changed = |count: usize| {
        let mut theirs = ours.clone();
        theirs[..count].iter_mut().for_each(|entry| entry.version += 1);
        compare(&ours, &theirs, 500).map(drop)
    };
    assert!(changed(2_000).is_ok());
    assert!(matches!(changed(2_001), Err(LoadError::TooDifferent)));
    let removed = compare(&ours, &ours[..1_000], 500).map(drop);
    assert!(matches!(removed, Err(LoadError::TooDifferent)));
    assert!(compare(&[], &ours[..1_000], 500).is_ok(), "a few are always read");
    // Those between changed ones are read, too.
    let mut theirs = ours.clone();
    theirs.iter_mut().step_by(10).for_each(|entry| entry.version += 1);
    let compared = compare(&ours, &theirs, 500).map(drop);
    assert!(matches!(compared, Err(LoadError::TooDifferent)));
}

#[test]
fn keys_out_of_order_are_refused() {
    let all = numbered(3);
    let swapped = [all[1].clone(), all[0].clone()];
    for chunk in [1, 2] {
        let compared = compare(&all, &swapped, chunk).map(drop);
        assert!(matches!(compared, Err(LoadError::Inconsistent)), "{chunk}");
    }
    let twice = [all[0].clone(), all[0].clone()];
    assert!(matches!(compare(&all, &twice, 1), Err(LoadError::Inconsistent)));
}

/// Keys with revisions, of a small space so that two sets have many in common.
fn some_keys() -> impl Strategy<Value = BTreeMap<u8, i64>> {
    proptest::collection::btree_map(0_u8..60, 1_i64..4, 0..40)
}

proptest! {
    #[test]
    fn whatever_is_not_read_is_the_same(ours in some_keys(), theirs in some_keys(), chunk in 1_usize..9, value_bytes in 0_usize..20_000) {
        let key_values = |of: &BTreeMap<u8, i64>| -> Vec<_> {
            of.iter().map(|(key, revision)| KeyValue::new(vec![*key], *revision, vec![b'v'; value_bytes])).collect()
        };
        let compared = compare(&key_values(&ours), &key_values(&theirs), chunk).unwrap();
        let mut result = ours.clone();
        for removed in &compared.removed {
            prop_assert!(result.remove(&removed[0]).is_some());
        }
        let mut newest: Vec<_> = result.iter().filter(|(key, revision)| theirs.get(key) == Some(revision)).map(|(_, revision)| *revision).collect();
        for span in &compared.spans {
            let read: Vec<_> = theirs.range(span.first[0]..=span.last[0]).collect();
            prop_assert_eq!(read.len() as u64, span.keys);
            for end in [&span.first, &span.last] {
                prop_assert_ne!(ours.get(&end[0]), theirs.get(&end[0]));
            }
            result.extend(read);
        }
        prop_assert_eq!(&result, &theirs);
        newest.sort_by(|a, b| b.cmp(a));
        let compared: Vec<_> = compared.newest.iter().map(StoredEntry::mod_revision).collect();
        prop_assert_eq!(compared, newest);
    }
}
