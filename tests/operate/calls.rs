//! `rangecache_calls_total` and the metrics beside it: every gRPC call by method, status and what answered it.

use std::collections::BTreeMap;

use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Stream};
use testkit::http;
use testkit::pb::{
    LeaseGrantRequest, RangeRequest, WatchCreateRequest, WatchRequest, WatchResponse, prefix_end,
};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

/// Calls that have ended, as `service/method code from`; those without calls are left out.
async fn calls(rangecache: &Rangecache) -> BTreeMap<String, u64> {
    let metrics = rangecache.metrics().await;
    let of_calls = metrics.0.iter().filter_map(|(sample, count)| {
        let labels = sample.strip_prefix("rangecache_calls_total{")?;
        let mut values = labels.split('"').skip(1).step_by(2);
        let (service, method) = (values.next()?, values.next()?);
        let (code, from) = (values.next()?, values.next()?);
        let service = service.trim_start_matches("etcdserverpb.");
        // A client that drops a stream closes its side and resets it: etcd may see either first.
        let is_endless = matches!(method, "Watch" | "LeaseKeepAlive");
        let code = if is_endless && matches!(code, "OK" | "Canceled") {
            "ended"
        } else {
            code
        };
        (*count > 0.0).then(|| (format!("{service}/{method} {code} {from}"), *count as u64))
    });
    of_calls.fold(BTreeMap::new(), |mut calls, (call, count)| {
        *calls.entry(call).or_default() += count;
        calls
    })
}

