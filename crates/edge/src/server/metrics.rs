//! Metrics of clients' connections.

use prometheus_client::metrics::counter::Counter;

use rangecache_base::telemetry::metrics::metric_group;

metric_group! {
    /// Closed connections of clients.
    pub struct ConnectionMetrics {
        /// Connections closed because of their client's behaviour, by listener and reason: address, flood, handshake, replaced, silent
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
