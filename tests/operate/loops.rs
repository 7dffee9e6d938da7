//! A rangecache in front of itself is found at its first call; a chain of two is served.

use testkit::etcd::{Etcd, Version, free_port};
use testkit::grpc::FAILED_PRECONDITION;
use testkit::http;
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

const FOUND: &str = "has come back to it";

async fn is_found(rangecache: &Rangecache) {
    until(SOON, "the loop is logged", async || {
        rangecache.log().contains(FOUND).then_some(())
    })
    .await;
    assert!(rangecache.log().contains("--endpoints leads to itself"));
    let client = rangecache.client().await;
    let refused = client.put("k", "v").await.expect_err("no etcd is there");
    assert_eq!(refused.code, FAILED_PRECONDITION, "{refused:?}");
    let health = http::get(&format!("{}/health", rangecache.url())).await.unwrap();
    assert_eq!(health.status, 508, "{}", health.body);
    assert!(rangecache.metrics().await.sum("rangecache_looped_calls_total") > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rangecache_in_front_of_itself_is_found_at_its_first_call() {
    // Under another name than that of the listener, which the flags would show.
    let port = free_port();
    let itself = Rangecache::at(&format!("http://localhost:{port}"))
        .listening_on(&format!("http://127.0.0.1:{port}"))
        .start_cold()
        .await;
    is_found(&itself).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_rangecaches_in_front_of_each_other_are_found() {
    let port = free_port();
    let first = Rangecache::at(&format!("http://localhost:{port}"))
        .start_cold()
        .await;
    let second = Rangecache::at(first.url())
        .listening_on(&format!("http://127.0.0.1:{port}"))
        .start_cold()
        .await;
    is_found(&first).await;
    is_found(&second).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chain_of_two_rangecaches_is_served() {
    let etcd = Etcd::start(Version::V3_7).await;
    let behind = Rangecache::before(&etcd).start().await;
    let front = Rangecache::at(behind.url()).start().await;
    let client = front.client().await;
    client.put("k", "v").await.expect("is written");
    let answer = client.range(&RangeRequest::one("k")).await.expect("is read");
    assert_eq!(answer.kvs[0].value, b"v");
    let health = http::get(&format!("{}/health", front.url())).await.unwrap();
    assert_eq!(health.status, 200, "{}", health.body);
    for rangecache in [&behind, &front] {
        assert!(!rangecache.log().contains(FOUND));
        assert_eq!(
            rangecache.metrics().await.sum("rangecache_looped_calls_total"),
            0.0
        );
    }
}
