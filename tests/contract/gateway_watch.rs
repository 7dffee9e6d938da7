//! `/v3/watch` of the JSON gateway: from memory, with etcd's own text.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use serde_json::Value;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::http::{self, Lines};
use testkit::pb::RequestOp;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

const WATCH: &str = "/v3/watch";
/// Watches per version.
const WATCHES: usize = 60;
/// Writes that each watch gets after it was created.
const WRITES: usize = 3;
/// Key that every write changes.
const KEY: &str = "/json/01";

fn base64(text: &str) -> String {
    STANDARD.encode(text)
}

/// An etcd with a history, compacted at revision 5, and a rangecache.
async fn scene(version: Version) -> (Etcd, Rangecache, Client) {
    let etcd = Etcd::start(version).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let client = rangecache.client().await;
    for n in 0..8_u8 {
        client
            .put(format!("/json/{:02}", n % 4), [n; 3])
            .await
            .expect("a put");
    }
    client.delete("/json/03").await.expect("a delete");
    client.grant_lease(7, 600).await.expect("a lease");
    client.put_with_lease(KEY, "<&>", 7).await.expect("a put");
    client.compact(5).await.expect("etcd compacts");
    (etcd, rangecache, client)
}

/// A watch, and what it shows of a write.
struct Watch {
    body: String,
    sees_puts: bool,
    is_cancelled: bool,
}

