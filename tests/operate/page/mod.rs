//! The status page: its content without scripts, which equals its data, and its behaviour in a browser. Without
//! Chromium the browser test is skipped with a message; `make page-test` requires it.

mod browser;
mod html;
use std::path::{Path, PathBuf};

use browser::Browser;
use html::{tags, text_of};
use serde_json::{Value, json};
use testkit::etcd::{Cluster, Etcd, Version};
use testkit::grpc::Client;
use testkit::pb::{RangeRequest, WatchCreateRequest};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

const PREFIX: &str = "/page/";
/// A prefix with HTML in it, to check that it is escaped.
const HOSTILE: &str = "/<img src=x onerror=alert(1)>\"'&/";
/// Begin of the links to documents.
const DOCUMENTS: &str = "https://github.com/rangecache/rangecache/blob/main/docs/";
/// Part of keys and values, which must never appear on the page.
const SECRET: &str = "s3cr3t";

/// Script that counts the page's timers and its calls in flight.
const WATCH: &str = "
    window.timers = new Set();
    window.calls = 0;
    (({ setTimeout, clearTimeout, fetch }) => {
        window.setTimeout = (run, ...rest) => {
            const timer = setTimeout(() => { timers.delete(timer); run(); }, ...rest);
            timers.add(timer);
            return timer;
        };
        window.clearTimeout = (timer) => { timers.delete(timer); clearTimeout(timer); };
        window.fetch = (...rest) => { calls++; return fetch(...rest).finally(() => { calls--; }); };
    })({ setTimeout, clearTimeout, fetch });
";

/// Names the sections and cards that lie over another one.
const OVERLAPS: &str = "(() => {
    const found = [];
    const boxes = [...document.querySelectorAll('header > *, main > section, footer')]
        .map((element) => [element.id || element.nodeName, element.getBoundingClientRect()]);
    const cards = [...document.querySelectorAll('.card')]
        .map((element) => [element.textContent.slice(0, 20), element.getBoundingClientRect()]);
    for (const list of [boxes, cards]) {
        for (const [index, [name, one]] of list.entries()) {
            for (const [other, two] of list.slice(index + 1)) {
                const width = Math.min(one.right, two.right) - Math.max(one.left, two.left);
                const height = Math.min(one.bottom, two.bottom) - Math.max(one.top, two.top);
                if (width > 1 && height > 1) found.push(`${name} and ${other}`);
            }
        }
    }
    return found.join('; ');
})()";

