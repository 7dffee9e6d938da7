//! Metrics of calls that go to etcd.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::register::{register, start_at_zero};

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

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FallbackLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RefusedLabels {
    calls: &'static str,
    reason: &'static str,
}

/// Calls that take turns.
#[derive(Clone, Debug)]
pub struct TurnMetrics {
    /// Value of the label `calls`.
    calls: &'static str,
    /// Calls in flight to etcd.
    pub in_flight: Gauge,
    /// Calls that wait.
    pub waiting: Gauge,
    refused: Family<RefusedLabels, Counter>,
}

impl TurnMetrics {
    /// Counts a call that got no turn.
    pub fn record_refused(&self, reason: &'static str) {
        let calls = self.calls;
        self.refused.get_or_create(&RefusedLabels { calls, reason }).inc();
    }
}

/// Calls forwarded to etcd.
#[derive(Debug)]
pub struct ForwardingMetrics {
    /// Calls other than Range and RangeStream that were forwarded to etcd.
    pub calls: Counter,
    /// Large Ranges in flight to etcd, and those that wait for their turn or for an identical one.
    pub large: TurnMetrics,
    /// Small reads, streams and watches that etcd has not begun to answer, and those that wait for their turn.
    pub small: TurnMetrics,
    /// Reads that were answered by an upstream call which another read shares.
    pub joined: Counter,
    /// Page series that are remembered or open.
    pub series: Gauge,
    /// Pages that were answered from a series.
    pub series_pages: Counter,
    stream_fallback: Family<FallbackLabels, Counter>,
}

impl ForwardingMetrics {
    pub(super) fn new(registry: &mut Registry) -> ForwardingMetrics {
        let refused: Family<RefusedLabels, Counter> = register(
            registry,
            "forward_refused",
            "Calls that got no turn to be sent to etcd, by size (large, small) and reason",
        );
        let reasons = ["too_many_waiting", "late", "deadline"];
        let labels = reasons
            .into_iter()
            .flat_map(|reason| ["large", "small"].map(|calls| RefusedLabels { calls, reason }));
        start_at_zero(&refused, labels);
        let stream_fallback = register(
            registry,
            "range_stream_fallback",
            "Loads and reads that went to etcd without RangeStream, by reason",
        );
        let labels = STREAM_FALLBACKS.map(|reason| FallbackLabels { reason });
        start_at_zero(&stream_fallback, labels);
        ForwardingMetrics {
            calls: register(
                registry,
                "forwarded_calls",
                "Calls other than Range and RangeStream that were forwarded to etcd",
            ),
            large: TurnMetrics {
                calls: "large",
                in_flight: register(registry, "forward_large", "Large Ranges in flight to etcd"),
                waiting: register(
                    registry,
                    "forward_waiting",
                    "Large Ranges waiting for their turn or for an identical one",
                ),
                refused: refused.clone(),
            },
            small: TurnMetrics {
                calls: "small",
                in_flight: register(
                    registry,
                    "forward_small",
                    "Small reads, streams and new watches that etcd has not begun to answer",
                ),
                waiting: register(
                    registry,
                    "forward_small_waiting",
                    "Small reads, streams and new watches waiting for their turn",
                ),
                refused,
            },
            joined: register(
                registry,
                "forward_joined",
                "Large Ranges answered by an upstream call that others share",
            ),
            series: register(
                registry,
                "series",
                "Lists read in pages of which the next page is expected",
            ),
            series_pages: register(
                registry,
                "series_pages",
                "Pages answered from a RangeStream that an earlier page began",
            ),
            stream_fallback,
        }
    }

    /// Counts a load or a read that went to etcd without RangeStream.
    pub fn record_stream_fallback(&self, reason: &'static str) {
        self.stream_fallback
            .get_or_create(&FallbackLabels { reason })
            .inc();
    }
}
