//! Runs the linearizability checker.

use std::path::Path;
use std::process::Command;

use testkit::process::tool;

/// The checker's result for a history.
pub struct Verdict {
    /// True if there is no violation.
    pub right: bool,
    /// The checker's output.
    pub text: String,
}

/// Checks a history.
pub fn check(history: &Path) -> Verdict {
    let output = Command::new(tool("linearizer"))
        .arg(history)
        .output()
        .expect("the linearizer runs");
    let text = [output.stdout, output.stderr].concat();
    Verdict {
        right: output.status.success(),
        text: String::from_utf8_lossy(&text).trim_end().to_owned(),
    }
}

/// A test of the checker itself: each of these histories has one violation, or none.
#[test]
fn linearizer_finds_each_violation() {
    // Two writes and the recorder's view of them.
    let base = [
        r#"{"t":"start","rev":1,"kvs":[]}"#,
        &put(10, 20, 2, "x", "one"),
        &put(30, 40, 3, "x", "two"),
        &event(0, 2, 21, &[("x", "one")]),
        &event(0, 3, 41, &[("x", "two")]),
    ]
    .map(str::to_owned);
    let one = r#"{"k":"x","v":"one","m":2,"c":2,"n":1}"#;
    let two = r#"{"k":"x","v":"two","m":3,"c":2,"n":2}"#;
    let torn = [
        op(
            50,
            60,
            "txn",
            r#""rev":4,"write":{"then":[{"k":"x","v":"three"},{"k":"y","v":"three"}],"applied":true}"#,
        ),
        event(0, 4, 61, &[("x", "three"), ("y", "three")]),
    ];
    let third = r#"{"k":"x","v":"three","m":4,"c":2,"n":3}"#;
    let third_too = r#"{"k":"y","v":"three","m":4,"c":4,"n":1}"#;
    let restored = [
        r#"{"t":"cut","at":100,"rev":2}"#.to_owned(),
        put(130, 140, 3, "x", "new"),
        event(1, 3, 141, &[("x", "new")]),
    ];
    let new = r#"{"k":"x","v":"new","m":3,"c":2,"n":2}"#;
    let lost = |call| put(call, -1, 0, "x", "lost");
    let both = |first: &[String], more: &[String]| [first, more].concat();
    let nothing: &[String] = &[];
    let cases: Vec<(&str, Vec<String>, &str)> = vec![
        ("fresh", vec![list(50, 60, 3, 0, &[two])], ""),
        ("concurrent", vec![list(25, 35, 2, 0, &[one])], ""),
        ("stale", vec![list(50, 60, 2, 0, &[one])], "time runs backwards"),
        (
            "back",
            vec![list(31, 33, 3, 0, &[two]), list(34, 38, 2, 0, &[one])],
            "time runs backwards",
        ),
        ("early", vec![list(22, 29, 3, 0, &[two])], "not linearizable"),
        ("wrong", vec![list(50, 60, 3, 0, &[one])], "not linearizable"),
        ("pinned", vec![list(50, 60, 3, 2, &[one])], ""),
        (
            "pinned with an old header",
            vec![list(50, 60, 2, 2, &[one])],
            "time runs backwards",
        ),
        (
            "pinned before its header's write",
            vec![list(22, 29, 3, 2, &[one])],
            "not linearizable",
        ),
        (
            "serializable with an old header",
            vec![serializable(50, 60, 2, 2, &[one])],
            "",
        ),
        (
            "compacted later",
            vec![list(50, 60, 3, 2, &[one]), compact(55, 70, 3, 3)],
            "",
        ),
        (
            "compacted before",
            vec![compact(50, 60, 3, 3), list(70, 80, 3, 2, &[one])],
            "a compacted revision was read",
        ),
        (
            "compaction not acknowledged",
            vec![compact(50, -1, 0, 3), list(70, 80, 3, 2, &[one])],
            "",
        ),
        (
            "compacted before, read serializably",
            vec![compact(50, 60, 3, 3), serializable(70, 80, 3, 2, &[one])],
            "",
        ),
        (
            "compacted revision itself",
            vec![compact(50, 60, 3, 2), list(70, 80, 3, 2, &[one])],
            "",
        ),
        (
            "compaction seen by another client",
            vec![
                compact(50, -1, 0, 3),
                refused(55, 60, 2, "compacted"),
                list(70, 80, 3, 2, &[one]),
            ],
            "a compacted revision was read",
        ),
        (
            "header newer than the compaction's",
            vec![
                compact(50, 60, 3, 3),
                put(61, 62, 4, "x", "three"),
                event(0, 4, 63, &[("x", "three")]),
                list(49, 80, 4, 2, &[one]),
            ],
            "has a newer header",
        ),
        (
            "header of a compaction goes back",
            vec![compact(50, 60, 2, 2)],
            "time runs backwards",
        ),
        (
            "refused without a compaction",
            vec![refused(50, 60, 2, "compacted")],
            "no client had compacted",
        ),
        (
            "future of a revision shown by a read",
            vec![list(31, 33, 3, 0, &[two]), refused(34, 36, 3, "future")],
            "ended before that",
        ),
        ("pinned wrong", vec![list(50, 60, 3, 2, &[two])], "the keys were"),
        (
            "pinned refused",
            vec![op(
                50,
                60,
                "pinned",
                r#""read":{"key":"a","end":"z","rev":3},"error":"future""#,
            )],
            "ended before that",
        ),
        (
            "whole",
            both(&torn, &[list(70, 80, 4, 0, &[third, third_too])]),
            "",
        ),
        (
            "torn",
            both(&torn, &[list(70, 80, 4, 0, &[third])]),
            "not linearizable",
        ),
        ("never happened", vec![lost(50)], ""),
        ("happened", vec![lost(50), event(0, 4, 70, &[("x", "lost")])], ""),
        (
            "happened before it was asked",
            vec![
                lost(60),
                event(0, 4, 61, &[("x", "lost")]),
                put(50, 55, 5, "x", "late"),
                event(0, 5, 62, &[("x", "late")]),
            ],
            "not linearizable",
        ),
        (
            "twice",
            vec![
                lost(50),
                event(0, 4, 70, &[("x", "lost")]),
                event(0, 5, 71, &[("x", "lost")]),
            ],
            "took effect 2 times",
        ),
        (
            "unknown writer",
            vec![event(0, 4, 70, &[("x", "none")])],
            "no client wrote",
        ),
        ("forgotten", vec![put(50, 60, 4, "x", "gone")], "no event for"),
        (
            "restored",
            both(
                &restored,
                &[list(110, 120, 2, 0, &[one]), list(150, 160, 3, 0, &[new])],
            ),
            "",
        ),
        (
            "haunted",
            both(&restored, &[list(110, 120, 3, 0, &[two])]),
            "not linearizable",
        ),
        (
            "haunted at a revision",
            both(&restored, &[list(150, 160, 3, 3, &[two])]),
            "the keys were",
        ),
        ("nothing more", nothing.to_vec(), ""),
    ];
    let folder = tempfile::tempdir().expect("a folder");
    for (name, more, says) in cases {
        let path = folder.path().join("history.jsonl");
        std::fs::write(&path, both(&base, &more).join("\n")).expect("is written");
        let verdict = check(&path);
        assert_eq!(verdict.right, says.is_empty(), "{name}: {}", verdict.text);
        assert!(verdict.text.contains(says), "{name}: {}", verdict.text);
    }
}

