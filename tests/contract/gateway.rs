//! `/v3/kv/range` of the JSON gateway: from memory, with etcd's own text but for white space, headers and errors.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use rand::{Rng, SeedableRng};
use testkit::etcd::{Etcd, Version};
use testkit::http;
use testkit::pb::RequestOp;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

const RANGE: &str = "/v3/kv/range";
/// Requests per version.
const REQUESTS: usize = 600;

fn base64(text: &str) -> String {
    STANDARD.encode(text)
}

fn without_cors(mut response: http::Response) -> http::Response {
    let cors = ["origin", "methods", "headers"].map(|of| format!("access-control-allow-{of}"));
    cors.iter().for_each(|name| drop(response.headers.remove(name)));
    response
}

/// Posts `body` to etcd and to rangecache, and compares status, headers and text, except for white space.
async fn compare(etcd: &Etcd, rangecache: &Rangecache, path: &str, body: &str) -> http::Response {
    let expected = http::post(&format!("{}{path}", etcd.url()), body).await;
    let expected = without_cors(expected.expect("etcd answers"));
    let got = http::post(&format!("{}{path}", rangecache.url()), body).await;
    let (got, expected) = (got.expect("rangecache answers").compact(), expected.compact());
    assert_eq!(got, expected, "{path} {body}");
    expected
}

/// Starts an etcd with keys of all kinds, compacted, and a rangecache.
async fn scene(version: Version) -> (Etcd, Rangecache) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    for round in 0..3_usize {
        let put = |n: usize| RequestOp::put(format!("/json/{n:02}"), value(n + round));
        direct
            .transact((0..40).map(put).collect())
            .await
            .expect("etcd writes");
    }
    direct.grant_lease(7, 600).await.expect("etcd grants");
    direct
        .put_with_lease("/json/lease", "<&>", 7)
        .await
        .expect("etcd puts");
    direct.delete("/json/39").await.expect("etcd deletes");
    direct.compact(3).await.expect("etcd compacts");
    let rangecache = Rangecache::before(&etcd).start().await;
    (etcd, rangecache)
}

/// Values of lengths around the one up to which Go sends a content length.
fn value(n: usize) -> Vec<u8> {
    let length = [0, 1, 2, 3, 30, 1_390, 1_400, 1_410, 5_000][n % 9];
    (0..length).map(|at| (at * 7 + n) as u8).collect()
}

/// Random choice among the values, most often the first.
fn pick<'a>(random: &mut StdRng, values: &[&'a str]) -> &'a str {
    if random.random_bool(0.4) {
        values[0]
    } else {
        values.choose(random).expect("is not empty")
    }
}

