//! The status of a running rangecache for people: what an operator looks at first, in twenty lines.

use std::fmt::Write as _;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use rangecache_report::format::{bytes, counted, duration, long, rate};
use rangecache_report::output::Style;
use rangecache_report::{FindingId, Severity, write_finding};

/// Whether it is ready, and has no finding that is bad.
pub(super) fn is_good(status: &Value) -> bool {
    is(status, "ready") && list(status, "findings").all(|finding| finding["severity"] != "bad")
}

/// The text; fields that a version does not have are left out.
pub(super) fn of(status: &Value, style: Style) -> String {
    let mut text = String::new();
    let answers_nothing = FindingId::AnswersNothing.as_str();
    let state = if !is(status, "ready") {
        "NOT READY"
    } else if list(status, "findings").any(|finding| finding["id"] == answers_nothing) {
        "ready, but nothing is answered from memory"
    } else if is_good(status) {
        "ready"
    } else {
        "ready, with bad findings"
    };
    let [version, host] = strings(status, ["version", "host"]);
    let uptime = long(Duration::from_secs(number(status, "uptime_seconds")));
    // Writing into a String cannot fail.
    let _ = writeln!(text, "rangecache {version} on {host}, up {uptime}: {state}");
    write_reads(&mut text, &status["reads"]);
    for finding in list(status, "findings") {
        let severity = Severity::deserialize(&finding["severity"]).unwrap_or(Severity::Note);
        let texts = strings(finding, ["title", "meaning", "remedy"]);
        write_finding(&mut text, style, severity, texts);
    }
    for mirror in list(status, "mirrors") {
        let state = match mirror["out_of_service"].as_str() {
            None => format!("in service at revision {}", mirror["revision"]),
            Some(reason) => format!("out of service ({reason})"),
        };
        let keys = counted(number(mirror, "keys"), "key");
        let size = bytes(number(mirror, "memory_bytes"));
        let [name] = strings(mirror, ["name"]);
        let _ = writeln!(text, "mirror   {name}: {state}, {keys}, {size}");
    }
    for endpoint in list(status, "endpoints") {
        let [url, error, role] = strings(endpoint, ["url", "last_error", "role"]);
        let role = if is(endpoint, "is_hub") {
            "another rangecache"
        } else {
            role
        };
        let version = endpoint["version"].as_str().unwrap_or("of unknown version");
        let state = match (is(endpoint, "is_connected"), is(endpoint, "is_healthy")) {
            (false, _) => format!("not connected: {error}"),
            (true, false) => "connected, not healthy".to_owned(),
            (true, true) => format!("etcd {version}, {role}"),
        };
        let _ = writeln!(text, "endpoint {url}: {state}");
    }
    style.encode(text)
}

fn write_reads(text: &mut String, reads: &Value) {
    let per_second = rate(reads["per_second"].as_f64().unwrap_or(0.0));
    let _ = write!(text, "reads    {per_second} a second");
    let time = |seconds: &Value| Duration::try_from_secs_f64(seconds.as_f64()?).ok();
    if let Some(ratio) = reads["memory_ratio"].as_f64() {
        let window = long(time(&reads["window_seconds"]).unwrap_or_default());
        let _ = write!(text, "; {:.1} % from memory in the last {window}", ratio * 100.0);
    }
    if let Some(p99) = time(&reads["latency_from_memory"]["p99_seconds"]) {
        let _ = write!(text, "; p99 {} from memory", duration(p99));
    }
    text.push('\n');
}

fn list<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    value[name].as_array().into_iter().flatten()
}

fn strings<'a, const N: usize>(value: &'a Value, names: [&str; N]) -> [&'a str; N] {
    names.map(|name| value[name].as_str().unwrap_or_default())
}

fn number(value: &Value, name: &str) -> u64 {
    value[name].as_u64().unwrap_or(0)
}

fn is(value: &Value, name: &str) -> bool {
    value[name].as_bool() == Some(true)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status() -> Value {
        json!({
            "version": "0.1.0", "host": "cp1", "uptime_seconds": 3_700, "ready": true,
            "reads": {
                "per_second": 812.4, "memory_ratio": 0.992, "window_seconds": 900.0,
                "latency_from_memory": {"p50_seconds": 0.0004, "p99_seconds": 0.0021},
            },
            "findings": [{"severity": "warning", "title": "memory is switched off", "meaning": "etcd answers.", "remedy": "Switch it on."}],
            "mirrors": [
                {"name": "everything", "out_of_service": null, "revision": 81_234, "keys": 20_000, "memory_bytes": 3 << 20},
                {"name": "/a/", "out_of_service": "loading", "revision": null, "keys": 0, "memory_bytes": 0},
            ],
            "endpoints": [
                {"url": "http://a:1", "is_connected": true, "is_healthy": true, "version": "3.7.3", "role": "leader", "last_error": ""},
                {"url": "http://hub:1", "is_hub": true, "is_connected": true, "is_healthy": true, "version": "3.7.3", "role": "leader", "last_error": ""},
                {"url": "http://b:1", "is_connected": false, "is_healthy": false, "version": null, "role": "unknown", "last_error": "refused"},
            ],
        })
    }

    #[test]
    fn text_has_what_an_operator_looks_at_first() {
        let expected = "\
rangecache 0.1.0 on cp1, up 1 h 1 min: ready
reads    812 a second; 99.2 % from memory in the last 15 min; p99 2.1 ms from memory
  warn memory is switched off. etcd answers
       -> Switch it on.
mirror   everything: in service at revision 81234, 20,000 keys, 3 MiB
mirror   /a/: out of service (loading), 0 keys, 0 B
endpoint http://a:1: etcd 3.7.3, leader
endpoint http://hub:1: etcd 3.7.3, another rangecache
endpoint http://b:1: not connected: refused
";
        assert_eq!(of(&status(), Style::Ascii), expected);
    }

    #[test]
    fn status_is_good_if_it_is_ready_and_nothing_is_bad() {
        assert!(is_good(&status()));
        let mut bad = status();
        bad["findings"][0]["severity"] = "bad".into();
        assert!(!is_good(&bad));
        assert!(
            of(&bad, Style::Ascii)
                .lines()
                .next()
                .unwrap()
                .ends_with(": ready, with bad findings")
        );
        let mut cold = status();
        cold["ready"] = false.into();
        assert!(!is_good(&cold) && of(&cold, Style::Ascii).contains("NOT READY"));
        assert!(!is_good(&json!({})), "another program");
    }
}
