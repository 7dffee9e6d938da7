//! Latencies and errors of a replay, for people and for scripts.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::time::Duration;

use serde_json::{Value, json};
use tonic::Code;

use super::line::{Passed, RecordedRead};
use super::recording::Recording;

/// Rows of prefixes that the report lists; further prefixes are one row.
const MAX_ROWS: usize = 200;
/// Prefix of the row of all further ones.
const OTHERS: &str = "(other prefixes)";

/// Delays of calls compared with the pace.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Pace {
    late: u64,
    most: Duration,
}

impl Pace {
    /// Records that a call started this long after it was due; from `late` on it counts.
    pub(super) fn record(&mut self, delay: Duration, late: Duration) {
        self.most = self.most.max(delay);
        self.late += u64::from(delay >= late);
    }
}

/// Calls of one method and prefix.
#[derive(Debug, Default)]
struct Row {
    /// Of each call, in microseconds.
    latencies: Vec<u32>,
    bytes: u64,
    /// Number of calls by the name of gRPC's code.
    errors: BTreeMap<String, u64>,
}

/// Result of a replay.
#[derive(Debug)]
pub(super) struct ReplayReport {
    rows: BTreeMap<(&'static str, String), Row>,
    passed: BTreeMap<Passed, u64>,
    calls: u64,
    errors: u64,
    recorded: Duration,
    took: Duration,
    pace: Pace,
}

impl ReplayReport {
    pub(super) fn new(recording: &Recording) -> ReplayReport {
        ReplayReport {
            rows: BTreeMap::new(),
            passed: recording.passed.clone(),
            calls: 0,
            errors: 0,
            recorded: recording.duration(),
            took: Duration::ZERO,
            pace: Pace::default(),
        }
    }

    /// Counts a call and its result: bytes, or gRPC's code.
    pub(super) fn count(&mut self, read: &RecordedRead, took: Duration, result: Result<u64, Code>) {
        let method = if read.is_stream { "RangeStream" } else { "Range" };
        let is_full = self.rows.len() >= MAX_ROWS;
        let key = (method, read.prefix.clone());
        let key = if is_full && !self.rows.contains_key(&key) {
            (method, OTHERS.to_owned())
        } else {
            key
        };
        let row = self.rows.entry(key).or_default();
        row.latencies
            .push(u32::try_from(took.as_micros()).unwrap_or(u32::MAX));
        self.calls += 1;
        match result {
            Ok(bytes) => row.bytes += bytes,
            Err(code) => {
                self.errors += 1;
                *row.errors.entry(format!("{code:?}")).or_default() += 1;
            }
        }
    }

    /// Records the end of the replay.
    pub(super) fn finish(&mut self, took: Duration, pace: Pace) {
        (self.took, self.pace) = (took, pace);
        for row in self.rows.values_mut() {
            row.latencies.sort_unstable();
        }
    }

    /// A line about the calls so far, of `all`.
    pub(super) fn progress(&self, all: usize) -> String {
        format!("{} of {all} calls, {} errors", self.calls, self.errors)
    }

    /// Whether every call succeeded.
    pub(super) fn is_clean(&self) -> bool {
        self.errors == 0
    }

    /// Report as a table.
    pub(super) fn to_text(&self) -> String {
        let all = self.total();
        // Keys are the clients' own: none may write control characters to the terminal.
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|((method, prefix), row)| (*method, prefix.escape_debug().to_string(), row))
            .collect();
        let widths = rows.iter().map(|(_, prefix, _)| prefix.chars().count());
        let width = widths.max().unwrap_or(0).max(6);
        // Writing into a String cannot fail.
        let mut text = String::new();
        let _ = writeln!(
            text,
            "{:<11}  {:<width$}  {:>9}  {:>9}  {:>9}  {:>9}  {:>9}  errors",
            "method", "prefix", "count", "p50 ms", "p90 ms", "p99 ms", "max ms"
        );
        for (method, prefix, row) in rows.into_iter().chain([("all", String::new(), &all)]) {
            let [p50, p90, p99, max] = row.quantiles().map(|micros| f64::from(micros) / 1000.0);
            let errors: Vec<_> = row
                .errors
                .iter()
                .map(|(code, count)| format!("{code} {count}"))
                .collect();
            let _ = writeln!(
                text,
                "{method:<11}  {prefix:<width$}  {:>9}  {p50:>9.3}  {p90:>9.3}  {p99:>9.3}  {max:>9.3}  {}",
                row.latencies.len(),
                if errors.is_empty() {
                    "-".to_owned()
                } else {
                    errors.join(", ")
                }
            );
        }
        let _ = writeln!(
            text,
            "\n{} calls in {:.1?}, recorded in {:.1?}, {:.1} MB of keys and values",
            self.calls,
            self.took,
            self.recorded,
            megabytes(all.bytes)
        );
        if self.pace.late > 0 {
            let _ = writeln!(
                text,
                "the pace was not kept: {} calls started 100 ms late or more, the latest by {:.1?}; raise --concurrency or \
                 lower --speed",
                self.pace.late, self.pace.most
            );
        }
        for (passed, lines) in &self.passed {
            let _ = writeln!(text, "passed over: {lines} {}", passed.as_str());
        }
        text
    }

