//! `--shadow`: reads that etcd answers although memory could, and their comparison.

use testkit::etcd::{Etcd, Version};
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

const PREFIX: &str = "/shadow/secret-key-";

/// Waits until that many comparisons had this result.
async fn compared(rangecache: &Rangecache, result: &str, count: f64) {
    let name = format!("rangecache_shadow_reads_total{{result=\"{result}\"}}");
    until(SOON, &format!("{count} comparisons are {result}"), async || {
        let metrics = rangecache.metrics().await;
        (metrics.0.get(&name).copied().unwrap_or_default() >= count).then_some(())
    })
    .await;
}

async fn etcd_answers_and_is_compared(version: Version) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    for n in 0..20 {
        direct
            .put(format!("{PREFIX}{n:02}"), "secret-value")
            .await
            .expect("etcd writes");
    }
    let rangecache = Rangecache::before(&etcd)
        .with("--shadow", "1")
        .with("--verify-interval", "0s")
        .with_fault_injection()
        .start()
        .await;
    let through = rangecache.client().await;
    let list = RangeRequest::prefix(PREFIX);
    let past = direct.put("/another", "1").await.expect("etcd writes");
    let requests = [
        list.clone(),
        RangeRequest::one(format!("{PREFIX}03")),
        RangeRequest {
            limit: 3,
            ..list.clone()
        },
        RangeRequest {
            keys_only: true,
            ..list.clone()
        },
        RangeRequest {
            count_only: true,
            ..list.clone()
        },
        RangeRequest {
            revision: past,
            ..list.clone()
        },
        RangeRequest {
            serializable: true,
            ..list.clone()
        },
    ];
    let before = rangecache.outcomes().await;
    for request in &requests {
        let answer = through.range(request).await.expect("etcd answers");
        let expected = direct.range(request).await.expect("etcd answers");
        assert_eq!(
            (answer.kvs, answer.count),
            (expected.kvs, expected.count),
            "{request:?}"
        );
    }
    let since = rangecache.outcomes_since(&before, requests.len() as u64).await;
    assert_eq!(since.memory_answers(), 0, "{since:?}");
    compared(&rangecache, "equal", requests.len() as f64).await;
    assert!(!rangecache.log().contains("memory's answer differs"));

    through.inject_fault("corrupt").await;
    let answer = through.range(&list).await.expect("etcd answers");
    assert_eq!(answer.kvs.len(), 20, "the client gets etcd's response");
    compared(&rangecache, "different", 1.0).await;
    let log = rangecache.log();
    assert!(log.contains("memory's answer differs"), "{log}");
    assert!(
        !log.contains("secret"),
        "neither keys nor values are logged: {log}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shadowed_reads_are_etcds_and_differences_are_found_3_7() {
    etcd_answers_and_is_compared(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn shadowed_reads_are_etcds_and_differences_are_found_3_5() {
    etcd_answers_and_is_compared(Version::V3_5).await;
}
