//! Metrics of exported spans.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

use super::labels::ResultLabels;
use super::register::register;

/// Counters of spans by result.
#[derive(Clone, Debug)]
pub struct SpanCounters {
    /// Spans that the collector accepted.
    pub exported: Counter,
    /// Spans dropped because the queue was full.
    pub dropped: Counter,
    /// Spans that the collector did not accept.
    pub failed: Counter,
}

/// Spans by result.
#[derive(Debug)]
pub struct TraceMetrics {
    spans: Family<ResultLabels, Counter>,
}

impl TraceMetrics {
    pub(super) fn new(registry: &mut Registry) -> TraceMetrics {
        TraceMetrics {
            spans: register(
                registry,
                "trace_spans",
                "Spans by result: exported, dropped because the queue was full, or failed to reach the collector",
            ),
        }
    }

    /// The counters, which exist from here on: without tracing they are not exported.
    #[must_use]
    pub fn counters(&self) -> SpanCounters {
        let counter = |result| self.spans.get_or_create_owned(&ResultLabels { result });
        SpanCounters {
            exported: counter("exported"),
            dropped: counter("dropped"),
            failed: counter("failed"),
        }
    }
}
