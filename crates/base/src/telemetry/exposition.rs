//! Text formats of `/metrics`: OpenMetrics with exemplars if the scraper accepts it, otherwise the format of
//! Prometheus.

use std::{fmt::Write as _, sync::Arc, time::SystemTime};

use opentelemetry::trace::TraceId;
use parking_lot::Mutex;

/// Media type of OpenMetrics.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
/// Media type of Prometheus' text format.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
/// Number of bounded buckets of every latency: [`FIRST_BOUND_SECONDS`], doubled from bucket to bucket. One bucket more
/// has no bound.
pub(super) const BOUNDS: u16 = 19;
/// Bound of the first bucket of every latency.
pub(super) const FIRST_BOUND_SECONDS: f64 = 0.000_05;

/// The last traced call in each bucket of a latency histogram.
#[derive(Debug)]
pub(super) struct Exemplars {
    /// Name of the histogram, with prefix and unit.
    name: &'static str,
    by_bucket: Mutex<[Option<Exemplar>; BOUNDS as usize + 1]>,
}

#[derive(Clone, Copy, Debug)]
struct Exemplar {
    trace_id: TraceId,
    seconds: f64,
    at: SystemTime,
}

impl Exemplars {
    pub(super) fn new(name: &'static str) -> Exemplars {
        Exemplars {
            name,
            by_bucket: Mutex::default(),
        }
    }

    /// Makes a call that took so long the exemplar of its bucket.
    pub(super) fn record(&self, seconds: f64, trace_id: TraceId) {
        let mut bucket = 0;
        let mut bound = FIRST_BOUND_SECONDS;
        while bucket < usize::from(BOUNDS) && seconds > bound {
            (bucket, bound) = (bucket + 1, bound * 2.0);
        }
        self.by_bucket.lock()[bucket] = Some(Exemplar {
            trace_id,
            seconds,
            at: SystemTime::now(),
        });
    }
}

/// Appends `exemplars` to the lines of their buckets.
pub(super) fn with_exemplars(text: &str, exemplars: &[Arc<Exemplars>]) -> String {
    let mut out = String::with_capacity(text.len() + 1024);
    let mut bucket = 0;
    for line in text.lines() {
        out.push_str(line);
        let of_line = exemplars.iter().find(|exemplars| {
            line.strip_prefix(exemplars.name)
                .is_some_and(|rest| rest.starts_with("_bucket{"))
        });
        if let Some(exemplars) = of_line {
            // Buckets are listed in the order of their bounds.
            let exemplar = exemplars.by_bucket.lock().get(bucket).copied().flatten();
            if let Some(Exemplar {
                trace_id,
                seconds,
                at,
            }) = exemplar
            {
                let at = at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
                // Writing into a String cannot fail.
                let _ = write!(
                    out,
                    " # {{trace_id=\"{trace_id}\"}} {seconds:?} {:.3}",
                    at.as_secs_f64()
                );
            }
            bucket += 1;
        } else {
            bucket = 0;
        }
        out.push('\n');
    }
    out
}

/// Converts OpenMetrics to Prometheus' text format, in which a counter has the name of its sample, and which has
/// neither units nor an end marker.
pub(super) fn plain(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    // HELP precedes TYPE, which decides on the suffix of the name.
    let mut help: Option<&str> = None;
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# HELP ") {
            help = Some(rest);
            continue;
        }
        if line.starts_with("# UNIT ") || line == "# EOF" {
            continue;
        }
        let typed = line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' '));
        let Some((name, kind)) = typed else {
            out.push_str(line);
            out.push('\n');
            continue;
        };
        let suffix = if kind == "counter" { "_total" } else { "" };
        if let Some((_, text)) = help.take().and_then(|help| help.split_once(' ')) {
            let _ = writeln!(out, "# HELP {name}{suffix} {text}");
        }
        let _ = writeln!(out, "# TYPE {name}{suffix} {kind}");
    }
    out
}

/// A text format of metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// OpenMetrics 1.0.
    OpenMetrics,
    /// Prometheus' text format 0.0.4.
    Text,
}

impl Format {
    /// The format that the header `accept` of a scrape prefers.
    #[must_use]
    pub fn accepted(accept: Option<&str>) -> Format {
        let mut best = (0.0, Format::Text);
        for range in accept.unwrap_or_default().split(',') {
            let mut parts = range.split(';').map(str::trim);
            let format = match parts.next() {
                Some("application/openmetrics-text") => Format::OpenMetrics,
                Some("text/plain" | "text/*" | "*/*") => Format::Text,
                _ => continue,
            };
            let parameters: Vec<_> = parts.collect();
            let quality = parameters
                .iter()
                .find_map(|parameter| parameter.strip_prefix("q="))
                .map_or(1.0, |quality| quality.parse().unwrap_or(0.0));
            // Other versions of OpenMetrics are not supported.
            let version = parameters
                .iter()
                .find_map(|parameter| parameter.strip_prefix("version="));
            let is_known =
                format == Format::Text || version.is_none_or(|version| ["1.0.0", "0.0.1"].contains(&version));
            if is_known && quality > best.0 {
                best = (quality, format);
            }
        }
        best.1
    }

    /// Value of the header `content-type`.
    #[must_use]
    pub fn content_type(self) -> &'static str {
        match self {
            Format::OpenMetrics => OPEN_METRICS,
            Format::Text => TEXT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_follows_the_accept_header() {
        for (accept, format) in [
            (None, Format::Text),
            (Some("*/*"), Format::Text),
            (Some("text/html"), Format::Text),
            (
                Some(
                    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,\
                     application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;q=0.4,\
                     text/plain;version=0.0.4;q=0.3,*/*;q=0.2",
                ),
                Format::OpenMetrics,
            ),
            (
                Some("application/openmetrics-text; version=1.0.0, text/plain;q=0.5"),
                Format::OpenMetrics,
            ),
            (
                Some("application/openmetrics-text;version=2.0.0,text/plain;version=0.0.4;q=0.5"),
                Format::Text,
            ),
            (
                Some("application/vnd.google.protobuf;proto=x,text/plain;version=0.0.4;q=0.5"),
                Format::Text,
            ),
            (Some("application/openmetrics-text;q=0"), Format::Text),
        ] {
            assert_eq!(Format::accepted(accept), format, "{accept:?}");
        }
    }

    #[test]
    fn text_format_names_counters_by_their_samples() {
        let text = "# HELP a_seconds Waits.\n# TYPE a_seconds histogram\n# UNIT a_seconds seconds\n\
                    a_seconds_sum 0.5\n# HELP b Bs. Many.\n# TYPE b counter\nb_total{c=\"# EOF\"} 1\n# EOF\n";
        assert_eq!(
            plain(text),
            "# HELP a_seconds Waits.\n# TYPE a_seconds histogram\na_seconds_sum 0.5\n\
             # HELP b_total Bs. Many.\n# TYPE b_total counter\nb_total{c=\"# EOF\"} 1\n"
        );
    }
}
