//! Outage of etcd as operators see it: failed calls are reported as failed, neither as etcd's responses nor as
//! refusals.

use std::collections::BTreeMap;

use prost::Message as _;
use serde_json::Value;
use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, UNAVAILABLE};
use testkit::http;
use testkit::kv::{PUT, RANGE, RANGE_STREAM};
use testkit::pb::RangeRequest;
use testkit::process::tool;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

/// `Unavailable` calls by what answered them.
async fn unavailable(rangecache: &Rangecache) -> BTreeMap<String, f64> {
    let metrics = rangecache.metrics().await;
    let calls = metrics.0.iter().filter(|(sample, count)| {
        sample.starts_with("rangecache_calls_total{")
            && sample.contains("grpc_code=\"Unavailable\"")
            && **count > 0.0
    });
    calls.fold(BTreeMap::new(), |mut by_source, (sample, count)| {
        let from = sample.rsplit('"').nth(1).expect("the label from");
        *by_source.entry(from.to_owned()).or_default() += count;
        by_source
    })
}

/// The field `name` of each element of a list.
fn texts<'a>(list: &'a Value, name: &str) -> Vec<&'a str> {
    let elements = list.as_array().expect("a list");
    elements
        .iter()
        .filter_map(|element| element[name].as_str())
        .collect()
}

async fn ask(client: &Client, path: &str, message: &[u8]) {
    let reply = client.raw(path, message).await.expect("the connection stays");
    assert_eq!(reply.status().code, UNAVAILABLE, "{path}: {:?}", reply.status());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_that_etcd_cannot_answer_are_counted_as_failed() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    let dir = TempDir::with_prefix("outage-").unwrap();
    let log = dir.path().join("access.log");
    let rangecache = Rangecache::before(&etcd)
        .with("--connect-timeout", "300ms")
        .with("--access-log", log.to_str().unwrap())
        .start()
        .await;
    let through = rangecache.client().await;
    through.put("/outage/a", "1").await.expect("etcd writes");
    let before = (rangecache.outcomes().await, rangecache.stream_outcomes().await);
    etcd.stop();

    let list = RangeRequest::prefix("/outage/").encode_to_vec();
    let small = RangeRequest::one("/outage/a").encode_to_vec();
    // A field that rangecache does not know.
    let unknown = [&small[..], &[0x88, 0x06, 1]].concat();
    for _ in 0..3 {
        ask(&through, RANGE, &small).await;
        ask(&through, RANGE, &unknown).await;
        ask(&through, RANGE_STREAM, &list).await;
    }
    // Identical large reads share a call.
    let others = [
        rangecache.client().await,
        rangecache.client().await,
        rangecache.client().await,
    ];
    let [one, two, three] = &others;
    tokio::join!(
        ask(one, RANGE, &list),
        ask(two, RANGE, &list),
        ask(three, RANGE, &list)
    );
    ask(&through, PUT, &[]).await;
    let url = format!("{}/v3/kv/range", rangecache.url());
    for body in [
        r#"{"key":"L291dGFnZS9h"}"#,
        r#"{"key":"L291dGFnZS9h","limit":null}"#,
    ] {
        let response = http::post(&url, body).await.unwrap();
        assert!([502, 503].contains(&response.status), "{response:?}");
    }

    let ranges = rangecache.outcomes_since(&before.0, 11).await;
    assert_eq!(ranges.of("failed"), 11, "{ranges:?}");
    let streams = rangecache.stream_outcomes_since(&before.1, 3).await;
    assert_eq!(streams.of("failed"), 3, "{streams:?}");
    let (by_source, _) = until(SOON, "every call is counted", async || {
        let by_source = unavailable(&rangecache).await;
        (by_source.values().sum::<f64>() >= 13.0).then_some(by_source)
    })
    .await;
    assert_eq!(by_source, BTreeMap::from([("failed".to_owned(), 13.0)]));

    let status: Value = serde_json::from_str(&rangecache.admin("/status").await.body).unwrap();
    let ids: Vec<_> = texts(&status["findings"], "id");
    // Neither that a bound was reached, nor that reads of the mirror are forwarded.
    assert_eq!(ids, ["etcd-unreachable", "reads-failed"], "{status}");
    // Fourteen reads failed, and no other was made.
    assert_eq!(status["reads"]["memory_ratio_last_minute"], 0.0);
    assert!(
        status["reads"]["failed_per_second"].as_f64() > Some(0.0),
        "{status}"
    );
    let changes = texts(&status["changes"], "kind");
    for kind in ["member_lost", "mirror_out_of_service"] {
        assert!(changes.contains(&kind), "{changes:?}");
    }
    let page = rangecache.admin("/").await.body;
    for words in [
        "failed without etcd",
        "out of service: watch lost",
        "<dd id=\"reads-memory\">0 %</dd>",
    ] {
        assert!(page.contains(words), "{words} is not in {page}");
    }

    let (lines, _) = until(SOON, "the access log is written", async || {
        let text = std::fs::read_to_string(&log).ok()?;
        let lines: Vec<Value> = text
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()
            .ok()?;
        let failed = lines.iter().filter(|line| line["outcome"] == "failed").count();
        (failed >= 15).then_some(lines)
    })
    .await;
    let causes = ["no_endpoint", "connection_lost"];
    for line in lines.iter().filter(|line| line["outcome"] == "failed") {
        assert!(causes.iter().any(|cause| line["reason"] == *cause), "{line}");
    }
}

