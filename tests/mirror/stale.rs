//! `--serve-stale`: what is answered from the last view while no member of etcd answers, and what never is.

use std::time::{Duration, Instant};

use prost::Message as _;
use testkit::etcd::{Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::{Client, DEADLINE_EXCEEDED, OUT_OF_RANGE, Reply, UNAVAILABLE};
use testkit::http;
use testkit::kv::{RANGE, RANGE_STREAM};
use testkit::pb::{RangeRequest, RangeResponse};
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, recovers};
use testkit::streams::{chunks_of, merged};
use testkit::wait::{SOON, until};
use tokio::time::timeout;

const PREFIX: &str = "/stale/";
const KEYS: usize = 30;

async fn write(etcd: &Client, value: &str) -> i64 {
    let mut revision = 0;
    for n in 0..KEYS {
        let key = format!("{PREFIX}{n:02}");
        revision = etcd.put(key, value).await.expect("etcd writes");
    }
    revision
}

fn list(serializable: bool, revision: i64) -> RangeRequest {
    RangeRequest {
        serializable,
        revision,
        ..RangeRequest::prefix(PREFIX)
    }
}

/// The JSON of [`list`]: prefix `/stale/` to `/stale0`.
fn json(serializable: bool, revision: i64) -> String {
    format!(
        r#"{{"key":"L3N0YWxlLw==","range_end":"L3N0YWxlMA==","serializable":{serializable},"revision":"{revision}"}}"#
    )
}

/// Age in the metadata of a response.
fn age(headers: &::http::HeaderMap) -> Option<u64> {
    let age = headers.get("rangecache-age-ms")?;
    Some(age.to_str().unwrap().parse().unwrap())
}

async fn ask(client: &Client, path: &str, request: &RangeRequest) -> Reply {
    client
        .raw(path, &request.encode_to_vec())
        .await
        .expect("the connection stays")
}

/// etcd with two values per key, a rangecache with this `--serve-stale`, and the revision between the values.
struct Scene {
    etcd: Etcd,
    rangecache: Rangecache,
    through: Client,
    /// Revision at which every key has the value `first`.
    first: i64,
    /// Revision at which every key has the value `second`.
    second: i64,
}

impl Scene {
    async fn new(version: Version, serve_stale: &str) -> Scene {
        Scene::with_probes(version, serve_stale, "1s").await
    }

    /// A scene with this `--probe-interval`.
    async fn with_probes(version: Version, serve_stale: &str, probe_interval: &str) -> Scene {
        let etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        let rangecache = Rangecache::before(&etcd)
            .with("--serve-stale", serve_stale)
            .with("--probe-interval", probe_interval)
            .start()
            .await;
        let through = rangecache.client().await;
        let first = write(&direct, "first").await;
        let second = write(&direct, "second").await;
        let now = through.range(&list(false, 0)).await.expect("etcd answers");
        assert_eq!(now.revision(), second);
        let scene = Scene {
            etcd,
            rangecache,
            through,
            first,
            second,
        };
        scene.is_in_service().await;
        scene
    }

    /// Waits for a response from memory: the mirror has a feed, and a later check has proven its revision.
    async fn is_in_service(&self) {
        until(SOON, "a linearizable read is answered from memory", async || {
            let before = self.rangecache.outcomes().await;
            self.through.range(&list(false, 0)).await.ok()?;
            let since = self.rangecache.outcomes_since(&before, 1).await;
            (since.memory_answers() > 0).then_some(())
        })
        .await;
    }

    async fn recovers(&self, after: &str) {
        let direct = self.etcd.client().await;
        recovers(
            after,
            PREFIX,
            &direct,
            &self.rangecache,
            &self.through,
            Reads::MayFail,
        )
        .await;
    }

