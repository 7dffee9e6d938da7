//! Metrics of watches.

use std::time::Duration;

use rangecache_base::telemetry::Reason;
use rangecache_base::telemetry::metrics::{Counted, Counter, Gauge, Latency, gauge, metric_group};
use rangecache_edge::limits::BufferKindMetrics;

/// Sources of the response to a create request, each with the kind of the watcher's start or the reason, whose series begin
/// at zero.
fn created() -> impl Iterator<Item = (&'static str, &'static str)> {
    let kinds = ["now", "revision", "compacted", "refused"].map(|kind| ("memory", kind));
    let ended = [Reason::HistoryReplaced, Reason::FeedLost].map(|reason| ("interrupted", reason.as_str()));
    kinds.into_iter().chain(ended)
}

metric_group! {
    /// Watches.
    pub struct WatchMetrics {
        /// Requests to create a watcher by `outcome` and `reason`: served from `memory` (the kind of start),
        /// left to `etcd`, or `interrupted`: a stream that nothing could continue ended with `Unavailable`
        ///
        /// See [watches](../consistency.md#watches)
        ///
        /// Useful when: watches cost etcd more than expected
        created[outcome, reason]: Counter = "rangecache_watch_created_total", from_zero = created();
        /// Watchers served from memory that were cancelled, by `reason`: by the `client`, because etcd has
        /// `compacted` what they need, or because its history was `replaced`
        ///
        /// Useful when: `compacted` grows: clients fall behind
        cancelled[reason]: Counter = "rangecache_watch_cancelled_total",
            from_zero = ["client", "compacted", "replaced"];
        /// Open watch streams by `source`: `memory`, or `etcd` with the `reason` (with `--watch-cache=off`
        /// none is counted)
        ///
        /// Useful when: many at `etcd` with `not_mirrored`: mirror their keys, too
        streams[source, reason]: Gauge = "rangecache_watch_streams";
        /// Open watch streams that another source continued to serve: `to` `etcd` or `memory`, by `reason`
        ///
        /// Useful when: it grows all the time: streams go to and fro
        handovers[to, reason]: Counter = "rangecache_watch_handovers_total",
            from_zero = [("memory", "mirrored"), ("etcd", Reason::FeedLost.as_str())];
        /// Open watchers served from memory, by `mirror`
        ///
        /// Useful when: sizing
        watchers[mirror]: Gauge = "rangecache_watch_watchers";
        /// Responses of watch streams served from memory
        ///
        /// Useful when: estimating load
        responses: Counter = "rangecache_watch_responses_total";
        /// Events sent to watchers from memory
        ///
        /// Useful when: estimating load
        events: Counter = "rangecache_watch_events_total";
        /// Time until a progress request of a client was answered
        ///
        /// Useful when: over 50 ms: the feed is slow
        progress: Latency = "rangecache_watch_progress_seconds";
        /// Revisions that the slowest watcher with events to send is behind, by `mirror`
        ///
        /// Useful when: it grows: a client does not keep up
        behind[mirror]: Gauge = "rangecache_watch_behind_revisions";
        /// Memory of watches served from memory, by `kind`: `streams` (with their watchers, also while etcd
        /// serves them), `topics` (lists of events by range, and ranges whose watchers are gone), `events`
        /// (on their way to clients); bounded by `--watch-max-bytes`
        ///
        /// Useful when: near `--watch-max-bytes`
        bytes[kind]: Gauge = "rangecache_watch_bytes";
        /// Bytes of all kinds.
        pub used_bytes: Gauge;
        /// Watch streams that wait for room in `--watch-max-bytes`
        ///
        /// Useful when: above 0: events are late
        waiting: Gauge = "rangecache_watch_waiting";
        /// Streams, watchers and messages that did not fit `--watch-max-bytes`
        ///
        /// Useful when: any increase: raise it, or find the clients that do not read
        refused: Counter = "rangecache_watch_refused_total";
    }
}

