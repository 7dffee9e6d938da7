//! Sessions of clients that use the JSON gateway: Patroni's and lua-resty-etcd's requests, compared with etcd's answers.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use testkit::etcd::{Etcd, Version};
use testkit::http;
use testkit::proxy::Rangecache;

fn base64(text: &str) -> String {
    STANDARD.encode(text)
}

/// Name and number fields that differ between two etcds.
const OF_THE_MEMBER: [&str; 5] = ["cluster_id", "member_id", "raft_term", "ID", "lease"];

/// `text` without what differs between two etcds: ids, terms, URLs and names of members, and white space.
fn comparable(text: &str) -> String {
    let mut text = http::compact_json(text);
    for name in OF_THE_MEMBER {
        let mut shown = String::new();
        let mut rest = text.as_str();
        while let Some(at) = rest.find(&format!("\"{name}\":")) {
            let value = at + name.len() + 3;
            shown.push_str(&rest[..value]);
            let end = rest[value..]
                .find([',', '}'])
                .map_or(rest.len(), |end| value + end);
            shown.push('0');
            rest = &rest[end..];
        }
        shown.push_str(rest);
        text = shown;
    }
    text
}

/// Response as a client sees it: status, headers without lengths, text.
fn seen(response: &http::Response) -> (u16, Vec<(String, String)>, String) {
    let headers = response.headers.iter();
    let headers = headers.filter(|(name, _)| {
        // etcd permits all web pages, rangecache only those of --cors.
        *name != "content-length" && !name.as_str().starts_with("access-control-")
    });
    let headers = headers.map(|(name, value)| {
        (
            name.to_string(),
            String::from_utf8_lossy(value.as_bytes()).into_owned(),
        )
    });
    // Go's HTTP server writes them in an order of its own each time.
    let mut headers: Vec<_> = headers.collect();
    headers.sort();
    (response.status, headers, comparable(&response.body))
}

/// Two etcds of one version, and a rangecache before the second one.
struct Pair {
    direct: Etcd,
    behind: Etcd,
    rangecache: Rangecache,
    /// Ids of the last lease on both.
    leases: [String; 2],
}

impl Pair {
    async fn start(version: Version) -> Pair {
        let (direct, behind) = (Etcd::start(version).await, Etcd::start(version).await);
        let rangecache = Rangecache::before(&behind).start().await;
        Pair {
            direct,
            behind,
            rangecache,
            leases: Default::default(),
        }
    }

    /// Posts `body` to the first etcd and to rangecache, and compares the responses. `$lease` is the last lease.
    async fn post(&mut self, path: &str, body: &str) -> String {
        let [of_direct, of_behind] = [0, 1].map(|side: usize| body.replace("$lease", &self.leases[side]));
        let expected = http::post(&format!("{}{path}", self.direct.url()), &of_direct).await;
        let got = http::post(&format!("{}{path}", self.rangecache.url()), &of_behind).await;
        let (expected, got) = (expected.expect("etcd answers"), got.expect("rangecache answers"));
        assert_eq!(seen(&got), seen(&expected), "{path} {body}");
        if path.ends_with("/lease/grant") {
            self.leases = [&expected, &got].map(|response| {
                let id = response.body.split("\"ID\":\"").nth(1).expect("an id");
                id.split('"').next().expect("an id").to_owned()
            });
        }
        got.body
    }

    /// Reads from the second etcd itself and through rangecache, where memory answers.
    async fn read(&mut self, path: &str, body: &str) -> String {
        let text = self.post(path, body).await;
        let expected = http::post(&format!("{}{path}", self.behind.url()), body).await;
        let mut expected = expected.expect("etcd answers");
        let before = self.rangecache.outcomes().await;
        let got = http::post(&format!("{}{path}", self.rangecache.url()), body).await;
        for name in ["origin", "methods", "headers"] {
            expected.headers.remove(format!("access-control-allow-{name}"));
        }
        let (got, expected) = (got.expect("rangecache answers").compact(), expected.compact());
        assert_eq!(got, expected, "{path} {body}");
        let outcomes = self.rangecache.outcomes_since(&before, 1).await;
        assert_eq!(
            outcomes.of("hit") + outcomes.of("waited"),
            1,
            "{path} {body}: {outcomes:?}"
        );
        text
    }

