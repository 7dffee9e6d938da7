//! Metrics of the access log.

use crate::telemetry::metrics::{Counter, metric_group};

metric_group! {
    /// Lines of the access log. Without one they are not exported.
    pub(super) struct LineMetrics {
        /// Lines of the access log by `result`: `written`, `dropped` (no room in the queue) or `failed` (not
        /// written)
        ///
        /// See [access log](../operations.md#access-log)
        ///
        /// Useful when: the log has gaps
        pub(super) lines[result]: Counter = "rangecache_access_log_lines_total",
            from_zero = ["written", "dropped", "failed"];
    }
}