fn op(call: i64, end: i64, kind: &str, more: &str) -> String {
    format!(
        r#"{{"t":"op","op":{{"client":{call},"via":"a","kind":"{kind}","call":{call},"return":{end},{more}}}}}"#
    )
}

fn put(call: i64, end: i64, revision: i64, key: &str, value: &str) -> String {
    let write = format!(
        r#""rev":{revision},"write":{{"then":[{{"k":"{key}","v":"{value}"}}],"applied":{}}}"#,
        end > 0
    );
    op(call, end, "put", &write)
}

/// A Compact, acknowledged unless `end` is negative.
fn compact(call: i64, end: i64, revision: i64, compacted: i64) -> String {
    op(
        call,
        end,
        "compact",
        &format!(r#""rev":{revision},"compact":{compacted}"#),
    )
}

/// A read of all keys at a revision, refused with `error`.
fn refused(call: i64, end: i64, at: i64, error: &str) -> String {
    let more = format!(r#""read":{{"key":"a","end":"z","rev":{at}}},"error":"{error}""#);
    op(call, end, "pinned", &more)
}

/// A serializable read of all keys at a revision.
fn serializable(call: i64, end: i64, revision: i64, at: i64, kvs: &[&str]) -> String {
    list(call, end, revision, at, kvs).replace(r#""end":"z","#, r#""end":"z","serializable":true,"#)
}

/// A read of all keys, at a revision unless that is 0.
fn list(call: i64, end: i64, revision: i64, at: i64, kvs: &[&str]) -> String {
    let (count, kvs) = (kvs.len(), kvs.join(","));
    let read = format!(
        r#""rev":{revision},"read":{{"key":"a","end":"z","rev":{at}}},"answer":{{"count":{count},"kvs":[{kvs}]}}"#
    );
    op(call, end, "list", &read)
}

fn event(segment: usize, revision: i64, seen: i64, puts: &[(&str, &str)]) -> String {
    let changes: Vec<_> = puts
        .iter()
        .map(|(key, value)| format!(r#"{{"k":"{key}","v":"{value}"}}"#))
        .collect();
    let changes = changes.join(",");
    format!(r#"{{"t":"event","segment":{segment},"rev":{revision},"seen":{seen},"changes":[{changes}]}}"#)
}
