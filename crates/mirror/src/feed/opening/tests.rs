//! Openings of feeds of a scripted etcd.

use etcd_store::cache::Change;

use super::*;
use crate::lineage::HistoryId;
use crate::testing::{Bench, Etcd};

/// Revision at which a feed has resumed, and its watch has begun; otherwise how it has ended.
async fn resume(bench: &Bench, mut loaded_by: LoadedBy) -> Result<(i64, i64), FeedEnd> {
    let connection = bench.connect().await;
    let feed = bench.open(&connection, &mut loaded_by).await?;
    assert_eq!(bench.mirror().revision(), Ok(feed.revision()));
    let start = bench.etcd.lock().watches.last().unwrap().start_revision;
    Ok((feed.revision(), start))
}

/// Fails unless the feed has found another history, and has dropped the mirror.
fn check_replaced(bench: &Bench, resumed: Result<(i64, i64), FeedEnd>) {
    assert!(matches!(resumed, Err(FeedEnd::StaleEpoch)), "{resumed:?}");
    assert_ne!(bench.set.cluster_state.history(), HistoryId::FIRST);
    assert!(bench.mirror().revision().is_err());
}

#[tokio::test]
async fn feed_behind_a_load_is_proven_by_the_connection_that_has_loaded() {
    let bench = Bench::new().await;
    let loaded_by = bench.fill().await;
    let reads = bench.etcd.lock().reads.len();
    assert_eq!(resume(&bench, loaded_by).await.unwrap(), (4, 5));
    assert_eq!(bench.etcd.lock().reads.len(), reads, "nothing is compared");
}

#[tokio::test]
async fn feed_after_an_interrupted_load_is_proven_by_its_keys() {
    let bench = Bench::new().await;
    bench.fill().await;
    assert_eq!(resume(&bench, None).await.unwrap(), (4, 5));
    bench.etcd.lock().rewrite(3);
    check_replaced(&bench, resume(&bench, None).await);
}

#[tokio::test]
async fn feed_resumes_at_the_events_since_the_load_and_compares_what_was_loaded() {
    let bench = Bench::new().await;
    bench.fill().await;
    for key in ["d", "a"] {
        let change = bench.etcd.lock().put(key, "new");
        bench.apply(change);
    }
    assert_eq!(resume(&bench, None).await.unwrap(), (6, 5));
    let compared = bench.etcd.lock().reads.last().unwrap().revision;
    assert_eq!(compared, 4, "the state before these events");
    bench.etcd.lock().rewrite(3);
    check_replaced(&bench, resume(&bench, None).await);
}

#[tokio::test]
async fn feed_that_delivers_another_event_is_of_another_history() {
    for revision in [5, 6] {
        let bench = Bench::new().await;
        bench.fill().await;
        for key in ["d", "e"] {
            let change = bench.etcd.lock().put(key, "new");
            bench.apply(change);
        }
        bench.etcd.lock().rewrite(revision);
        check_replaced(&bench, resume(&bench, None).await);
    }
}

/// A mirror that was loaded at 4, got one `change`, and reached 9 without another event.
async fn advanced(change: impl FnOnce(&mut Etcd) -> Change) -> Bench {
    let bench = Bench::new().await;
    bench.fill().await;
    let change = change(&mut bench.etcd.lock());
    bench.apply(change);
    bench.etcd.lock().revision = 9;
    let epoch = bench.mirror().epoch();
    bench.mirror().advance(epoch, 9).unwrap();
    bench
}

#[tokio::test]
async fn feed_without_a_later_event_is_proven_by_a_progress_notification() {
    let bench = advanced(|etcd| etcd.put("d", "new")).await;
    assert_eq!(resume(&bench, None).await.unwrap(), (9, 5));
    assert!(bench.etcd.lock().progress_requests > 0);
}

#[tokio::test]
async fn keys_prove_a_feed_whose_events_are_compacted() {
    let bench = advanced(|etcd| etcd.put("d", "new")).await;
    bench.etcd.lock().compacted = 8;
    assert_eq!(resume(&bench, None).await.unwrap(), (9, 10));
    bench.etcd.lock().rewrite(5);
    check_replaced(&bench, resume(&bench, None).await);
}

/// A mirror that got more events since its load than are compared, of which etcd has compacted all but the newest.
async fn compacted_but_for_the_newest() -> Bench {
    let bench = Bench::new().await;
    bench.fill().await;
    for number in 0..70 {
        let change = bench.etcd.lock().put(&format!("k{number}"), "new");
        bench.apply(change);
    }
    let mut etcd = bench.etcd.lock();
    etcd.compacted = etcd.revision;
    drop(etcd);
    bench
}

#[tokio::test]
async fn one_event_that_is_left_of_many_proves_a_feed_with_the_keys_alone() {
    let bench = compacted_but_for_the_newest().await;
    assert_eq!(resume(&bench, None).await.unwrap(), (74, 74));
    bench.etcd.lock().rewrite(73);
    check_replaced(&bench, resume(&bench, None).await);
}

#[tokio::test]
async fn nothing_proves_a_feed_after_a_delete_that_is_compacted() {
    let bench = advanced(|etcd| etcd.delete("c")).await;
    bench.etcd.lock().compacted = 8;
    let end = resume(&bench, None).await.unwrap_err();
    assert!(matches!(end, FeedEnd::Reload(LoadCause::Unproven, _)), "{end}");
    assert_eq!(bench.set.cluster_state.history(), HistoryId::FIRST);
}

#[tokio::test]
async fn mirror_behind_a_compaction_is_loaded_again() {
    let bench = Bench::new().await;
    bench.fill().await;
    bench.etcd.lock().revision = 9;
    bench.etcd.lock().compacted = 9;
    let end = resume(&bench, None).await.unwrap_err();
    // etcd's response to the comparison names no revision.
    assert!(
        matches!(end, FeedEnd::Reload(LoadCause::Compacted(5), _)),
        "{end}"
    );
}

#[tokio::test]
async fn member_of_another_cluster_does_not_feed() {
    let bench = Bench::new().await;
    let loaded_by = bench.fill().await;
    bench.etcd.lock().watch_cluster_id = 8;
    check_replaced(&bench, resume(&bench, loaded_by).await);
}

#[tokio::test]
async fn member_below_the_mirrors_revision_does_not_feed() {
    let bench = Bench::new().await;
    let loaded_by = bench.fill().await;
    bench.etcd.lock().revision = 3;
    check_replaced(&bench, resume(&bench, loaded_by).await);
}
