//! Metrics of exported spans.

use rangecache_base::telemetry::metrics::{Counter, metric_group};

metric_group! {
    /// Spans for a collector. Without one they are not exported.
    pub(super) struct SpanMetrics {
        /// Spans by `result`: `exported`, `dropped` (no room in the queue) or `failed` (not accepted by the
        /// collector)
        ///
        /// Useful when: traces have gaps
        pub(super) spans[result]: Counter = "rangecache_trace_spans_total",
            from_zero = ["exported", "dropped", "failed"];
    }
}
