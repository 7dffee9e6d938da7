//! The access log: a line per call, opened again on SIGHUP, and never in the way of a call.

use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use futures_util::future::join_all;
use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::http;
use testkit::pb::{DESCEND, LeaseGrantRequest, RangeRequest, WatchCreateRequest, WatchResponse, prefix_end};
use testkit::proxy::{Builder, Rangecache, rangecache_command};
use testkit::wait::{SOON, until};

/// Part of each key that must not be logged without being asked for.
const NAME: &str = "the-name-of-a-secret";
/// A value, which must never be logged.
const VALUE: &str = "the-value-of-a-secret";
const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

fn logging(etcd: &Etcd, file: &Path) -> Builder {
    Rangecache::before(etcd)
        .with("--cache-prefix", "/cached/")
        .with("--access-log", file.to_str().unwrap())
}

fn directory() -> (TempDir, PathBuf) {
    let dir = TempDir::with_prefix("access-log-").unwrap();
    let file = dir.path().join("access.log");
    (dir, file)
}

fn lines(text: &str) -> Vec<Value> {
    let lines = text.lines().map(serde_json::from_str);
    lines.collect::<Result<_, _>>().expect("each line is JSON")
}

/// The lines of `file`, once there are at least `count`.
async fn written(file: &Path, count: usize) -> Vec<Value> {
    until(SOON, "the access log is written", async || {
        let text = std::fs::read_to_string(file).ok()?;
        let lines = lines(text.rsplit_once('\n')?.0);
        (lines.len() >= count).then_some(lines)
    })
    .await
    .0
}

/// The lines of calls of `method`, without what differs between two runs.
fn of<'a>(lines: &'a [Value], method: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["method"] == method).collect()
}

