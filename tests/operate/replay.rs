//! `rangecache replay`: reads of an access log, played against etcd and against rangecache.

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};
use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::pb::{RangeRequest, WatchCreateRequest};
use testkit::proxy::{Rangecache, rangecache_command};
use testkit::wait::{SOON, until};

fn replay(file: &Path, endpoint: &str, more: &[&str]) -> Output {
    let mut command = rangecache_command();
    command
        .arg("replay")
        .arg(file)
        .args(["--endpoints", endpoint])
        .args(more);
    command.output().expect("rangecache runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Records reads, writes and a watch by a client of rangecache; returns the log's directory and file.
async fn recorded(etcd: &Etcd) -> (TempDir, std::path::PathBuf) {
    let dir = TempDir::with_prefix("replay-").unwrap();
    let file = dir.path().join("access.log");
    let rangecache = Rangecache::before(etcd)
        .with("--access-log", file.to_str().unwrap())
        .with_flag("--access-log-keys")
        .start()
        .await;
    let client = rangecache.client().await;
    for n in 0..20 {
        client
            .put(format!("/replay/a/{n:02}"), vec![n; 100])
            .await
            .expect("a write");
    }
    for n in 0..20 {
        client.get(format!("/replay/a/{n:02}")).await.expect("a read");
    }
    client
        .range(&RangeRequest::prefix("/replay/"))
        .await
        .expect("a list");
    client
        .range_stream(&RangeRequest::prefix("/replay/a/"))
        .await
        .expect("a stream");
    let ended = RangeRequest {
        revision: 1_000_000,
        ..RangeRequest::one("/future/x/y")
    };
    client.range(&ended).await.expect_err("a future revision");
    drop(
        client
            .watch(WatchCreateRequest {
                key: "/replay/a/".into(),
                ..WatchCreateRequest::default()
            })
            .await,
    );
    until(SOON, "every call is logged", async || {
        let text = std::fs::read_to_string(&file).ok()?;
        (text.lines().count() == 44).then_some(())
    })
    .await;
    (dir, file)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recorded_reads_are_played_against_etcd_and_rangecache() {
    let etcd = Etcd::start(Version::V3_7).await;
    let (_dir, file) = recorded(&etcd).await;
    let revision = etcd.client().await.put("/after", "v").await.expect("a write");
    let rangecache = Rangecache::before(&etcd).start().await;
    for (endpoint, speed) in [(etcd.url(), "1"), (rangecache.url().to_owned(), "max")] {
        let before = rangecache.outcomes().await;
        let output = replay(&file, &endpoint, &["--speed", speed, "--output", "json"]);
        assert_eq!(output.status.code(), Some(1), "one read fails: {output:?}");
        let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
        assert_eq!(
            (&report["calls"], &report["errors"]),
            (&json!(23), &json!(1)),
            "{report:#}"
        );
        let passed = report["passed_over"].as_object().expect("what was passed over");
        assert_eq!(
            (
                &passed["writes and other calls that are no reads"],
                &passed["watches"]
            ),
            (&json!(20), &json!(1))
        );
        let row = |method: &str, prefix: &str| {
            let rows = report["rows"].as_array().expect("rows").iter();
            let mut found = rows.filter(|row| row["method"] == method && row["prefix"] == prefix);
            found
                .next()
                .unwrap_or_else(|| panic!("no {method} {prefix} in {report:#}"))
                .clone()
        };
        let gets = row("Range", "/replay/a/");
        assert_eq!((&gets["count"], &gets["errors"]), (&json!(20), &json!({})));
        assert!(gets["p50_us"].as_u64() > Some(0) && gets["max_us"].as_u64() >= gets["p99_us"].as_u64());
        // The list and the stream have the same keys and values.
        assert_eq!(
            row("Range", "/replay/")["bytes"],
            row("RangeStream", "/replay/a/")["bytes"]
        );
        assert_eq!(row("Range", "/future/x/")["errors"], json!({"OutOfRange": 1}));
        if endpoint == rangecache.url() {
            let outcomes = rangecache.outcomes_since(&before, 22).await;
            assert!(outcomes.of("hit") + outcomes.of("waited") >= 21, "{outcomes:?}");
        }
    }
    let output = replay(&file, &etcd.url(), &["--speed", "10", "--concurrency", "1"]);
    let table = text(&output.stdout);
    for part in [
        "p99 ms",
        "/replay/a/",
        "OutOfRange 1",
        "passed over: 20 writes",
        "passed over: 1 watches",
    ] {
        assert!(table.contains(part), "{part} not in\n{table}");
    }
    let now = etcd
        .client()
        .await
        .range(&RangeRequest::one("/after"))
        .await
        .expect("a read");
    assert_eq!(now.revision(), revision, "nothing was written");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn access_log_that_cannot_be_played_is_refused_with_the_reason() {
    let etcd = Etcd::start(Version::V3_7).await;
    let (dir, file) = recorded(&etcd).await;
    let log = std::fs::read_to_string(&file).unwrap();
    let broken = dir.path().join("broken.log");
    let without_keys: String = log
        .lines()
        .map(|line| {
            let mut line: Value = serde_json::from_str(line).unwrap();
            line.as_object_mut()
                .unwrap()
                .retain(|name, _| !name.starts_with("key") && !name.starts_with("range_end"));
            format!("{line}\n")
        })
        .collect();
    let cut = log.replacen("\"method\"", "\"methOd\"", 1);
    for (content, says) in [
        (
            cut.as_str(),
            "line 1 is no line of an access log: missing field `method`",
        ),
        (
            without_keys.as_str(),
            "record the access log with --access-log-keys",
        ),
        ("", "there is no read to play in 0 lines"),
    ] {
        std::fs::write(&broken, content).unwrap();
        let output = replay(&broken, &etcd.url(), &[]);
        let error = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{error}");
        assert!(
            error.contains(says) && error.contains("broken.log"),
            "{says} not in {error}"
        );
    }
    let output = replay(Path::new("/no/such/file"), &etcd.url(), &[]);
    assert!(text(&output.stderr).contains("No such file"), "{output:?}");
    let output = replay(&file, "http://127.0.0.1:1", &["--connect-timeout", "200ms"]);
    assert!(
        output.status.code() == Some(1) && !output.stderr.is_empty(),
        "{output:?}"
    );
}

#[test]
fn help_of_replay_has_examples_and_the_flags_that_matter() {
    let output = rangecache_command().args(["replay", "--help"]).output().unwrap();
    let help = text(&output.stdout);
    for part in [
        "rangecache replay access.log --endpoints http://etcd:2379",
        "--access-log-keys",
        "--speed <1|N|max>",
        "--cacert",
        "Writes and watches are never played",
    ] {
        assert!(help.contains(part), "{part} not in\n{help}");
    }
    assert!(
        !help.contains("--history-max-bytes"),
        "flags without a meaning are not shown:\n{help}"
    );
}
