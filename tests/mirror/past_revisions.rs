//! Reads at a past revision are as linearizable as etcd's: their header is no older than any write that was acknowledged
//! before them, and no revision is read after any client's acknowledged Compact of it. Only serializable ones may lag.
//!
//! The probe makes no check during these tests, so that only the reads themselves can find out.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Status};
use testkit::pb::{RangeRequest, RangeResponse, RequestOp};
use testkit::proxy::{Builder, Rangecache};
use testkit::roles::{MIRROR, create_users, password, token};
use testkit::wait::{SOON, until};
use tokio::task::JoinSet;

const PREFIX: &str = "/past/";
const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
/// Writes beside which past revisions are read.
const WRITES: i64 = 300;

fn unprobed(etcd: &Etcd) -> Builder {
    Rangecache::before(etcd).with("--probe-interval", "1h")
}

/// Three rangecaches that mirror only [`PREFIX`]: writes elsewhere reach them by no event.
async fn three_sidecars(etcd: &Etcd) -> Vec<Rangecache> {
    let mut sidecars = Vec::new();
    for _ in 0..3 {
        sidecars.push(unprobed(etcd).with("--cache-prefix", PREFIX).start().await);
    }
    sidecars
}

fn at(revision: i64) -> RangeRequest {
    RangeRequest {
        revision,
        ..RangeRequest::prefix(PREFIX)
    }
}

/// Number of ways to read a past revision.
const WAYS: usize = 5;

/// Reads a past revision: by a Range, a page of a list, a single key, a RangeStream or a streamed page.
async fn read_one_way(client: &Client, revision: i64, way: usize) -> Result<RangeResponse, Status> {
    let page = RangeRequest {
        key: format!("{PREFIX}1\0").into(),
        limit: 2,
        ..at(revision)
    };
    let one = RangeRequest {
        revision,
        ..RangeRequest::one(format!("{PREFIX}2"))
    };
    match way {
        0 => client.range(&at(revision)).await,
        1 => client.range(&page).await,
        2 => client.range(&one).await,
        3 => client.streamed(&at(revision)).await,
        _ => client.streamed(&page).await,
    }
}

async fn read_in_each_way(client: &Client, revision: i64) -> Vec<Result<RangeResponse, Status>> {
    let mut answers = Vec::new();
    for way in 0..WAYS {
        answers.push(read_one_way(client, revision, way).await);
    }
    answers
}

async fn write_keys(direct: &Client) -> i64 {
    let mut revision = 0;
    for key in 0..5 {
        let put = direct.put(format!("{PREFIX}{key}"), "value").await;
        revision = put.expect("etcd writes");
    }
    revision
}

