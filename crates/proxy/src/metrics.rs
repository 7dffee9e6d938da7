//! Metrics of the path of a request: Range and RangeStream by outcome, and their latencies; Watch streams and watchers; forwarded and
//! refused calls, aborted responses; all of them together.

use std::sync::{Arc, OnceLock};
use std::{ops::Deref, time::Duration};

use rangecache_base::instance::Instance;
use rangecache_base::telemetry::metrics::{
    By, Counted, Counter, Gauge, Latency, LatencyCounts, TracedLatency, gauge, metric_group,
};
use rangecache_base::telemetry::outcome::{Failure, Kind, Outcome, Read, Reason};
use rangecache_base::telemetry::{Metrics, Telemetry};
use rangecache_base::telemetry::{prefixes::PrefixCounters, trace::TraceId};
use rangecache_edge::limits::{BufferKindMetrics, SlotsMetrics};
use rangecache_mirror::{PrefixMetrics, StreamFallbacks};

metric_group! {
    /// Calls forwarded to etcd.
    pub struct ForwardingMetrics {
        /// Calls other than Range and RangeStream that were forwarded to etcd
        ///
        /// Useful when: estimating etcd's load
        pub calls: Counter = "rangecache_forwarded_calls_total";
        /// Large reads that shared another call's response
        ///
        /// Useful when: clients list the same range
        pub joined: Counter = "rangecache_forward_joined_total";
        /// Page series, which are lists read in pages, whose next page is expected
        ///
        /// Useful when: clients list in pages
        pub series: Gauge = "rangecache_series";
        /// Pages cut from a page series: from a RangeStream that an earlier page began
        ///
        /// Useful when: clients list in pages
        pub series_pages: Counter = "rangecache_series_pages_total";
    }
}

metric_group! {
    /// Calls that were refused, whatever they ask.
    pub struct RefusalMetrics {
        /// Calls of all kinds refused because `--max-calls` were in flight
        ///
        /// Useful when: any increase
        pub shed_calls: Counter = "rangecache_shed_calls_total";
        /// Requests of this rangecache that came back to it, because `--endpoints` leads to itself
        ///
        /// Useful when: any increase: see [RangecacheLoops](../runbooks.md#rangecacheloops)
        pub looped_calls: Counter = "rangecache_looped_calls_total";
        /// Requests that may write, refused because they came to `--read-only-listen-client-urls`
        ///
        /// Useful when: any increase: a client was given the wrong URL
        pub read_only_refused: Counter = "rangecache_read_only_refused_total";
    }
}

metric_group! {
    /// Responses that were aborted.
    pub struct AbortedResponses {
        /// Responses that were given up, by `reason`: `idle` (nothing read for a minute), `memory` (a slow
        /// reader kept more old data than `--cache-max-bytes` allows) or `watch_memory` (a watch was not read
        /// while others waited for room in `--watch-max-bytes`)
        ///
        /// Useful when: any increase
        aborted[reason]: Counter = "rangecache_responses_given_up_total",
            from_zero = ["idle", "memory", "watch_memory"];
    }
}

impl AbortedResponses {
    /// Counts `responses` that were given up for `reason`.
    pub fn record_given_up(&self, reason: &'static str, responses: usize) {
        self.aborted.of(reason).inc_by(responses as u64);
    }
}

/// Metrics of calls. Cloning counts references.
#[derive(Clone, Debug)]
pub struct ProxyMetrics {
    /// Range and RangeStream.
    pub reads: Arc<ReadMetrics>,
    /// Watches.
    pub watches: Arc<WatchMetrics>,
    /// Calls to etcd.
    pub forwarding: Arc<ForwardingMetrics>,
    /// Calls to etcd that take turns.
    pub slots: Arc<SlotsMetrics>,
    /// Reads that could not use RangeStream.
    pub stream_fallbacks: Arc<StreamFallbacks>,
    /// Refused calls.
    pub refusals: Arc<RefusalMetrics>,
    /// Aborted responses.
    pub responses: Arc<AbortedResponses>,
    /// Reads and watches by prefix.
    pub prefixes: PrefixCounters,
}

impl ProxyMetrics {
    /// The groups in `metrics`.
    #[must_use]
    pub fn new(metrics: &Metrics) -> ProxyMetrics {
        ProxyMetrics {
            reads: metrics.group(),
            watches: metrics.group(),
            forwarding: metrics.group(),
            slots: metrics.group(),
            stream_fallbacks: metrics.group(),
            refusals: metrics.group(),
            responses: metrics.group(),
            prefixes: metrics.group::<PrefixMetrics>().counters.clone(),
        }
    }
}

/// Telemetry of the process with the metrics of this room.
#[derive(Debug)]
pub(super) struct ProxyTelemetry {
    pub(super) metrics: ProxyMetrics,
    /// The identity that other rangecaches are told.
    pub(super) instance: Instance,
    process: Arc<Telemetry>,
}

