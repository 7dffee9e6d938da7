//! The report for people.

use std::fmt::Write as _;

use super::model::{Area, KeyGroup, Keyspace, Report};
use crate::diagnosis::format::bytes;
use crate::diagnosis::{Finding, Severity};

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
        for area in Area::ALL {
            let mut of_area = self
                .findings
                .iter()
                .filter(|(found_in, _)| *found_in == area)
                .peekable();
            if of_area.peek().is_none() {
                continue;
            }
            let _ = writeln!(text, "\n{}", area.as_str());
            for (_, finding) in of_area {
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
        report.find(Area::Gates, FindingId::CapabilityAvailable, "took 5µs …");
        let down = Finding::new(FindingId::EtcdUnreachable, "down").with_remedy("start it");
        report.add(Area::Endpoints, down);
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
}
