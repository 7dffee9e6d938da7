//! Metrics of the mirrors.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

use crate::telemetry::metrics::metric_group;

/// Every reason for which a load or a read went to etcd without RangeStream; docs/consistency.md explains them.
pub const STREAM_FALLBACKS: [&str; 16] = [
    "off",
    "version",
    "unimplemented",
    "shape",
    "busy",
    "budget",
    "too_large",
    "late",
    "broken",
    "malformed",
    "refused",
    "no_endpoint",
    "auth",
    "not_proven",
    "history_replaced",
    "compacted",
];

metric_group! {
    /// All mirrors together.
    pub(super) struct RoomMetrics {
        /// 1 while an operator has switched memory off and etcd answers everything
        pub(super) forward_all: Gauge = "rangecache_forward_all";
    }
}

metric_group! {
    /// Loads of mirrors, and reads of clients, that could not use RangeStream.
    pub struct StreamFallbacks {
        /// Loads and reads that went to etcd without RangeStream, by reason
        fallbacks[reason]: Counter = "rangecache_range_stream_fallback_total", from_zero = STREAM_FALLBACKS;
    }
}

impl StreamFallbacks {
    /// Counts a load or a read.
    pub fn record(&self, reason: &'static str) {
        self.fallbacks.of(reason).inc();
    }
}