impl ProxyTelemetry {
    pub(super) fn new(process: &Arc<Telemetry>) -> ProxyTelemetry {
        ProxyTelemetry {
            metrics: ProxyMetrics::new(&process.metrics),
            instance: Instance::unrelated(),
            process: Arc::clone(process),
        }
    }
}

impl Default for ProxyTelemetry {
    fn default() -> ProxyTelemetry {
        ProxyTelemetry::new(&Arc::default())
    }
}

impl Deref for ProxyTelemetry {
    type Target = Telemetry;

    fn deref(&self) -> &Telemetry {
        &self.process
    }
}

/// The most frequent outcome: its counter is kept, which saves the lookup by labels.
const MOST_FREQUENT: Outcome = Outcome::Hit(Read::Linearizable);

/// Labels of the outcomes whose series begin at zero: the most frequent one, and what alerts look for.
fn outcomes() -> impl Iterator<Item = (&'static str, &'static str)> {
    let failed = Failure::ALL.iter().copied().map(Outcome::Failed);
    let shed = [Reason::BufferBytes, Reason::TooManyWaiting, Reason::Loading].map(Outcome::Shed);
    let all = [MOST_FREQUENT].into_iter().chain(failed).chain(shed);
    all.map(Outcome::labels)
}

metric_group! {
    /// Outcomes and latencies of Range and RangeStream.
    pub struct ReadMetrics {
        /// Range calls by `outcome` and `reason`: `hit` and `waited` were answered from memory, `streamed`
        /// and `forwarded` by etcd, `failed` got no response of etcd's, `shed` were refused
        ///
        /// Useful when: first of all; [consistency.md](../consistency.md) explains the reasons
        unary[outcome, reason]: Counter = "rangecache_range_total", from_zero = outcomes();
        /// RangeStream calls by `outcome` and `reason`; `hit` and `waited` were answered from memory
        ///
        /// Useful when: clients list by RangeStream
        stream[outcome, reason]: Counter = "rangecache_range_stream_total", from_zero = outcomes();
        /// Counter of [`MOST_FREQUENT`] in `unary`.
        unary_most_frequent: OnceLock<Counter>;
        /// The part of `rangecache_range_duration_seconds` that calls answered from memory waited for their
        /// proof of freshness
        ///
        /// Useful when: it is the largest part: see
        /// [RangecacheProofsSlow](../runbooks.md#rangecacheproofsslow)
        wait: TracedLatency = "rangecache_range_wait_seconds";
        /// Time from the arrival of a Range or RangeStream to the head of its response
        ///
        /// Useful when: reads are slow
        duration: TracedLatency = "rangecache_range_duration_seconds";
        /// Age of the responses that `--serve-stale` permits, while no member of etcd answered
        ///
        /// Useful when: it counts anything: etcd was unreachable
        stale_age: Latency = "rangecache_range_stale_age_seconds";
    }
}

impl ReadMetrics {
    /// Counts one Range or RangeStream. To be called once, when the head of its response is known.
    pub fn record(&self, kind: Kind, outcome: Outcome, waited: Duration, total: Duration) {
        match kind {
            Kind::Unary if outcome == MOST_FREQUENT => {
                let counter = || self.unary.handle(outcome.labels());
                self.unary_most_frequent.get_or_init(counter).inc();
            }
            _ => drop(self.family(kind).of(outcome.labels()).inc()),
        }
        if outcome.is_from_memory() {
            self.wait.observe(waited);
        }
        self.duration.observe(total);
    }

    /// Records the age of a stale response.
    pub fn record_stale(&self, age: Duration) {
        self.stale_age.observe(age);
    }

    /// Adds a traced call as the exemplar of the buckets that [`ReadMetrics::record`] counted it in.
    pub fn record_exemplar(&self, trace_id: TraceId, outcome: Outcome, waited: Duration, total: Duration) {
        if outcome.is_from_memory() {
            self.wait.record_exemplar(waited, trace_id);
        }
        self.duration.record_exemplar(total, trace_id);
    }

    /// Waits of reads from memory for their proof, since the start.
    #[must_use]
    pub fn waits(&self) -> LatencyCounts {
        self.wait.counts()
    }

    /// Range and RangeStream calls together by outcome, since the start; outcomes without calls are left out.
    #[must_use]
    pub fn by_outcome(&self) -> Vec<(Outcome, u64)> {
        let count = |outcome: Outcome| {
            let family = |kind| self.family(kind).get(outcome.labels());
            let count = |kind| family(kind).map_or(0, |counter| counter.get());
            count(Kind::Unary) + count(Kind::Stream)
        };
        Outcome::all()
            .map(|outcome| (outcome, count(outcome)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }

    fn family(&self, kind: Kind) -> &By<2, Counter> {
        match kind {
            Kind::Unary => &self.unary,
            Kind::Stream => &self.stream,
        }
    }
}

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
mod tests;