fn is_compacted(answer: &Result<RangeResponse, Status>) -> bool {
    matches!(answer, Err(status) if status.code == 11 && status.message == COMPACTED)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_read_has_a_header_at_or_above_every_acknowledged_write() {
    for version in [Version::V3_7, Version::V3_6, Version::V3_5] {
        let etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        let revision = write_keys(&direct).await;
        let sidecars = three_sidecars(&etcd).await;
        let newest = Arc::new(AtomicI64::new(0));
        let mut tasks = JoinSet::new();
        let (writer, acknowledged) = (etcd.client().await, newest.clone());
        tasks.spawn(async move {
            for n in 0..WRITES {
                // Every other write reaches no mirror by an event.
                let prefix = if n % 2 == 0 { "/elsewhere/" } else { PREFIX };
                let put = writer.put(format!("{prefix}written"), n.to_string()).await;
                acknowledged.fetch_max(put.expect("etcd writes"), Ordering::SeqCst);
            }
            acknowledged.store(i64::MAX, Ordering::SeqCst);
        });
        for sidecar in &sidecars {
            let (client, newest) = (sidecar.client().await, newest.clone());
            tasks.spawn(async move {
                while newest.load(Ordering::SeqCst) < i64::MAX {
                    for way in 0..WAYS {
                        let oldest = newest.load(Ordering::SeqCst);
                        if oldest == i64::MAX {
                            break;
                        }
                        let answer = read_one_way(&client, revision, way).await.expect("an answer");
                        let shown = answer.revision();
                        assert!(shown >= oldest, "way {way}: {shown} after a write at {oldest}");
                    }
                }
            });
        }
        while let Some(ended) = tasks.join_next().await {
            ended.expect("no header is older than a write before it");
        }
        // Once more without concurrency, after a write that the mirrors cannot know of.
        let put = direct.put("/elsewhere/last", "").await.expect("etcd writes");
        for sidecar in &sidecars {
            let before = sidecar.outcomes().await;
            for (way, answer) in read_in_each_way(&sidecar.client().await, revision)
                .await
                .iter()
                .enumerate()
            {
                let shown = answer.as_ref().expect("an answer").revision();
                assert!(shown >= put, "way {way}: {shown} after a write at {put}");
            }
            let since = sidecar.outcomes_since(&before, 3).await;
            assert_eq!(since.memory_answers(), 3, "{since:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_by_another_client_ends_past_reads_at_once() {
    for version in [Version::V3_7, Version::V3_6, Version::V3_5] {
        let etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        let mut revision = write_keys(&direct).await;
        let sidecars = three_sidecars(&etcd).await;
        let mut clients = Vec::new();
        for sidecar in &sidecars {
            clients.push(sidecar.client().await);
        }
        // Through etcd itself, then through one of the sidecars.
        for compactor in [&direct, &clients[0]] {
            let next = write_keys(&direct).await;
            for client in &clients {
                for answer in read_in_each_way(client, revision).await {
                    answer.expect("not compacted yet");
                }
            }
            compactor.compact(revision + 1).await.expect("etcd compacts");
            for (n, client) in clients.iter().enumerate() {
                for (way, answer) in read_in_each_way(client, revision).await.iter().enumerate() {
                    assert!(is_compacted(answer), "sidecar {n}, way {way}: {answer:?}");
                }
                for answer in read_in_each_way(client, revision + 1).await {
                    answer.expect("the compacted revision itself can still be read");
                }
                client.range(&at(0)).await.expect("the newest state");
            }
            revision = next;
        }
    }
}

/// A page that is cut from an open RangeStream.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_of_a_series_sees_writes_and_compactions_of_others_at_once() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    for start in (0..3_000).step_by(100) {
        let batch = (start..start + 100).map(|n| RequestOp::put(format!("{PREFIX}{n:05}"), "value"));
        direct.transact(batch.collect()).await.expect("etcd writes");
    }
    let rangecache = unprobed(&etcd).with("--cache-prefix", "/other/").start().await;
    let through = rangecache.client().await;
    let mut request = RangeRequest { limit: 100, ..at(0) };
    let mut put = 0;
    for n in 0..6 {
        let page = through.range(&request).await.expect("a page");
        assert!(
            page.revision() >= put,
            "page {n}: {} after a write at {put}",
            page.revision()
        );
        if request.revision == 0 {
            request.revision = page.revision();
        }
        request.key = [&page.kvs.last().expect("keys").key[..], b"\0"].concat();
        put = direct
            .put("/elsewhere", n.to_string())
            .await
            .expect("etcd writes");
    }
    let pages = rangecache.metrics().await.sum("rangecache_series_pages_total");
    assert_eq!(pages, 5.0, "all pages but the first are cut from a stream");
    direct.compact(request.revision + 1).await.expect("etcd compacts");
    let page = through.range(&request).await;
    assert!(is_compacted(&page), "{page:?}");
}

/// The caller's own authorization finds the compaction.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn authorized_past_read_sees_writes_and_compactions_of_others_at_once() {
    for version in [Version::V3_7, Version::V3_6, Version::V3_5] {
        let etcd = Etcd::start(version).await;
        let root = create_users(&etcd).await;
        let mut revision = 0;
        for key in 0..3 {
            revision = root.put(format!("/a/{key}"), "value").await.expect("etcd writes");
        }
        let rangecache = unprobed(&etcd)
            .with("--user", &format!("{MIRROR}:{}", password(MIRROR)))
            .start()
            .await;
        let direct = etcd.client().await;
        let token_of = |name| token(&direct, name);
        let alice = rangecache
            .client()
            .await
            .with_metadata("token", &token_of("alice").await);
        let carol = rangecache
            .client()
            .await
            .with_metadata("token", &token_of("carol").await);
        let list = RangeRequest {
            revision,
            ..RangeRequest::prefix("/a/")
        };
        let put = root.put("/b/0", "value").await.expect("etcd writes");
        let before = rangecache.outcomes().await;
        let answer = until(SOON, "an answer from memory", async || {
            let answer = alice.range(&list).await.expect("an answer");
            let outcomes = rangecache.outcomes().await;
            (outcomes.memory_answers() > before.memory_answers()).then_some(answer)
        })
        .await
        .0;
        assert!(
            answer.revision() >= put,
            "{} after a write at {put}",
            answer.revision()
        );
        assert_eq!(answer.kvs.len(), 3);
        root.compact(put).await.expect("etcd compacts");
        let answer = alice.range(&list).await;
        assert!(is_compacted(&answer), "{answer:?}");
        let refused = carol.range(&list).await.expect_err("carol may not read it");
        assert_eq!(refused.message, "etcdserver: permission denied");
        let readable = RangeRequest {
            revision: put,
            ..list.clone()
        };
        alice.range(&readable).await.expect("not compacted");
    }
}
