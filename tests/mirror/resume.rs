//! An interrupted load resumes after the last key received, at the same revision; after a compaction it starts again.

use testkit::etcd::{Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::Client;
use testkit::pb::{RangeRequest, RequestOp};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

const PREFIX: &str = "/resume/";
const KEYS: usize = 12_000;
const VALUE_BYTES: usize = 1000;
/// Each connection is cut in the middle of the load.
const CUT_AFTER_BYTES: u64 = 3 << 20;
const CUTS: u64 = 3;

fn key(number: usize) -> String {
    format!("{PREFIX}{number:05}")
}

async fn write_all(etcd: &Client) {
    for start in (0..KEYS).step_by(100) {
        let batch =
            (start..start + 100).map(|n| RequestOp::put(key(n), vec![b'a' + (n % 26) as u8; VALUE_BYTES]));
        etcd.transact(batch.collect()).await.expect("etcd writes");
    }
}

/// Cuts loads, and applies `meanwhile` to etcd at each cut before the load can resume.
async fn cut_loads(version: Version, meanwhile: impl AsyncFn(&Client, u64)) -> (Etcd, Rangecache) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    write_all(&direct).await;
    let link = FaultLink::cutting_after(&etcd.url(), CUT_AFTER_BYTES, CUTS).await;
    let rangecache = Rangecache::at(link.url()).start_cold().await;
    for cut in 1..=CUTS {
        until(SOON, "the load is cut", async || {
            (link.cuts() >= cut).then_some(())
        })
        .await;
        meanwhile(&direct, cut).await;
        link.set(Condition::Normal);
    }
    rangecache.warm().await;
    // The mirror equals etcd, and follows it.
    let through = rangecache.client().await;
    direct.put(key(1), "after the load").await.expect("etcd writes");
    let list = RangeRequest::prefix(PREFIX);
    let before = rangecache.outcomes().await;
    assert_eq!(through.range_raw(&list).await, direct.range_raw(&list).await);
    assert_eq!(rangecache.outcomes_since(&before, 1).await.memory_answers(), 1);
    drop(link);
    (etcd, rangecache)
}

async fn loads(rangecache: &Rangecache) -> f64 {
    rangecache.metrics().await.sum("rangecache_mirror_reloads_total")
}

async fn load_resumes(version: Version) {
    let (_etcd, rangecache) = cut_loads(version, async |direct, cut| {
        // Writes before, at and after the position of the load; none of them is of the load's revision.
        let changes = [10, KEYS / 2, KEYS - 10].map(|n| RequestOp::put(key(n), format!("at cut {cut}")));
        direct.transact(changes.into()).await.expect("etcd writes");
        direct.delete(key(20 + cut as usize)).await.expect("etcd writes");
        direct
            .put(format!("{}-new", key(30)), "new")
            .await
            .expect("etcd writes");
    })
    .await;
    assert_eq!(loads(&rangecache).await, 1.0, "one load, begun once");
    let resumed = rangecache.log().matches("continuing behind the last key").count();
    assert!(resumed >= CUTS as usize, "{resumed} resumes");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_stream_load_resumes() {
    load_resumes(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_page_load_resumes() {
    load_resumes(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_load_restarts_after_a_compaction() {
    let (_etcd, rangecache) = cut_loads(Version::V3_7, async |direct, _| {
        let revision = direct.put(key(5), "compacted").await.expect("etcd writes");
        direct.compact(revision).await.expect("etcd compacts");
    })
    .await;
    assert_eq!(loads(&rangecache).await, 1.0 + CUTS as f64);
}
