//! `rangecache status`, `health` and `ctl` in front of a rangecache that runs.

use std::io::Read as _;
use std::process::Output;

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::proxy::{Rangecache, rangecache_command};
use testkit::wait::SOON;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

/// Runs a command, which asks at `url`.
async fn ask(args: &[&str], url: &str) -> Output {
    let mut command = rangecache_command();
    command.args(args).args(["--metrics-url", url]);
    let child = tokio::process::Command::from(command).kill_on_drop(true).output();
    tokio::time::timeout(SOON, child)
        .await
        .expect("it ends")
        .expect("it starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn running_rangecache_is_asked_and_does_what_it_is_told() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    etcd.client().await.put("/a/1", "value").await.expect("etcd puts");
    let dir = TempDir::with_prefix("flags-").unwrap();
    let file = dir.path().join("flags");
    std::fs::write(&file, "RANGECACHE_MAX_CALLS=1000\n").unwrap();
    let rangecache = Rangecache::before(&etcd)
        .with("--flags-file", file.to_str().unwrap())
        .start()
        .await;
    let url = rangecache.metrics_url().to_owned();

    let status = ask(&["status"], &url).await;
    let printed = text(&status.stdout);
    assert_eq!(status.status.code(), Some(0), "{printed}");
    for part in [
        "ready",
        "mirror   everything: in service at revision 2, 1 key",
        "endpoint http://",
        "etcd 3.7",
    ] {
        assert!(printed.contains(part), "{part} is not in {printed}");
    }
    let status = ask(&["status", "--output", "json"], &url).await;
    let status: Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["ready"], json!(true));
    for args in [&["health"][..], &["health", "--ready"]] {
        let health = ask(args, &url).await;
        assert_eq!(health.status.code(), Some(0), "{health:?}");
    }

    let switched = ask(&["ctl", "forward-all"], &url).await;
    assert_eq!(
        (switched.status.code(), text(&switched.stdout)),
        (Some(0), "{\"forward_all\":true}\n".to_owned())
    );
    assert_eq!(rangecache.metrics().await.sum("rangecache_forward_all"), 1.0);
    let printed = text(&ask(&["status"], &url).await.stdout);
    assert!(printed.contains("warn memory is switched off"), "{printed}");
    assert!(
        printed.contains(": ready, but nothing is answered from memory"),
        "{printed}"
    );
    let health = ask(&["health", "--ready"], &url).await;
    assert_eq!(health.status.code(), Some(1), "{health:?}");
    assert!(
        text(&health.stdout).contains("nothing is answered from memory"),
        "{health:?}"
    );
    assert_eq!(ask(&["ctl", "use-memory"], &url).await.status.code(), Some(0));
    assert_eq!(rangecache.metrics().await.sum("rangecache_forward_all"), 0.0);

    std::fs::write(&file, "RANGECACHE_MAX_CALLS=2000\n").unwrap();
    let reloaded = text(&ask(&["ctl", "reload"], &url).await.stdout);
    assert!(reloaded.contains("max-calls: 1000 → 2000"), "{reloaded}");
    std::fs::write(&file, "RANGECACHE_MAX_CALLS=many\n").unwrap();
    let refused = ask(&["ctl", "reload"], &url).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stdout).contains("error"), "{refused:?}");
    let told = async || {
        let printed = text(&ask(&["status"], &url).await.stdout);
        printed
            .contains("warn the flags could not be reloaded")
            .then_some(())
    };
    testkit::wait::until(SOON, "the status has what its alert says", told).await;

    etcd.stop();
    let bad = async || {
        let status = ask(&["status"], &url).await;
        let printed = text(&status.stdout);
        (status.status.code() == Some(1) && printed.contains("BAD ")).then_some(printed)
    };
    let (printed, _) = testkit::wait::until(SOON, "the status is bad", bad).await;
    assert!(printed.contains("not connected"), "{printed}");
    drop(rangecache);
    let gone = ask(&["health"], &url).await;
    assert_eq!(gone.status.code(), Some(2));
    let told = text(&gone.stderr);
    assert!(
        told.contains("no rangecache responds at") && told.contains("--metrics-url"),
        "{told}"
    );
}

/// Series of what has not happened exist only for failures whose first one an alert must see.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_process_exports_few_series() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let series = rangecache.metrics().await.0;
    let mut names: Vec<_> = series.keys().map(String::as_str).collect();
    names.sort_unstable();
    assert!(names.len() <= 300, "{}: {names:#?}", names.len());
    assert!(series.contains_key("rangecache_panics_total"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scrape_is_compressed_for_who_takes_gzip() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let scrape = async |coding: &str| {
        let address = rangecache.metrics_url().trim_start_matches("http://");
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!(
            "GET /metrics HTTP/1.1\r\nhost: {address}\r\naccept-encoding: {coding}\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut response = Vec::new();
        stream.read_to_end(&mut response).await.unwrap();
        let end = response
            .windows(4)
            .position(|bytes| bytes == b"\r\n\r\n")
            .unwrap();
        (
            text(&response[..end]).to_ascii_lowercase(),
            response.split_off(end + 4),
        )
    };
    let (head, plain) = scrape("identity").await;
    assert!(
        head.starts_with("http/1.1 200") && !head.contains("content-encoding"),
        "{head}"
    );
    let (head, compressed) = scrape("gzip").await;
    assert!(
        head.contains("content-encoding: gzip") && head.contains("vary: accept-encoding"),
        "{head}"
    );
    let mut read = String::new();
    flate2::read::GzDecoder::new(&compressed[..])
        .read_to_string(&mut read)
        .unwrap();
    assert!(read.contains("rangecache_mirror_in_service") && compressed.len() * 3 < plain.len());
}