    /// Report as one JSON object; latencies are in microseconds.
    pub(super) fn to_json(&self) -> Value {
        let rows: Vec<_> = self
            .rows
            .iter()
            .map(|((method, prefix), row)| row.to_json(method, prefix))
            .collect();
        let passed: BTreeMap<_, _> = self
            .passed
            .iter()
            .map(|(why, lines)| (why.as_str(), lines))
            .collect();
        json!({
            "calls": self.calls,
            "errors": self.errors,
            "seconds": self.took.as_secs_f64(),
            "recorded_seconds": self.recorded.as_secs_f64(),
            "late_calls": self.pace.late,
            "latest_us": u64::try_from(self.pace.most.as_micros()).unwrap_or(u64::MAX),
            "all": self.total().to_json("", ""),
            "rows": rows,
            "passed_over": passed,
        })
    }

    /// All rows in one.
    fn total(&self) -> Row {
        let mut all = Row::default();
        for row in self.rows.values() {
            all.latencies.extend(&row.latencies);
            all.bytes += row.bytes;
            for (code, count) in &row.errors {
                *all.errors.entry(code.clone()).or_default() += count;
            }
        }
        all.latencies.sort_unstable();
        all
    }
}

impl Row {
    /// p50, p90, p99 and the maximum, in microseconds.
    fn quantiles(&self) -> [u32; 4] {
        let last = self.latencies.len().saturating_sub(1);
        [50, 90, 99, 100].map(|percent| {
            let at = (last * percent).div_ceil(100);
            self.latencies.get(at).copied().unwrap_or(0)
        })
    }

    fn to_json(&self, method: &str, prefix: &str) -> Value {
        let [p50, p90, p99, max] = self.quantiles();
        json!({
            "method": method,
            "prefix": prefix,
            "count": self.latencies.len(),
            "p50_us": p50,
            "p90_us": p90,
            "p99_us": p99,
            "max_us": max,
            "bytes": self.bytes,
            "errors": self.errors,
        })
    }
}

#[allow(clippy::cast_precision_loss, reason = "shown with one digit")]
fn megabytes(bytes: u64) -> f64 {
    bytes as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use super::*;
    use etcd_wire::etcdserverpb::RangeRequest;

    #[test]
    fn report_has_quantiles_and_errors_by_method_and_prefix() {
        let mut report = ReplayReport::new(&Recording {
            passed: BTreeMap::from([(Passed::Watch, 3)]),
            ..Recording::default()
        });
        for n in 1..=100 {
            let read = RecordedRead {
                arrived_at: SystemTime::UNIX_EPOCH,
                is_stream: n % 2 == 0,
                prefix: "/a/".to_owned(),
                request: RangeRequest::default(),
            };
            let result = if n == 7 { Err(Code::Unavailable) } else { Ok(10) };
            report.count(&read, Duration::from_micros(n), result);
        }
        let mut pace = Pace::default();
        pace.record(Duration::from_millis(150), Duration::from_millis(100));
        report.finish(Duration::from_secs(1), pace);
        assert!(!report.is_clean());
        let shown = report.to_json();
        assert_eq!(
            (
                &shown["all"]["p50_us"],
                &shown["all"]["p99_us"],
                &shown["all"]["max_us"]
            ),
            (&json!(51), &json!(100), &json!(100))
        );
        assert_eq!(shown["rows"][0]["errors"], json!({"Unavailable": 1}));
        assert_eq!(shown["passed_over"], json!({"watches": 3}));
        let text = report.to_text();
        for part in [
            "Range ",
            "RangeStream",
            "Unavailable 1",
            "passed over: 3 watches",
            "1 calls started 100 ms late",
        ] {
            assert!(text.contains(part), "{part} not in\n{text}");
        }
    }
    #[test]
    fn control_characters_of_keys_are_escaped_in_the_table() {
        let mut report = ReplayReport::new(&Recording::default());
        let read = RecordedRead {
            arrived_at: SystemTime::UNIX_EPOCH,
            is_stream: false,
            prefix: "/re\u{1b}[31mg/\u{1b}]0;title\u{7}/\u{9b}2J/ä/".to_owned(),
            request: RangeRequest::default(),
        };
        report.count(&read, Duration::from_micros(1), Ok(1));
        let text = report.to_text();
        assert!(!text.contains(|c: char| c.is_control() && c != '\n'), "{text:?}");
        let shown = r"/re\u{1b}[31mg/\u{1b}]0;title\u{7}/\u{9b}2J/ä/";
        let of_range = text.lines().find(|line| line.starts_with("Range "));
        assert!(of_range.is_some_and(|line| line.contains(shown)), "{text}");
        // Columns are as wide as what is shown.
        let heading = text.lines().next().unwrap();
        let all = text.lines().find(|line| line.starts_with("all")).unwrap();
        assert_eq!(heading.find("errors"), all.rfind('-'));
    }
}
