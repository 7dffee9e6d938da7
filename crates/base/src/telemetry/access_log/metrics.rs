//! Metrics of the access log.

use prometheus_client::metrics::counter::Counter;

use crate::telemetry::metrics::metric_group;

metric_group! {
    /// Lines of the access log. Without one they are not exported.
    pub(super) struct LineMetrics {
        /// Lines of the access log by result: written, dropped because the queue was full, or failed to be written
        pub(super) lines[result]: Counter = "rangecache_access_log_lines_total",
            from_zero = ["written", "dropped", "failed"];
    }
}
