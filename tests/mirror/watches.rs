//! Watches from memory whose mirror has lost its feed.

use std::time::Duration;

use testkit::etcd::{Cluster, Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::{Client, Status, Stream, UNAVAILABLE};
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchRequest, WatchResponse, prefix_end};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

use super::EXCLUSIVE;

fn create() -> WatchCreateRequest {
    WatchCreateRequest {
        key: b"w/".to_vec(),
        range_end: prefix_end(b"w/"),
        ..WatchCreateRequest::default()
    }
}

async fn watch(client: &Client) -> Stream {
    client.watch(create()).await
}

async fn end_of(stream: &mut Stream) -> Status {
    while stream.next_as::<WatchResponse>(SOON).await.is_some() {}
    stream.end().expect("an end").clone()
}

async fn from_memory(rangecache: &Rangecache) -> f64 {
    let sample = "rangecache_watch_streams{source=\"memory\",reason=\"mirrored\"}";
    rangecache.metrics().await.0.get(sample).copied().unwrap_or(0.0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_from_memory_survives_a_short_loss_of_its_feed_and_ends_after_a_long_one() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--watch-cache", "auto")
        .start()
        .await;
    let through = rangecache.client().await;
    let mut stream = watch(&through).await;
    assert_eq!(from_memory(&rangecache).await, 1.0);
    etcd.restart().await;
    let revision = etcd.client().await.put("w/a", "1").await.expect("etcd writes");
    let event: WatchResponse = stream.next_as(SOON).await.expect("the event");
    assert_eq!(event.header.expect("a header").revision, revision);
    assert_eq!(from_memory(&rangecache).await, 1.0);
    etcd.stop();
    assert_eq!(end_of(&mut stream).await.code, UNAVAILABLE);
    assert_eq!(from_memory(&rangecache).await, 0.0);
}

/// W15.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_that_requires_a_leader_ends_as_at_etcd_when_there_is_none() {
    let _alone = EXCLUSIVE.lock().await;
    let mut cluster = Cluster::start(Version::V3_7).await;
    let remaining = cluster.members[0].url();
    let rangecache = Rangecache::at(&remaining)
        .with("--watch-cache", "auto")
        .start()
        .await;
    let through = rangecache.client().await.with_metadata("hasleader", "true");
    let direct = cluster.members[0]
        .client()
        .await
        .with_metadata("hasleader", "true");
    let mut streams = [watch(&through).await, watch(&direct).await];
    assert_eq!(from_memory(&rangecache).await, 1.0);
    cluster.members[1].stop();
    cluster.members[2].stop();
    let [through, direct] = &mut streams;
    let (through, direct) = tokio::join!(end_of(through), end_of(direct));
    assert_eq!((through.code, &through.message), (direct.code, &direct.message));
    assert_eq!(through.code, UNAVAILABLE);
}

/// W10. The lost revisions are written again before rangecache sees etcd, so that only the events show the rollback; and
/// the stream leaves memory before the mirror's own feed, which is slow, shows it.
async fn watch_that_leaves_memory_after_a_rollback_gets_nothing_of_the_new_history(version: Version) {
    let mut etcd = Etcd::start(version).await;
    let link = FaultLink::to(&etcd.url(), 0).await;
    let rangecache = Rangecache::at(link.url())
        .with("--watch-cache", "auto")
        .start()
        .await;
    let through = rangecache.client().await;
    let direct = etcd.client().await;
    let kept = direct.put("w/kept", "1").await.expect("etcd writes");
    etcd.copy_data();
    let from_kept = WatchCreateRequest {
        start_revision: kept,
        ..create()
    };
    let mut stream = through.watch(from_kept).await;
    assert_eq!(from_memory(&rangecache).await, 1.0);
    let mut lost = kept;
    for n in 0..20 {
        lost = direct.put("w/lost", format!("{n}")).await.expect("etcd writes");
    }
    let mut shown = 0;
    while shown < lost {
        let response: WatchResponse = stream.next_as(SOON).await.expect("an event");
        shown = response.header.expect("a header").revision;
    }

    link.set(Condition::Cut);
    etcd.roll_back();
    etcd.run();
    etcd.ready().await;
    let direct = etcd.client().await;
    until(SOON, "the lost revisions are written again", async || {
        (direct.put("w/new", "1").await.ok()? > lost + 5).then_some(())
    })
    .await;
    let newest = direct
        .range(&RangeRequest::one("w/new"))
        .await
        .expect("etcd answers");
    let of_new_history = newest.kvs[0].create_revision..=newest.revision();
    assert!(of_new_history.contains(&(lost + 1)), "{of_new_history:?}, {lost}");
    link.set(Condition::SlowFeeds(Duration::from_secs(2)));
    // Memory cannot serve it yet, and so gives the stream to etcd.
    stream.send(&WatchRequest {
        create_request: Some(WatchCreateRequest {
            start_revision: lost + 1,
            ..create()
        }),
        ..WatchRequest::default()
    });
    let response: WatchResponse = stream.next_as(SOON).await.expect("a response");
    assert!(
        response.canceled && response.watch_id == 0 && response.compact_revision > 0,
        "{version:?}: {response:?}"
    );
    // The client lists again; its other watcher is of the new history.
    let response: WatchResponse = stream.next_as(SOON).await.expect("a response");
    assert!(response.created && response.watch_id == 1, "{response:?}");
    let response: WatchResponse = stream.next_as(SOON).await.expect("events");
    assert_eq!((response.watch_id, response.events.is_empty()), (1, false));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_that_leaves_memory_after_a_rollback_gets_nothing_of_the_new_history_3_7() {
    watch_that_leaves_memory_after_a_rollback_gets_nothing_of_the_new_history(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn watch_that_leaves_memory_after_a_rollback_gets_nothing_of_the_new_history_3_6() {
    watch_that_leaves_memory_after_a_rollback_gets_nothing_of_the_new_history(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn watch_that_leaves_memory_after_a_rollback_gets_nothing_of_the_new_history_3_5() {
    watch_that_leaves_memory_after_a_rollback_gets_nothing_of_the_new_history(Version::V3_5).await;
}
