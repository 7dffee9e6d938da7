use std::sync::Arc;

use etcd_store::cache::{Entry, Repacking, testing::KeyValue};
use rangecache_upstream::Connection;

use super::*;
use crate::testing::{Bench, SOON};
use crate::{load::LoadedBy, view::Mirror};

/// A loaded mirror of `a`, `b` and `c`, and the connection of its load.
async fn loaded() -> (Bench, LoadedBy, Arc<Connection>) {
    let bench = Bench::new().await;
    let loaded_by = bench.fill().await;
    let connection = bench.connect().await;
    (bench, loaded_by, connection)
}

fn leave_out_values(mirror: &Mirror) {
    let tree = mirror.current_tree(mirror.epoch()).unwrap().unwrap();
    let left_out = tree.repack((b"", b""), Repacking::LeaveOut, u64::MAX).unwrap();
    drop(tree);
    mirror.put_repacked(mirror.epoch(), &left_out).unwrap();
    let tree = mirror.current_tree(mirror.epoch()).unwrap().unwrap();
    assert!(tree.summary().not_held_bytes > 0);
}

/// Follows etcd until the mirror is at `revision`; returns how the feed has ended before.
async fn follow_until(
    (bench, loaded_by, connection): &mut (Bench, LoadedBy, Arc<Connection>),
    revision: i64,
) -> Option<FeedEnd> {
    let feed = match bench.open(connection, loaded_by).await {
        Ok(feed) => feed,
        Err(end) => return Some(end),
    };
    bench.mirror().want(crate::lineage::HistoryId::FIRST, revision);
    let reached = async {
        while bench.mirror().revision() != Ok(revision) {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        end = feed.follow() => Some(end),
        reached = tokio::time::timeout(SOON, reached) => {
            reached.unwrap();
            None
        }
    }
}

/// Values that the events of the mirror have replaced.
fn replaced(mirror: &Mirror) -> Vec<Option<String>> {
    let log = mirror.observe(0, 10).log.unwrap();
    let events = log.batches.iter().flat_map(|batch| batch.changes().to_vec());
    let value = |old: &Entry| String::from_utf8(KeyValue::from(old).value).unwrap();
    events.map(|change| change.replaced.as_ref().map(value)).collect()
}

#[tokio::test]
async fn replaced_value_that_is_not_held_comes_with_its_event() {
    let mut of = loaded().await;
    leave_out_values(of.0.mirror());
    let end = follow_until(&mut of, 4).await;
    assert!(end.is_none(), "{end:?}");
    let reads = {
        let mut etcd = of.0.etcd.lock();
        etcd.put("a", "new");
        etcd.put("a", "newer");
        etcd.delete("b");
        etcd.put("d", "first");
        etcd.reads.len()
    };
    of.1 = None;
    let end = follow_until(&mut of, 8).await;
    assert!(end.is_none(), "{end:?}");
    let (mirror, old) = (of.0.mirror(), || Some("loaded".to_owned()));
    assert_eq!(replaced(mirror), [old(), Some("new".to_owned()), old(), None]);
    let etcd = of.0.etcd.lock();
    assert!(etcd.watches.iter().all(|watch| watch.prev_kv));
    // A compaction to the head would refuse reads of later ones.
    assert!(
        etcd.reads[reads..].iter().all(|read| read.revision == 4),
        "{:?}",
        etcd.reads
    );
}

#[tokio::test]
async fn feed_asks_for_replaced_values_once_one_is_not_held() {
    let mut of = loaded().await;
    assert!(follow_until(&mut of, 4).await.is_none());
    leave_out_values(of.0.mirror());
    of.0.etcd.lock().put("a", "new");
    // Such an event on a watch that was opened before ends it, and is not applied.
    let connection = Arc::clone(&of.2);
    let applied = super::apply(
        of.0.feeding(&connection),
        vec![of.0.etcd.lock().put("a", "newer")],
        6,
        false,
    );
    assert!(matches!(applied, Err(FeedEnd::Lost(_))), "{applied:?}");
    assert_eq!(of.0.mirror().revision(), Ok(4));
    assert!(follow_until(&mut of, 6).await.is_none());
    let asked: Vec<_> =
        of.0.etcd
            .lock()
            .watches
            .iter()
            .map(|watch| watch.prev_kv)
            .collect();
    assert_eq!(asked, [false, true]);
    assert_eq!(
        replaced(of.0.mirror()),
        [Some("loaded".to_owned()), Some("new".to_owned())]
    );
}

#[tokio::test]
async fn value_that_etcd_has_compacted_is_left_out_as_etcd_does() {
    let of = loaded().await;
    of.0.mirror().put_in_service(of.0.mirror().epoch()).unwrap();
    leave_out_values(of.0.mirror());
    let change = of.0.etcd.lock().put("a", "new");
    super::apply(of.0.feeding(&of.2), vec![change], 5, true).unwrap();
    assert_eq!(replaced(of.0.mirror()), [None]);
    assert_eq!(of.0.mirror().revision(), Ok(5));
}

#[tokio::test]
async fn mirror_whose_value_is_another_one_in_etcd_is_dropped() {
    let of = loaded().await;
    let mirror = of.0.mirror();
    mirror.put_in_service(mirror.epoch()).unwrap();
    leave_out_values(mirror);
    let mut change = of.0.etcd.lock().put("a", "new");
    change.replaced = Some(KeyValue::new("a", 2, "another").entry());
    let end = super::apply(of.0.feeding(&of.2), vec![change], 5, true);
    assert!(matches!(end, Err(FeedEnd::StaleEpoch)), "{end:?}");
    assert_eq!(
        (mirror.revision(), mirror.metrics.mismatches.get()),
        (Err(Reason::Mismatch), 1)
    );
}