    /// Checks that reads which may be stale are answered with every key's value at the last revision, and at `first`.
    async fn answers_stale(&self) {
        for (request, value) in [
            (list(true, 0), "second"),
            (list(true, self.first), "first"),
            (list(false, self.first), "first"),
            (list(false, self.second), "second"),
        ] {
            for path in [RANGE, RANGE_STREAM] {
                let reply = ask(&self.through, path, &request).await;
                assert_eq!(reply.status().code, 0, "{path} {request:?}: {:?}", reply.status());
                assert!(
                    age(&reply.headers).is_some(),
                    "{path} {request:?}: {:?}",
                    reply.headers
                );
                let answer = match path {
                    RANGE => reply.answer::<RangeResponse>().expect("it is one message"),
                    _ => merged(chunks_of(&reply)),
                };
                assert_eq!(answer.kvs.len(), KEYS, "{path} {request:?}");
                assert!(
                    answer.kvs.iter().all(|kv| kv.value == value.as_bytes()),
                    "{path} {request:?}"
                );
                assert_eq!(answer.revision(), self.second, "{path} {request:?}");
            }
            let url = format!("{}/v3/kv/range", self.rangecache.url());
            let text = json(request.serializable, request.revision);
            let response = http::post(&url, &text).await.unwrap();
            assert_eq!(response.status, 200, "{text}: {}", response.body);
            assert!(age(&response.headers).is_some(), "{text}: {:?}", response.headers);
            let body: serde_json::Value = serde_json::from_str(&response.body).unwrap();
            assert_eq!(body["count"], KEYS.to_string(), "{text}");
        }
    }

    /// Checks that linearizable reads of the newest state fail.
    async fn refuses_linearizable(&self) {
        for path in [RANGE, RANGE_STREAM] {
            for revision in [0, -1] {
                let hurried = self.through.with_metadata("grpc-timeout", "300m");
                let reply = ask(&hurried, path, &list(false, revision)).await;
                assert_ne!(
                    reply.status().code,
                    0,
                    "{path} at {revision} was answered: {reply:?}"
                );
            }
        }
        let url = format!("{}/v3/kv/range", self.rangecache.url());
        // Without a deadline it fails only when the connection is given up.
        let answered = timeout(Duration::from_secs(1), http::post(&url, &json(false, 0))).await;
        if let Ok(Ok(response)) = answered {
            assert_eq!(response.status, 503, "{}", response.body);
        }
    }
}