/// Names the texts whose contrast to their background is below WCAG's AA.
const CONTRAST: &str = "(() => {
    const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
    const luminance = (color) => {
        const [r, g, b] = numbers(color).map((part) => part / 255)
            .map((part) => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const ground = (element) => {
        for (let at = element; at; at = at.parentElement) {
            const color = getComputedStyle(at).backgroundColor;
            const parts = numbers(color);
            if (parts.length === 3 || parts[3] > 0) return color;
        }
        return 'rgb(255, 255, 255)';
    };
    const found = [];
    for (const element of document.querySelectorAll('body *')) {
        const text = [...element.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
        if (!text.length || !element.checkVisibility() || element.closest('script, style, noscript')) continue;
        const style = getComputedStyle(element);
        const [one, two] = [luminance(style.color), luminance(ground(element))];
        const ratio = (Math.max(one, two) + 0.05) / (Math.min(one, two) + 0.05);
        const size = parseFloat(style.fontSize);
        const isLarge = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        if (ratio < (isLarge ? 3 : 4.5)) found.push(`${text[0].data.trim().slice(0, 30)}: ${ratio.toFixed(2)}`);
    }
    return found.join('; ');
})()";

async fn status(rangecache: &Rangecache) -> Value {
    let answer = rangecache.admin("/status").await;
    assert_eq!(
        (answer.status, &answer.headers["content-type"]),
        (200, &"application/json".parse().unwrap())
    );
    serde_json::from_str(&answer.body).expect("it is JSON")
}

/// Waits until `find` finds a value in the status.
async fn status_when<T>(rangecache: &Rangecache, what: &str, mut find: impl FnMut(&Value) -> Option<T>) -> T {
    until(SOON, what, async || find(&status(rangecache).await))
        .await
        .0
}

fn finding(status: &Value, words: &str) -> Option<Value> {
    let findings = status["findings"].as_array().expect("a list");
    findings
        .iter()
        .find(|finding| {
            finding["title"]
                .as_str()
                .is_some_and(|title| title.contains(words))
        })
        .cloned()
}

fn ended(status: &Value, outcome: &str, reason: &str) -> u64 {
    let outcomes = status["reads"]["outcomes"].as_array().expect("a list");
    let found = outcomes
        .iter()
        .find(|ended| ended["outcome"] == outcome && ended["reason"] == reason);
    found.map_or(0, |ended| ended["count"].as_u64().expect("a number"))
}

/// Three reads from memory and two outside the mirror.
async fn read(client: &Client) {
    for _ in 0..2 {
        client.get(format!("{PREFIX}{SECRET}")).await.expect("a response");
        client
            .get(format!("/elsewhere/{SECRET}"))
            .await
            .expect("a response");
    }
    let all = client
        .range(&RangeRequest::prefix(PREFIX))
        .await
        .expect("a response");
    assert_eq!(all.kvs.len(), 5);
}

async fn write(etcd: &Etcd) {
    let direct = etcd.client().await;
    direct
        .put(format!("{PREFIX}{SECRET}"), SECRET)
        .await
        .expect("etcd writes");
    // A mirror without keys is a finding.
    let hostile = direct.put(format!("{HOSTILE}0"), SECRET).await;
    hostile.expect("etcd writes");
    for n in 0..4 {
        direct
            .put(format!("{PREFIX}{n}"), SECRET.repeat(100))
            .await
            .expect("etcd writes");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_without_scripts_shows_the_status_data() {
    let etcd = Etcd::start(Version::V3_7).await;
    write(&etcd).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .with("--cache-prefix", HOSTILE)
        .start()
        .await;
    let client = rangecache.client().await;
    read(&client).await;
    let watch = |key: &str| WatchCreateRequest {
        key: key.into(),
        ..WatchCreateRequest::default()
    };
    let _watches = [
        client.watch(watch(PREFIX)).await,
        client.watch(watch("/elsewhere/")).await,
    ];
    status_when(
        &rangecache,
        "five reads are counted, and the member's role is known",
        |status| {
            let counted = status["reads"]["since_start"] == 5 && status["slowest"].as_array()?.len() == 5;
            (counted && status["endpoints"][0]["role"] == "leader").then_some(())
        },
    )
    .await;
    let status = status(&rangecache).await;
    let page = rangecache.admin("/").await;

    assert_eq!(
        ended(&status, "hit", "linearizable") + ended(&status, "waited", "linearizable"),
        3,
        "{status}"
    );
    assert_eq!(ended(&status, "forwarded", "not_mirrored"), 2, "{status}");
    assert_eq!(status["reads"]["memory_ratio"], 0.6);
    assert_eq!(status["findings"], serde_json::json!([]));
    assert_eq!(status["ready"], true);
    let samples = status["samples"].as_object().expect("columns");
    let columns: Vec<&Vec<Value>> = samples.values().filter_map(Value::as_array).collect();
    assert!(columns.len() == 11 && columns.iter().all(|column| column.len() == columns[0].len()));
    let sampled = |names: &[&str]| -> u64 {
        let values = names
            .iter()
            .flat_map(|name| samples[*name].as_array().expect("a column"));
        values.map(|value| value.as_u64().expect("a count")).sum()
    };
    assert_eq!(sampled(&["reads_from_memory", "reads_after_a_wait"]), 3);
    assert_eq!(sampled(&["reads_by_etcd"]), 2);
    let ok =
        json!({"grpc_code": "OK", "calls": 5, "memory": 3, "etcd": 2, "failed": 0, "refused": 0, "none": 0});
    assert_eq!(status["calls"], json!([ok]));
    assert_eq!(status["watches"]["open"], json!({"memory": 1, "etcd": 1}));
    assert_eq!(
        samples["open_watches"].as_array().unwrap().last(),
        Some(&status["watches"]["open"])
    );
    for from in ["latency_from_memory", "latency_by_etcd"] {
        let quantile = |of: &Value, name: &str| of[name].as_f64().expect("a quantile");
        let of_minute = &status["reads"][from];
        let (p50, p99) = (
            quantile(of_minute, "p50_seconds"),
            quantile(of_minute, "p99_seconds"),
        );
        assert!(0.0 < p50 && p50 <= p99, "{of_minute}");
        let is_measured = |sample: &Value| sample["p99_seconds"].as_f64() > Some(0.0);
        assert!(
            samples[from].as_array().unwrap().iter().any(is_measured),
            "{samples:?}"
        );
    }
    let mirrors = status["mirrors"].as_array().expect("a list");
    let mirror = mirrors
        .iter()
        .find(|mirror| mirror["name"] == PREFIX)
        .expect("the mirror");
    assert_eq!(
        (&mirror["keys"], &mirror["out_of_service"]),
        (&5.into(), &Value::Null)
    );
    assert!(
        mirror["memory_bytes"].as_u64() > Some(400 * SECRET.len() as u64),
        "{mirror}"
    );
    let endpoint = &status["endpoints"][0];
    assert_eq!(
        (&endpoint["url"], &endpoint["is_healthy"]),
        (&etcd.url().into(), &true.into())
    );
    assert_eq!(
        (&endpoint["connections"], &endpoint["connections_wanted"]),
        (&8.into(), &8.into())
    );
    for slow in status["slowest"].as_array().expect("a list") {
        let phases: f64 = slow["phases"]
            .as_array()
            .expect("a list")
            .iter()
            .map(|phase| phase["seconds"].as_f64().expect("a number"))
            .sum();
        assert!(
            (phases - slow["total_seconds"].as_f64().unwrap()).abs() < 1e-6,
            "{slow}"
        );
    }

    let tags = tags(&page.body);
    assert_eq!(text_of(&tags, "reads-total"), "5");
    assert_eq!(text_of(&tags, "reads-memory"), "60 %");
    assert_eq!(text_of(&tags, "watches-memory"), "1");
    assert_eq!(text_of(&tags, "watches-etcd"), "1");
    for section in [
        "headline",
        "changes",
        "reads",
        "reasons",
        "slowest",
        "mirrors",
        "calls",
        "watches",
        "endpoints",
        "gates",
        "budgets",
        "process",
        "flags",
    ] {
        text_of(&tags, section);
    }
    for words in [
        "not mirrored",
        "--cache-prefix",
        "<strong>Healthy.</strong>",
        "role</dt><dd>leader",
        "All 2 mirrors are in service",
    ] {
        assert!(page.body.contains(words), "{words} not in\n{}", page.body);
    }
    let commit = status["commit"].as_str().expect("is text");
    assert!(
        page.body.contains(&format!("(commit <code>{commit}</code>)")),
        "{}",
        page.body
    );
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    assert_eq!(status["host"], host.trim());
    assert!(
        page.body.contains(&format!("<b>{}</b>", host.trim())),
        "{}",
        page.body
    );
    assert!(
        status["process"]["resident_bytes"].as_u64() > Some(1 << 20),
        "{status}"
    );
    let flags = status["flags"].as_array().expect("a list");
    let prefix = flags
        .iter()
        .find(|flag| flag["flag"] == "cache-prefix")
        .expect("the flag");
    assert_eq!(prefix["source"], "command line");
    assert_eq!(prefix["value"], format!("{PREFIX},{HOSTILE}"));
    let named = tags.iter().filter(|tag| tag.name == "code");
    let escaped = HOSTILE
        .replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;");
    let escaped = escaped.replace('"', "&quot;");
    assert!(named.into_iter().any(|tag| tag.text == escaped), "{}", page.body);

    // What unauthenticated readers may see, and what a browser may do with it.
    for answer in [&page.body, &serde_json::to_string(&status).unwrap()] {
        assert!(!answer.contains(SECRET), "a key or a value shows:\n{answer}");
    }
    let policy = page.headers["content-security-policy"].to_str().unwrap();
    assert!(
        policy.starts_with("default-src 'none'; script-src 'self'; style-src 'self'"),
        "{policy}"
    );
    assert!(
        !policy.contains("unsafe") && policy.contains("frame-ancestors 'none'"),
        "{policy}"
    );
    assert_eq!(page.headers["x-content-type-options"], "nosniff");
    assert!(!page.headers.contains_key("access-control-allow-origin"));
    for tag in &tags {
        assert!(
            tag.attributes
                .keys()
                .all(|name| name != "style" && !name.starts_with("on")),
            "{tag:?}"
        );
        assert!(
            tag.name != "style" && (tag.name != "script" || tag.text.trim().is_empty()),
            "{tag:?}"
        );
        for (name, value) in &tag.attributes {
            let is_document = tag.name == "a" && value.starts_with(DOCUMENTS);
            let is_own = is_document || value.starts_with("data:image/") || !value.contains(':');
            assert!(!["src", "href"].contains(&name.as_str()) || is_own, "{tag:?}");
        }
    }
    for (path, content_type) in [
        ("/page.css", "text/css; charset=utf-8"),
        ("/page.js", "text/javascript; charset=utf-8"),
    ] {
        let file = rangecache.admin(path).await;
        assert_eq!(
            (file.status, &file.headers["content-type"]),
            (200, &content_type.parse().unwrap())
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn problems_are_shown_with_a_remedy() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    write(&etcd).await;

    let small = Rangecache::before(&etcd)
        .with("--cache-max-bytes", "1000")
        .with("--cache-pack", "never")
        .start()
        .await;
    small
        .client()
        .await
        .get(format!("{PREFIX}0"))
        .await
        .expect("a response");
    let aside = status_when(&small, "the mirror is disabled", |status| {
        (ended(status, "forwarded", "over_budget") == 1).then_some(())?;
        finding(status, "everything is not answered from memory")
    })
    .await;
    assert_eq!(aside["severity"], "warning");
    assert!(
        aside["remedy"].as_str().unwrap().contains("--cache-max-bytes"),
        "{aside}"
    );
    assert!(
        aside["meaning"].as_str().unwrap().contains("bound of 0.98 KiB"),
        "{aside}"
    );
    let page = small.admin("/").await.body;
    tags(&page);
    for words in [
        "Nothing is answered from memory. The mirror is out of service.",
        "too large for its memory",
        "forwarded{over_budget}",
    ] {
        assert!(page.contains(words), "{words} not in\n{page}");
    }

    let rangecache = Rangecache::before(&etcd).start().await;
    let direct = etcd.client().await;
    direct.add_user("root", "root").await.expect("a user");
    direct.add_role("root").await.expect("a role");
    direct.grant_role("root", "root").await.expect("a right");
    direct.auth_enable().await.expect("auth is on");
    let auth = status_when(&rangecache, "auth is found to be on", |status| {
        finding(status, "rangecache has no user of its own")
    })
    .await;
    assert!(auth["remedy"].as_str().unwrap().contains("--user"), "{auth}");

    etcd.stop();
    let down = status_when(&rangecache, "etcd is found to be down", |status| {
        finding(status, "etcd cannot be reached")
    })
    .await;
    assert_eq!(down["severity"], "bad");
    assert!(down["meaning"].as_str().unwrap().contains(&etcd.url()), "{down}");
    let status = status(&rangecache).await;
    // Its text names the last failure, which may be another one by now.
    assert_eq!(status["findings"][0]["id"], down["id"], "the worst is first");
    assert_eq!(status["endpoints"][0]["role"], "unknown");
    let page = rangecache.admin("/").await.body;
    tags(&page);
    for words in ["<strong>Unhealthy (", "etcd cannot be reached", "not connected"] {
        assert!(page.contains(words), "{words} not in\n{page}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_and_their_roles_are_shown() {
    let mut cluster = Cluster::start(Version::V3_7).await;
    let rangecache = Rangecache::at(&cluster.endpoints()).start().await;
    let roles = |status: &Value| {
        let endpoints = status["endpoints"].as_array().expect("a list");
        let mut roles: Vec<_> = endpoints
            .iter()
            .map(|endpoint| endpoint["role"].as_str().expect("a word").to_owned())
            .collect();
        roles.sort();
        roles
    };
    status_when(&rangecache, "all roles are known", |status| {
        (roles(status) == ["follower", "follower", "leader"]).then_some(())
    })
    .await;
    let url = cluster.members[0].url();
    cluster.members[0].stop();
    let lost = status_when(&rangecache, "one is missed, and another leads", |status| {
        (roles(status) == ["follower", "leader", "unknown"]).then_some(())?;
        finding(status, &format!("{url} is not connected"))
    })
    .await;
    assert_eq!(lost["severity"], "warning");
}

/// Folder for the screenshots of `make page-test`.
fn pictures() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/page");
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn browser_updates_the_figures_live() {
    let Some(path) = browser::installed() else {
        println!("SKIPPED browser_updates_the_figures_live: there is no Chromium; PAGE_BROWSER may name one");
        return;
    };
    let etcd = Etcd::start(Version::V3_7).await;
    write(&etcd).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .with("--cache-prefix", HOSTILE)
        .start()
        .await;
    let client = rangecache.client().await;
    read(&client).await;

    let mut browser = Browser::start(&path).await;
    browser.look(1280, 900, false).await;
    browser.before_scripts(WATCH).await;
    browser.open(rangecache.metrics_url()).await;
    let total = "document.getElementById('reads-total').textContent";
    browser.wait_for(&format!("{total} === '5'")).await;
    // The reader's changes to the page survive updates.
    browser
        .evaluate("document.querySelector('#reads details').open = true; document.querySelector('#reads summary').focus()")
        .await;
    read(&client).await;
    browser.wait_for(&format!("{total} === '10'")).await;
    let kept =
        "document.querySelector('#reads details').open && document.activeElement.matches('#reads summary')";
    assert_eq!(browser.evaluate(kept).await, true);
    // A small phone's screen, with the dark colour scheme.
    for (name, width, dark) in [
        ("desktop", 1280, false),
        ("desktop-dark", 1280, true),
        ("phone", 390, false),
        ("phone-dark", 390, true),
        ("small-phone", 360, false),
        ("tablet", 768, false),
        ("tablet-dark", 768, true),
        ("small-desktop", 1024, false),
        ("small-desktop-dark", 1024, true),
        ("wide", 1440, false),
        ("wide-dark", 1440, true),
    ] {
        browser.look(width, 900, dark).await;
        let wide = "document.documentElement.scrollWidth";
        assert_eq!(browser.evaluate(wide).await, width, "{name} scrolls sideways");
        for (what, script) in [("overlaps", OVERLAPS), ("has too little contrast", CONTRAST)] {
            let found = browser.evaluate(script).await;
            assert_eq!(found, "", "{name} {what}");
        }
        browser.picture(&pictures().join(format!("{name}.png"))).await;
    }
    // A hidden page sends no requests: it has no timer and no call in flight.
    let (idle, busy) = ("!timers.size && !calls", "timers.size === 1");
    let visibility = |state: &str| {
        format!(
            "Object.defineProperty(document, 'visibilityState', {{ value: '{state}', configurable: true }});
             document.dispatchEvent(new Event('visibilitychange'))"
        )
    };
    let press = "document.getElementById('pause').click()".to_owned();
    for (expression, then) in [
        (visibility("hidden"), idle),
        (visibility("visible"), busy),
        (press.clone(), idle),
        (visibility("visible"), idle),
        (press, busy),
    ] {
        browser.evaluate(&expression).await;
        browser.wait_for(then).await;
    }
    assert_eq!(browser.complaints().await, [""; 0]);

    assert!(rangecache.terminate().await.success());
    browser.wait_for("!document.getElementById('stale').hidden").await;
    let stale = browser
        .evaluate("document.getElementById('stale').textContent")
        .await;
    assert!(stale.as_str().unwrap().contains("does not respond"), "{stale}");
    browser.picture(&pictures().join("stale.png")).await;
}
