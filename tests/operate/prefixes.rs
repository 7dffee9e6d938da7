//! Metrics of the prefixes that cost most (`--prefix-metrics-top`), on a real etcd.

use prost::Message;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::pb::{RangeRequest, RangeResponse, WatchCreateRequest, prefix_end};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

/// Prefixes, each with a number of keys and the bytes of their values; the first two cost most.
const PREFIXES: [(&str, usize, usize); 4] = [
    ("/r/big/", 30, 4_000),
    ("/r/middle/", 20, 1_000),
    ("/r/small/", 10, 10),
    ("/other/one/", 1, 10),
];

async fn fill(direct: &Client) {
    for (prefix, keys, bytes) in PREFIXES {
        for n in 0..keys {
            let key = format!("{prefix}{n:02}");
            direct.put(key, "v".repeat(bytes)).await.unwrap();
        }
    }
}

async fn value(rangecache: &Rangecache, figure: &str, prefix: &str) -> Option<f64> {
    let sample = format!("rangecache_prefix_{figure}{{prefix=\"{prefix}\"}}");
    rangecache.metrics().await.0.get(&sample).copied()
}

/// Bytes of all keys and values below a prefix, as etcd encodes them.
async fn bytes_at_etcd(direct: &Client, prefix: &str) -> f64 {
    let response = direct.range(&RangeRequest::prefix(prefix)).await.unwrap();
    let entries = RangeResponse {
        kvs: response.kvs,
        ..RangeResponse::default()
    };
    entries.encoded_len() as f64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_that_cost_most_have_their_figures_and_no_others_have_any() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    fill(&direct).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--prefix-metrics-top", "2")
        .start()
        .await;
    let client = rangecache.client().await;
    for (prefix, keys, _) in &PREFIXES[..2] {
        until(SOON, "the mirrored keys are counted", async || {
            (value(&rangecache, "keys", prefix).await? == *keys as f64).then_some(())
        })
        .await;
        let bytes = value(&rangecache, "bytes", prefix).await;
        assert_eq!(bytes, Some(bytes_at_etcd(&direct, prefix).await), "{prefix}");
    }
    for figure in ["keys", "bytes", "reads_total", "writes_total", "watches_total"] {
        let metrics = rangecache.metrics().await.0;
        let name = format!("rangecache_prefix_{figure}{{");
        let series: Vec<_> = metrics
            .keys()
            .filter(|sample| sample.starts_with(&name))
            .collect();
        assert_eq!(series.len(), 2, "{series:?}");
    }

    for n in 0..5 {
        client.get(format!("/r/big/{n:02}")).await.unwrap();
        client.get(format!("/r/small/{n:02}")).await.unwrap();
    }
    client.range(&RangeRequest::prefix("/r/middle/")).await.unwrap();
    for n in 0..3 {
        direct
            .put(format!("/r/big/{n:02}"), "v".repeat(4_000))
            .await
            .unwrap();
    }
    let _watch = client
        .watch(WatchCreateRequest {
            key: b"/r/middle/".to_vec(),
            range_end: prefix_end(b"/r/middle/"),
            ..WatchCreateRequest::default()
        })
        .await;
    for (figure, prefix, expected) in [
        ("reads_total", "/r/big/", 5.0),
        ("reads_total", "/r/middle/", 1.0),
        ("writes_total", "/r/big/", 3.0),
        ("watches_total", "/r/middle/", 1.0),
    ] {
        until(SOON, &format!("{figure} of {prefix} is {expected}"), async || {
            (value(&rangecache, figure, prefix).await? == expected).then_some(())
        })
        .await;
    }
    let proven = value(&rangecache, "proven_reads_total", "/r/big/").await;
    assert_eq!(proven, Some(5.0));
    let waited = value(&rangecache, "read_wait_seconds_total", "/r/big/").await;
    assert!(waited.is_some_and(|seconds| seconds > 0.0), "{waited:?}");
    assert_eq!(value(&rangecache, "writes_total", "/r/middle/").await, Some(0.0));
    assert_eq!(value(&rangecache, "watches_total", "/r/big/").await, Some(0.0));

    // A prefix that has become costly takes the place of another.
    for n in 0..10 {
        direct
            .put(format!("/r/small/{n:02}"), "v".repeat(50_000))
            .await
            .unwrap();
    }
    until(SOON, "the larger prefix has figures", async || {
        (value(&rangecache, "keys", "/r/small/").await? == 10.0).then_some(())
    })
    .await;
    assert_eq!(value(&rangecache, "keys", "/r/middle/").await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefixes_have_no_figures_with_a_top_of_none() {
    let etcd = Etcd::start(Version::V3_7).await;
    fill(&etcd.client().await).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--prefix-metrics-top", "0")
        .start()
        .await;
    rangecache.client().await.get("/r/big/00").await.unwrap();
    let metrics = rangecache.metrics().await.0;
    let named = metrics
        .keys()
        .find(|sample| sample.starts_with("rangecache_prefix_"));
    assert_eq!(named, None);
}
