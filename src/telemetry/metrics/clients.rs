//! Metrics of the clients that cost most.

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::register::{register, start_at_zero};
use crate::telemetry::clients::ClientFigures;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ClientLabels {
    client: String,
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct AnswerLabels {
    client: String,
    kind: &'static str,
    from: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ByteLabels {
    client: String,
    kind: &'static str,
    direction: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LimitLabels {
    limit: &'static str,
}

/// Calls refused because their client has used up its share.
#[derive(Clone, Debug, Default)]
pub struct ShareMetrics(Family<LimitLabels, Counter>);

impl ShareMetrics {
    /// Counts a call that exceeds the bound `limit`.
    pub fn record_refused(&self, limit: &'static str) {
        self.0.get_or_create(&LimitLabels { limit }).inc();
    }
}

/// Metrics of the clients that cost most at the last scrape.
#[derive(Debug)]
pub struct ClientMetrics {
    calls: Family<ClientLabels, Counter>,
    answers: Family<AnswerLabels, Counter>,
    lists: Family<ClientLabels, Counter>,
    bytes: Family<ByteLabels, Counter>,
    in_flight: Family<ClientLabels, Gauge>,
    watches: Family<ClientLabels, Gauge>,
    /// Calls refused because their client has used up its share, of all clients.
    pub shares: ShareMetrics,
    /// Excludes other scrapes while series are replaced.
    exporting: Mutex<()>,
}

impl ClientMetrics {
    pub(super) fn new(registry: &mut Registry) -> ClientMetrics {
        let shares = register(
            registry,
            "client_share_refused",
            "Calls refused because their client has used up its share, by limit: bytes, calls, costly, lists, watches",
        );
        let limits = ["bytes", "calls", "costly", "lists", "watches"];
        start_at_zero(&shares, limits.map(|limit| LimitLabels { limit }));
        ClientMetrics {
            calls: register(
                registry,
                "client_calls",
                "Calls of the clients that cost most, by client and kind of its name: certificate, user, address, unix, others",
            ),
            answers: register(
                registry,
                "client_answers",
                "Calls of these clients by from: memory, etcd, refused",
            ),
            lists: register(
                registry,
                "client_lists",
                "Reads of ranges without a limit and RangeStreams of these clients",
            ),
            bytes: register(
                registry,
                "client_bytes",
                "Bytes of these clients by direction: received, sent",
            ),
            in_flight: register(
                registry,
                "client_calls_in_flight",
                "Calls of these clients in flight",
            ),
            watches: register(registry, "client_watches", "Open Watch streams of these clients"),
            shares: ShareMetrics(shares),
            exporting: Mutex::default(),
        }
    }

    /// Replaces the exported clients by these.
    pub fn export(&self, clients: &[ClientFigures]) {
        let _exporting = self.exporting.lock();
        self.calls.clear();
        self.answers.clear();
        self.lists.clear();
        self.bytes.clear();
        self.in_flight.clear();
        self.watches.clear();
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        for figures in clients {
            let (client, kind) = (figures.name.as_str().to_owned(), figures.name.kind().as_str());
            let labels = ClientLabels { client, kind };
            self.calls.get_or_create(&labels).inc_by(figures.calls);
            self.lists.get_or_create(&labels).inc_by(figures.lists);
            self.in_flight
                .get_or_create(&labels)
                .set(gauge(figures.in_flight));
            self.watches.get_or_create(&labels).set(gauge(figures.watches));
            for (from, count) in [
                ("memory", figures.from_memory),
                ("etcd", figures.from_etcd),
                ("refused", figures.refused),
            ] {
                let client = labels.client.clone();
                self.answers
                    .get_or_create(&AnswerLabels { client, kind, from })
                    .inc_by(count);
            }
            for (direction, count) in [("received", figures.received_bytes), ("sent", figures.sent_bytes)] {
                let client = labels.client.clone();
                self.bytes
                    .get_or_create(&ByteLabels {
                        client,
                        kind,
                        direction,
                    })
                    .inc_by(count);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::telemetry::Metrics;
    use crate::telemetry::clients::{ClientName, ClientRegistry};
    use crate::telemetry::exposition::Format;

    #[test]
    fn clients_of_the_last_export_alone_have_series() {
        let (metrics, clients) = (Metrics::new(), ClientRegistry::default());
        let name = ClientName::of_user("alice");
        let client = clients.connect(&name);
        let call = client.begin_call();
        call.record_sent(5);
        call.record_from_etcd();
        for _ in 0..2 {
            metrics.clients.export(&clients.figures());
        }
        let text = metrics.encode(Format::Text);
        for line in [
            "rangecache_client_calls_total{client=\"alice\",kind=\"user\"} 1",
            "rangecache_client_answers_total{client=\"alice\",kind=\"user\",from=\"etcd\"} 1",
            "rangecache_client_bytes_total{client=\"alice\",kind=\"user\",direction=\"sent\"} 5",
            "rangecache_client_calls_in_flight{client=\"alice\",kind=\"user\"} 1",
        ] {
            assert!(text.contains(line), "{line} not in\n{text}");
        }
        metrics.clients.export(&[]);
        assert!(!metrics.encode(Format::Text).contains("alice"));
    }
}
