//! The report for people, and for scripts.

use std::fmt::Write as _;

use serde_json::{Value, json};

use super::model::{KeyGroup, Keyspace, Report};
use crate::diagnosis::format::bytes;
use crate::diagnosis::{Area, Finding, Severity};

/// Most resources in the table of prefixes.
const MAX_ROWS: usize = 40;
/// Most parts of a resource in that table.
const MAX_PARTS: usize = 4;

/// Character set of the report.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Style {
    /// Marks such as ✓ and ✗, for a terminal with a UTF-8 locale.
    Symbols,
    /// ASCII only.
    Ascii,
}

impl Style {
    fn mark(self, severity: Severity) -> &'static str {
        match (self, severity) {
            (Style::Symbols, Severity::Good) => "✓",
            (Style::Symbols, Severity::Note) => "·",
            (Style::Symbols, Severity::Warning) => "!",
            (Style::Symbols, Severity::Bad) => "✗",
            (Style::Ascii, Severity::Good) => "ok  ",
            (Style::Ascii, Severity::Note) => "note",
            (Style::Ascii, Severity::Warning) => "warn",
            (Style::Ascii, Severity::Bad) => "BAD ",
        }
    }

    /// Style for the locale of the environment, and whether standard output is a terminal.
    #[must_use]
    pub(crate) fn detect(is_terminal: bool) -> Style {
        let set = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG"));
        let locale = locale.unwrap_or_default().to_ascii_lowercase();
        if is_terminal && (locale.contains("utf-8") || locale.contains("utf8")) {
            Style::Symbols
        } else {
            Style::Ascii
        }
    }
}

impl Report {
    /// Report for people: the areas in order, each finding with its remedy.
    #[must_use]
    pub(crate) fn to_text(&self, style: Style) -> String {
        let mut text = format!("rangecache {} doctor\n", env!("CARGO_PKG_VERSION"));
        let mut findings: Vec<_> = self.findings.iter().collect();
        findings.sort_by_key(|finding| finding.id.area());
        for of_area in findings.chunk_by(|one, other| one.id.area() == other.id.area()) {
            let area = of_area[0].id.area();
            let _ = writeln!(text, "\n{}", area.as_str());
            for finding in of_area {
                write_finding(&mut text, style, finding);
            }
            if area == Area::Keyspace
                && let Some(keyspace) = &self.keyspace
            {
                write_table(&mut text, keyspace);
            }
        }
        if style == Style::Ascii {
            text = text.replace('…', "...").replace('µ', "u");
        }
        text
    }

    /// Report as one JSON object. `result` is `ok`, `warning` or `bad`; sizes are in bytes.
    pub(super) fn to_json(&self) -> Value {
        json!({
            "rangecache": env!("CARGO_PKG_VERSION"),
            "result": self.result(),
            "findings": self.findings.iter().map(finding).collect::<Vec<_>>(),
            "endpoints": self.endpoints,
            "keyspace": self.keyspace.as_ref().map(keyspace),
            "mirrors": self.mirrors,
            "watches": self.watches,
        })
    }

    /// The worst level of all findings. Notes need no action, so that they count as `ok`.
    pub(super) fn result(&self) -> &'static str {
        match self.severity() {
            Severity::Note => level(Severity::Good),
            severity => level(severity),
        }
    }
}

/// Name of a severity in the report for scripts.
pub(super) fn level(severity: Severity) -> &'static str {
    match severity {
        Severity::Good => "ok",
        Severity::Note => "note",
        Severity::Warning => "warning",
        Severity::Bad => "bad",
    }
}

fn finding(finding: &Finding) -> Value {
    let given = |text: &'_ String| Some(text.clone()).filter(|text| !text.is_empty());
    let (subject, remedy) = (given(&finding.subject), given(&finding.remedy));
    json!({
        "id": finding.id,
        "area": finding.id.area().as_str(),
        "subject": subject,
        "level": level(finding.severity),
        "text": finding.text(),
        "remedy": remedy,
    })
}

fn keyspace(keyspace: &Keyspace) -> Value {
    let resources = keyspace.resources();
    json!({
        "revision": keyspace.revision,
        "keys": keyspace.keys,
        "bytes": keyspace.encoded_bytes(),
        "exact": keyspace.is_exact,
        "revisions_per_second": keyspace.revisions_per_second,
        "resources": resources.iter().map(|resource| group(&resource.total)).collect::<Vec<_>>(),
        "prefixes": keyspace.groups.iter().map(group).collect::<Vec<_>>(),
        "cost": {
            "calls": keyspace.cost.calls,
            "seconds": keyspace.cost.took.as_secs_f64(),
            "read_bytes": keyspace.cost.read_bytes,
        },
    })
}

