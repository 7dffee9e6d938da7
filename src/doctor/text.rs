//! The report for people.

use std::fmt::Write as _;

use super::keyspace::{Group, Keyspace};
use super::report::{Area, Finding, Level, Report};

/// Lines of the table of prefixes.
const MAX_ROWS: usize = 40;

/// How it is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// With ✓ and ✗, where a terminal speaks UTF-8.
    Symbols,
    /// With words, for everything else.
    Ascii,
}

impl Style {
    fn mark(self, level: Level) -> &'static str {
        match (self, level) {
            (Style::Symbols, Level::Good) => "✓",
            (Style::Symbols, Level::Warning) => "!",
            (Style::Symbols, Level::Bad) => "✗",
            (Style::Ascii, Level::Good) => "ok  ",
            (Style::Ascii, Level::Warning) => "warn",
            (Style::Ascii, Level::Bad) => "BAD ",
        }
    }

    /// By what the environment says of the locale, and whether a terminal reads.
    #[must_use]
    pub fn of(is_terminal: bool) -> Style {
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
    /// The report in words, areas in order, with what to do about each thing that is not good.
    #[must_use]
    pub fn to_text(&self, style: Style) -> String {
        let mut text = format!("rangecache {} doctor\n", env!("CARGO_PKG_VERSION"));
        for area in Area::ALL {
            let mut of_area = self
                .findings
                .iter()
                .filter(|finding| finding.area == area)
                .peekable();
            if of_area.peek().is_none() {
                continue;
            }
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
}

fn write_finding(text: &mut String, style: Style, finding: &Finding) {
    // Writing into a String cannot fail.
    let _ = writeln!(text, "  {} {}", style.mark(finding.level), finding.text);
    if let Some(remedy) = &finding.remedy {
        let arrow = match style {
            Style::Symbols => "  →",
            Style::Ascii => "     ->",
        };
        let _ = writeln!(text, "  {arrow} {remedy}");
    }
}

fn write_table(text: &mut String, keyspace: &Keyspace) {
    if keyspace.groups.is_empty() {
        return;
    }
    let mut groups: Vec<&Group> = keyspace.groups.iter().collect();
    groups.sort_by_key(|group| std::cmp::Reverse((group.encoded_bytes(), group.keys)));
    let width = groups.iter().map(|group| group.name().chars().count()).max();
    let width = width.unwrap_or(0).clamp("prefix".len(), 50);
    let _ = writeln!(
        text,
        "\n    {:width$}  {:>10}  {:>10}  {:>10}  mirrored",
        "prefix", "keys", "size", "a key"
    );
    for group in groups.iter().take(MAX_ROWS) {
        let _ = writeln!(
            text,
            "    {:width$}  {:>10}  {:>10}  {:>10}  {}",
            group.name(),
            group.keys,
            bytes(group.encoded_bytes()),
            bytes(group.weight.encoded_of(1)),
            if group.mirror.is_some() { "yes" } else { "no" },
        );
    }
    if groups.len() > MAX_ROWS {
        let _ = writeln!(text, "    … and {} smaller ones", groups.len() - MAX_ROWS);
    }
}

/// Bytes in the unit that fits: `1.2 GiB`.
pub(super) fn bytes(bytes: impl TryInto<u64>) -> String {
    let bytes = bytes.try_into().unwrap_or(0);
    #[allow(clippy::cast_precision_loss, reason = "three digits are shown")]
    let (mut value, mut unit) = (bytes as f64, 0);
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 || value >= 100.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// `1 key`, `2 keys`.
pub(super) fn counted(n: u64, what: &str) -> String {
    if n == 1 {
        format!("1 {what}")
    } else {
        format!("{n} {what}s")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_readable() {
        for (n, text) in [
            (0_u64, "0 B"),
            (1023, "1023 B"),
            (1536, "1.5 KiB"),
            (200 << 20, "200 MiB"),
            (3 << 40, "3.0 TiB"),
        ] {
            assert_eq!(bytes(n), text);
        }
        assert_eq!(bytes(-1_i64), "0 B");
    }

    #[test]
    fn without_a_terminal_it_is_ascii() {
        let mut report = Report::default();
        report.good(Area::Gates, "took 5µs …");
        report.bad(Area::Endpoints, "down", "start it");
        let text = report.to_text(Style::Ascii);
        assert!(text.is_ascii(), "{text}");
        assert!(
            text.contains("BAD  down\n") && text.contains("-> start it"),
            "{text}"
        );
        let (endpoints, gates) = (text.find("endpoints"), text.find("gates"));
        assert!(endpoints < gates, "areas in their order:\n{text}");
        assert!(report.to_text(Style::Symbols).contains("✗ down"));
        assert_eq!((report.level(), report.exit_code()), (Level::Bad, 1));
    }
}
