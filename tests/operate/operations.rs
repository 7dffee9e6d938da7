//! Panics, corruption, shutdown and handover: none of them leads to a wrong response.

use std::process::Stdio;
use std::time::Duration;

use ::http::Method;
use serde_json::Value;
use tempfile::TempDir;
use testkit::etcd::{Cluster, Etcd, Version};
use testkit::grpc::{Client, UNAVAILABLE};
use testkit::http;
use testkit::kv::RANGE;
use testkit::pb::{LeaseGrantRequest, RangeRequest, WatchCreateRequest, WatchResponse};
use testkit::process::tool;
use testkit::proxy::Rangecache;
use testkit::recovery::{self, Reads};
use testkit::wait::{SOON, until};
use tokio::process::Command;

const PREFIX: &str = "/operations/";
/// gRPC's status code of an internal error.
const INTERNAL: i32 = 13;
/// HTTP/2's error code of an internal error.
const INTERNAL_ERROR: u32 = 2;
/// Longer than any test: whatever waits for it fails the test.
const FOR_EVER: &str = "1h";

async fn etcd_with(keys: usize) -> Etcd {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    for n in 0..keys {
        let put = direct.put(format!("{PREFIX}{n:03}"), vec![b'v'; 1000]).await;
        put.expect("etcd writes");
    }
    etcd
}

/// A rangecache into which faults can be injected.
async fn with_fault_injection(etcd: &Etcd, flags: &[(&str, &str)]) -> Rangecache {
    let mut builder = Rangecache::before(etcd).with_fault_injection();
    for (flag, value) in flags {
        builder = builder.with(flag, value);
    }
    builder.start().await
}

/// Waits until responses come from memory again; each response until then must equal etcd's.
async fn recovers(after: &str, etcd: &Etcd, rangecache: &Rangecache, through: &Client) {
    let direct = etcd.client().await;
    recovery::recovers(after, PREFIX, &direct, rangecache, through, Reads::MustSucceed).await;
}

