use std::sync::Arc;

use super::*;
use crate::testing::{Bench, SOON};
use crate::view::Mirror;
use etcd_store::cache::testing::KeyValue;
use rangecache_upstream::Connection;

/// A mirror of `a`, `b` and `c` without their values.
async fn without_values() -> (Bench, Arc<Connection>) {
    let bench = Bench::new().await;
    bench.fill().await;
    let mirror = bench.mirror();
    mirror.put_in_service(mirror.epoch()).unwrap();
    let tree = mirror.current_tree(mirror.epoch()).unwrap().unwrap();
    let left_out = tree.leave_out_values((b"", b""), b"", u64::MAX).unwrap();
    drop(tree);
    mirror.put_repacked(mirror.epoch(), &left_out).unwrap();
    assert_eq!(
        mirror
            .view()
            .unwrap()
            .tree
            .next_not_held(b"", u64::MAX)
            .unwrap()
            .last[..],
        b"c"[..]
    );
    bench.etcd.lock().reads.clear();
    let connection = bench.connect().await;
    (bench, connection)
}

async fn bring(
    (bench, connection): &(Bench, Arc<Connection>),
    changes: &mut [Change],
) -> Result<(), FeedEnd> {
    let bringing = bring_replaced(bench.feeding(connection), changes);
    tokio::time::timeout(SOON, bringing).await.unwrap()
}

/// Values that the changes bring.
fn brought(changes: &[Change]) -> Vec<Option<String>> {
    let value = |old: &Entry| String::from_utf8(KeyValue::from(old).value).unwrap();
    changes
        .iter()
        .map(|change| change.replaced.as_ref().map(value))
        .collect()
}

fn mismatches(mirror: &Mirror) -> u64 {
    mirror.metrics.mismatches.get()
}

#[tokio::test]
async fn value_that_is_not_held_is_read_once_at_the_revision_before_it_was_replaced() {
    let of = without_values().await;
    let mut changes = {
        let mut etcd = of.0.etcd.lock();
        [
            etcd.put("a", "new"),
            etcd.put("a", "newer"),
            etcd.delete("b"),
            etcd.put("d", "first"),
        ]
    };
    bring(&of, &mut changes).await.unwrap();
    let old = || Some("loaded".to_owned());
    assert_eq!(brought(&changes), [old(), None, old(), None]);
    let mut reads: Vec<_> =
        of.0.etcd
            .lock()
            .reads
            .iter()
            .map(|read| (read.key.clone(), read.revision))
            .collect();
    reads.sort();
    assert_eq!(reads, [("a".into(), 4), ("b".into(), 6)]);

    let mirror = of.0.mirror();
    mirror.apply(mirror.epoch(), changes.to_vec(), 8).unwrap();
    let log = mirror.observe(0, 10).log.unwrap();
    let events: Vec<_> = log
        .batches
        .iter()
        .flat_map(|batch| batch.changes().to_vec())
        .collect();
    assert_eq!(brought(&events), [old(), Some("new".to_owned()), old(), None]);
    let mut later = [of.0.etcd.lock().put("a", "newest")];
    bring(&of, &mut later).await.unwrap();
    assert_eq!(of.0.etcd.lock().reads.len(), 2, "what was written is held");
}

#[tokio::test]
async fn value_that_etcd_has_compacted_is_left_out_as_etcd_does() {
    let of = without_values().await;
    let mut changes = [of.0.etcd.lock().put("a", "new")];
    of.0.etcd.lock().compacted = 5;
    bring(&of, &mut changes).await.unwrap();
    assert_eq!(brought(&changes), [None]);
    assert_eq!(of.0.mirror().revision(), Ok(4));
}

#[tokio::test]
async fn mirror_whose_value_is_another_one_in_etcd_is_dropped() {
    for is_gone in [false, true] {
        let of = without_values().await;
        let mut changes = [of.0.etcd.lock().put("a", "new")];
        if is_gone {
            of.0.etcd.lock().events.remove(0);
        } else {
            of.0.etcd.lock().rewrite(2);
        }
        let end = bring(&of, &mut changes).await;
        assert!(matches!(end, Err(FeedEnd::StaleEpoch)), "{end:?}");
        let mirror = of.0.mirror();
        assert_eq!(
            (mirror.revision(), mismatches(mirror)),
            (Err(Reason::Mismatch), 1)
        );
    }
}

#[tokio::test]
async fn feed_of_a_member_that_does_not_answer_is_lost() {
    let of = without_values().await;
    let mut changes = [of.0.etcd.lock().put("a", "new")];
    of.0.etcd.lock().revision = 2;
    let end = bring(&of, &mut changes).await;
    assert!(matches!(end, Err(FeedEnd::Lost(_))), "{end:?}");
    assert_eq!(of.0.mirror().revision(), Ok(4));
}