/// Waits until the calls since `before` are `expected`.
async fn expect(rangecache: &Rangecache, before: &BTreeMap<String, u64>, expected: &[(&str, u64)]) {
    let mut expected: BTreeMap<String, u64> = expected
        .iter()
        .map(|(call, count)| ((*call).to_owned(), *count))
        .collect();
    for (call, count) in before {
        *expected.entry(call.clone()).or_default() += count;
    }
    let mut last = BTreeMap::new();
    let wait = until(SOON, "the calls are counted", async || {
        last = calls(rangecache).await;
        (last == expected).then_some(())
    });
    // Ends before `until` does, to show the difference.
    if tokio::time::timeout(SOON / 2, wait).await.is_err() {
        assert_eq!(last, expected);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_is_counted_by_method_status_and_what_answered_it() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/a")
        .with("--read-only-listen-client-urls", "http://127.0.0.1:0")
        .start()
        .await;
    let client = rangecache.client().await;
    client.put("/a", vec![b'v'; 5_000]).await.expect("etcd puts");
    client.get("/a").await.expect("a read from memory");
    let before = calls(&rangecache).await;
    let list = RangeRequest {
        key: b"/a".to_vec(),
        range_end: prefix_end(b"/a"),
        ..Default::default()
    };
    for _ in 0..3 {
        client.get("/a").await.expect("a read from memory");
        client.get("/b").await.expect("a read from etcd");
    }
    client.range(&list).await.expect("a list from memory");
    client.range_stream(&list).await.expect("a stream from memory");
    client.put("/a", "v").await.expect("etcd puts");
    client.grant_lease(7, 600).await.expect("etcd grants");
    client.grant_lease(7, 600).await.expect_err("the lease exists");
    client.range(&RangeRequest::default()).await.expect_err("no key");
    client
        .unary::<()>("/etcdserverpb.KV/Unheard", &())
        .await
        .expect_err("no such method");
    let reader = Client::connect(&rangecache.read_only_url()).await;
    reader.put("/a", "v").await.expect_err("a listener for reads");
    expect(
        &rangecache,
        &before,
        &[
            ("KV/Range OK memory", 4),
            ("KV/Range OK etcd", 3),
            ("KV/RangeStream OK memory", 1),
            ("KV/Put OK etcd", 1),
            ("KV/Put PermissionDenied refused", 1),
            ("KV/Range InvalidArgument memory", 1),
            ("Lease/LeaseGrant OK etcd", 1),
            ("Lease/LeaseGrant FailedPrecondition etcd", 1),
            ("other/other Unimplemented etcd", 1),
        ],
    )
    .await;
    let metrics = rangecache.metrics().await;
    let sample = |name: &str| {
        metrics
            .0
            .get(name)
            .copied()
            .unwrap_or_else(|| panic!("no {name}"))
    };
    let memory = calls(&rangecache).await;
    let reads = memory
        .iter()
        .filter(|(call, _)| call.starts_with("KV/Range") && call.ends_with("memory"));
    let counted = |class: &str| {
        sample(&format!(
            "rangecache_call_duration_seconds_count{{class=\"{class}\",from=\"memory\"}}"
        ))
    };
    let [gets, lists, streams] = ["get", "list", "stream"].map(counted);
    assert!(
        gets > 0.0 && lists > 0.0 && streams == 1.0,
        "{gets}, {lists}, {streams}"
    );
    assert_eq!(
        (gets + lists + streams) as u64,
        reads.map(|(_, count)| count).sum::<u64>()
    );
    assert!(sample("rangecache_sent_bytes_total{from=\"memory\"}") > 20_000.0);
    assert!(sample("rangecache_sent_bytes_total{from=\"etcd\"}") > 0.0);
    assert!(sample("rangecache_received_bytes_total") > 5_000.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_is_in_flight_until_it_ends_and_counts_what_served_it_last() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/a")
        .start()
        .await;
    let client = rangecache.client().await;
    client.grant_lease(7, 600).await.expect("etcd grants");
    let before = calls(&rangecache).await;
    let create = |key: &str| WatchCreateRequest {
        key: key.as_bytes().to_vec(),
        ..Default::default()
    };
    let watches = [client.watch(create("/a")).await, client.watch(create("/b")).await];
    let mut keep_alive = client.open("/etcdserverpb.Lease/LeaseKeepAlive");
    // In its request the lease's id is the first field.
    keep_alive.send(&LeaseGrantRequest { ttl: 7, id: 0 });
    assert!(keep_alive.next().await.is_some(), "the lease is kept alive");
    let in_flight = async |class: &str| {
        let metrics = rangecache.metrics().await;
        metrics
            .0
            .get(&format!("rangecache_calls_in_flight{{class=\"{class}\"}}"))
            .copied()
    };
    until(SOON, "three streams are open", async || {
        let open = (in_flight("watch").await, in_flight("lease_keep_alive").await);
        (open == (Some(2.0), Some(1.0))).then_some(())
    })
    .await;
    drop((watches, keep_alive));
    expect(
        &rangecache,
        &before,
        &[
            ("Watch/Watch ended memory", 1),
            ("Watch/Watch ended etcd", 1),
            ("Lease/LeaseKeepAlive ended etcd", 1),
        ],
    )
    .await;
    assert_eq!(in_flight("watch").await, Some(0.0));
    assert_eq!(in_flight("lease_keep_alive").await, Some(0.0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stream_that_leaves_memory_counts_as_etcds() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", "/a")
        .start()
        .await;
    let client = rangecache.client().await;
    let before = calls(&rangecache).await;
    let create = |key: &str| WatchCreateRequest {
        key: key.as_bytes().to_vec(),
        ..Default::default()
    };
    let mut watch = client.watch(create("/a")).await;
    let create_another = async |watch: &mut Stream, key: &str| {
        watch.send(&WatchRequest {
            create_request: Some(create(key)),
            ..Default::default()
        });
        let created: WatchResponse = watch.next_as(SOON).await.expect("a response");
        assert!(created.created, "{created:?}");
    };
    create_another(&mut watch, "/a/2").await;
    let metrics = rangecache.metrics().await;
    assert_eq!(
        (metrics.watches_created("memory"), metrics.watches_created("etcd")),
        (2.0, 0.0)
    );
    // Memory does not have this key, so that etcd serves the whole stream from now on.
    create_another(&mut watch, "/b").await;
    drop(watch);
    expect(&rangecache, &before, &[("Watch/Watch ended etcd", 1)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bytes_of_a_watch_in_json_are_those_of_memory() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let url = format!("{}/v3/watch", rangecache.url());
    let body = r#"{"create_request": {"key": "L2E="}}"#;
    let mut lines = http::post_for_lines(&url, body).await.unwrap();
    let created = lines.next().await.expect("a line");
    assert!(created.contains("\"created\":true"), "{created}");
    until(SOON, "the line is counted", async || {
        let metrics = rangecache.metrics().await;
        let sent = metrics.0.get("rangecache_sent_bytes_total{from=\"memory\"}")?;
        (*sent >= created.len() as f64).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_that_no_endpoint_takes_is_counted_with_its_error() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--connect-timeout", "500ms")
        .start()
        .await;
    let client = rangecache.client().await;
    client.put("/a", "v").await.expect("etcd puts");
    let before = calls(&rangecache).await;
    drop(etcd);
    let status = client.put("/a", "v").await.expect_err("no etcd");
    let name = match status.code {
        4 => "DeadlineExceeded",
        14 => "Unavailable",
        other => panic!("{other}"),
    };
    expect(&rangecache, &before, &[(&format!("KV/Put {name} failed"), 1)]).await;
}
