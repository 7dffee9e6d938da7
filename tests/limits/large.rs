//! Large reads that memory cannot answer do not overload etcd: identical ones share a call sent after they arrived,
//! they become RangeStreams, and over the limits they are refused with a status that names the limit.

use std::sync::Arc;

use testkit::etcd::{Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::{Client, RESOURCE_EXHAUSTED, Status, UNAVAILABLE};
use testkit::pb::{ASCEND, BY_MOD, DESCEND, RangeRequest, RangeResponse, RequestOp};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::task::JoinHandle;

const PREFIX: &str = "/large/";

type Read = JoinHandle<Result<RangeResponse, Status>>;

/// A suspended etcd, and reads of a prefix outside the mirror that wait for it.
struct Scene {
    etcd: Etcd,
    rangecache: Rangecache,
    before: testkit::metrics::Outcomes,
    calls_before: f64,
    reads: Vec<Read>,
}

impl Scene {
    async fn new(reads: usize, flags: &[(&str, &str)]) -> Scene {
        let etcd = Etcd::start(Version::V3_7).await;
        let direct = etcd.client().await;
        for n in 0..50 {
            direct
                .put(format!("{PREFIX}{n:02}"), vec![b'v'; 12_000])
                .await
                .expect("etcd puts");
        }
        let mut builder = Rangecache::before(&etcd).with("--cache-prefix", "/elsewhere/");
        for (flag, value) in flags {
            builder = builder.with(flag, value);
        }
        let rangecache = builder.start().await;
        let client = Arc::new(rangecache.client().await);
        let before = rangecache.outcomes().await;
        let calls_before = calls(&etcd).await;
        etcd.pause();
        let reads = (0..reads)
            .map(|_| {
                let client = Arc::clone(&client);
                tokio::spawn(async move { client.range(&RangeRequest::prefix(PREFIX)).await })
            })
            .collect();
        Scene {
            etcd,
            rangecache,
            before,
            calls_before,
            reads,
        }
    }

    fn read_by(&mut self, client: Client) {
        let read = async move { client.range(&RangeRequest::prefix(PREFIX)).await };
        self.reads.push(tokio::spawn(read));
    }

    /// Waits until this many reads wait for the call in flight.
    async fn waiting(&self, reads: f64) {
        until(SOON, "reads wait", async || {
            let metrics = self.rangecache.metrics().await;
            (metrics.sum("rangecache_forward_waiting") == reads).then_some(())
        })
        .await;
    }

    /// Resumes etcd; returns the responses, and the codes of refusals.
    async fn resume_and_collect(&mut self) -> (Vec<RangeResponse>, Vec<i32>) {
        self.etcd.resume();
        let (mut answers, mut codes) = (Vec::new(), Vec::new());
        for read in std::mem::take(&mut self.reads) {
            match read.await.expect("the read ends") {
                Ok(answer) => answers.push(answer),
                Err(status) => codes.push(status.code),
            }
        }
        (answers, codes)
    }
}

/// Number of Range and RangeStream calls, as counted by etcd.
async fn calls(etcd: &Etcd) -> f64 {
    etcd.started_calls("Range").await + etcd.started_calls("RangeStream").await
}

/// Number of reads that shared another one's response.
async fn joined(rangecache: &Rangecache) -> f64 {
    let metrics = rangecache.metrics().await;
    metrics.sum("rangecache_forward_joined_total")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn identical_large_reads_share_a_call() {
    let mut scene = Scene::new(64, &[]).await;
    scene.waiting(63.0).await;
    let (answers, codes) = scene.resume_and_collect().await;
    assert_eq!((answers.len(), codes), (64, vec![]));
    assert!(
        answers
            .iter()
            .all(|answer| answer.kvs.len() == 50 && answer.kvs == answers[0].kvs)
    );
    let outcomes = scene.rangecache.outcomes_since(&scene.before, 64).await;
    assert_eq!(outcomes.of("streamed"), 64);
    assert_eq!(joined(&scene.rangecache).await, 63.0);
    let etcds = calls(&scene.etcd).await - scene.calls_before;
    assert!(etcds < 32.0, "64 reads and a few checks cost etcd {etcds} Ranges");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metadata_of_one_client_fails_no_read_that_shares_its_call() {
    let mut scene = Scene::new(1, &[]).await;
    until(SOON, "a call is in flight", async || {
        let metrics = scene.rangecache.metrics().await;
        (metrics.sum("rangecache_forward_large") == 1.0).then_some(())
    })
    .await;
    let client = scene.rangecache.client().await;
    // The next call is made for a read that etcd would refuse, and for those that wait with it.
    let refused = client.with_metadata("host", "a").with_metadata("host", "b");
    scene.read_by(refused);
    scene.waiting(1.0).await;
    for _ in 0..20 {
        scene.read_by(client.clone());
    }
    scene.waiting(21.0).await;
    let (answers, codes) = scene.resume_and_collect().await;
    assert_eq!((answers.len(), codes), (22, vec![]));
    assert!(answers.iter().all(|answer| answer.kvs == answers[0].kvs));
    assert_eq!(joined(&scene.rangecache).await, 21.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_beyond_the_wait_limit_are_refused() {
    let mut scene = Scene::new(12, &[("--forward-max-waiting", "4")]).await;
    until(SOON, "the other reads are refused", async || {
        let finished = scene.reads.iter().filter(|read| read.is_finished()).count();
        (finished == 7).then_some(())
    })
    .await;
    scene.waiting(4.0).await;
    let (answers, codes) = scene.resume_and_collect().await;
    assert_eq!((answers.len(), codes), (5, vec![UNAVAILABLE; 7]));
    let outcomes = scene.rangecache.outcomes_since(&scene.before, 12).await;
    assert_eq!(
        outcomes.0.get(&("shed".into(), "too_many_waiting".into())),
        Some(&7)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_responses_over_the_budget_are_read_by_each_alone() {
    let flags = [("--buffer-max-bytes", "4MiB"), ("--range-stream", "off")];
    let mut scene = Scene::new(6, &flags).await;
    scene.waiting(5.0).await;
    let (answers, codes) = scene.resume_and_collect().await;
    assert_eq!((answers.len(), codes), (6, vec![]));
    assert!(answers.iter().all(|answer| answer.kvs == answers[0].kvs));
    let begun = async || calls(&scene.etcd).await - scene.calls_before;
    let first_calls = begun().await;
    assert!(
        first_calls >= 7.0,
        "one call for all, then one for each: {first_calls}"
    );
    let refused = "rangecache_buffer_refused_total{kind=\"shared\"}";
    assert_eq!(scene.rangecache.metrics().await.0.get(refused), Some(&1.0));
    // The list is known to be too large: no call reads it for nothing.
    let clients = [scene.rangecache.client().await, scene.rangecache.client().await];
    let list = RangeRequest::prefix(PREFIX);
    let lists = futures_util::future::join_all(clients.iter().map(|client| client.range(&list)));
    assert!(lists.await.into_iter().all(|listed| listed.is_ok()));
    assert_eq!(scene.rangecache.metrics().await.0.get(refused), Some(&1.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mirror_over_budget_is_disabled() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    for n in 0..50 {
        direct
            .put(format!("{PREFIX}{n:02}"), vec![b'v'; 1000])
            .await
            .expect("etcd puts");
    }
    // Ready, although never warm; the log says why.
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-max-bytes", "10KiB")
        .with("--cache-pack", "never")
        .start()
        .await;
    let before = rangecache.outcomes().await;
    let through = rangecache.client().await;
    let list = RangeRequest::prefix(PREFIX);
    assert_eq!(through.range(&list).await, direct.range(&list).await);
    let outcomes = rangecache.outcomes_since(&before, 1).await;
    assert_eq!(
        outcomes.0.get(&("streamed".into(), "over_budget".into())),
        Some(&1)
    );
    assert!(
        rangecache.log().contains("--cache-max-bytes"),
        "the log says what to do"
    );
}

/// Writes `keys` values of that many bytes under `prefix`.
async fn fill(client: &testkit::grpc::Client, prefix: &str, keys: usize, value_bytes: usize) {
    // Below etcd's limits for one transaction.
    let batch = (1_000_000 / value_bytes.max(1)).clamp(1, 100);
    for start in (0..keys).step_by(batch) {
        let puts = (start..(start + batch).min(keys)).map(|n| {
            RequestOp::put(
                format!("{prefix}{n:05}"),
                vec![b'a' + (n % 26) as u8; value_bytes],
            )
        });
        client.transact(puts.collect()).await.expect("etcd puts");
    }
}

/// Requests that are converted to streams, and whether they have a response.
fn streamable(old: i64, compacted: i64, future: i64) -> Vec<RangeRequest> {
    let list = RangeRequest::prefix(PREFIX);
    let none = RangeRequest::prefix("/nothing/");
    vec![
        list.clone(),
        none.clone(),
        RangeRequest::everything(),
        RangeRequest::range(format!("{PREFIX}m"), b"\0"),
        RangeRequest::range("z", "a"),
        RangeRequest {
            limit: 1000,
            ..list.clone()
        },
        RangeRequest {
            limit: 1499,
            ..list.clone()
        },
        RangeRequest {
            limit: 1500,
            ..list.clone()
        },
        RangeRequest {
            limit: 9999,
            ..list.clone()
        },
        RangeRequest {
            limit: -3,
            ..list.clone()
        },
        RangeRequest {
            limit: i64::MAX,
            ..list.clone()
        },
        RangeRequest {
            keys_only: true,
            ..list.clone()
        },
        RangeRequest {
            keys_only: true,
            limit: 1200,
            ..list.clone()
        },
        RangeRequest {
            keys_only: true,
            ..none
        },
        RangeRequest {
            serializable: true,
            ..list.clone()
        },
        RangeRequest {
            sort_order: ASCEND,
            ..list.clone()
        },
        RangeRequest {
            revision: old,
            ..list.clone()
        },
        RangeRequest {
            revision: old,
            limit: 1000,
            ..list.clone()
        },
        RangeRequest {
            revision: -1,
            ..list.clone()
        },
        RangeRequest {
            revision: compacted,
            ..list.clone()
        },
        RangeRequest {
            revision: future,
            ..list
        },
    ]
}

/// Requests that etcd's RangeStream refuses, or answers differently.
fn others() -> Vec<RangeRequest> {
    let list = RangeRequest::prefix(PREFIX);
    vec![
        RangeRequest {
            sort_order: DESCEND,
            ..list.clone()
        },
        RangeRequest {
            sort_target: BY_MOD,
            ..list.clone()
        },
        RangeRequest {
            sort_order: ASCEND,
            sort_target: BY_MOD,
            ..list.clone()
        },
        RangeRequest {
            min_mod_revision: 5,
            ..list.clone()
        },
        RangeRequest {
            max_create_revision: 9,
            ..list.clone()
        },
        RangeRequest {
            count_only: true,
            ..list
        },
    ]
}

async fn converted_responses_equal_etcds(version: Version) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    fill(&direct, PREFIX, 1500, 300).await;
    let old = direct
        .put(format!("{PREFIX}00003"), vec![b'x'; 1 << 20])
        .await
        .expect("etcd puts");
    direct.grant_lease(77, 3600).await.expect("etcd grants");
    direct
        .put_with_lease(format!("{PREFIX}00002-leased"), "", 77)
        .await
        .expect("etcd puts");
    direct
        .delete(format!("{PREFIX}00005"))
        .await
        .expect("etcd deletes");
    let current = direct
        .put(format!("{PREFIX}zz"), vec![b'y'; 700 << 10])
        .await
        .expect("etcd puts");
    direct.compact(old - 3).await.expect("etcd compacts");
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/elsewhere/")
        .start()
        .await;
    let through = rangecache.client().await;
    let before = rangecache.outcomes().await;
    let (shapes, others) = (streamable(old, old - 4, current + 1), others());
    for request in shapes.iter().chain(&others) {
        let expected = direct.range_raw(request).await.expect("etcd answers");
        let got = through.range_raw(request).await.expect("rangecache answers");
        assert!(
            got == expected,
            "{request:?}\n etcd: {expected:?}\n rangecache: {got:?}"
        );
    }
    let outcomes = rangecache
        .outcomes_since(&before, (shapes.len() + others.len()) as u64)
        .await;
    let streamed = if version == Version::V3_7 {
        shapes.len() as u64
    } else {
        0
    };
    assert_eq!(outcomes.of("streamed"), streamed, "{outcomes:?}");
    let held = rangecache.metrics().await.buffered("converted");
    assert_eq!(held, 0.0, "nothing is held at the end");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn converted_responses_equal_etcds_3_7() {
    converted_responses_equal_etcds(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn converted_responses_equal_etcds_3_6() {
    converted_responses_equal_etcds(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn converted_responses_equal_etcds_3_5() {
    converted_responses_equal_etcds(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn auth_on_streams_with_the_callers_identity() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    fill(&direct, PREFIX, 200, 100).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/elsewhere/")
        .start()
        .await;
    let through = rangecache.client().await;
    let root = through.enable_auth("secret").await.expect("auth is on");
    let before = rangecache.outcomes().await;
    let list = RangeRequest::prefix(PREFIX);
    assert_eq!(
        through.range_raw(&list).await,
        direct.range_raw(&list).await,
        "refused alike"
    );
    assert_eq!(root.range(&list).await.expect("root reads").kvs.len(), 200);
    let garbage = through.with_metadata("token", "garbage.1");
    let expected = direct.with_metadata("token", "garbage.1").range_raw(&list).await;
    assert_eq!(garbage.range_raw(&list).await, expected);
    let outcomes = rangecache.outcomes_since(&before, 3).await;
    assert!(outcomes.of("streamed") >= 1, "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn broken_stream_falls_back_to_the_unary_call() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    fill(&direct, PREFIX, 4000, 1000).await;
    let link = FaultLink::cutting_after(&etcd.url(), 1 << 20, 1).await;
    let rangecache = Rangecache::at(link.url())
        .with("--cache-prefix", "/elsewhere/")
        .start()
        .await;
    let through = rangecache.client().await;
    let list = RangeRequest::prefix(PREFIX);
    let (got, ()) = tokio::join!(through.range_raw(&list), async {
        until(SOON, "the stream is cut", async || {
            (link.cuts() == 1).then_some(())
        })
        .await;
        link.set(Condition::Normal);
    });
    assert_eq!(got, direct.range_raw(&list).await);
    assert_eq!(fallbacks(&rangecache, "broken").await, 1.0);
}

async fn fallbacks(rangecache: &Rangecache, reason: &str) -> f64 {
    let metrics = rangecache.metrics().await;
    let name = format!("rangecache_range_stream_fallback_total{{reason=\"{reason}\"}}");
    metrics.0.get(&name).copied().unwrap_or(0.0)
}

/// Resident memory of a process, in bytes.
fn resident_bytes(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it runs");
    let line = status
        .lines()
        .find(|line| line.starts_with("VmRSS:"))
        .expect("a size");
    line.split_whitespace()
        .nth(1)
        .expect("a number")
        .parse::<u64>()
        .expect("a number")
        * 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_large_responses_stay_within_the_budget() {
    const CLIENTS: usize = 16;
    const BUDGET_BYTES: f64 = (16 << 20) as f64;
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    for n in 0..CLIENTS {
        fill(&direct, &format!("/many/{n:02}/"), 500, 10_000).await;
    }
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/elsewhere/")
        .with("--buffer-max-bytes", "64MiB")
        .start()
        .await;
    let resident_before = resident_bytes(rangecache.pid());
    let mut reads = tokio::task::JoinSet::new();
    for n in 0..CLIENTS {
        let client = rangecache.client().await;
        reads.spawn(async move {
            let list = RangeRequest::prefix(format!("/many/{n:02}/"));
            let mut bytes = 0;
            for _ in 0..3 {
                bytes += match client.range(&list).await {
                    Ok(answer) => {
                        assert_eq!((answer.kvs.len(), answer.count), (500, 500));
                        answer.kvs.iter().map(|kv| kv.value.len()).sum()
                    }
                    Err(status) => {
                        assert!(
                            [UNAVAILABLE, RESOURCE_EXHAUSTED].contains(&status.code),
                            "{status:?}"
                        );
                        0
                    }
                };
            }
            bytes
        });
    }
    let (mut held, mut resident, mut answered) = (0.0_f64, 0, 0);
    while !reads.is_empty() {
        tokio::select! {
            read = reads.join_next() => answered += read.expect("not empty").expect("the read ends"),
            metrics = rangecache.metrics() => {
                held = held.max(metrics.buffered("converted"));
                resident = resident.max(resident_bytes(rangecache.pid()));
            }
        }
    }
    let grown = resident.saturating_sub(resident_before);
    println!("{answered} B answered; held {held} B at most, grown by {grown} B");
    assert!(held > 0.0 && held <= BUDGET_BYTES, "{held} B held");
    // In addition to the budget: a window per stream from etcd and per client, and memory kept by the allocator.
    assert!(grown < 128 << 20, "grown by {grown} B");
    assert!(answered >= CLIENTS * 5_000_000, "only {answered} B were answered");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn response_larger_than_the_budget_is_forwarded_unchanged() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    fill(&direct, PREFIX, 500, 10_000).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/elsewhere/")
        .with("--buffer-max-bytes", "8MiB")
        .with("--forward-max-large", "8")
        .start()
        .await;
    let through = rangecache.client().await;
    let list = RangeRequest::prefix(PREFIX);
    assert_eq!(through.range_raw(&list).await, direct.range_raw(&list).await);
    assert_eq!(fallbacks(&rangecache, "too_large").await, 1.0);
    let streams = async || etcd.started_calls("RangeStream").await;
    let begun = streams().await;
    assert_eq!(through.range_raw(&list).await, direct.range_raw(&list).await);
    assert_eq!(streams().await, begun, "etcd does not read it twice again");
    assert_eq!(fallbacks(&rangecache, "too_large").await, 2.0);

    // Such lists take an eighth of the turns.
    etcd.pause();
    let reads = futures_util::future::join_all((0..3).map(|_| through.range(&list)));
    let wait_for_one = until(SOON, "one is in flight and two wait", async || {
        let metrics = rangecache.metrics().await;
        let counts = ["rangecache_forward_large", "rangecache_forward_waiting"];
        (counts.map(|name| metrics.sum(name)) == [1.0, 2.0]).then(|| etcd.resume())
    });
    let (reads, _) = futures_util::future::join(reads, wait_for_one).await;
    assert!(
        reads
            .iter()
            .all(|read| read.as_ref().is_ok_and(|read| read.kvs.len() == 500))
    );
}