fn assert_contains(line: &Value, expected: &Value) {
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(&line[name], value, "{name} of {line}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_call_has_a_line() {
    let etcd = Etcd::start(Version::V3_7).await;
    let (_dir, file) = directory();
    let rangecache = logging(&etcd, &file).with_flag("--access-log-keys").start().await;
    let client = rangecache.client().await;
    let revision = client
        .put(format!("/cached/x/{NAME}"), VALUE)
        .await
        .expect("a write");
    let traced = client.with_metadata("traceparent", &format!("00-{TRACE}-00f067aa0ba902b7-00"));
    let list = RangeRequest {
        limit: 7,
        keys_only: true,
        sort_order: DESCEND,
        revision,
        ..RangeRequest::prefix("/cached/x/")
    };
    traced.range(&list).await.expect("a list");
    client
        .range_stream(&RangeRequest::prefix("/cached/"))
        .await
        .expect("a stream");
    client.get("/elsewhere/y/z").await.expect("a read");
    for prefix in ["/cached/x/", "/elsewhere/"] {
        let mut watch = client
            .watch(WatchCreateRequest {
                key: prefix.into(),
                range_end: prefix_end(prefix.as_bytes()),
                ..WatchCreateRequest::default()
            })
            .await;
        for n in 0..3 {
            client.put(format!("{prefix}{n}"), VALUE).await.expect("a write");
            let events: Option<WatchResponse> = watch.next_as(SOON).await;
            assert_eq!(events.map(|response| response.events.len()), Some(1));
        }
    }
    let lease = LeaseGrantRequest::default();
    client
        .raw(
            "/etcdserverpb.Lease/NoSuchMethod",
            &prost::Message::encode_to_vec(&lease),
        )
        .await
        .unwrap();
    let url = rangecache.url();
    let json = http::post(&format!("{url}/v3/kv/range"), "{\"key\":\"L2NhY2hlZC94LzA=\"}")
        .await
        .unwrap();
    http::get(&format!("{url}/no/such/path")).await.unwrap();

    let lines = written(&file, 15).await;
    assert_eq!(lines.len(), 15, "{lines:#?}");
    for line in &lines {
        assert_eq!(line["client"], "127.0.0.1", "{line}");
        let time = line["time"].as_str().unwrap();
        assert!(time.len() == 27 && time.ends_with('Z'), "{time}");
        let micros = |name: &str| line[name].as_u64().unwrap_or(0);
        let parts = micros("prove_us") + micros("respond_us") + micros("send_us");
        assert!(micros("duration_us").abs_diff(parts) <= 3, "{line}");
    }
    let puts = of(&lines, "etcdserverpb.KV/Put");
    assert_eq!(puts.len(), 7);
    assert_contains(
        puts[0],
        &json!({"code": 0, "header_revision": revision, "key": null}),
    );
    assert!(puts[0]["bytes"].as_u64().unwrap() > 5, "{}", puts[0]);
    let reads = of(&lines, "etcdserverpb.KV/Range");
    assert_contains(
        reads[0],
        &json!({
            "prefix": "/cached/x/", "key": "/cached/x/", "range_end": "/cached/x0", "limit": 7, "keys_only": true,
            "sort_order": DESCEND, "revision": revision, "header_revision": revision, "reason": "pinned", "code": 0,
            "trace_id": TRACE,
        }),
    );
    assert!(reads[0]["prove_us"].is_u64(), "{}", reads[0]);
    assert_contains(
        reads[1],
        &json!({
            "prefix": "/elsewhere/y/", "key": "/elsewhere/y/z", "range_end": null, "outcome": "forwarded",
            "reason": "not_mirrored", "header_revision": revision, "code": 0, "trace_id": null,
        }),
    );
    let streams = of(&lines, "etcdserverpb.KV/RangeStream");
    assert_contains(
        streams[0],
        &json!({"prefix": "/cached/", "range_end": "/cached0", "header_revision": revision, "code": 0}),
    );
    let watches = of(&lines, "etcdserverpb.Watch/Watch");
    for (watch, prefix, source, last) in [
        (watches[0], "/cached/x/", "memory", revision + 3),
        (watches[1], "/elsewhere/", "etcd", revision + 6),
    ] {
        assert_contains(
            watch,
            &json!({"prefix": prefix, "outcome": source, "events": 3, "code": 1, "header_revision": last}),
        );
    }
    assert_contains(
        of(&lines, "etcdserverpb.Lease/NoSuchMethod")[0],
        &json!({"code": 12}),
    );
    let gateway = of(&lines, "/v3/kv/range");
    assert_contains(
        gateway[0],
        &json!({"key": "/cached/x/0", "http_status": 200, "bytes": json.body.len(), "reason": "linearizable"}),
    );
    assert_contains(of(&lines, "/no/such/path")[0], &json!({"http_status": 404}));
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains(VALUE), "values are never logged");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn access_log_names_prefixes_only_and_is_private() {
    let etcd = Etcd::start(Version::V3_7).await;
    let (_dir, file) = directory();
    let rangecache = logging(&etcd, &file).start().await;
    let client = rangecache.client().await;
    for prefix in ["/cached/x/", "/elsewhere/"] {
        client
            .put(format!("{prefix}{NAME}"), VALUE)
            .await
            .expect("a write");
        client.get(format!("{prefix}{NAME}")).await.expect("a read");
        let watch = WatchCreateRequest {
            key: format!("{prefix}{NAME}").into(),
            ..WatchCreateRequest::default()
        };
        drop(client.watch(watch).await);
    }
    let url = format!("{}/v3/kv/range", rangecache.url());
    http::post(&url, "{\"key\":\"dGhlLW5hbWUtb2YtYS1zZWNyZXQ=\"}")
        .await
        .unwrap();
    let lines = written(&file, 7).await;
    let prefixes: Vec<&Value> = of(&lines, "etcdserverpb.KV/Range")
        .iter()
        .map(|line| &line["prefix"])
        .collect();
    assert_eq!(prefixes, ["/cached/x/", "/elsewhere/"]);
    assert_contains(of(&lines, "/v3/kv/range")[0], &json!({"http_status": 200}));
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains(NAME) && !text.contains(VALUE), "{text}");
    let mode = std::fs::metadata(&file).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hangup_opens_the_access_log_again_and_ends_nothing() {
    let etcd = Etcd::start(Version::V3_7).await;
    let (dir, file) = directory();
    let rangecache = logging(&etcd, &file).start().await;
    let client = rangecache.client().await;
    client.get("/cached/a").await.expect("a read");
    written(&file, 1).await;
    let rotated = dir.path().join("access.log.1");
    std::fs::rename(&file, &rotated).unwrap();
    client.get("/cached/b").await.expect("a read");
    assert_eq!(written(&rotated, 2).await.len(), 2);
    rangecache.signal("HUP");
    until(SOON, "the file is opened again", async || {
        file.exists().then_some(())
    })
    .await;
    client.get("/cached/c").await.expect("the connection is open");
    assert_eq!(written(&file, 1).await.len(), 1);
    assert_eq!(lines(&std::fs::read_to_string(&rotated).unwrap()).len(), 2);
    // A file that cannot be opened again leaves the old one in use.
    std::fs::rename(&file, dir.path().join("access.log.2")).unwrap();
    std::fs::create_dir(&file).unwrap();
    rangecache.signal("HUP");
    until(SOON, "the log reports it", async || {
        rangecache
            .log()
            .contains("the access log cannot be opened again")
            .then_some(())
    })
    .await;
    client.get("/cached/d").await.expect("the connection is open");
    written(&dir.path().join("access.log.2"), 2).await;

    let without = Rangecache::before(&etcd).start().await;
    let client = without.client().await;
    without.signal("HUP");
    client.get("/cached/e").await.expect("SIGHUP ends nothing");
    assert!(without.terminate().await.success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn access_log_on_standard_output_is_complete_after_a_shutdown() {
    let etcd = Etcd::start(Version::V3_7).await;
    let dir = TempDir::with_prefix("access-log-").unwrap();
    let (file, url) = (dir.path().join("stdout"), dir.path().join("socket"));
    let stdout = std::fs::File::create(&file).unwrap();
    let listen = format!("unix://{}", url.display());
    let mut process = rangecache_command()
        .args([
            "--endpoints",
            &etcd.url(),
            "--listen-client-urls",
            "http://127.0.0.1:0",
        ])
        .args([
            "--listen-metrics-urls",
            &listen,
            "--access-log",
            "-",
            "--log-format",
            "json",
        ])
        .stdout(stdout)
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut stderr = std::io::BufRead::lines(std::io::BufReader::new(process.stderr.take().unwrap()));
    let url = stderr
        .by_ref()
        .map(|line| serde_json::from_str::<Value>(&line.unwrap()).expect("the log is on standard error"))
        .find(|line| line["message"] == "serving clients")
        .expect("it serves")["url"]
        .as_str()
        .unwrap()
        .to_owned();
    let client = testkit::grpc::Client::connect(&url).await;
    join_all((0..300).map(|n| client.get(format!("/k/{n}")))).await;
    let killed = std::process::Command::new("kill")
        .arg(process.id().to_string())
        .status()
        .unwrap();
    assert!(killed.success() && process.wait().unwrap().success());
    assert_eq!(lines(&std::fs::read_to_string(&file).unwrap()).len(), 300);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reader_of_the_access_log_that_stops_delays_no_call() {
    let etcd = Etcd::start(Version::V3_7).await;
    let (_dir, pipe) = directory();
    assert!(
        std::process::Command::new("mkfifo")
            .arg(&pipe)
            .status()
            .unwrap()
            .success()
    );
    // Open for both directions, so that neither side waits for the other; nothing is ever read.
    let unread = std::fs::File::options()
        .read(true)
        .write(true)
        .open(&pipe)
        .unwrap();
    let rangecache = logging(&etcd, &pipe).start().await;
    let client = rangecache.client().await;
    let mut calls = 0;
    let dropped = "rangecache_access_log_lines_total{result=\"dropped\"}";
    until(SOON * 3, "calls are left out", async || {
        let reads = join_all((0..500).map(|_| client.get("/cached/a"))).await;
        assert!(reads.iter().all(Result::is_ok), "no call fails");
        calls += reads.len();
        let metrics = rangecache.metrics().await;
        metrics
            .0
            .get(dropped)
            .is_some_and(|count| *count > 0.0)
            .then_some(())
    })
    .await;
    assert!(calls > 4096, "the queue holds 4,096 calls: {calls}");
    until(SOON, "the log reports it", async || {
        rangecache
            .log()
            .contains("calls are missing in the access log")
            .then_some(())
    })
    .await;
    assert!(rangecache.terminate().await.success(), "it stops all the same");
    drop(unread);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn share_of_the_calls_is_logged_and_traces_as_a_whole() {
    let etcd = Etcd::start(Version::V3_7).await;
    let (_dir, file) = directory();
    let rangecache = logging(&etcd, &file)
        .with("--access-log-sample", "0.25")
        .start()
        .await;
    let client = rangecache.client().await;
    join_all((0..400).map(|_| client.get("/cached/a"))).await;
    let [kept, left_out] =
        [("0", true), ("f", false)].map(|(digit, _)| format!("{TRACE:.16}{}", digit.repeat(15)) + "1");
    for trace in [&kept, &left_out] {
        let traced = client.with_metadata("traceparent", &format!("00-{trace}-00f067aa0ba902b7-00"));
        join_all((0..5).map(|_| traced.get("/cached/a"))).await;
    }
    let log = written(&file, 105).await;
    let of_trace = |trace: &str| log.iter().filter(|line| line["trace_id"] == *trace).count();
    assert_eq!((of_trace(&kept), of_trace(&left_out)), (5, 0));
    assert!((105..=106).contains(&log.len()), "{}", log.len());
}

#[test]
fn access_log_that_cannot_be_opened_is_refused_at_the_start() {
    let output = rangecache_command()
        .args([
            "--access-log",
            "/no/such/directory/access.log",
            "--endpoints",
            "http://127.0.0.1:1",
        ])
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    for part in [
        "--access-log /no/such/directory/access.log",
        "No such file or directory",
        "- for standard output",
    ] {
        assert!(text.contains(part), "{part} not in {text}");
    }
    assert!(!text.contains("serving"), "no port was bound");
}
