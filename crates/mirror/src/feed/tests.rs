//! Feeds that follow a scripted etcd.

use super::*;
use crate::history::HistoryId;
use crate::testing::{Bench, SOON};

/// Follows etcd until the mirror is at `revision`.
async fn follow_until(bench: &Bench, feed: Feed<'_>, revision: i64) {
    let reached = async {
        while bench.mirror().revision() != Ok(revision) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        end = feed.follow() => panic!("{end}"),
        reached = tokio::time::timeout(SOON, reached) => reached.unwrap(),
    }
}

#[tokio::test]
async fn feed_delivers_what_the_mirror_has_missed() {
    let bench = Bench::new().await;
    bench.fill().await;
    let change = bench.etcd.lock().put("d", "new");
    bench.apply(change);
    bench.etcd.lock().put("e", "missed");
    let connection = bench.connect().await;
    let feed = bench.open(&connection, &mut None).await.unwrap();
    follow_until(&bench, feed, 6).await;
    assert!(bench.mirror().view().unwrap().tree.get(b"e").is_some());
}

#[tokio::test]
async fn feed_asks_for_progress_only_once_a_reader_waits_for_a_later_revision() {
    let bench = Bench::new().await;
    let mut loaded_by = bench.fill().await;
    let connection = bench.connect().await;
    let feed = bench.open(&connection, &mut loaded_by).await.unwrap();
    assert_eq!(bench.etcd.lock().progress_requests, 0);
    bench.etcd.lock().revision = 9;
    bench.mirror().want(HistoryId::FIRST, 9);
    follow_until(&bench, feed, 9).await;
    assert!(bench.etcd.lock().progress_requests > 0);
}

#[tokio::test]
async fn feed_ends_when_the_mirror_outgrows_its_memory() {
    let bench = Bench::with_memory("1KiB").await;
    let mut loaded_by = bench.fill().await;
    bench.etcd.lock().put("d", &"x".repeat(4096));
    let connection = bench.connect().await;
    let feed = bench.open(&connection, &mut loaded_by).await.unwrap();
    let end = tokio::time::timeout(SOON, feed.follow()).await.unwrap();
    assert!(matches!(end, FeedEnd::OverBudget), "{end}");
}