fn watch(random: &mut StdRng) -> Watch {
    let one = |random: &mut StdRng, values: &[&'static str]| *values.choose(random).expect("is not empty");
    let (key, end) = *[
        (KEY, None),
        ("/json/", Some("/json0")),
        ("/json/", Some("\0")),
        ("\0", Some("\0")),
        ("/none", None),
    ]
    .choose(random)
    .expect("is not empty");
    let mut fields = vec![format!("\"key\":\"{}\"", base64(key))];
    if let Some(end) = end {
        let name = one(random, &["range_end", "rangeEnd"]);
        fields.push(format!("\"{name}\":\"{}\"", base64(end)));
    }
    let start = one(random, &["", "0", "\"6\"", "7", "\"9\"", "2", "\"4\""]);
    if !start.is_empty() {
        let name = one(random, &["start_revision", "startRevision"]);
        fields.push(format!("\"{name}\":{start}"));
    }
    let filter = one(random, &["", "", "[]", "[\"NOPUT\"]", "[\"NODELETE\"]", "[1]"]);
    if !filter.is_empty() {
        fields.push(format!("\"filters\":{filter}"));
    }
    for name in ["prev_kv", "prevKv", "progress_notify", "fragment"] {
        if random.random_bool(0.2)
            && !(name == "prevKv" && fields.iter().any(|field| field.contains("prev_kv")))
        {
            fields.push(format!("\"{name}\":true"));
        }
    }
    if random.random_bool(0.3) {
        fields.push(format!("\"watch_id\":{}", one(random, &["3", "\"12\"", "0"])));
    }
    let name = one(random, &["create_request", "createRequest"]);
    Watch {
        body: format!("{{\"{name}\":{{{}}}}}", fields.join(",")),
        sees_puts: key != "/none" && !filter.contains("NOPUT"),
        is_cancelled: matches!(start, "2" | "\"4\""),
    }
}

/// Reads lines until an event of this revision; returns them, and all their events.
async fn until_revision(lines: &mut Lines, revision: i64) -> (String, Vec<Value>) {
    let (mut text, mut events) = (String::new(), Vec::new());
    let wanted = Value::from(revision.to_string());
    loop {
        let line = lines.next().await.expect("events");
        let message: Value = serde_json::from_str(&line).expect("is JSON");
        let of_line = message["result"]["events"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let is_last = of_line.iter().any(|event| event["kv"]["mod_revision"] == wanted);
        text.push_str(&line);
        events.extend(of_line);
        if is_last {
            return (text, events);
        }
    }
}

async fn watches_equal_etcds(version: Version) {
    let (etcd, rangecache, client) = scene(version).await;
    let mut random = StdRng::seed_from_u64(20_261_122);
    let (mut texts, mut equal_texts) = (0, 0);
    for _ in 0..WATCHES {
        let watch = watch(&mut random);
        let open = async |url: &str| {
            let lines = http::post_for_lines(&format!("{url}{WATCH}"), &watch.body).await;
            lines.expect("a response")
        };
        let (mut direct, mut through) = (open(etcd.url().as_str()).await, open(rangecache.url()).await);
        assert_eq!(through.status, direct.status, "{}", watch.body);
        let created = direct.next().await.expect("created");
        assert_eq!(through.next().await.expect("created"), created, "{}", watch.body);
        if watch.is_cancelled {
            let cancelled = direct.next().await.expect("cancelled");
            assert!(cancelled.contains("\"compact_revision\":\"5\""), "{cancelled}");
            assert_eq!(
                through.next().await.expect("cancelled"),
                cancelled,
                "{}",
                watch.body
            );
            continue;
        }
        for n in 0..WRITES {
            let mut changes = vec![RequestOp::put(KEY, [n as u8]), RequestOp::put("/json/02", "")];
            if n % 2 == 1 {
                // The revision has two events of the key.
                changes.push(RequestOp::delete(KEY));
                changes = changes.into_iter().map(RequestOp::nested).collect();
            }
            let revision = client.transact(changes).await.expect("a write");
            if !watch.sees_puts {
                continue;
            }
            let (expected, of_etcd) = until_revision(&mut direct, revision).await;
            let (got, of_rangecache) = until_revision(&mut through, revision).await;
            assert_eq!(of_rangecache, of_etcd, "{}", watch.body);
            texts += 1;
            equal_texts += usize::from(got == expected);
        }
    }
    // Events of one write may be in one line or in two, of etcd as well.
    assert!(
        texts >= WATCHES / 2 && equal_texts * 4 > texts * 3,
        "{equal_texts} of {texts} texts are equal"
    );
    assert_eq!(
        rangecache.metrics().await.watches_created("memory") as usize,
        WATCHES,
        "all were served from memory"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generated_json_watches_equal_etcds_3_7() {
    watches_equal_etcds(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn generated_json_watches_equal_etcds_3_6() {
    watches_equal_etcds(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn generated_json_watches_equal_etcds_3_5() {
    watches_equal_etcds(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_watches_that_are_not_understood_are_etcds() {
    let (etcd, rangecache, client) = scene(Version::V3_7).await;
    let (one, two) = (base64(KEY), base64("/json/02"));
    for body in [
        format!(r#"{{"create_request":{{"key":"{one}"}}}}{{"create_request":{{"key":"{two}"}}}}"#),
        format!(r#"{{"create_request":{{"key":"{one}"}}}} {{"cancel_request":{{"watch_id":"0"}}}}"#),
        format!(r#"{{"create_request":{{"key":"{one}","other":1}}}}{{"create_request":{{"key":"{two}"}}}}"#),
    ] {
        let open = async |url: &str| {
            let lines = http::post_for_lines(&format!("{url}{WATCH}"), &body).await;
            lines.expect("a response")
        };
        let (mut direct, mut through) = (open(etcd.url().as_str()).await, open(rangecache.url()).await);
        for _ in 0..2 {
            let expected = direct.next().await.expect("a line");
            assert_eq!(through.next().await.expect("a line"), expected, "{body}");
        }
    }
    assert_eq!(rangecache.metrics().await.watches_created("memory"), 0.0);
    client.put(KEY, "alive").await.expect("a put");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_watch_ends_with_its_client() {
    let (_etcd, rangecache, _client) = scene(Version::V3_7).await;
    let body = format!(r#"{{"create_request":{{"key":"{}"}}}}"#, base64(KEY));
    let mut lines = http::post_for_lines(&format!("{}{WATCH}", rangecache.url()), &body)
        .await
        .expect("a response");
    lines.next().await.expect("created");
    assert_eq!(rangecache.metrics().await.sum("rangecache_watch_watchers"), 1.0);
    drop(lines);
    until(SOON, "the watcher has ended", async || {
        (rangecache.metrics().await.sum("rangecache_watch_watchers") == 0.0).then_some(())
    })
    .await;
}
