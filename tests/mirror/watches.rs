//! Watches from memory whose mirror has lost its feed.

use testkit::etcd::{Cluster, Etcd, Version};
use testkit::grpc::{Client, Status, Stream, UNAVAILABLE};
use testkit::pb::{WatchCreateRequest, WatchResponse, prefix_end};
use testkit::proxy::Rangecache;
use testkit::wait::SOON;

use super::EXCLUSIVE;

async fn watch(client: &Client) -> Stream {
    let create = WatchCreateRequest {
        key: b"w/".to_vec(),
        range_end: prefix_end(b"w/"),
        ..WatchCreateRequest::default()
    };
    client.watch(create).await
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
