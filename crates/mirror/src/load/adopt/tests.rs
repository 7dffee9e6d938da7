//! Adoptions of what a mirror had before, at a scripted etcd.

use std::ops::ControlFlow;

use super::*;
use crate::testing::{Bench, Etcd};
use crate::{lineage::HistoryId, load::Source};

/// Keys with their values.
fn contents(tree: &Tree) -> Vec<String> {
    let mut contents = Vec::new();
    tree.for_each_from(0, |entry| {
        let entry = entry.read().unwrap();
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let fields = entry.fields();
        contents.push(format!(
            "{}={}",
            text(fields.key),
            text(&fields.value.contiguous())
        ));
        ControlFlow::Continue(())
    });
    contents
}

/// Keys whose values were read since the first `skipped` reads.
fn values_read(etcd: &Etcd, skipped: usize) -> Vec<String> {
    let text = |key: &Bytes| String::from_utf8(key.to_vec()).unwrap();
    etcd.reads[skipped..].iter().map(|read| text(&read.key)).collect()
}

/// Keys that the mirror had before.
fn of_memory(anchor: Anchor) -> Option<Have> {
    Some(Have::of_memory(anchor.tree, anchor.revision))
}

/// Makes a neighbour the source of `have`, whose etcd has this cluster id.
fn of_neighbour(have: &mut Option<Have>, cluster_id: u64) {
    let have = have.as_mut().unwrap();
    let header = etcd_wire::etcdserverpb::ResponseHeader {
        cluster_id,
        ..Default::default()
    };
    have.lineage = Some(Fingerprint::of_header(&header));
    (have.from, have.verified) = (Source::Neighbour, false);
}

/// Keys of `a`, `b` and `c`, from an etcd that then has another `b`, no `c`, and a `d`.
async fn changed() -> (Bench, Option<Have>) {
    let bench = Bench::new().await;
    let have = of_memory(bench.load().await.unwrap().anchor);
    let mut etcd = bench.etcd.lock();
    etcd.put("b", "changed");
    etcd.delete("c");
    etcd.put("d", "new");
    drop(etcd);
    (bench, have)
}

#[tokio::test]
async fn what_differs_is_not_read_beyond_the_memory_of_the_mirror() {
    let bench = Bench::with_memory("64KiB").await;
    let mut have = of_memory(bench.load().await.unwrap().anchor);
    bench.etcd.lock().put("b", &"v".repeat(128 << 10));
    let loaded = bench.load_after(&mut have).await;
    assert_eq!(loaded.ok().and_then(|loaded| loaded.adopted), None);
    assert!(have.is_none(), "everything is loaded instead");
}

const NOW: [&str; 3] = ["a=loaded", "b=changed", "d=new"];

#[tokio::test]
async fn only_what_is_new_or_changed_is_read() {
    for has_range_stream in [true, false] {
        let (bench, mut have) = changed().await;
        bench.etcd.lock().has_range_stream = has_range_stream;
        let read_before = bench.etcd.lock().reads.len();
        let loaded = bench.load_after(&mut have).await.unwrap();
        assert_eq!(
            (contents(&loaded.anchor.tree), loaded.anchor.revision),
            (NOW.map(String::from).to_vec(), 7)
        );
        assert!(loaded.connection.is_some());
        let adopted = loaded.adopted.unwrap();
        let kept = have.unwrap().anchor.tree.get(b"a").unwrap().encoded_len() as u64;
        let expected = Adopted {
            source: Source::Memory,
            keys: 1,
            bytes: kept,
        };
        assert_eq!(adopted, expected);
        let etcd = bench.etcd.lock();
        // Behind the RangeStream of keys. `a` is compared; `b` and `d` are read together.
        assert_eq!(values_read(&etcd, read_before + 1), ["a", "b"]);
    }
}

#[tokio::test]
async fn tree_whose_newest_unchanged_entry_has_another_value_is_of_another_history() {
    let (bench, mut have) = changed().await;
    bench.etcd.lock().rewrite(2);
    let error = bench.load_after(&mut have).await.unwrap_err();
    assert!(matches!(error, LoadError::HistoryReplaced), "{error}");
    assert_ne!(bench.set.cluster_state.history(), HistoryId::FIRST);
}

#[tokio::test]
async fn each_of_the_newest_unchanged_entries_is_compared() {
    for (rewritten, is_replaced) in [(104, true), (41, true), (40, false)] {
        let bench = Bench::new().await;
        for n in 0..100 {
            bench.etcd.lock().put(&format!("k{n:02}"), "loaded");
        }
        let mut have = of_memory(bench.load().await.unwrap().anchor);
        bench.etcd.lock().rewrite(rewritten);
        let loaded = bench.load_after(&mut have).await;
        assert_eq!(loaded.is_err(), is_replaced, "{rewritten}: {:?}", loaded.err());
    }
}