async fn stopped_etcd(version: Version) {
    let mut scene = Scene::new(version, "10m").await;
    let ask_now = ask(&scene.through, RANGE, &list(true, 0)).await;
    assert_eq!(age(&ask_now.headers), None, "etcd answers");
    scene.etcd.stop();
    scene.answers_stale().await;
    scene.refuses_linearizable().await;
    let metrics = scene.rangecache.metrics().await;
    let stale = [
        r#"rangecache_range_total{outcome="hit",reason="stale"}"#,
        r#"rangecache_range_stream_total{outcome="hit",reason="stale"}"#,
    ]
    .map(|name| metrics.0.get(name).copied().unwrap_or_default());
    assert_eq!(stale, [8.0, 4.0], "gRPC and JSON, and streams");
    assert_eq!(metrics.sum("rangecache_range_stale_age_seconds_count"), 12.0);
    let status: serde_json::Value =
        serde_json::from_str(&scene.rangecache.admin("/status").await.body).unwrap();
    assert!(
        status["mirrors"][0]["stale_age_ms"].as_u64().is_some(),
        "{status}"
    );
    let page = scene.rangecache.admin("/").await.body;
    assert!(page.contains("serving a last view of age"));
    // The age counts from the last proof, so it grows.
    let reply = ask(&scene.through, RANGE, &list(true, 0)).await;
    until(SOON, "the age grows", async || {
        let later = ask(&scene.through, RANGE, &list(true, 0)).await;
        (age(&later.headers)? > age(&reply.headers)?).then_some(())
    })
    .await;
    scene.etcd.run();
    scene.etcd.ready().await;
    scene.recovers("a stop of etcd").await;
    let reply = ask(&scene.through, RANGE, &list(true, 0)).await;
    assert_eq!(age(&reply.headers), None, "etcd answers again");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_that_may_be_stale_are_answered_while_etcd_is_stopped_3_7() {
    stopped_etcd(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn reads_that_may_be_stale_are_answered_while_etcd_is_stopped_3_6() {
    stopped_etcd(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn reads_that_may_be_stale_are_answered_while_etcd_is_stopped_3_5() {
    stopped_etcd(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_that_may_be_stale_are_answered_while_etcd_hangs() {
    let scene = Scene::new(Version::V3_7, "10m").await;
    scene.etcd.pause();
    // A serializable read is answered as usual until the silence is known.
    until(SOON, "the silence is known", async || {
        let reply = ask(&scene.through, RANGE, &list(true, 0)).await;
        assert_eq!(reply.status().code, 0, "{:?}", reply.status());
        age(&reply.headers)
    })
    .await;
    scene.answers_stale().await;
    scene.refuses_linearizable().await;
    scene.etcd.resume();
    scene.recovers("a suspension of etcd").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn linearizable_read_is_never_answered_stale() {
    let mut scene = Scene::new(Version::V3_7, "10m").await;
    for outage in 0..3 {
        scene.etcd.stop();
        let down = Instant::now();
        let hurried = scene.through.with_metadata("grpc-timeout", "200m");
        while down.elapsed() < Duration::from_secs(2) {
            for path in [RANGE, RANGE_STREAM] {
                let reply = ask(&hurried, path, &list(false, 0)).await;
                assert_ne!(reply.status().code, 0, "answered without etcd: {reply:?}");
            }
        }
        scene.etcd.run();
        scene.etcd.ready().await;
        // A linearizable read sees this write at once, although the last view does not.
        let key = format!("{PREFIX}outage-{outage}");
        let revision = scene
            .etcd
            .client()
            .await
            .put(key, "new")
            .await
            .expect("etcd writes");
        let what = "a linearizable read is answered";
        let read = async || scene.through.range(&list(false, 0)).await.ok();
        let answer = until(SOON, what, read).await.0;
        assert!(
            answer.revision() >= revision,
            "{} is older than {revision}",
            answer.revision()
        );
        scene.is_in_service().await;
    }
}

/// A restored etcd may have the revision that etcd had compacted before.
#[tokio::test]
async fn compacted_revision_is_not_refused_without_etcd() {
    let mut scene = Scene::new(Version::V3_7, "10m").await;
    scene.through.compact(scene.second).await.expect("etcd compacts");
    let reply = ask(&scene.through, RANGE, &list(false, scene.first)).await;
    assert_eq!(reply.status().code, OUT_OF_RANGE, "while etcd answers");
    scene.etcd.stop();
    until(SOON, "the last view is served", async || {
        let reply = ask(&scene.through, RANGE, &list(true, 0)).await;
        age(&reply.headers).map(drop)
    })
    .await;
    for path in [RANGE, RANGE_STREAM] {
        for serializable in [true, false] {
            let hurried = scene.through.with_metadata("grpc-timeout", "300m");
            let reply = ask(&hurried, path, &list(serializable, scene.first)).await;
            let code = reply.status().code;
            assert!(
                [UNAVAILABLE, DEADLINE_EXCEEDED].contains(&code),
                "refused without etcd: {path}, serializable {serializable}: {reply:?}"
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn last_view_is_served_up_to_its_age_only() {
    let mut scene = Scene::new(Version::V3_7, "2s").await;
    scene.etcd.stop();
    let reply = ask(&scene.through, RANGE, &list(true, 0)).await;
    assert!(age(&reply.headers).is_some(), "{reply:?}");
    let hurried = scene.through.with_metadata("grpc-timeout", "100m");
    until(SOON, "the last view is too old", async || {
        for request in [list(true, 0), list(true, scene.first), list(false, scene.first)] {
            let reply = ask(&hurried, RANGE, &request).await;
            match age(&reply.headers) {
                Some(age) => {
                    assert!(age <= 2000, "{age} ms");
                    return None;
                }
                None => assert_ne!(reply.status().code, 0, "{reply:?}"),
            }
        }
        Some(())
    })
    .await;
    let refused = scene.through.range(&list(true, 0)).await;
    assert_eq!(refused.expect_err("the last view is too old").code, UNAVAILABLE);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn last_view_of_a_restored_etcd_never_appears_again() {
    let mut scene = Scene::new(Version::V3_7, "10m").await;
    let snapshot = scene.etcd.save_snapshot().await;
    let third = write(&scene.etcd.client().await, "third").await;
    let read = async || {
        let answer = scene.through.range(&list(true, 0)).await.ok()?;
        (answer.revision() == third).then_some(())
    };
    until(SOON, "memory has the third value", read).await;
    // A check proves that revision.
    scene.is_in_service().await;
    let values = |answer: &RangeResponse| {
        let mut values: Vec<_> = answer
            .kvs
            .iter()
            .map(|kv| String::from_utf8(kv.value.clone()).unwrap())
            .collect();
        values.dedup();
        values.join(" ")
    };
    let hurried = scene.through.with_metadata("grpc-timeout", "300m");
    let mut seen_restored = false;
    scene.etcd.restore(&snapshot, "rangecache", &[]);
    for _ in 0..4 {
        let stale = hurried.range(&list(true, 0)).await;
        match (seen_restored, stale) {
            (false, stale) => assert_eq!(values(&stale.expect("the last view")), "third"),
            (true, Ok(answer)) => {
                assert_eq!(values(&answer), "second", "the replaced history appeared again")
            }
            (true, Err(_)) => {}
        }
        scene.etcd.run();
        // The first response of the restored etcd.
        let restored = until(SOON, "the restored etcd answers", async || {
            let answer = hurried.range(&list(true, 0)).await.ok()?;
            let value = values(&answer);
            assert!(value == "second" || !seen_restored, "{value} appeared again");
            (value == "second").then_some(())
        });
        restored.await;
        seen_restored = true;
        scene.etcd.stop();
    }
    scene.etcd.run();
    scene.etcd.ready().await;
    scene.recovers("a restore").await;
}

/// The last call before an outage is one of the JSON gateway, and no check follows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_calls_before_an_outage_leave_the_last_view_usable() {
    for call in [
        ("/v3/kv/range", r#"{"key":12}"#, 400),
        ("/v3/kv/range", r#"{"key":"L290aGVy","limit":null}"#, 200),
        ("/v3/lease/leases", "{}", 200),
    ] {
        let mut scene = Scene::with_probes(Version::V3_7, "10m", "10m").await;
        let (path, body, status) = call;
        let url = format!("{}{path}", scene.rangecache.url());
        let response = http::post(&url, body).await.expect("etcd answers");
        assert_eq!(response.status, status, "{call:?}: {}", response.body);
        scene.etcd.stop();
        scene.answers_stale().await;
    }
}

/// A write through the JSON gateway that the mirror has not seen is not hidden by the last view.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn last_view_is_not_older_than_a_json_response() {
    let etcd = Etcd::start(Version::V3_7).await;
    let key = format!("{PREFIX}a");
    etcd.client().await.put(&key, "old").await.expect("etcd writes");
    let link = FaultLink::to(&etcd.url(), 0).await;
    let rangecache = Rangecache::at(link.url())
        .with("--serve-stale", "10m")
        .with("--probe-interval", "10m")
        .start()
        .await;
    let through = rangecache.client().await;
    assert_eq!(through.get(&key).await, Ok(Some(b"old".to_vec())));
    link.set(Condition::SlowFeeds(Duration::from_secs(600)));
    // The key `/stale/a`, and the value `new`.
    let put = r#"{"key":"L3N0YWxlL2E=","value":"bmV3"}"#;
    let url = format!("{}/v3/kv/put", rangecache.url());
    assert_eq!(http::post(&url, put).await.expect("etcd writes").status, 200);
    link.set(Condition::Cut);
    let hurried = through.with_metadata("grpc-timeout", "300m");
    let request = RangeRequest {
        serializable: true,
        ..RangeRequest::one(&key)
    };
    for _ in 0..5 {
        let reply = ask(&hurried, RANGE, &request).await;
        assert_ne!(reply.status().code, 0, "older than the write: {reply:?}");
    }
}