    /// Watches on both sides from a past revision, and compares the message of the past, and then that of each change.
    async fn watch(&mut self, body: &str, changes: &[(&str, &str)]) {
        let mut expected = Watching::start(&self.direct.url(), body).await;
        let mut got = Watching::start(self.rangecache.url(), body).await;
        assert_eq!(got.head, expected.head, "{body}");
        for message in ["created", "the past"] {
            assert_eq!(got.next().await, expected.next().await, "{message}: {body}");
        }
        // One at a time: how many events share a message is a matter of time.
        for (path, change) in changes {
            self.post(path, change).await;
            assert_eq!(got.next().await, expected.next().await, "{change}: {body}");
        }
    }
}

/// An open watch.
struct Watching {
    /// Status and names of the headers.
    head: (u16, Vec<String>),
    lines: http::Lines,
}

impl Watching {
    async fn start(url: &str, body: &str) -> Watching {
        let lines = http::post_for_lines(&format!("{url}/v3/watch"), body).await;
        let lines = lines.expect("a response");
        let names = lines.headers.keys().map(ToString::to_string);
        let names = names.filter(|name| !name.starts_with("access-control-"));
        let mut names: Vec<_> = names.collect();
        names.sort();
        Watching {
            head: (lines.status, names),
            lines,
        }
    }

    /// The next message, a line of JSON.
    async fn next(&mut self) -> String {
        comparable(&self.lines.next().await.expect("a message"))
    }
}