async fn panics(rangecache: &Rangecache) -> f64 {
    rangecache.metrics().await.sum("rangecache_panics_total")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feed_and_admin_port_run_while_the_threads_of_calls_are_busy() {
    let etcd = etcd_with(1).await;
    let rangecache = with_fault_injection(&etcd, &[("--worker-threads", "1")]).await;
    let (through, direct) = (rangecache.client().await, etcd.client().await);
    let blocked = tokio::spawn(async move { through.inject_fault("block").await });
    until(SOON, "the only thread of calls is blocked", async || {
        rangecache
            .log()
            .contains("blocked by a planted fault")
            .then_some(())
    })
    .await;
    let written = direct
        .put(format!("{PREFIX}000"), "new")
        .await
        .expect("etcd writes");
    until(SOON, "the mirror has the write", async || {
        let reached = rangecache.metrics().await.sum("rangecache_mirror_revision");
        (reached >= written as f64).then_some(())
    })
    .await;
    let probe = http::get(&format!("{}/livez", rangecache.metrics_url())).await;
    assert_eq!(probe.expect("answers").status, 200);
    assert!(!blocked.is_finished());
    blocked.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_listener_serves_reads_alone() {
    let etcd = etcd_with(1).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    for path in ["/", "/status", "/livez", "/metrics"] {
        let url = format!("{}{path}", rangecache.metrics_url());
        for method in [Method::DELETE, Method::POST, Method::PUT, Method::OPTIONS] {
            let response = http::send(method.clone(), &url).await.expect("a response");
            assert_eq!(response.status, 405, "{method} {path}");
            assert_eq!(response.headers["allow"], "GET, HEAD");
        }
        let head = http::send(Method::HEAD, &url).await.expect("a response");
        assert_eq!((head.status, head.body.as_str()), (200, ""), "{path}");
    }
}

/// A connected endpoint without a failure has no error; one that cannot be reached has its error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_reports_errors_of_endpoints_only_if_there_were_any() {
    let etcd = etcd_with(1).await;
    let endpoints = format!("{},http://127.0.0.1:1", etcd.url());
    let rangecache = Rangecache::at(&endpoints).start().await;
    let status: Value = serde_json::from_str(&rangecache.admin("/status").await.body).expect("JSON");
    let (etcd, other) = (&status["endpoints"][0], &status["endpoints"][1]);
    assert_eq!(
        (&etcd["is_connected"], &etcd["last_error"]),
        (&true.into(), &"".into())
    );
    assert_eq!(other["is_connected"], false);
    assert!(
        other["last_error"]
            .as_str()
            .is_some_and(|error| error.contains("127.0.0.1:1"))
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn panic_fails_one_request_only() {
    let etcd = etcd_with(100).await;
    let rangecache = with_fault_injection(&etcd, &[]).await;
    let through = rangecache.client().await;
    let mut watch = through.watch(watch_all()).await;

    let faulty = through.with_metadata("rangecache-test-fault", "request");
    for path in [RANGE, "/etcdserverpb.Maintenance/Status"] {
        let reply = faulty.raw(path, &[]).await.expect("the connection is open");
        assert_eq!(reply.status().code, INTERNAL, "{reply:?}");
    }
    assert_eq!(panics(&rangecache).await, 2.0);

    let faulty = through.with_metadata("rangecache-test-fault", "body");
    let reply = faulty
        .range_raw(&RangeRequest::prefix(PREFIX))
        .await
        .expect("the connection is open");
    assert_eq!(reply.reset, Some(INTERNAL_ERROR), "{reply:?}");
    assert_eq!(panics(&rangecache).await, 3.0);

    // All other calls on that connection continue.
    recovers("a fault", &etcd, &rangecache, &through).await;
    etcd.client()
        .await
        .put(format!("{PREFIX}new"), "v")
        .await
        .expect("etcd writes");
    let seen: Option<WatchResponse> = watch.next_as(SOON).await;
    assert_eq!(seen.expect("the watch continues").events.len(), 1);
    assert!(rangecache.log().contains("a planted fault"), "the log says where");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn background_panic_restarts_the_task() {
    let etcd = etcd_with(10).await;
    let rangecache = with_fault_injection(&etcd, &[("--probe-interval", "50ms")]).await;
    let through = rangecache.client().await;
    for (n, fault) in [
        "feed", "check", "probe", "feed", "check", "check", "check", "check",
    ]
    .into_iter()
    .enumerate()
    {
        through.inject_fault(fault).await;
        let key = format!("{PREFIX}after/{n}");
        etcd.client().await.put(&key, "v").await.expect("etcd writes");
        until(SOON, "the fault has panicked", async || {
            let read = through.get(&key).await.expect("rangecache answers");
            assert!(read.is_some(), "a read after a panic of {fault} is stale");
            (panics(&rangecache).await == n as f64 + 1.0).then_some(())
        })
        .await;
        recovers("a fault", &etcd, &rangecache, &through).await;
    }
    let metrics = rangecache.metrics().await;
    let reloads = metrics.sum_with_label("rangecache_mirror_reloads_total", "reason=\"panicked\"");
    assert_eq!(reloads, 2.0, "each panic of the feed reloads the mirror");
}

fn watch_all() -> WatchCreateRequest {
    let all = RangeRequest::prefix(PREFIX);
    WatchCreateRequest {
        key: all.key,
        range_end: all.range_end,
        ..WatchCreateRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn corrupt_mirror_is_found_and_reloaded() {
    let etcd = etcd_with(100).await;
    let list = RangeRequest::prefix(PREFIX);
    let expected = etcd.client().await.range(&list).await.expect("etcd answers");

    // Without verification the corruption is visible: it is real. The first reads may be forwarded.
    let blind = with_fault_injection(&etcd, &[("--verify-interval", "0s")]).await;
    let through = blind.client().await;
    through.inject_fault("corrupt").await;
    until(SOON, "the injected fault loses a key", async || {
        let got = through.range(&list).await.expect("rangecache answers");
        (got.kvs.len() == 99).then_some(())
    })
    .await;

    let rangecache = with_fault_injection(&etcd, &[("--verify-interval", "200ms")]).await;
    let through = rangecache.client().await;
    through.inject_fault("corrupt").await;
    until(SOON, "verification finds the difference", async || {
        let metrics = rangecache.metrics().await;
        (metrics.sum("rangecache_verify_mismatch_total") >= 1.0).then_some(())
    })
    .await;
    let got = through.range(&list).await.expect("rangecache answers");
    assert_eq!(
        got.kvs,
        expected.kvs,
        "out of service at once: {}",
        rangecache.log()
    );
    recovers("a fault", &etcd, &rangecache, &through).await;
    let log = rangecache.log();
    assert!(log.contains("the mirror differs from etcd"), "{log}");
    assert!(!log.contains(PREFIX), "no key is logged: {log}");
    let metrics = rangecache.metrics().await;
    assert!(metrics.sum_with_label("rangecache_mirror_reloads_total", "reason=\"mismatch\"") > 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn verification_of_a_correct_mirror_finds_nothing() {
    let etcd = etcd_with(300).await;
    let rangecache = with_fault_injection(&etcd, &[("--verify-interval", "20ms")]).await;
    let direct = etcd.client().await;
    let rounds = async || {
        let metrics = rangecache.metrics().await;
        metrics.sum_with_label("rangecache_verify_rounds_total", "result=\"same\"")
    };
    let mut n = 0;
    until(SOON * 3, "many rounds under writes and compactions", async || {
        n += 1;
        let key = format!("{PREFIX}{:03}", n % 300);
        let revision = if n % 7 == 0 {
            direct.delete(&key).await
        } else {
            direct.put(&key, vec![b'w'; n % 5000]).await
        };
        if n % 50 == 0 {
            direct
                .compact(revision.expect("etcd writes"))
                .await
                .expect("etcd compacts");
        }
        (n > 500 && rounds().await >= 10.0).then_some(())
    })
    .await;
    let metrics = rangecache.metrics().await;
    assert_eq!(metrics.sum("rangecache_verify_mismatch_total"), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_endless_calls_with_unavailable() {
    let etcd = etcd_with(1).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--shutdown-timeout", FOR_EVER)
        .with("--watch-cache", "off")
        .start()
        .await;
    let through = rangecache.client().await;
    let mut watch = through.watch(watch_all()).await;
    // A stream without a response from etcd, because nothing was requested.
    let passed = async || rangecache.metrics().await.sum("rangecache_forwarded_calls_total");
    let before = passed().await;
    let mut silent = through.open(testkit::kv::WATCH);
    let silent = tokio::spawn(async move {
        assert!(silent.next().await.is_none(), "nothing was requested");
        silent
    });
    until(SOON, "the call is in flight", async || {
        (passed().await > before).then_some(())
    })
    .await;
    through.grant_lease(7, 600).await.expect("etcd grants");
    let mut keepalive = through.open("/etcdserverpb.Lease/LeaseKeepAlive");
    // In its request the lease's id is the first field.
    let request = LeaseGrantRequest { ttl: 7, id: 0 };
    keepalive.send(&request);
    assert!(keepalive.next().await.is_some(), "the lease is kept alive");
    let through_http = tokio::spawn(gateway_watch(rangecache.url().to_owned()));
    until(SOON, "the gateway's watch is open", async || {
        let metrics = etcd.metrics().await;
        (metrics.sum("etcd_debugging_mvcc_watcher_total") >= 3.0).then_some(())
    })
    .await;

    let end = tokio::spawn(rangecache.terminate());
    for stream in [&mut watch, &mut keepalive, &mut silent.await.expect("no panic")] {
        assert!(stream.next().await.is_none(), "no message before the end");
        let status = stream.end().expect("it has ended");
        assert_eq!(status.code, UNAVAILABLE, "{status:?}");
        assert!(status.message.contains("stopping"), "{status:?}");
    }
    through_http.await.expect("no panic");
    let status = end.await.expect("an end long before --shutdown-timeout");
    assert!(status.success(), "{status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_ends_watches_from_memory_with_unavailable() {
    let etcd = etcd_with(1).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--shutdown-timeout", FOR_EVER)
        .start()
        .await;
    let mut watch = rangecache.client().await.watch(watch_all()).await;
    let streams = rangecache.metrics().await.0;
    let from_memory = "rangecache_watch_streams{source=\"memory\",reason=\"mirrored\"}";
    assert_eq!(streams.get(from_memory), Some(&1.0), "{streams:?}");
    let end = tokio::spawn(rangecache.terminate());
    assert!(watch.next().await.is_none(), "no message before the end");
    let status = watch.end().expect("it has ended");
    assert_eq!(status.code, UNAVAILABLE, "{status:?}");
    assert!(end.await.expect("no panic").success());
}

/// Watches over the JSON gateway until the server ends the call.
async fn gateway_watch(url: String) {
    // "L29wZXJhdGlvbnMv" is the prefix, and "L29wZXJhdGlvbnMw" its end.
    let body = r#"{"create_request":{"key":"L29wZXJhdGlvbnMv","range_end":"L29wZXJhdGlvbnMw"}}"#;
    let answer = testkit::http::post(&format!("{url}/v3/watch"), body).await;
    assert!(
        answer
            .expect("a regular end of the response")
            .body
            .contains("created")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shutdown_does_not_wait_for_a_paused_etcd() {
    let etcd = etcd_with(1).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--shutdown-timeout", FOR_EVER)
        .with("--freshness-timeout", FOR_EVER)
        .with("--probe-interval", "10ms")
        .start()
        .await;
    etcd.pause();
    // A check is in flight, for which only the probe waits.
    until(SOON, "etcd is found unhealthy", async || {
        rangecache.log().contains("does not serve").then_some(())
    })
    .await;
    let status = rangecache.terminate().await;
    assert!(status.success(), "{status}");
    etcd.resume();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn port_handover_fails_no_call() {
    hand_over("http://127.0.0.1:0").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unix_socket_handover_fails_no_call() {
    let dir = TempDir::new().unwrap();
    hand_over(&format!("unix://{}", dir.path().join("socket").display())).await;
    let left: Vec<_> = std::fs::read_dir(dir.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "only the socket is left: {left:?}");
}

/// Another rangecache takes over the address while etcd's own Go client sends load (F9).
async fn hand_over(listen: &str) {
    let etcd = etcd_with(1).await;
    let mut old = Rangecache::before(&etcd)
        .with_flag("--socket-reuse-port")
        .listening_on(listen)
        .start()
        .await;
    let url = old.url().to_owned();
    let dir = TempDir::new().unwrap();
    let done = dir.path().join("done");
    let mut command = Command::new(tool("goclient"));
    command
        .args(["--endpoints", &url, "--load", "8", "--until"])
        .arg(&done)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    let load = command.spawn().expect("it starts");
    for _ in 0..3 {
        let direct = etcd.client().await;
        let written = async || direct.get("/load/0").await.expect("etcd answers");
        let before = written().await;
        let new = Rangecache::before(&etcd)
            .with_flag("--reuse-port")
            .listening_on(&url)
            .start()
            .await;
        until(SOON, "the load continues", async || {
            (written().await != before).then_some(())
        })
        .await;
        let old = std::mem::replace(&mut old, new);
        let status = old.terminate().await;
        assert!(status.success(), "{status}");
        let before = written().await;
        until(SOON, "the load continues", async || {
            (written().await != before).then_some(())
        })
        .await;
    }
    std::fs::write(&done, "").unwrap();
    let output = tokio::time::timeout(Duration::from_secs(60), load.wait_with_output())
        .await
        .expect("it ends")
        .expect("the client has run");
    let said = String::from_utf8_lossy(&output.stdout);
    let wrong = String::from_utf8_lossy(&output.stderr);
    println!("{said}");
    assert!(
        output.status.success() && said.contains("failures=0"),
        "{said}{wrong}"
    );
}

/// New calls move away from a suspended member at once, including those that must not be sent twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_move_away_from_a_paused_member() {
    let cluster = Cluster::start(Version::V3_7).await;
    let rangecache = Rangecache::at(&cluster.endpoints()).start().await;
    let through = rangecache.client().await;
    through.put(format!("{PREFIX}a"), "v").await.expect("etcd writes");
    let mut follower = None;
    for member in &cluster.members {
        let status = member.client().await.status().await.expect("a status");
        if status.header.expect("has a header").member_id != status.leader {
            follower = Some(member);
        }
    }
    let follower = follower.expect("two members follow");
    follower.pause();
    // Before HTTP/2's pings close its connections.
    let is_healthy = async || {
        let status = rangecache.admin("/status").await.body;
        let status: Value = serde_json::from_str(&status).expect("it is JSON");
        let endpoints = status["endpoints"].as_array().expect("a list").clone();
        let found = endpoints
            .into_iter()
            .find(|endpoint| endpoint["url"] == follower.url());
        found.expect("the endpoint")["is_healthy"] == true
    };
    until(
        Duration::from_secs(8),
        "the member is found unhealthy",
        async || (!is_healthy().await).then_some(()),
    )
    .await;
    // A call that still went to the member would hang until its connection is closed.
    for n in 0..100 {
        let put = through.put(format!("{PREFIX}b/{n}"), "v");
        let put = tokio::time::timeout(Duration::from_secs(5), put).await;
        put.expect("no put hangs").expect("etcd writes");
    }
    follower.resume();
    until(SOON, "the member is healthy again", async || {
        is_healthy().await.then_some(())
    })
    .await;
}
