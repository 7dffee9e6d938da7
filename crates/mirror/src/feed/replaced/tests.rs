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

async fn apply(
    (bench, connection): &(Bench, Arc<Connection>),
    changes: impl Into<Vec<Change>>,
) -> Result<(), FeedEnd> {
    let changes = changes.into();
    let revision = changes.last().unwrap().revision();
    let applying = super::apply(bench.feeding(connection), changes, revision);
    tokio::time::timeout(SOON, applying).await.unwrap()
}

/// Values that the events of the mirror have replaced.
fn replaced(mirror: &Mirror) -> Vec<Option<String>> {
    let log = mirror.observe(0, 10).log.unwrap();
    let events = log.batches.iter().flat_map(|batch| batch.changes().to_vec());
    let value = |old: &Entry| String::from_utf8(KeyValue::from(old).value).unwrap();
    events.map(|change| change.replaced.as_ref().map(value)).collect()
}

fn mismatches(mirror: &Mirror) -> u64 {
    mirror.metrics.mismatches.get()
}

#[tokio::test]
async fn value_that_is_not_held_is_read_once_at_the_revision_before_it_was_replaced() {
    let of = without_values().await;
    let changes = {
        let mut etcd = of.0.etcd.lock();
        [
            etcd.put("a", "new"),
            etcd.put("a", "newer"),
            etcd.delete("b"),
            etcd.put("d", "first"),
        ]
    };
    apply(&of, changes).await.unwrap();
    let (mirror, old) = (of.0.mirror(), || Some("loaded".to_owned()));
    assert_eq!(replaced(mirror), [old(), Some("new".to_owned()), old(), None]);
    let mut reads: Vec<_> =
        of.0.etcd
            .lock()
            .reads
            .iter()
            .map(|read| (read.key.clone(), read.revision))
            .collect();
    reads.sort();
    assert_eq!(reads, [("a".into(), 4), ("b".into(), 6)]);
    assert_eq!(mirror.revision(), Ok(8));

    let later = of.0.etcd.lock().put("a", "newest");
    apply(&of, [later]).await.unwrap();
    assert_eq!(of.0.etcd.lock().reads.len(), 2, "what was written is held");
    assert_eq!(replaced(mirror).last(), Some(&Some("newer".to_owned())));
}

#[tokio::test]
async fn value_that_etcd_has_compacted_is_left_out_as_etcd_does() {
    let of = without_values().await;
    let change = of.0.etcd.lock().put("a", "new");
    of.0.etcd.lock().compacted = 5;
    apply(&of, [change]).await.unwrap();
    assert_eq!(replaced(of.0.mirror()), [None]);
    assert_eq!(of.0.mirror().revision(), Ok(5));
}

#[tokio::test]
async fn mirror_whose_value_is_another_one_in_etcd_is_dropped() {
    for is_gone in [false, true] {
        let of = without_values().await;
        let change = of.0.etcd.lock().put("a", "new");
        if is_gone {
            of.0.etcd.lock().events.remove(0);
        } else {
            of.0.etcd.lock().rewrite(2);
        }
        let end = apply(&of, [change]).await;
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
    let change = of.0.etcd.lock().put("a", "new");
    of.0.etcd.lock().revision = 2;
    let end = apply(&of, [change]).await;
    assert!(matches!(end, Err(FeedEnd::Lost(_))), "{end:?}");
    assert_eq!(of.0.mirror().revision(), Ok(4));
}
