//! Metrics of the access log.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::labels::ResultLabels;
use super::register::register;

/// Counters of lines by result.
#[derive(Clone, Debug)]
pub struct LineCounters {
    /// Lines that were written.
    pub written: Counter,
    /// Calls without a line because the queue was full.
    pub dropped: Counter,
    /// Lines that could not be written.
    pub failed: Counter,
}

/// Lines of the access log by result.
#[derive(Debug)]
pub struct AccessLogMetrics {
    lines: Family<ResultLabels, Counter>,
}

impl AccessLogMetrics {
    pub(super) fn new(registry: &mut Registry) -> AccessLogMetrics {
        AccessLogMetrics {
            lines: register(
                registry,
                "access_log_lines",
                "Lines of the access log by result: written, dropped because the queue was full, or failed to be written",
            ),
        }
    }

    /// The counters, which exist from here on: without an access log they are not exported.
    #[must_use]
    pub fn counters(&self) -> LineCounters {
        let counter = |result| self.lines.get_or_create_owned(&ResultLabels { result });
        LineCounters {
            written: counter("written"),
            dropped: counter("dropped"),
            failed: counter("failed"),
        }
    }
}