fn request(random: &mut StdRng) -> String {
    let number = |random: &mut StdRng| {
        pick(
            random,
            &[
                "0", "1", "\"2\"", "\"0\"", "4", "5", "6", "\"7\"", "-1", "\"-1\"", "1000", "\"1000\"",
            ],
        )
        .to_owned()
    };
    let odd_number = |random: &mut StdRng| {
        pick(
            random,
            &[
                "null", "1.0", "1.5", "1e1", "\"\"", "\"x\"", "\"01\"", "\"+1\"", "true", "[]", "1e400",
            ],
        )
        .to_owned()
    };
    let keys = [
        "/json/01",
        "/json/",
        "/json/2",
        "\0",
        "",
        "/json/lease",
        "/none",
        "/json/39",
    ];
    let ends = ["/json0", "/json/3", "\0", "", "/json/", "/a", "/json/07"];
    let mut fields = vec![format!("\"key\":\"{}\"", base64(pick(random, &keys)))];
    if random.random_bool(0.7) {
        let name = pick(random, &["range_end", "rangeEnd"]);
        fields.push(format!("\"{name}\":\"{}\"", base64(pick(random, &ends))));
    }
    for names in [
        ["limit", "limit"],
        ["revision", "revision"],
        ["min_mod_revision", "minModRevision"],
        ["max_mod_revision", "maxModRevision"],
        ["min_create_revision", "minCreateRevision"],
        ["max_create_revision", "maxCreateRevision"],
    ] {
        if random.random_bool(0.15) {
            let odd = random.random_bool(0.1);
            let value = if odd { odd_number(random) } else { number(random) };
            fields.push(format!("\"{}\":{value}", pick(random, &names)));
        }
    }
    for names in [
        ["serializable", "serializable"],
        ["keys_only", "keysOnly"],
        ["count_only", "countOnly"],
    ] {
        if random.random_bool(0.2) {
            let value = if random.random_bool(0.1) {
                pick(random, &["null", "\"true\"", "1"])
            } else {
                pick(random, &["true", "false"])
            };
            fields.push(format!("\"{}\":{value}", pick(random, &names)));
        }
    }
    if random.random_bool(0.25) {
        let value = pick(
            random,
            &[
                "\"DESCEND\"",
                "\"ASCEND\"",
                "\"NONE\"",
                "0",
                "1",
                "2",
                "\"descend\"",
                "null",
            ],
        );
        fields.push(format!(
            "\"{}\":{value}",
            pick(random, &["sort_order", "sortOrder"])
        ));
        let value = pick(
            random,
            &[
                "\"KEY\"",
                "\"MOD\"",
                "\"CREATE\"",
                "\"VERSION\"",
                "\"VALUE\"",
                "0",
                "3",
                "\"X\"",
            ],
        );
        fields.push(format!(
            "\"{}\":{value}",
            pick(random, &["sort_target", "sortTarget"])
        ));
    }
    if random.random_bool(0.05) {
        let odd = [
            "\"other\":{\"a\":[1,null]}",
            "\"key\":\"YQ==\"",
            "\"Key\":\"YQ==\"",
            "\"key\":\"_-8\"",
            "\"limit\"",
        ];
        fields.push(pick(random, &odd).to_owned());
    }
    let mut body = format!("{{{}}}", fields.join(","));
    if random.random_bool(0.05) {
        body = pick(
            random,
            &[
                "",
                "{",
                "null",
                "[]",
                "{}",
                "{} ",
                "{}{}",
                "{\"key\":\"!\"}",
                "{\"key\":\"YQ\"}",
            ],
        )
        .to_owned();
    }
    body
}

async fn generated_requests_equal_etcds(version: Version) {
    let (etcd, rangecache) = scene(version).await;
    let mut random = StdRng::seed_from_u64(20_261_122);
    let before = rangecache.outcomes().await;
    for _ in 0..REQUESTS {
        let body = request(&mut random);
        let path = pick(&mut random, &[RANGE, "/v3beta/kv/range"]);
        compare(&etcd, &rangecache, path, &body).await;
    }
    let outcomes = rangecache.outcomes_since(&before, REQUESTS as u64).await;
    let from_memory = outcomes.of("hit") + outcomes.of("waited");
    assert!(from_memory > REQUESTS as u64 / 2, "{outcomes:?}");
    assert!(outcomes.of("forwarded") > 0, "{outcomes:?}");
}

