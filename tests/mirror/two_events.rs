//! Revisions with two events of one key: of transactions in a transaction, one may delete what another has put. They are no sign of
//! another history.

use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Stream};
use testkit::kv::WATCH;
use testkit::pb::{Event, RequestOp, WatchCreateRequest, WatchRequest, WatchResponse, prefix_end};
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, recovers};
use testkit::wait::SOON;

const PREFIX: &str = "/two/";

/// Puts a key and deletes it in the same revision, which is returned.
pub(super) async fn put_and_delete(client: &Client, key: &str) -> i64 {
    let changes = [RequestOp::put(key, "soon gone"), RequestOp::delete(key)];
    let nested = changes.map(RequestOp::nested);
    client.transact(nested.into()).await.expect("etcd writes")
}

/// Fails if `rangecache` has taken the history for another one.
pub(super) async fn history_has_continued(rangecache: &Rangecache) {
    let log = rangecache.log();
    assert!(!log.contains("history was replaced"), "{log}");
    let metrics = rangecache.metrics().await;
    assert_eq!(metrics.sum("rangecache_mirror_reloads_total"), 1.0, "{log}");
}

fn watch(key: &str, range_end: Vec<u8>) -> WatchRequest {
    WatchRequest {
        create_request: Some(WatchCreateRequest {
            key: key.into(),
            range_end,
            prev_kv: true,
            ..WatchCreateRequest::default()
        }),
        ..WatchRequest::default()
    }
}

async fn next(stream: &mut Stream) -> WatchResponse {
    let next = stream.next_as(SOON).await;
    next.unwrap_or_else(|| panic!("the stream ended: {:?}", stream.end()))
}

/// The events of the stream up to that of `revision`.
async fn events_up_to(stream: &mut Stream, revision: i64) -> Vec<Event> {
    let mut events: Vec<Event> = Vec::new();
    let is_of_last = |event: &Event| event.kv.as_ref().expect("a kv").mod_revision >= revision;
    while !events.iter().any(is_of_last) {
        let response = next(stream).await;
        assert!(!response.canceled, "{response:?}");
        events.extend(response.events);
    }
    events
}

/// A watcher of `PREFIX` in memory, and one at etcd, which both have got the events of such a revision.
async fn watched(etcd: &Etcd, rangecache: &Rangecache) -> [Stream; 2] {
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    direct
        .put(format!("{PREFIX}old"), "old")
        .await
        .expect("etcd writes");
    let mut streams = [&direct, &through].map(|client| {
        let stream = client.open(WATCH);
        stream.send(&watch(PREFIX, prefix_end(PREFIX.as_bytes())));
        stream
    });
    for stream in &mut streams {
        assert!(next(stream).await.created);
    }
    put_and_delete(&direct, &format!("{PREFIX}new")).await;
    let last = put_and_delete(&direct, &format!("{PREFIX}old")).await;
    let [at_etcd, in_memory] = &mut streams;
    let expected = events_up_to(at_etcd, last).await;
    assert_eq!(expected.len(), 4);
    assert_eq!(events_up_to(in_memory, last).await, expected);
    streams
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_leaves_memory_after_two_events_of_one_key() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .start()
        .await;
    let [_, mut stream] = watched(&etcd, &rangecache).await;
    stream.send(&watch("/elsewhere", Vec::new()));
    assert!(next(&mut stream).await.created);
    let direct = etcd.client().await;
    let last = direct
        .put(format!("{PREFIX}last"), "")
        .await
        .expect("etcd writes");
    assert_eq!(events_up_to(&mut stream, last).await.len(), 1);
    history_has_continued(&rangecache).await;
}

async fn restart_after_two_events_of_one_key(version: Version) {
    let mut etcd = Etcd::start(version).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .start()
        .await;
    let [_, mut stream] = watched(&etcd, &rangecache).await;
    etcd.restart().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    recovers(
        "a restart",
        PREFIX,
        &direct,
        &rangecache,
        &through,
        Reads::MayFail,
    )
    .await;
    let last = direct
        .put(format!("{PREFIX}last"), "")
        .await
        .expect("etcd writes");
    events_up_to(&mut stream, last).await;
    history_has_continued(&rangecache).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_restarts_after_two_events_of_one_key_3_7() {
    restart_after_two_events_of_one_key(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn etcd_restarts_after_two_events_of_one_key_3_5() {
    restart_after_two_events_of_one_key(Version::V3_5).await;
}
