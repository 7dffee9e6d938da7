//! The report for people.

use std::cmp::Reverse;
use std::fmt::Write as _;

use super::model::{Keyspace, PrefixFacts, Report};
use rangecache_report::format::bytes;
use rangecache_report::output::Style;
use rangecache_report::{Area, write_finding};

/// Most resources in the table of prefixes.
const MAX_ROWS: usize = 40;
/// Most parts of a resource in that table.
const MAX_PARTS: usize = 4;

impl Report {
    /// The areas in order, each finding with its remedy.
    pub(crate) fn to_text(&self, style: Style) -> String {
        let mut text = format!("rangecache {} doctor\n", self.version);
        let mut findings: Vec<_> = self.findings.iter().collect();
        findings.sort_by_key(|finding| finding.id.area());
        for of_area in findings.chunk_by(|one, other| one.id.area() == other.id.area()) {
            let area = of_area[0].id.area();
            let _ = writeln!(text, "\n{}", area.as_str());
            for finding in of_area {
                let texts = [&*finding.title, &finding.meaning, &finding.remedy];
                write_finding(&mut text, style, finding.severity, texts);
            }
            if let Some(keyspace) = self.keyspace.as_ref().filter(|_| area == Area::Keyspace) {
                write_table(&mut text, keyspace);
            }
        }
        style.encode(text)
    }
}

/// The largest prefixes, at most this many.
fn largest<'a>(prefixes: impl Iterator<Item = &'a PrefixFacts>, most: usize) -> Vec<&'a PrefixFacts> {
    let mut prefixes: Vec<_> = prefixes.collect();
    prefixes.sort_by_key(|of| Reverse((of.sizes.encoded_bytes, of.sizes.keys)));
    prefixes.truncate(most);
    prefixes
}

/// Each resource, and the largest of the parts into which it was divided.
fn write_table(text: &mut String, keyspace: &Keyspace) {
    let mut rows = Vec::new();
    for resource in largest(keyspace.resources.iter(), MAX_ROWS) {
        rows.push((resource.prefix.clone(), resource));
        let parts = keyspace.prefixes.iter().filter(|part| resource.has(part));
        if !resource.resource.is_empty() && parts.clone().count() > 1 {
            let parts = largest(parts, MAX_PARTS).into_iter();
            rows.extend(parts.map(|part| (format!("  {}", part.prefix), part)));
        }
    }
    let width = rows.iter().map(|(name, _)| name.chars().count()).max();
    let Some(width) = width.map(|width| width.clamp("prefix".len(), 50)) else {
        return;
    };
    text.push('\n');
    let mut row = |[prefix, keys, size, mean, mirrored]: [&str; 5]| {
        let _ = writeln!(
            text,
            "    {prefix:width$}  {keys:>10}  {size:>10}  {mean:>10}  {mirrored}"
        );
    };
    row(["prefix", "keys", "size", "a key", "mirrored"]);
    for (name, of) in rows {
        let (sizes, is_mirrored) = (of.sizes, if of.mirror.is_some() { "yes" } else { "no" });
        let [size, mean] = [sizes, sizes.scaled(1)].map(|sizes| bytes(sizes.encoded_bytes));
        row([&name, &sizes.keys.to_string(), &size, &mean, is_mirrored]);
    }
    if keyspace.resources.len() > MAX_ROWS {
        let more = keyspace.resources.len() - MAX_ROWS;
        let _ = writeln!(text, "    … and {more} smaller ones");
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use rangecache_report::{Finding, FindingId, Severity};

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
        assert_eq!((report.result, report.exit_code()), (Severity::Bad, 1));
    }

    #[test]
    fn findings_have_ids_and_what_is_not_known_is_not_good() {
        let mut report = Report::default();
        report.find(FindingId::WatchesUnknown, "unknown");
        let json = |report: &Report| serde_json::to_value(report).unwrap();
        assert_eq!(json(&report)["result"], "good", "a note needs no action");
        let down = Finding::new(FindingId::MemberNotConnected, "down").about("http://a:1");
        report.add(down);
        let json = json(&report);
        assert_eq!(
            json["findings"][0],
            json!({
                "id": "watches-unknown", "area": "watches", "severity": "note", "subject": "",
                "title": "unknown", "meaning": "", "remedy": "",
            })
        );
        let down = &json["findings"][1];
        assert_eq!(
            (&down["id"], &down["subject"], &down["severity"]),
            (
                &"member-not-connected".into(),
                &"http://a:1".into(),
                &"warning".into()
            )
        );
        assert_eq!(json["result"], "warning");
    }
}
