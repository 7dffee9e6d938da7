//! Large reads that memory cannot answer do not stampede etcd: identical ones share a call that starts after they
//! arrived, and past the bounds they are refused with a status that says so.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "so a test fails"
)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::large_futures,
    reason = "small numbers, and no load"
)]

mod support;

use std::sync::Arc;

use support::etcd::{Etcd, Version};
use support::grpc::Status;
use support::pb::{RangeRequest, RangeResponse};
use support::proxy::Rangecache;
use support::wait::{SOON, until};
use tokio::task::JoinHandle;

const PREFIX: &str = "/large/";
/// gRPC's codes.
const RESOURCE_EXHAUSTED: i32 = 8;
const UNAVAILABLE: i32 = 14;

type Read = JoinHandle<Result<RangeResponse, Status>>;

/// An etcd that stands still, and reads of a prefix that is not mirrored, all waiting for it.
struct Scene {
    etcd: Etcd,
    rangecache: Rangecache,
    before: support::proxy::Outcomes,
    ranges_before: f64,
    reads: Vec<Read>,
}

impl Scene {
    async fn new(reads: usize, flags: &[(&str, &str)]) -> Scene {
        let etcd = Etcd::start(Version::V3_7).await;
        let direct = etcd.client().await;
        for n in 0..50 {
            direct
                .put(format!("{PREFIX}{n:02}"), vec![b'v'; 100])
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
        let ranges_before = ranges(&etcd).await;
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
            ranges_before,
            reads,
        }
    }

    /// Waits until so many reads wait for the one that is under way.
    async fn waiting(&self, reads: f64) {
        until(SOON, "reads wait", async || {
            let metrics = self.rangecache.metrics().await;
            (metrics.sum("rangecache_forward_waiting") == reads).then_some(())
        })
        .await;
    }

    /// etcd goes on; returns how the reads ended: answers, and the codes of refusals.
    async fn go_on(&mut self) -> (Vec<RangeResponse>, Vec<i32>) {
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

/// Ranges that etcd itself has counted.
async fn ranges(etcd: &Etcd) -> f64 {
    let metrics = etcd.metrics().await;
    metrics
        .0
        .iter()
        .filter(|(name, _)| {
            name.starts_with("grpc_server_started_total") && name.contains("grpc_method=\"Range\"")
        })
        .map(|(_, count)| count)
        .sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn identical_large_reads_share_a_call() {
    let mut scene = Scene::new(64, &[]).await;
    scene.waiting(63.0).await;
    let (answers, codes) = scene.go_on().await;
    assert_eq!((answers.len(), codes), (64, vec![]));
    assert!(
        answers
            .iter()
            .all(|answer| answer.kvs.len() == 50 && answer.kvs == answers[0].kvs)
    );
    let outcomes = scene.rangecache.outcomes_since(&scene.before, 64).await;
    assert_eq!(outcomes.of("forwarded"), 64);
    assert_eq!(
        scene
            .rangecache
            .metrics()
            .await
            .sum("rangecache_forward_joined_total"),
        63.0
    );
    let etcds = ranges(&scene.etcd).await - scene.ranges_before;
    assert!(etcds < 32.0, "64 reads and a few checks cost etcd {etcds} Ranges");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_that_wait_are_refused() {
    let mut scene = Scene::new(12, &[("--forward-max-waiting", "4")]).await;
    until(SOON, "the others are refused", async || {
        let finished = scene.reads.iter().filter(|read| read.is_finished()).count();
        (finished == 7).then_some(())
    })
    .await;
    scene.waiting(4.0).await;
    let (answers, codes) = scene.go_on().await;
    assert_eq!((answers.len(), codes), (5, vec![UNAVAILABLE; 7]));
    let outcomes = scene.rangecache.outcomes_since(&scene.before, 12).await;
    assert_eq!(
        outcomes.0.get(&("shed".into(), "too_many_waiting".into())),
        Some(&7)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shared_answers_that_take_too_much_memory_are_refused() {
    let mut scene = Scene::new(6, &[("--forward-shared-max-bytes", "1KiB")]).await;
    scene.waiting(5.0).await;
    let (answers, codes) = scene.go_on().await;
    assert_eq!(
        (answers.len(), codes),
        (1, vec![RESOURCE_EXHAUSTED; 5]),
        "the first is passed on, not held"
    );
    let outcomes = scene.rangecache.outcomes_since(&scene.before, 6).await;
    assert_eq!(outcomes.0.get(&("shed".into(), "shared_bytes".into())), Some(&5));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mirror_that_does_not_fit_steps_aside() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    for n in 0..50 {
        direct
            .put(format!("{PREFIX}{n:02}"), vec![b'v'; 1000])
            .await
            .expect("etcd puts");
    }
    // Ready: it will never be warm, and says why.
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-max-bytes", "10KiB")
        .start()
        .await;
    let before = rangecache.outcomes().await;
    let through = rangecache.client().await;
    let list = RangeRequest::prefix(PREFIX);
    assert_eq!(through.range(&list).await, direct.range(&list).await);
    let outcomes = rangecache.outcomes_since(&before, 1).await;
    assert_eq!(
        outcomes.0.get(&("forwarded".into(), "over_budget".into())),
        Some(&1)
    );
    assert!(
        rangecache.log().contains("--cache-max-bytes"),
        "the log says what to do"
    );
}
