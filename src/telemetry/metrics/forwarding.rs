//! Metrics of calls that go to etcd, and of the buffers that hold its responses.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::register::{register, register_unit};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct FallbackLabels {
    reason: &'static str,
}

/// Calls forwarded to etcd and buffered responses.
#[derive(Debug)]
pub struct ForwardingMetrics {
    /// Calls other than Range and RangeStream that were forwarded to etcd.
    pub calls: Counter,
    /// Large Ranges in flight to etcd.
    pub large: Gauge,
    /// Large Ranges that wait for their turn or for an identical one.
    pub waiting: Gauge,
    /// Bytes of responses that several reads share.
    pub shared_bytes: Gauge,
    /// Reads that were answered by an upstream call which another read shares.
    pub joined: Counter,
    /// Bytes of RangeStreams from etcd that are buffered for responses.
    pub stream_held_bytes: Gauge,
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
            shared_bytes: register_unit(
                registry,
                "forward_shared",
                Unit::Bytes,
                "Responses held for several identical reads",
            ),
            joined: register(
                registry,
                "forward_joined",
                "Large Ranges answered by an upstream call that others share",
            ),
            stream_held_bytes: register_unit(
                registry,
                "stream_held",
                Unit::Bytes,
                "RangeStreams from etcd held for unary responses and page series; bounded by --stream-max-bytes",
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
