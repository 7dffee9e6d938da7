//! Metrics of calls that go to etcd.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::register::register;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FallbackLabels {
    reason: &'static str,
}

/// Calls forwarded to etcd.
#[derive(Debug)]
pub struct ForwardingMetrics {
    /// Calls other than Range and RangeStream that were forwarded to etcd.
    pub calls: Counter,
    /// Large Ranges in flight to etcd.
    pub large: Gauge,
    /// Large Ranges that wait for their turn or for an identical one.
    pub waiting: Gauge,
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
        ForwardingMetrics {
            calls: register(
                registry,
                "forwarded_calls",
                "Calls other than Range and RangeStream that were forwarded to etcd",
            ),
            large: register(registry, "forward_large", "Large Ranges in flight to etcd"),
            waiting: register(
                registry,
                "forward_waiting",
                "Large Ranges waiting for their turn or for an identical one",
            ),
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
            stream_fallback: register(
                registry,
                "range_stream_fallback",
                "Loads and reads that went to etcd without RangeStream, by reason",
            ),
        }
    }

    /// Counts a load or a read that went to etcd without RangeStream.
    pub fn record_stream_fallback(&self, reason: &'static str) {
        self.stream_fallback
            .get_or_create(&FallbackLabels { reason })
            .inc();
    }
}