fn group(group: &KeyGroup) -> Value {
    let sizes = group.estimate();
    json!({
        "prefix": group.name(),
        "keys": group.range.keys,
        "bytes": sizes.encoded_bytes,
        "memory_bytes": sizes.memory_bytes,
        "packed_bytes": sizes.packed_bytes,
        "largest_bytes": sizes.largest_bytes,
        "mirrored": group.mirror.is_some(),
    })
}

fn write_finding(text: &mut String, style: Style, finding: &Finding) {
    // Writing into a String cannot fail.
    let _ = writeln!(text, "  {} {}", style.mark(finding.severity), finding.text());
    if !finding.remedy.is_empty() {
        let arrow = match style {
            Style::Symbols => "  →",
            Style::Ascii => "     ->",
        };
        let _ = writeln!(text, "  {arrow} {}", finding.remedy);
    }
}

fn write_table(text: &mut String, keyspace: &Keyspace) {
    if keyspace.groups.is_empty() {
        return;
    }
    let by_size = |group: &KeyGroup| std::cmp::Reverse((group.estimate().encoded_bytes, group.range.keys));
    let mut resources = keyspace.resources();
    resources.sort_by_key(|resource| by_size(&resource.total));
    // Each resource, and the largest of the parts into which it was divided.
    let mut rows = Vec::new();
    for resource in resources.iter().take(MAX_ROWS) {
        rows.push((String::new(), &resource.total));
        let mut parts = resource.groups.clone();
        if parts.len() > 1 && !resource.total.range.prefix.is_empty() {
            parts.sort_by_key(|group| by_size(group));
            rows.extend(parts.iter().take(MAX_PARTS).map(|part| ("  ".to_owned(), *part)));
        }
    }
    let width = rows
        .iter()
        .map(|(indent, group)| indent.len() + group.name().chars().count());
    let width = width.max().unwrap_or(0).clamp("prefix".len(), 50);
    let _ = writeln!(
        text,
        "\n    {:width$}  {:>10}  {:>10}  {:>10}  mirrored",
        "prefix", "keys", "size", "a key"
    );
    for (indent, group) in rows {
        let _ = writeln!(
            text,
            "    {:width$}  {:>10}  {:>10}  {:>10}  {}",
            indent + &group.name(),
            group.range.keys,
            bytes(group.estimate().encoded_bytes),
            bytes(group.sample.scaled(1).encoded_bytes),
            if group.mirror.is_some() { "yes" } else { "no" },
        );
    }
    if resources.len() > MAX_ROWS {
        let _ = writeln!(text, "    … and {} smaller ones", resources.len() - MAX_ROWS);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnosis::FindingId;

    #[test]
    fn report_without_a_terminal_is_ascii() {
        let mut report = Report::default();
        report.find(FindingId::CapabilityAvailable, "took 5µs …");
        let down = Finding::new(FindingId::EtcdUnreachable, "down").with_remedy("start it");
        report.add(down);
        let text = report.to_text(Style::Ascii);
        assert!(text.is_ascii(), "{text}");
        assert!(
            text.contains("BAD  down\n") && text.contains("-> start it"),
            "{text}"
        );
        let (endpoints, gates) = (text.find("endpoints"), text.find("gates"));
        assert!(endpoints < gates, "areas are in order:\n{text}");
        assert!(report.to_text(Style::Symbols).contains("✗ down"));
        assert_eq!((report.severity(), report.exit_code()), (Severity::Bad, 1));
    }

    #[test]
    fn findings_have_ids_and_what_is_not_known_is_not_ok() {
        let mut report = Report::default();
        report.find(FindingId::WatchesUnknown, "unknown");
        let down = Finding::new(FindingId::MemberNotConnected, "down").about("http://a:1");
        report.add(down);
        let json = report.to_json();
        assert_eq!(
            json["findings"][0],
            json!({
                "id": "watches-unknown", "area": "watches", "subject": null, "level": "note",
                "text": "unknown", "remedy": null,
            })
        );
        let down = &json["findings"][1];
        assert_eq!(
            (&down["id"], &down["subject"], &down["level"]),
            (
                &"member-not-connected".into(),
                &"http://a:1".into(),
                &"warning".into()
            )
        );
        assert_eq!(json["result"], "warning");
        let mut noted = Report::default();
        noted.find(FindingId::WatchesUnknown, "unknown");
        assert_eq!(noted.to_json()["result"], "ok", "a note needs no action");
    }
}
