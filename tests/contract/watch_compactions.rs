//! Watches that begin in the past, around a compaction that another client has made: they end, or lack what was compacted,
//! exactly as at etcd.

use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::pb::{WatchCreateRequest, WatchResponse};
use testkit::proxy::{Builder, Rangecache};
use testkit::roles::{MIRROR, create_users, password, token};

use super::watch_streams::{before, create, created, next, open, prefix};

/// Writes before each compaction.
const WRITES: usize = 10;

/// A rangecache that finds compactions of other clients by nothing but its checks.
fn without_probes(etcd: &Etcd) -> Builder {
    before(etcd).with("--probe-interval", "1h")
}

/// Writes to one key, lets `through` know of it, and compacts at the fourth revision from the end, which is returned.
async fn write_and_compact(direct: &Client, through: &Client) -> i64 {
    let mut last = 0;
    for value in 0..WRITES {
        last = direct.put("/a/key", value.to_string()).await.expect("put");
    }
    assert!(through.get("/a/key").await.expect("a read").is_some());
    let compacted = last - 3;
    direct.compact(compacted).await.expect("a compaction");
    compacted
}

fn with_prev_kv(start_revision: i64) -> WatchCreateRequest {
    WatchCreateRequest {
        prev_kv: true,
        ..prefix("/a/", start_revision)
    }
}

/// First two responses to a watcher on a stream of its own, without the headers.
async fn outcome(client: &Client, watch: WatchCreateRequest) -> Vec<WatchResponse> {
    let mut stream = open(client, &[create(watch)]);
    let mut responses = vec![next(&mut stream).await, next(&mut stream).await];
    if responses[1].canceled {
        let header = responses[1].header.take().expect("a header");
        assert_eq!(header.revision, 0, "of a cancel for a compaction");
    }
    responses.iter_mut().for_each(|response| response.header = None);
    responses
}

async fn watches_around_a_compaction_equal_etcds(version: Version) {
    let etcd = Etcd::start(version).await;
    let rangecache = without_probes(&etcd).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    // The second compaction is found, too, although memory knows of the first.
    for _ in 0..2 {
        let compacted = write_and_compact(&direct, &through).await;
        for start in [compacted - 1, compacted - 5, compacted, compacted + 1] {
            for watch in [prefix("/a/", start), with_prev_kv(start)] {
                let expected = outcome(&direct, watch.clone()).await;
                assert_eq!(expected[1].canceled, start < compacted, "{expected:?}");
                assert_eq!(
                    outcome(&through, watch).await,
                    expected,
                    "{version:?} {start} {compacted}"
                );
            }
        }
    }
    assert_eq!(created(&rangecache, "memory", "compacted").await, 8.0);
    assert_eq!(created(&rangecache, "memory", "revision").await, 8.0);
}

#[tokio::test]
async fn watches_around_a_compaction_of_another_client_equal_etcds_3_7() {
    watches_around_a_compaction_equal_etcds(Version::V3_7).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn watches_around_a_compaction_of_another_client_equal_etcds_3_6() {
    watches_around_a_compaction_equal_etcds(Version::V3_6).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn watches_around_a_compaction_of_another_client_equal_etcds_3_5() {
    watches_around_a_compaction_equal_etcds(Version::V3_5).await;
}

#[tokio::test]
async fn authorized_watches_around_a_compaction_of_another_client_equal_etcds() {
    let etcd = Etcd::start(Version::V3_7).await;
    let root = create_users(&etcd).await;
    let own = without_probes(&etcd).with("--user", MIRROR);
    let rangecache = own.with("--password", &password(MIRROR)).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let alice = token(&direct, "alice").await;
    let [direct, through] = [direct, through].map(|client| client.with_metadata("token", &alice));
    let mut last = 0;
    for value in 0..WRITES {
        last = root.put("/a/key", value.to_string()).await.expect("put");
    }
    assert!(through.get("/a/key").await.expect("a read").is_some());
    root.compact(last - 3).await.expect("a compaction");
    for watch in [
        prefix("/a/", last - 4),
        with_prev_kv(last - 3),
        with_prev_kv(last - 2),
    ] {
        let expected = outcome(&direct, watch.clone()).await;
        assert_eq!(outcome(&through, watch).await, expected);
    }
    assert_eq!(created(&rangecache, "memory", "compacted").await, 1.0);
    assert_eq!(created(&rangecache, "memory", "revision").await, 2.0);
}

async fn checks(rangecache: &Rangecache) -> f64 {
    rangecache.metrics().await.sum("rangecache_quorum_checks_total")
}

/// Watches of the next revision, as after a list, and of the future need no check; those of the past share one.
#[tokio::test]
async fn watches_of_the_past_share_checks_and_others_need_none() {
    const WATCHES: usize = 300;
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = without_probes(&etcd).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let first = direct.put("/a/key", "1").await.expect("put");
    let last = direct.put("/a/key", "2").await.expect("put");
    assert!(through.get("/a/key").await.expect("a read").is_some());
    let before = checks(&rangecache).await;
    for start in [last + 1, last + 1_000] {
        let mut stream = open(&through, &[create(with_prev_kv(start))]);
        assert!(next(&mut stream).await.created);
    }
    assert_eq!(checks(&rangecache).await, before, "nothing of the past is read");
    let watching: Vec<_> = (0..WATCHES)
        .map(|_| {
            let mut stream = open(&through, &[create(with_prev_kv(first))]);
            tokio::spawn(async move {
                assert!(next(&mut stream).await.created);
                assert_eq!(next(&mut stream).await.events.len(), 2);
                stream
            })
        })
        .collect();
    let mut streams = Vec::new();
    for watching in watching {
        streams.push(watching.await.expect("the events"));
    }
    let made = checks(&rangecache).await - before;
    assert!((1.0..WATCHES as f64 / 4.0).contains(&made), "{made} checks");
    println!("{WATCHES} watches of the past, {made} checks");
}
