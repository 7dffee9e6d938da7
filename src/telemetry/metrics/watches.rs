//! Metrics of watches.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::labels::MirrorLabels;
use super::register::register;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CreatedLabels {
    outcome: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CancelledLabels {
    reason: &'static str,
}

/// Watches.
#[derive(Debug)]
pub struct WatchMetrics {
    created: Family<CreatedLabels, Counter>,
    cancelled: Family<CancelledLabels, Counter>,
    streams: Gauge,
    watchers: Family<MirrorLabels, Gauge>,
    responses: Counter,
    events: Counter,
}

impl WatchMetrics {
    pub(super) fn new(registry: &mut Registry) -> WatchMetrics {
        WatchMetrics {
            created: register(
                registry,
                "watch_created",
                "Requests to create a watcher, by what answered them and kind of start or reason",
            ),
            cancelled: register(
                registry,
                "watch_cancelled",
                "Watchers served from memory that were cancelled, by reason",
            ),
            streams: register(registry, "watch_streams", "Open watch streams served from memory"),
            watchers: register(
                registry,
                "watch_watchers",
                "Open watchers served from memory, by mirror",
            ),
            responses: register(
                registry,
                "watch_responses",
                "Responses of watch streams served from memory",
            ),
            events: register(registry, "watch_events", "Events sent to watchers from memory"),
        }
    }

    /// Counts a create request: answered from `memory` (`reason` is the kind of start), by `etcd`, or `interrupted`
    /// because only etcd could have understood it on a stream that memory served.
    pub fn record_created(&self, outcome: &'static str, reason: &'static str) {
        self.created
            .get_or_create(&CreatedLabels { outcome, reason })
            .inc();
    }

    /// Counts a cancelled watcher.
    pub fn record_cancelled(&self, reason: &'static str) {
        self.cancelled.get_or_create(&CancelledLabels { reason }).inc();
    }

    /// Counts a stream that begins (1) or ends (-1).
    pub fn add_streams(&self, change: i64) {
        self.streams.inc_by(change);
    }

    /// Counts a watcher of a mirror that begins (1) or ends (-1).
    pub fn add_watchers(&self, mirror: &str, change: i64) {
        self.watchers
            .get_or_create(&MirrorLabels::new(mirror))
            .inc_by(change);
    }

    /// Counts a response.
    pub fn record_response(&self) {
        self.responses.inc();
    }

    /// Counts a response with this number of events.
    pub fn record_events(&self, events: usize) {
        self.responses.inc();
        self.events.inc_by(events as u64);
    }
}