async fn differs_in_white_space_alone(version: Version) {
    let (etcd, rangecache) = scene(version).await;
    let (key, end) = (base64("/json/"), base64("/json/2"));
    let before = rangecache.outcomes().await;
    let bodies = [
        format!(r#"{{"key":"{key}"}}"#),
        format!(r#"{{"key":"{key}","range_end":"{end}","limit":3}}"#),
        format!(r#"{{"key":"{key}","range_end":"{end}","revision":1}}"#),
        format!(r#"{{"key":"{key}","range_end":"{end}","revision":1000}}"#),
    ];
    for body in &bodies {
        let expected = http::post(&format!("{}{RANGE}", etcd.url()), body).await;
        let got = http::post(&format!("{}{RANGE}", rangecache.url()), body).await;
        let (expected, got) = (
            without_cors(expected.expect("etcd answers")),
            got.expect("rangecache answers"),
        );
        // No value has a comma: some builds of etcd write a space behind each.
        assert_eq!(expected.body.replace(", ", ","), got.body);
        assert_eq!(http::compact_json(&got.body), got.body, "no white space");
        let length = |response: &http::Response| {
            let length = response.headers.get("content-length")?.to_str().ok()?;
            length.parse().ok()
        };
        assert_eq!(length(&got), Some(got.body.len()));
        assert_eq!(length(&expected), Some(expected.body.len()));
        assert_eq!(got.compact(), expected.compact(), "{body}");
    }
    let outcomes = rangecache.outcomes_since(&before, 4).await;
    assert_eq!(
        outcomes.memory_answers(),
        4,
        "the first request, too: {outcomes:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_from_memory_differs_from_etcds_in_white_space_alone() {
    for version in [Version::V3_7, Version::V3_6, Version::V3_5] {
        differs_in_white_space_alone(version).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generated_json_ranges_equal_etcds_3_7() {
    generated_requests_equal_etcds(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generated_json_ranges_equal_etcds_3_6() {
    generated_requests_equal_etcds(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generated_json_ranges_equal_etcds_3_5() {
    generated_requests_equal_etcds(Version::V3_5).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_range_sees_every_earlier_write_and_large_ones_are_whole() {
    let (etcd, rangecache) = scene(Version::V3_7).await;
    let direct = etcd.client().await;
    let url = format!("{}{RANGE}", rangecache.url());
    let one = format!(r#"{{"key":"{}"}}"#, base64("/json/fresh"));
    for n in 0..100 {
        let revision = direct.put("/json/fresh", n.to_string()).await.expect("etcd puts");
        let got = http::post(&url, &one).await.expect("rangecache answers");
        let expected = format!("\"mod_revision\":\"{revision}\"");
        assert!(got.body.contains(&expected), "{expected} in {}", got.body);
    }
    for n in 0..40 {
        let large = vec![n; 100_000];
        direct.put(format!("/large/{n}"), large).await.expect("etcd puts");
    }
    let all = format!(
        r#"{{"key":"{}","range_end":"{}"}}"#,
        base64("/large/"),
        base64("/large0")
    );
    let before = rangecache.outcomes().await;
    let expected = compare(&etcd, &rangecache, RANGE, &all).await;
    assert!(expected.body.len() > 5_000_000);
    let outcomes = rangecache.outcomes_since(&before, 1).await;
    assert_eq!(outcomes.of("hit") + outcomes.of("waited"), 1, "{outcomes:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_range_does_not_crash_an_etcd_that_checks_no_sort_target() {
    let (newer, _) = scene(Version::V3_6).await;
    let (etcd, rangecache) = scene(Version::V3_5).await;
    let (key, end) = (base64("/json/"), base64("/json0"));
    let list = format!(r#"{{"key":"{key}","range_end":"{end}","sort_order":1,"sort_target":9}}"#);
    let expected = http::post(&format!("{}{RANGE}", newer.url()), &list).await;
    let got = http::post(&format!("{}{RANGE}", rangecache.url()), &list).await;
    let (expected, got) = (expected.expect("etcd answers"), got.expect("rangecache answers"));
    assert_eq!((got.status, expected.status), (400, 400));
    let text = "etcdserver: invalid sort option";
    assert!(expected.body.contains(text), "{expected:?}");
    assert_eq!(
        got.body,
        format!(r#"{{"error":"{text}","code":3,"message":"{text}"}}"#)
    );
    etcd.client()
        .await
        .put("/json/alive", "1")
        .await
        .expect("etcd lives");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_range_has_the_rights_of_its_token() {
    let (etcd, _) = scene(Version::V3_7).await;
    let root = async |path: &str, body: &str| {
        let response = http::post(&format!("{}{path}", etcd.url()), body).await;
        let response = response.expect("etcd answers");
        assert_eq!(response.status, 200, "{path}: {response:?}");
        response
    };
    for name in ["root", "reader", "stranger", "rangecache"] {
        let user = format!(r#"{{"name":"{name}","password":"{name}"}}"#);
        root("/v3/auth/user/add", &user).await;
    }
    root("/v3/auth/role/add", r#"{"name":"json"}"#).await;
    let (key, end) = (base64("/json/"), base64("/json0"));
    let perm = format!(r#"{{"name":"json","perm":{{"permType":"READ","key":"{key}","range_end":"{end}"}}}}"#);
    root("/v3/auth/role/grant", &perm).await;
    root("/v3/auth/user/grant", r#"{"user":"reader","role":"json"}"#).await;
    root("/v3/auth/user/grant", r#"{"user":"root","role":"root"}"#).await;
    root("/v3/auth/user/grant", r#"{"user":"rangecache","role":"root"}"#).await;
    root("/v3/auth/enable", "{}").await;
    let rangecache = Rangecache::before(&etcd)
        .with("--user", "rangecache")
        .with("--password", "rangecache")
        .start()
        .await;
    let list = format!(r#"{{"key":"{key}","range_end":"{end}"}}"#);
    let etcds = format!("{}{RANGE}", etcd.url());
    let ours = format!("{}{RANGE}", rangecache.url());
    for name in ["reader", "stranger"] {
        let login = format!(r#"{{"name":"{name}","password":"{name}"}}"#);
        let login = root("/v3/auth/authenticate", &login).await;
        let token = login.body.split("\"token\":\"").nth(1).expect("a token");
        let token = token.split('"').next().expect("a token").to_owned();
        let expected = http::post_as(&etcds, &token, &list).await.expect("etcd answers");
        let expected = without_cors(expected).compact();
        assert_eq!(expected.status, if name == "reader" { 200 } else { 403 });
        let before = rangecache.outcomes().await;
        for _ in 0..2 {
            let got = http::post_as(&ours, &token, &list).await;
            assert_eq!(got.expect("rangecache answers").compact(), expected, "{name}");
        }
        let outcomes = rangecache.outcomes_since(&before, 2).await;
        let from_memory = outcomes.of("hit") + outcomes.of("waited");
        assert_eq!(
            from_memory,
            if name == "reader" { 2 } else { 0 },
            "{name}: {outcomes:?}"
        );
    }
    let anonymous = without_cors(http::post(&etcds, &list).await.expect("etcd answers"));
    assert_eq!(anonymous.status, 400, "{anonymous:?}");
    let got = http::post(&ours, &list).await.expect("rangecache answers");
    assert_eq!(got, anonymous);
    let wrong = without_cors(http::post_as(&etcds, "wrong", &list).await.expect("etcd answers"));
    let got = http::post_as(&ours, "wrong", &list)
        .await
        .expect("rangecache answers");
    assert_eq!(got, wrong);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_ranges_with_headers_of_unknown_effect_and_long_bodies_are_forwarded() {
    let (etcd, rangecache) = scene(Version::V3_7).await;
    let before = rangecache.outcomes().await;
    let long = format!(
        r#"{{"key":"{}","range_end":"{}"}}"#,
        base64("/json/01"),
        "A".repeat(400_000)
    );
    compare(&etcd, &rangecache, RANGE, &long).await;
    let spaces = format!(r#"{{"key":"{}"{}}}"#, base64("/json/01"), " ".repeat(200_000));
    compare(&etcd, &rangecache, RANGE, &spaces).await;
    let query = format!(r#"{{"key":"{}"}}"#, base64("/json/01"));
    compare(&etcd, &rangecache, "/v3/kv/range?limit=1", &query).await;
    let outcomes = rangecache.outcomes_since(&before, 2).await;
    assert_eq!(outcomes.of("forwarded"), 2, "{outcomes:?}");
    // etcd gets to know what rangecache cannot reach: the first response after a restart is from memory again.
    until(SOON, "a read from memory", async || {
        let before = rangecache.outcomes().await;
        compare(&etcd, &rangecache, RANGE, &query).await;
        (rangecache.outcomes_since(&before, 1).await.of("hit") == 1).then_some(())
    })
    .await;
}