impl WatchMetrics {
    /// The budget `--watch-max-bytes`, and the part of it for streams and watchers.
    #[must_use]
    pub fn budgets(&self) -> [BufferKindMetrics; 2] {
        let (used, waiting) = (self.used_bytes.clone(), self.waiting.clone());
        let of_streams = (self.bytes.handle("streams"), Gauge::default());
        [(used, waiting), of_streams]
            .map(|(used, waiting)| BufferKindMetrics::of_budget(used, waiting, self.refused.clone()))
    }

    /// Counts a create request: answered from `memory` (`reason` is the kind of start), by `etcd`, or `interrupted`: a
    /// stream that nothing could continue ended.
    pub fn record_created(&self, outcome: &'static str, reason: &'static str) {
        self.created.of((outcome, reason)).inc();
    }

    /// Counts a cancelled watcher.
    pub fn record_cancelled(&self, reason: &'static str) {
        self.cancelled.of(reason).inc();
    }

    /// Counts an open stream that memory serves.
    #[must_use]
    pub fn open_memory(&self) -> Counted {
        self.open("memory", "mirrored")
    }

    /// Counts an open stream that etcd serves, for `reason`.
    #[must_use]
    pub fn open_etcd(&self, reason: &'static str) -> Counted {
        self.open("etcd", reason)
    }

    fn open(&self, source: &'static str, reason: &'static str) -> Counted {
        Counted::on(&self.streams.of((source, reason)))
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
        self.streams.get((source, reason)).map_or(0, |gauge| gauge.get())
    }

    /// Events sent since the start.
    #[must_use]
    pub fn events_sent(&self) -> u64 {
        self.events.get()
    }

    /// Counts an open stream that `to` continues to serve (`etcd` or `memory`).
    pub fn record_handover(&self, to: &'static str, reason: &'static str) {
        self.handovers.of((to, reason)).inc();
    }

    /// Counts an open watcher of the mirror with this name.
    #[must_use]
    pub fn open_watcher(&self, mirror: &str) -> Counted {
        Counted::on(&self.watchers.of(mirror.to_owned()))
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
        self.progress.observe(wait);
    }

    /// Sets how far the slowest watcher of a mirror is behind.
    pub fn set_behind(&self, mirror: &str, revisions: i64) {
        self.behind.of(mirror.to_owned()).set(revisions);
    }

    /// Sets the bytes of topics, and those of events: what is left of `used` without topics and `streams`.
    pub fn set_bytes(&self, topics: u64, streams: u64, used: u64) {
        self.bytes.of("topics").set(gauge(topics));
        let events = used.saturating_sub(topics + streams);
        self.bytes.of("events").set(gauge(events));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_is_counted_where_it_is_served_until_it_ends() {
        let metrics = WatchMetrics::default();
        let memory = metrics.open_memory();
        let streams: Vec<_> = [Reason::NotMirrored, Reason::NotMirrored, Reason::Loading]
            .map(|reason| metrics.open_etcd(reason.as_str()))
            .into();
        assert_eq!(metrics.memory_streams(), 1);
        let mut at_etcd: Vec<_> = metrics.etcd_streams().collect();
        at_etcd.sort_by_key(|(_, count)| *count);
        assert_eq!(at_etcd, [(Reason::Loading, 1), (Reason::NotMirrored, 2)]);
        drop((memory, streams));
        assert_eq!((metrics.memory_streams(), metrics.etcd_streams().count()), (0, 0));
    }

    #[test]
    fn bytes_of_events_are_what_streams_and_topics_leave() {
        let metrics = WatchMetrics::default();
        let bytes = |kind: &'static str| metrics.bytes.of(kind).get();
        metrics.set_bytes(30, 50, 100);
        assert_eq!((bytes("topics"), bytes("events")), (30, 20));
        // The three are not read at the same time.
        metrics.set_bytes(30, 90, 100);
        assert_eq!(bytes("events"), 0);
    }

    #[test]
    fn response_with_events_counts_as_one() {
        let metrics = WatchMetrics::default();
        metrics.record_response();
        metrics.record_events(3);
        assert_eq!((metrics.responses.get(), metrics.events_sent()), (2, 3));
    }
}