/// Calls of `etcdctl` with a timeout below `--connect-timeout`, all of which fail.
async fn time_out(rangecache: &Rangecache) {
    for arguments in [
        &["get", "/outage/a"][..],
        &["get", "/outage/", "--prefix"],
        &["put", "/outage/a", "2"],
    ] {
        let output = tokio::process::Command::new(tool("etcdctl"))
            .args(["--endpoints", rangecache.url(), "--command-timeout=500ms"])
            .args(arguments)
            .output()
            .await
            .expect("etcdctl runs");
        assert!(!output.status.success(), "{output:?}");
    }
}

/// Their clients leave before rangecache has an error for them, whether etcd has ended or is silent.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_whose_timeout_expires_before_etcd_answers_are_counted_as_failed() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let through = rangecache.client().await;
    through.put("/outage/a", "1").await.expect("etcd writes");
    let before = rangecache.outcomes().await;
    etcd.pause();
    time_out(&rangecache).await;
    etcd.resume();
    etcd.stop();
    time_out(&rangecache).await;
    let outcomes = rangecache.outcomes_since(&before, 4).await;
    assert_eq!(outcomes.of("failed"), 4, "{outcomes:?}");
    let is_counted = async || {
        let metrics = rangecache.metrics().await;
        let puts = |labels: &str| {
            let of_put = "grpc_service=\"etcdserverpb.KV\",grpc_method=\"Put\"";
            metrics.sum_with_label("rangecache_calls_total", &format!("{of_put},{labels}"))
        };
        let failed = puts("grpc_code=\"DeadlineExceeded\",from=\"failed\"");
        assert_eq!(puts("grpc_code=\"Canceled\",from=\"etcd\""), 0.0);
        (failed == 2.0).then_some(())
    };
    until(SOON, "the writes are counted", is_counted).await;
}

/// A Service sends no new clients to an instance that no member of etcd answers; one with `--serve-stale` has responses for them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_that_no_member_answers_serves_no_new_clients() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    let alone = Rangecache::before(&etcd).start().await;
    let stale = Rangecache::before(&etcd)
        .with("--serve-stale", "1h")
        .start()
        .await;
    let servez = async |of: &Rangecache| of.admin("/servez").await;
    assert_eq!(servez(&alone).await.status, 200);
    etcd.stop();
    until(SOON, "the loss is seen", async || {
        (servez(&alone).await.status == 503).then_some(())
    })
    .await;
    assert_eq!(servez(&alone).await.body, "no member of etcd answers\n");
    until(SOON, "the other one has seen it, too", async || {
        let healthy = stale.metrics().await.sum("rangecache_endpoint_healthy");
        (healthy == 0.0).then_some(())
    })
    .await;
    assert_eq!(servez(&stale).await.status, 200);
    assert_eq!(
        alone.admin("/livez").await.status,
        200,
        "a restart would not help"
    );
    etcd.restart().await;
    until(SOON, "etcd is back", async || {
        (servez(&alone).await.status == 200).then_some(())
    })
    .await;
    until(SOON, "the end of the outage is among the changes", async || {
        let status: Value = serde_json::from_str(&alone.admin("/status").await.body).unwrap();
        let kinds = texts(&status["changes"], "kind");
        let newest = |kind: &str| kinds.iter().position(|found| *found == kind);
        let is_over = |end, begin| newest(end) < newest(begin) && newest(end).is_some();
        (is_over("mirror_in_service", "mirror_out_of_service") && is_over("member_healthy", "member_lost"))
            .then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaf_whose_hub_is_away_names_the_hub_and_the_remedy() {
    let etcd = Etcd::start(Version::V3_7).await;
    let hub = Rangecache::before(&etcd).start().await;
    let url = hub.url().to_owned();
    let leaf = Rangecache::at(&url).start().await;
    drop(hub);
    let (finding, _) = until(SOON, "the hub is missed", async || {
        let status: Value = serde_json::from_str(&leaf.admin("/status").await.body).unwrap();
        let finding = status["findings"][0].clone();
        (finding["title"] == "no hub can be reached").then_some(finding)
    })
    .await;
    assert_eq!(finding["id"], "etcd-unreachable", "{finding}");
    let remedy = finding["remedy"].as_str().unwrap();
    assert!(remedy.contains("--fallback-endpoints"), "{remedy}");
    let log = leaf.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str(line).ok());
    let mut lost = lines.filter(|line: &Value| {
        line["message"]
            .as_str()
            .is_some_and(|of| of.starts_with("watch lost"))
    });
    assert!(lost.any(|line| line["endpoint"] == url), "{log}");
}
