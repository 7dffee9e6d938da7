//! Metrics of clients' connections and of the calls refused on them.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::register::{register, register_unit, start_at_zero};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ClosedLabels {
    listener: &'static str,
    reason: &'static str,
}

/// Clients' connections and the calls refused on them.
#[derive(Debug)]
pub struct ConnectionMetrics {
    /// Open client connections.
    pub open: Gauge,
    /// Calls refused because `--max-calls` were in flight.
    pub shed_calls: Counter,
    /// Requests that this process had sent itself.
    pub looped_calls: Counter,
    /// Requests refused because their listener is read-only.
    pub read_only_refused: Counter,
    /// Bytes of responses of the metrics listener that were not read.
    pub admin_unread_bytes: Gauge,
    closed: Family<ClosedLabels, Counter>,
}

impl ConnectionMetrics {
    pub(super) fn new(registry: &mut Registry) -> ConnectionMetrics {
        let closed = register(
            registry,
            "client_connections_closed",
            "Connections closed because of their client's behaviour, by listener and reason: address, flood, handshake, replaced, silent",
        );
        for (listener, reason) in [
            ("clients", "address"),
            ("clients", "flood"),
            ("clients", "handshake"),
            ("clients", "replaced"),
            ("clients", "silent"),
            ("metrics", "flood"),
            ("metrics", "replaced"),
            ("metrics", "silent"),
        ] {
            start_at_zero(&closed, [ClosedLabels { listener, reason }]);
        }
        ConnectionMetrics {
            open: register(registry, "client_connections", "Open client connections"),
            shed_calls: register(
                registry,
                "shed_calls",
                "Calls of all kinds refused because --max-calls were in flight",
            ),
            looped_calls: register(
                registry,
                "looped_calls",
                "Requests of this rangecache that came back to it, because --endpoints leads to itself",
            ),
            read_only_refused: register(
                registry,
                "read_only_refused",
                "Requests that may write, refused because they came to --read-only-listen-client-urls",
            ),
            admin_unread_bytes: register_unit(
                registry,
                "admin_unread",
                Unit::Bytes,
                "Bytes of responses of the metrics listener that their clients have not read yet",
            ),
            closed,
        }
    }

    /// Counts a connection of `listener` that was closed because of its client's behaviour.
    pub fn record_closed(&self, listener: &'static str, reason: &'static str) {
        self.closed
            .get_or_create(&ClosedLabels { listener, reason })
            .inc();
    }
}