/// A cluster of two members of Patroni, with its paths and fields.
async fn patroni(version: Version) {
    let mut pair = Pair::start(version).await;
    for path in ["/version", "/health"] {
        let expected = http::get(&format!("{}{path}", pair.behind.url()))
            .await
            .expect("etcd answers");
        let got = http::get(&format!("{}{path}", pair.rangecache.url()))
            .await
            .expect("rangecache answers");
        assert_eq!(seen(&got), seen(&expected), "{path}");
    }
    let refused = pair
        .post("/v3/auth/authenticate", r#"{"name": "patroni", "password": "x"}"#)
        .await;
    assert!(refused.contains("authentication is not enabled"), "{refused}");
    let (prefix, end) = (base64("/service/batman/"), base64("/service/batman0"));
    let cluster = format!(r#"{{"key": "{prefix}", "range_end": "{end}", "serializable": false}}"#);
    let key = |name: &str| base64(&format!("/service/batman/{name}"));
    pair.read("/v3/kv/range", &cluster).await;
    pair.post("/v3/lease/grant", r#"{"TTL": 30}"#).await;
    let kept = pair.post("/v3/lease/keepalive", r#"{"ID": "$lease"}"#).await;
    assert!(kept.contains("\"TTL\":\"30\""), "{kept}");
    pair.post("/v3/lease/keepalive", r#"{"ID": "12345"}"#).await;
    let create = |name: &str, value: &str| {
        let (key, value) = (key(name), base64(value));
        format!(
            r#"{{"compare": [{{"key": "{key}", "target": "CREATE", "create_revision": "0"}}], "success": [{{"request_put": {{"key": "{key}", "value": "{value}", "lease": "$lease"}}}}]}}"#
        )
    };
    for (name, value) in [("initialize", "7"), ("leader", "node1"), ("leader", "node2")] {
        pair.post("/v3/kv/txn", &create(name, value)).await;
        pair.read("/v3/kv/range", &cluster).await;
    }
    let member = format!(
        r#"{{"key": "{}", "value": "{}", "lease": "$lease"}}"#,
        key("members/node1"),
        base64(r#"{"role":"primary","state":"running"}"#)
    );
    pair.post("/v3/kv/put", &member).await;
    let serializable = format!(r#"{{"key": "{prefix}", "range_end": "{end}", "serializable": true}}"#);
    pair.read("/v3/kv/range", &serializable).await;
    let update = format!(
        r#"{{"compare": [{{"key": "{0}", "target": "VALUE", "value": "{1}"}}], "success": [{{"request_put": {{"key": "{0}", "value": "{1}", "lease": "$lease"}}}}], "failure": [{{"request_range": {{"key": "{0}"}}}}]}}"#,
        key("leader"),
        base64("node2")
    );
    let held = pair.post("/v3/kv/txn", &update).await;
    assert!(held.contains(&base64("node1")), "{held}");
    let watch = format!(
        r#"{{"create_request": {{"key": "{prefix}", "range_end": "{end}", "start_revision": "3", "filters": []}}}}"#
    );
    let gone = format!(r#"{{"key": "{}"}}"#, key("leader"));
    pair.watch(&watch, &[("/v3/kv/deleterange", &gone), ("/v3/kv/put", &member)])
        .await;
    pair.read("/v3/kv/range", &cluster).await;
    pair.post(
        "/v3/kv/deleterange",
        &format!(r#"{{"key": "{prefix}", "range_end": "{end}"}}"#),
    )
    .await;
    pair.read("/v3/kv/range", &cluster).await;
}

/// Requests of lua-resty-etcd, as APISIX configures it.
async fn lua_resty_etcd(version: Version) {
    let mut pair = Pair::start(version).await;
    let key = |name: &str| base64(&format!("/apisix/{name}"));
    let put = |name: &str, value: &str| format!(r#"{{"value":"{}","key":"{}"}}"#, base64(value), key(name));
    for n in 0..12 {
        let route = format!(r#"{{"uri":"/{n}","id":"{n}"}}"#);
        pair.post("/v3/kv/put", &put(&format!("routes/{n:02}"), &route))
            .await;
    }
    let list = |more: &str| {
        let (first, end) = (key("routes"), key("routet"));
        format!(
            r#"{{"range_end":"{end}","serializable":false,"keys_only":false,"count_only":false,"limit":0,"revision":0,"sort_order":0,"sort_target":0,"min_mod_revision":0,"max_mod_revision":0,"min_create_revision":0,"max_create_revision":0,"key":"{first}"{more}}}"#
        )
    };
    pair.post("/v3/kv/range", &list("")).await;
    pair.read("/v3/kv/range", &list("")).await;
    for fields in [
        r#""sort_order":"DESCEND","sort_target":"MOD""#,
        r#""sort_order":"ASCEND","sort_target":"KEY","limit":3"#,
        r#""sort_order":2,"sort_target":2,"limit":2"#,
        r#""keys_only":true"#,
        r#""count_only":true"#,
        r#""limit":4,"revision":6"#,
        r#""serializable":true"#,
        r#""min_mod_revision":5,"max_mod_revision":9"#,
    ] {
        let body = format!(
            r#"{{{fields},"key":"{}","range_end":"{}"}}"#,
            key("routes"),
            key("routet")
        );
        pair.read("/v3/kv/range", &body).await;
    }
    let missing = format!(r#"{{"serializable":false,"key":"{}"}}"#, key("none"));
    pair.read("/v3/kv/range", &missing).await;
    let set_if_absent = format!(
        r#"{{"compare":[{{"target":"CREATE","key":"{0}","createRevision":0}}],"success":[{{"requestPut":{{"key":"{0}","value":"{1}"}}}}]}}"#,
        key("consumers/a"),
        base64("{}")
    );
    for _ in 0..2 {
        pair.post("/v3/kv/txn", &set_if_absent).await;
    }
    // The newest event is of the watched keys: the header of the past is its revision in both.
    pair.post("/v3/kv/put", &put("routes/03", "{}")).await;
    pair.post("/v3/lease/grant", r#"{"TTL":60,"ID":4711}"#).await;
    pair.post("/v3/kv/lease/timetolive", r#"{"ID":4711,"keys":true}"#)
        .await;
    pair.post("/v3/lease/leases", "{}").await;
    let watch = format!(
        r#"{{"create_request":{{"key":"{}","range_end":"{}","start_revision":15,"prev_kv":true,"progress_notify":true,"fragment":true}}}}"#,
        key("routes"),
        key("routet")
    );
    let gone = format!(r#"{{"key":"{}","prev_kv":true}}"#, key("routes/01"));
    let changed = put("routes/02", r#"{"uri":"/changed"}"#);
    pair.watch(&watch, &[("/v3/kv/put", &changed), ("/v3/kv/deleterange", &gone)])
        .await;
    pair.post("/v3/kv/lease/revoke", r#"{"ID":4711}"#).await;
    pair.read("/v3/kv/range", &list("")).await;
    pair.post("/v3/kv/range", "{\"key\":\"not base64\"}").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn patronis_requests_get_etcds_answers_3_7() {
    patroni(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn patronis_requests_get_etcds_answers_3_6() {
    patroni(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn patronis_requests_get_etcds_answers_3_5() {
    patroni(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_of_lua_resty_etcd_get_etcds_answers_3_7() {
    lua_resty_etcd(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn requests_of_lua_resty_etcd_get_etcds_answers_3_6() {
    lua_resty_etcd(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn requests_of_lua_resty_etcd_get_etcds_answers_3_5() {
    lua_resty_etcd(Version::V3_5).await;
}
