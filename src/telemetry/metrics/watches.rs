//! Metrics of watches.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::buffers::BufferKindMetrics;
use super::labels::MirrorLabels;
use super::register::{register, register_latency, register_unit, start_at_zero};
use crate::telemetry::Reason;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CreatedLabels {
    outcome: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CancelledLabels {
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct StreamLabels {
    source: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct HandoverLabels {
    to: &'static str,
    reason: &'static str,
}

/// Counts a stream as open until dropped.
#[derive(Debug)]
pub struct OpenStream(Gauge);

impl Drop for OpenStream {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Counts a watcher as open until dropped.
#[derive(Debug)]
pub struct OpenWatcher(Gauge);

impl Drop for OpenWatcher {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Watches. Cloning counts references.
#[derive(Clone, Debug)]
pub struct WatchMetrics {
    created: Family<CreatedLabels, Counter>,
    cancelled: Family<CancelledLabels, Counter>,
    streams: Family<StreamLabels, Gauge>,
    handovers: Family<HandoverLabels, Counter>,
    watchers: Family<MirrorLabels, Gauge>,
    responses: Counter,
    events: Counter,
    progress_seconds: Histogram,
    behind: Family<MirrorLabels, Gauge>,
    bytes: Family<KindLabels, Gauge>,
    /// The budget `--watch-max-bytes`.
    pub budget: BufferKindMetrics,
    /// The part of it for streams and watchers.
    pub stream_budget: BufferKindMetrics,
}

impl WatchMetrics {
    pub(super) fn new(registry: &mut Registry) -> WatchMetrics {
        let bytes: Family<KindLabels, Gauge> = register_unit(
            registry,
            "watch",
            Unit::Bytes,
            "Memory of watches served from memory, by kind; bounded by --watch-max-bytes",
        );
        let streams = bytes.get_or_create(&KindLabels { kind: "streams" }).clone();
        let refused: Counter = register(
            registry,
            "watch_refused",
            "Streams, watchers and messages that did not fit --watch-max-bytes",
        );
        let cancelled = register(
            registry,
            "watch_cancelled",
            "Watchers served from memory that were cancelled, by reason",
        );
        let reasons = ["client", "compacted", "replaced"];
        start_at_zero(&cancelled, reasons.map(|reason| CancelledLabels { reason }));
        let created = register(
            registry,
            "watch_created",
            "Requests to create a watcher, by what answered them and kind of start or reason",
        );
        let kinds = ["now", "revision", "compacted", "refused"].map(|kind| ("memory", kind));
        let ended =
            [Reason::HistoryReplaced, Reason::FeedLost].map(|reason| ("interrupted", reason.as_str()));
        let of_etcd = || Reason::ALL.iter().map(|reason| ("etcd", reason.as_str()));
        let outcomes = kinds.into_iter().chain(ended).chain(of_etcd());
        start_at_zero(
            &created,
            outcomes.map(|(outcome, reason)| CreatedLabels { outcome, reason }),
        );
        let handovers = register(
            registry,
            "watch_handovers",
            "Open watch streams that another source continued to serve, by source and reason",
        );
        let returns = [("memory", "mirrored")].into_iter().chain(of_etcd());
        start_at_zero(
            &handovers,
            returns.map(|(to, reason)| HandoverLabels { to, reason }),
        );
        WatchMetrics {
            stream_budget: BufferKindMetrics {
                used: streams,
                refused: refused.clone(),
                ..BufferKindMetrics::default()
            },
            bytes,
            progress_seconds: register_latency(
                registry,
                "watch_progress",
                "Time until a progress request of a client was answered",
            ),
            behind: register(
                registry,
                "watch_behind_revisions",
                "Revisions that the slowest watcher with events to send is behind, by mirror",
            ),
            budget: BufferKindMetrics {
                waiting: register(
                    registry,
                    "watch_waiting",
                    "Watch streams that wait for room in --watch-max-bytes",
                ),
                refused,
                ..BufferKindMetrics::default()
            },
            created,
            cancelled,
            streams: register(
                registry,
                "watch_streams",
                "Open watch streams by what serves them, and the reason if it is etcd",
            ),
            handovers,
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

    /// Counts a create request: answered from `memory` (`reason` is the kind of start), by `etcd`, or `interrupted`: a
    /// stream that nothing could continue ended.
    pub fn record_created(&self, outcome: &'static str, reason: &'static str) {
        self.created
            .get_or_create(&CreatedLabels { outcome, reason })
            .inc();
    }

    /// Counts a cancelled watcher.
    pub fn record_cancelled(&self, reason: &'static str) {
        self.cancelled.get_or_create(&CancelledLabels { reason }).inc();
    }

    /// Counts an open stream that memory serves.
    #[must_use]
    pub fn open_memory(&self) -> OpenStream {
        self.open("memory", "mirrored")
    }

    /// Counts an open stream that etcd serves, for `reason`.
    #[must_use]
    pub fn open_etcd(&self, reason: &'static str) -> OpenStream {
        self.open("etcd", reason)
    }

    fn open(&self, source: &'static str, reason: &'static str) -> OpenStream {
        let gauge = self
            .streams
            .get_or_create(&StreamLabels { source, reason })
            .clone();
        gauge.inc();
        OpenStream(gauge)
    }

    /// Open streams that memory serves.
    #[must_use]
    pub fn memory_streams(&self) -> i64 {
        self.streams_of("memory", "mirrored")
    }

    /// Open streams that etcd serves, by reason; none is 0.
    pub fn etcd_streams(&self) -> impl Iterator<Item = (Reason, i64)> {
        let counts = Reason::ALL
            .iter()
            .map(|reason| (*reason, self.streams_of("etcd", reason.as_str())));
        counts.filter(|(_, count)| *count > 0)
    }

    fn streams_of(&self, source: &'static str, reason: &'static str) -> i64 {
        let labels = StreamLabels { source, reason };
        self.streams.get(&labels).map_or(0, |gauge| gauge.get())
    }

    /// Events sent since the start.
    #[must_use]
    pub fn events_sent(&self) -> u64 {
        self.events.get()
    }

    /// Counts an open stream that `to` continues to serve (`etcd` or `memory`).
    pub fn record_handover(&self, to: &'static str, reason: &'static str) {
        self.handovers.get_or_create(&HandoverLabels { to, reason }).inc();
    }

    /// Counts an open watcher of the mirror with this name.
    #[must_use]
    pub fn open_watcher(&self, mirror: &str) -> OpenWatcher {
        let gauge = self.watchers.get_or_create(&MirrorLabels::new(mirror)).clone();
        gauge.inc();
        OpenWatcher(gauge)
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

    /// Records the `wait` for the response to a progress request.
    pub fn record_progress(&self, wait: Duration) {
        self.progress_seconds.observe(wait.as_secs_f64());
    }

    /// Sets how far the slowest watcher of a mirror is behind.
    pub fn set_behind(&self, mirror: &str, revisions: i64) {
        self.behind
            .get_or_create(&MirrorLabels::new(mirror))
            .set(revisions);
    }

    /// Sets the bytes of topics, and those of events: what is left of `used` without topics and `streams`.
    pub fn set_bytes(&self, topics: u64, streams: u64, used: u64) {
        let set = |kind, bytes: u64| {
            let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
            self.bytes.get_or_create(&KindLabels { kind }).set(bytes);
        };
        set("topics", topics);
        set("events", used.saturating_sub(topics + streams));
    }
}
