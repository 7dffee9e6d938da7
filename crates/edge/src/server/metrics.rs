//! Metrics of clients' connections.

use rangecache_base::telemetry::metrics::{Counter, metric_group};

metric_group! {
    /// Closed connections of clients.
    pub struct ConnectionMetrics {
        /// Connections closed because of their client's behaviour, by `listener` (`clients`, `metrics`) and
        /// `reason`: `address`, `flood`, `handshake`, `replaced`, `silent`
        ///
        /// `address`: `--max-connections-per-address`; `flood`: control frames, or a header list in parts;
        /// `handshake`: too many are not complete; `replaced`: the oldest of the metrics listener, for a new
        /// one or for pages that are not read, or the oldest client that has sent no request, for a new one;
        /// `silent`: no first bytes
        ///
        /// Useful when: any increase: a client leaks connections or is hostile
        closed[listener, reason]: Counter = "rangecache_client_connections_closed_total", from_zero = [
            ("clients", "address"), ("clients", "flood"), ("clients", "handshake"), ("clients", "replaced"),
            ("clients", "silent"), ("metrics", "flood"), ("metrics", "replaced"), ("metrics", "silent"),
        ];
    }
}

impl ConnectionMetrics {
    /// Counts a connection of `listener` that was closed because of its client's behaviour.
    pub fn record_closed(&self, listener: &'static str, reason: &'static str) {
        self.closed.of((listener, reason)).inc();
    }
}