#[tokio::test]
async fn unchanged_entry_that_is_read_with_its_neighbours_is_compared_too() {
    let bench = Bench::new().await;
    for n in 0..100 {
        bench.etcd.lock().put(&format!("k{n:02}"), "loaded");
    }
    let mut have = of_memory(bench.load().await.unwrap().anchor);
    // The first keys are among the changed ones, and are not among the newest.
    bench.etcd.lock().put("a", "changed");
    bench.etcd.lock().put("c", "changed");
    bench.etcd.lock().rewrite(3);
    let error = bench.load_after(&mut have).await.unwrap_err();
    assert!(matches!(error, LoadError::HistoryReplaced), "{error}");
}

#[tokio::test]
async fn comparison_that_breaks_off_removes_nothing_and_begins_again() {
    let (bench, mut have) = changed().await;
    let write: crate::testing::Then = |etcd| drop(etcd.put("e", "later"));
    bench.etcd.lock().breaks.push_back((1, write));
    let loaded = bench.load_after(&mut have).await.unwrap();
    let mut expected = NOW.map(String::from).to_vec();
    expected.push("e=later".into());
    assert_eq!(
        (contents(&loaded.anchor.tree), loaded.anchor.revision),
        (expected, 8)
    );
    assert!(loaded.adopted.is_some());
}

#[tokio::test]
async fn revision_that_is_compacted_meanwhile_is_replaced_by_a_later_one() {
    let (bench, mut have) = changed().await;
    let compact: crate::testing::Then = |etcd| {
        etcd.put("e", "later");
        etcd.compacted = 8;
    };
    bench.etcd.lock().breaks.push_back((3, compact));
    let loaded = bench.load_after(&mut have).await.unwrap();
    assert_eq!(loaded.anchor.revision, 8);
    assert!(loaded.adopted.is_some());
}

#[tokio::test]
async fn everything_is_loaded_where_too_much_has_changed() {
    let bench = Bench::new().await;
    let mut have = of_memory(bench.load().await.unwrap().anchor);
    for n in 0..1_001 {
        bench.etcd.lock().put(&format!("k{n:04}"), "new");
    }
    let loaded = bench.load_after(&mut have).await.unwrap();
    assert_eq!((loaded.anchor.tree.len(), loaded.adopted), (1_004, None));
    assert!(have.is_none(), "its memory is free during the load");
}

#[tokio::test]
async fn another_cluster_is_not_asked_for_differences() {
    let (bench, mut have) = changed().await;
    bench.etcd.lock().cluster_id = 8;
    let reads = bench.etcd.lock().reads.len();
    let error = bench.load_after(&mut have).await.unwrap_err();
    assert!(matches!(error, LoadError::HistoryReplaced), "{error}");
    assert_eq!(bench.etcd.lock().reads.len(), reads);
}

#[tokio::test]
async fn keys_of_a_neighbour_that_are_not_of_etcds_history_are_read_from_etcd_and_nothing_else_is_dropped() {
    for (rewritten, cluster_id) in [(Some(2), 7), (None, 8)] {
        let (bench, mut have) = changed().await;
        of_neighbour(&mut have, cluster_id);
        if let Some(revision) = rewritten {
            bench.etcd.lock().rewrite(revision);
        }
        let loaded = bench.load_after(&mut have).await.unwrap();
        assert_eq!((loaded.anchor.tree.len(), loaded.adopted), (3, None));
        assert_eq!(bench.set.cluster_state.history(), HistoryId::FIRST);
    }
    let (bench, mut have) = changed().await;
    of_neighbour(&mut have, 7);
    let loaded = bench.load_after(&mut have).await.unwrap();
    assert_eq!(loaded.adopted.unwrap().source, Source::Neighbour);
}

/// Two etcds that continue copies of one data folder: the keys have the same revisions, and the newest the same values.
#[tokio::test]
async fn value_of_a_neighbour_below_the_newest_is_compared_before_it_is_used() {
    for rewritten in [None, Some(2)] {
        for has_range_stream in [true, false] {
            let bench = Bench::new().await;
            for n in 0..100 {
                bench.etcd.lock().put(&format!("k{n:02}"), "loaded");
            }
            let mut have = of_memory(bench.load().await.unwrap().anchor);
            of_neighbour(&mut have, 7);
            bench.etcd.lock().has_range_stream = has_range_stream;
            if let Some(revision) = rewritten {
                bench.etcd.lock().rewrite(revision);
            }
            let loaded = bench.load_after(&mut have).await.unwrap();
            let is_kept = loaded.adopted.is_some();
            assert_eq!(is_kept, rewritten.is_none(), "{has_range_stream}");
            let expected = if is_kept {
                "a=loaded"
            } else {
                "a=of another history"
            };
            assert_eq!(contents(&loaded.anchor.tree)[0], expected);
            assert_eq!(bench.set.cluster_state.history(), HistoryId::FIRST);
        }
    }
}
