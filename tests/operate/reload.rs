//! Flags that change while the process runs: `--flags-file`, SIGHUP and `POST /reload`.

use std::path::Path;

use ::http::Method;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::http;
use testkit::pb::{WatchCreateRequest, WatchResponse, prefix_end};
use testkit::proxy::{Builder, Rangecache};
use testkit::wait::{SOON, until};
use tokio::net::UnixStream;

/// A rangecache with a flags file of this text.
fn with_file(etcd: &Etcd, dir: &TempDir, text: &str) -> Builder {
    let file = dir.path().join("flags");
    write(&file, text);
    Rangecache::before(etcd).with("--flags-file", file.to_str().unwrap())
}

fn write(file: &Path, text: &str) {
    std::fs::write(file, text).unwrap();
}

/// Status and JSON of a request to the metrics listener.
async fn send(rangecache: &Rangecache, method: Method, path: &str) -> (u16, Value) {
    let url = format!("{}{path}", rangecache.metrics_url());
    let response = http::send(method, &url).await.unwrap();
    (response.status, serde_json::from_str(&response.body).unwrap())
}

async fn limit(rangecache: &Rangecache, limit: &str) -> f64 {
    let metrics = rangecache.metrics().await;
    metrics.0[&format!("rangecache_limit{{limit=\"{limit}\"}}")]
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reload_changes_flags_of_the_file_and_names_those_that_need_a_restart() {
    let etcd = Etcd::start(Version::V3_7).await;
    let dir = TempDir::with_prefix("flags-").unwrap();
    let file = dir.path().join("flags");
    let rangecache = with_file(
        &etcd,
        &dir,
        "RANGECACHE_MAX_CALLS=1000\nRANGECACHE_LOG_LEVEL=debug\n",
    )
    .with("--trace-sample", "0.5")
    .start()
    .await;
    assert_eq!(limit(&rangecache, "max_calls").await, 1000.0);
    let (status, body) = send(&rangecache, Method::POST, "/reload").await;
    assert_eq!((status, body), (200, json!({"changed": [], "needs_restart": []})));

    // The command line wins over the file.
    write(
        &file,
        "RANGECACHE_MAX_CALLS=2000\nRANGECACHE_LOG_LEVEL=info\nRANGECACHE_MAX_CONCURRENT_STREAMS=7\nRANGECACHE_TRACE_SAMPLE=0\nRANGECACHE_FORWARD_MAX_SMALL=3\n",
    );
    let (status, body) = send(&rangecache, Method::POST, "/reload").await;
    let changed = [
        "forward-max-small: 64 → 3",
        "max-calls: 1000 → 2000",
        "log-level: debug → info",
    ];
    let expected = json!({"changed": changed, "needs_restart": ["max-concurrent-streams: 1000 → 7"]});
    assert_eq!((status, body), (200, expected));
    assert_eq!(limit(&rangecache, "max_calls").await, 2000.0);
    assert_eq!(limit(&rangecache, "max_concurrent_streams").await, 1000.0);
    let log = rangecache.log();
    assert!(log.contains("max-calls: 1000 → 2000"), "{log}");
    assert!(
        log.contains("flags differ that take effect with the next start only"),
        "{log}"
    );

    // By the signal, too.
    write(
        &file,
        "RANGECACHE_MAX_CALLS=3000\nRANGECACHE_LOG_LEVEL=info\nRANGECACHE_MAX_CONCURRENT_STREAMS=7\nRANGECACHE_FORWARD_MAX_SMALL=3\n",
    );
    rangecache.signal("HUP");
    until(SOON, "the signal reloads", async || {
        (limit(&rangecache, "max_calls").await == 3000.0).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_file_is_refused_as_a_whole_and_changes_nothing() {
    let etcd = Etcd::start(Version::V3_7).await;
    let dir = TempDir::with_prefix("flags-").unwrap();
    let file = dir.path().join("flags");
    let rangecache = with_file(&etcd, &dir, "RANGECACHE_MAX_CALLS=1000\n")
        .start()
        .await;
    for (text, says) in [
        (
            "RANGECACHE_MAX_CALLS=2000\nRANGECACHE_MAX_CALS=1\n",
            "line 2: RANGECACHE_MAX_CALS is no setting of rangecache: did you mean RANGECACHE_MAX_CALLS?",
        ),
        (
            "RANGECACHE_MAX_CALLS=2000\nRANGECACHE_FORWARD_MAX_SMALL=none\n",
            "line 2: invalid value 'none'",
        ),
        (
            "RANGECACHE_MAX_CALLS=2000\nRANGECACHE_LOG_LEVEL=loud\n",
            "is not a level",
        ),
        (
            "RANGECACHE_MAX_CALLS=2000\nRANGECACHE_FRESHNESS_TIMEOUT=0s\n",
            "longer than zero",
        ),
    ] {
        write(&file, text);
        let (status, body) = send(&rangecache, Method::POST, "/reload").await;
        assert_eq!(status, 400, "{body}");
        assert!(body["error"].as_str().unwrap().contains(says), "{body}");
        assert_eq!(limit(&rangecache, "max_calls").await, 1000.0);
    }
    std::fs::remove_file(&file).unwrap();
    let (status, body) = send(&rangecache, Method::POST, "/reload").await;
    assert_eq!(status, 400, "{body}");
    let metrics = rangecache.metrics().await;
    assert_eq!(
        metrics.0["rangecache_flag_reloads_total{result=\"refused\"}"],
        5.0
    );
    assert!(rangecache.log().contains("the flags cannot be reloaded"));
    rangecache
        .client()
        .await
        .get("/a")
        .await
        .expect("the process serves");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reload_is_refused_to_web_pages_and_other_methods() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let url = format!("{}/reload", rangecache.metrics_url());
    let origin = [("origin", "https://page.example")];
    assert_eq!(http::post_with(&url, &origin, "").await.unwrap().status, 403);
    assert_eq!(send(&rangecache, Method::GET, "/reload").await.0, 405);
    let metrics = rangecache.metrics().await;
    assert_eq!(metrics.sum("rangecache_flag_reloads_total"), 0.0);
}

/// Status of `POST /reload`, and of `POST /forward-all`, over a loopback address and through a unix socket.
async fn control(mode: &str) -> ([u16; 2], [u16; 2]) {
    let etcd = Etcd::start(Version::V3_7).await;
    let dir = TempDir::with_prefix("control-").unwrap();
    let socket = dir.path().join("admin");
    let rangecache = Rangecache::before(&etcd)
        .with("--listen-metrics-urls", &format!("unix://{}", socket.display()))
        .with("--control", mode)
        .start()
        .await;
    let (mut by_address, mut by_socket) = ([0; 2], [0; 2]);
    for (at, path) in ["/reload", "/forward-all"].into_iter().enumerate() {
        by_address[at] = send(&rangecache, Method::POST, path).await.0;
        let stream = UnixStream::connect(&socket).await.unwrap();
        let response = http::over(stream, Method::POST, "localhost", path, String::new()).await;
        by_socket[at] = response.unwrap().status;
    }
    // Reads, and the signal, do not depend on it.
    assert_eq!(rangecache.admin("/metrics").await.status, 200);
    let reloads = async || rangecache.metrics().await.sum("rangecache_flag_reloads_total");
    let before = reloads().await;
    rangecache.signal("HUP");
    until(SOON, "the signal reloads", async || {
        (reloads().await > before).then_some(())
    })
    .await;
    (by_address, by_socket)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn control_is_accepted_from_where_the_flag_says() {
    assert_eq!(control("local").await, ([200; 2], [200; 2]));
    assert_eq!(control("unix").await, ([403; 2], [200; 2]));
    assert_eq!(control("off").await, ([403; 2], [403; 2]));
}

/// Outcome and reason of one read of `key`.
async fn outcome(rangecache: &Rangecache, key: &str) -> (String, String) {
    let before = rangecache.outcomes().await;
    rangecache.client().await.get(key).await.unwrap();
    let outcomes = rangecache.outcomes_since(&before, 1).await;
    outcomes.0.into_keys().next().unwrap()
}

async fn is_from_memory(rangecache: &Rangecache, key: &str) -> bool {
    ["hit", "waited"].contains(&outcome(rangecache, key).await.0.as_str())
}

async fn prefixes_change(version: Version) {
    let etcd = Etcd::start(version).await;
    let dir = TempDir::with_prefix("flags-").unwrap();
    let file = dir.path().join("flags");
    let rangecache = with_file(&etcd, &dir, "RANGECACHE_CACHE_PREFIX=/a/\n")
        .start()
        .await;
    let (client, direct) = (rangecache.client().await, etcd.client().await);
    direct.put("/a/1", "one").await.unwrap();
    direct.put("/b/1", "one").await.unwrap();
    assert!(is_from_memory(&rangecache, "/a/1").await);
    assert_eq!(outcome(&rangecache, "/b/1").await.1, "not_mirrored");
    let mut watch = client
        .watch(WatchCreateRequest {
            key: "/a/".into(),
            range_end: prefix_end(b"/a/"),
            ..WatchCreateRequest::default()
        })
        .await;

    // A mirror is added; the other one serves meanwhile.
    write(&file, "RANGECACHE_CACHE_PREFIX=/a/,/b/\n");
    let (status, body) = send(&rangecache, Method::POST, "/reload").await;
    assert_eq!(
        (status, &body["changed"]),
        (200, &json!(["cache-prefix: /a/ → /a/,/b/"]))
    );
    assert!(is_from_memory(&rangecache, "/a/1").await);
    assert_eq!(rangecache.admin("/readyz").await.status, 200);
    until(SOON, "the new mirror is loaded", async || {
        is_from_memory(&rangecache, "/b/1").await.then_some(())
    })
    .await;

    // One is removed; its reads are forwarded, and its watch continues at etcd.
    write(&file, "RANGECACHE_CACHE_PREFIX=/b/\n");
    let events = tokio::spawn(async move {
        let mut values = Vec::new();
        while values.len() < 100 {
            let response = watch.next_as::<WatchResponse>(SOON).await.unwrap();
            for event in response.events {
                values.push(String::from_utf8(event.kv.unwrap().value.to_vec()).unwrap());
            }
        }
        (watch, values)
    });
    for n in 0..100 {
        if n == 50 {
            assert_eq!(send(&rangecache, Method::POST, "/reload").await.0, 200);
        }
        direct.put("/a/2", n.to_string()).await.unwrap();
    }
    let (mut watch, values) = events.await.unwrap();
    assert_eq!(values, (0..100).map(|n| n.to_string()).collect::<Vec<_>>());
    assert_eq!(outcome(&rangecache, "/a/1").await.1, "not_mirrored");
    assert!(is_from_memory(&rangecache, "/b/1").await);
    let metrics = rangecache.metrics().await;
    assert!(
        !metrics
            .0
            .contains_key("rangecache_mirror_in_service{mirror=\"/a/\"}")
    );
    assert_eq!(metrics.0["rangecache_mirror_in_service{mirror=\"/b/\"}"], 1.0);
    assert_eq!(rangecache.admin("/readyz").await.status, 200);

    // It is added again: with all that was written meanwhile, and the watch returns to it.
    write(&file, "RANGECACHE_CACHE_PREFIX=/a/,/b/\n");
    assert_eq!(send(&rangecache, Method::POST, "/reload").await.0, 200);
    until(SOON, "the mirror is loaded again", async || {
        is_from_memory(&rangecache, "/a/2").await.then_some(())
    })
    .await;
    assert_eq!(client.get("/a/2").await.unwrap().unwrap(), b"99");
    until(SOON * 2, "the watch returns to memory", async || {
        (rangecache.metrics().await.watch_streams("memory") == 1.0).then_some(())
    })
    .await;
    direct.put("/a/2", "last").await.unwrap();
    let response = watch.next_as::<WatchResponse>(SOON).await.unwrap();
    assert_eq!(response.events.len(), 1);
    assert_eq!(response.events[0].kv.as_ref().unwrap().value, &b"last"[..]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mirrors_are_added_and_removed_while_others_serve_3_7() {
    prefixes_change(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn mirrors_are_added_and_removed_while_others_serve_3_6() {
    prefixes_change(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn mirrors_are_added_and_removed_while_others_serve_3_5() {
    prefixes_change(Version::V3_5).await;
}
