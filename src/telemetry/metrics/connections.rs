//! Metrics of clients' connections and of the calls refused on them.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::register::register;

/// Clients' connections and the calls refused on them.
#[derive(Debug)]
pub struct ConnectionMetrics {
    /// Open client connections.
    pub open: Gauge,
    /// Calls refused because `--max-calls` were in flight.
    pub shed_calls: Counter,
}

impl ConnectionMetrics {
    pub(super) fn new(registry: &mut Registry) -> ConnectionMetrics {
        ConnectionMetrics {
            open: register(registry, "client_connections", "Open client connections"),
            shed_calls: register(
                registry,
                "shed_calls",
                "Calls of all kinds refused because --max-calls were in flight",
            ),
        }
    }
}
