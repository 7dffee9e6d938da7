//! Flags that change while the process runs: `--flags-file`, SIGHUP and `POST /reload`.

use std::path::Path;

use ::http::Method;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::http;
use testkit::proxy::{Builder, Rangecache};
use testkit::wait::{SOON, until};

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
    let rangecache = with_file(&etcd, &dir, "max-calls=1000\nlog-level=debug\n")
        .with("--shadow", "0.5")
        .start()
        .await;
    assert_eq!(limit(&rangecache, "max_calls").await, 1000.0);
    let (status, body) = send(&rangecache, Method::POST, "/reload").await;
    assert_eq!((status, body), (200, json!({"changed": [], "needs_restart": []})));

    // The command line wins over the file.
    write(
        &file,
        "max-calls=2000\nlog-level=info\nmax-connections=7\nshadow=0\nforward-max-small=3\n",
    );
    let (status, body) = send(&rangecache, Method::POST, "/reload").await;
    let changed = [
        "forward-max-small: 64 → 3",
        "max-calls: 1000 → 2000",
        "log-level: debug → info",
    ];
    let expected = json!({"changed": changed, "needs_restart": ["max-connections: 16384 → 7"]});
    assert_eq!((status, body), (200, expected));
    assert_eq!(limit(&rangecache, "max_calls").await, 2000.0);
    assert_eq!(limit(&rangecache, "max_connections").await, 16_384.0);
    let log = rangecache.log();
    assert!(log.contains("max-calls: 1000 → 2000"), "{log}");
    assert!(
        log.contains("flags differ that take effect with the next start only"),
        "{log}"
    );

    // By the signal, too.
    write(
        &file,
        "max-calls=3000\nlog-level=info\nmax-connections=7\nforward-max-small=3\n",
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
    let rangecache = with_file(&etcd, &dir, "max-calls=1000\n").start().await;
    for (text, says) in [
        (
            "max-calls=2000\nmax-cals=1\n",
            "line 2: max-cals is no flag of serving: did you mean max-calls?",
        ),
        (
            "max-calls=2000\nforward-max-small=none\n",
            "line 2: invalid value 'none'",
        ),
        ("max-calls=2000\nlog-level=loud\n", "is not a level"),
        ("max-calls=2000\nfreshness-timeout=0s\n", "longer than zero"),
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
