//! Metrics of the clients that cost most.

use super::instruments::{Counter, Gauge};
use parking_lot::Mutex;

use super::{gauge, metric_group};
use crate::telemetry::clients::ClientFigures;

metric_group! {
    /// Metrics of the clients that cost most at the last scrape.
    pub struct ClientMetrics {
        /// Calls of the clients that cost most, since the start, by `client` and `kind` of its name:
        /// `certificate` (common name), `user` (of etcd), `address`, `unix`, `others` (beyond 1,024 clients)
        ///
        /// Only these clients have series (`--client-metrics-top`); those of a client begin and end with its
        /// place among them
        ///
        /// Useful when: to see who causes load; `/clients` has all
        calls[client, kind]: Counter = "rangecache_client_calls_total";
        /// Calls of these clients by `from`: `memory`, `etcd`, `refused`. Watches from memory are not counted
        ///
        /// Useful when: a client's reads reach etcd
        answers[client, kind, from]: Counter = "rangecache_client_answers_total";
        /// Reads of ranges without a limit, and RangeStreams, of these clients
        ///
        /// Useful when: a client lists too often
        lists[client, kind]: Counter = "rangecache_client_lists_total";
        /// Bytes of these clients by `direction`: `received` on connections, `sent` in responses
        ///
        /// Useful when: bandwidth is short
        bytes[client, kind, direction]: Counter = "rangecache_client_bytes_total";
        /// Calls of these clients in flight, watches included
        ///
        /// Useful when: one of them has most of `--max-calls`
        in_flight[client, kind]: Gauge = "rangecache_client_calls_in_flight";
        /// Open Watch streams of these clients
        ///
        /// Useful when: a client leaks watches
        watches[client, kind]: Gauge = "rangecache_client_watches";
        /// Excludes other scrapes while series are replaced.
        exporting: Mutex<()>;
    }
}

impl ClientMetrics {
    /// Replaces the exported clients by these.
    pub fn export(&self, clients: &[ClientFigures]) {
        let _exporting = self.exporting.lock();
        self.calls.clear();
        self.answers.clear();
        self.lists.clear();
        self.bytes.clear();
        self.in_flight.clear();
        self.watches.clear();
        for figures in clients {
            let client = || (figures.name.as_str().to_owned(), figures.name.kind().as_str());
            let client_and = |label| (client().0, client().1, label);
            self.calls.of(client()).inc_by(figures.calls);
            self.lists.of(client()).inc_by(figures.lists);
            self.in_flight.of(client()).set(gauge(figures.in_flight));
            self.watches.of(client()).set(gauge(figures.watches));
            for (from, count) in [
                ("memory", figures.from_memory),
                ("etcd", figures.from_etcd),
                ("refused", figures.refused),
            ] {
                self.answers.of(client_and(from)).inc_by(count);
            }
            for (direction, count) in [("received", figures.received_bytes), ("sent", figures.sent_bytes)] {
                self.bytes.of(client_and(direction)).inc_by(count);
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
