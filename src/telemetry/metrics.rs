//! Every metric, in one place: name, unit, meaning.

mod labels;
mod readings;

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Registry, Unit};

use super::calls::Slowest;
use super::exposition::{self, BOUNDS, Exemplars, FIRST_BOUND_SECONDS, Format};
use super::outcome::{Kind, Outcome, Read};
use super::trace::{TraceId, Tracer};
use crate::net::Url;
use labels::{
    EndpointLabels, FallbackLabels, LimitLabels, MirrorLabels, MirrorResultLabels, RangeLabels, ReasonLabels,
    ResultLabels, TlsFileLabels, TlsReloadLabels,
};
pub use readings::QuorumChecks;

/// The gauges and counters of one mirror.
#[derive(Clone, Debug)]
pub struct MirrorMetrics {
    /// 1 while reads may be answered from it, else 0.
    pub in_service: Gauge,
    /// The revision up to which it has every event.
    pub revision: Gauge,
    /// How many revisions it was behind at the last quorum check.
    pub lag_revisions: Gauge,
    /// How long it had been behind then, in seconds.
    pub lag_seconds: Gauge<f64, AtomicU64>,
    /// Keys it holds.
    pub keys: Gauge,
    /// Memory of keys, values and nodes, history included.
    pub memory_bytes: Gauge,
    /// Memory of past revisions.
    pub history_bytes: Gauge,
    /// The oldest revision that it can answer.
    pub oldest_revision: Gauge,
    /// Keys loaded so far, while a load is under way.
    pub load_keys: Gauge,
    /// Bytes loaded so far, while a load is under way.
    pub load_bytes: Gauge,
    /// Events applied.
    pub events: Counter,
    /// Events dropped because they were at or below what it had (fenced).
    pub events_fenced: Counter,
    /// Progress requests sent.
    pub progress_requests: Counter,
}

/// What becomes of spans.
#[derive(Clone, Debug)]
pub struct SpanMetrics {
    /// Taken by the collector.
    pub exported: Counter,
    /// Given up: the queue had no room.
    pub dropped: Counter,
    /// Given up: the collector did not take them.
    pub failed: Counter,
}

/// All metrics, the tracer, and the slowest calls. Cloning is not needed: one is shared behind an `Arc`.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    range: Family<RangeLabels, Counter>,
    range_stream: Family<RangeLabels, Counter>,
    /// The counter of the most frequent outcome, without the search.
    hit_linearizable: Counter,
    range_wait_seconds: Histogram,
    range_duration_seconds: Histogram,
    checks: Family<ResultLabels, Counter>,
    check_reads: Counter,
    check_duration_seconds: Histogram,
    authorizations: Family<ResultLabels, Counter>,
    authorization_duration_seconds: Histogram,
    reloads: Family<ReasonLabels, Counter>,
    mirror_in_service: Family<MirrorLabels, Gauge>,
    mirror_revision: Family<MirrorLabels, Gauge>,
    mirror_lag_revisions: Family<MirrorLabels, Gauge>,
    mirror_lag_seconds: Family<MirrorLabels, Gauge<f64, AtomicU64>>,
    endpoint_well: Family<EndpointLabels, Gauge>,
    endpoint_connections: Family<EndpointLabels, Gauge>,
    endpoint_calls: Family<EndpointLabels, Gauge>,
    mirror_keys: Family<MirrorLabels, Gauge>,
    mirror_memory_bytes: Family<MirrorLabels, Gauge>,
    mirror_history_bytes: Family<MirrorLabels, Gauge>,
    mirror_oldest_revision: Family<MirrorLabels, Gauge>,
    mirror_load_keys: Family<MirrorLabels, Gauge>,
    mirror_load_bytes: Family<MirrorLabels, Gauge>,
    mirror_events: Family<MirrorLabels, Counter>,
    mirror_events_fenced: Family<MirrorLabels, Counter>,
    mirror_progress_requests: Family<MirrorLabels, Counter>,
    verify_mismatches: Family<MirrorLabels, Counter>,
    verify_rounds: Family<MirrorResultLabels, Counter>,
    limits: Family<LimitLabels, Gauge<f64, AtomicU64>>,
    range_stream_fallback: Family<FallbackLabels, Counter>,
    /// Panics of any task.
    pub panics: Counter,
    /// Calls refused because too many were under way.
    pub shed_calls: Counter,
    /// Bytes that verification has read from etcd.
    pub verify_bytes: Counter,
    tls_not_after_seconds: Family<TlsFileLabels, Gauge>,
    tls_reloads: Family<TlsReloadLabels, Counter>,
    tls_handshakes: Family<ResultLabels, Counter>,
    /// Clients' TLS handshakes under way or waiting their turn.
    pub tls_handshaking: Gauge,
    /// Client connections open.
    pub connections: Gauge,
    /// Calls that were passed on to etcd as they came, Ranges not included.
    pub passed_calls: Counter,
    /// Tasks alive: connections, calls, mirrors.
    pub tasks: Gauge,
    /// Large Ranges under way to etcd.
    pub forward_large: Gauge,
    /// Large Ranges that wait their turn or for an identical one.
    pub forward_waiting: Gauge,
    /// Bytes of answers that several reads share.
    pub forward_shared_bytes: Gauge,
    /// Reads that were answered by an upstream call which another read shares.
    pub forward_joined: Counter,
    /// Bytes of RangeStreams from etcd that are held for answers.
    pub stream_held_bytes: Gauge,
    /// Page series that are remembered or open.
    pub series: Gauge,
    /// Pages that were answered from a series.
    pub series_pages: Counter,
    /// The slowest calls of the last minutes.
    pub slowest: Slowest,
    /// Begins spans; traces nothing unless an exporter was opened.
    pub tracer: Tracer,
    spans: Family<ResultLabels, Counter>,
    exemplars: ByHistogram,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

/// Calls whose traces can be looked up.
#[derive(Debug)]
struct ByHistogram {
    wait: Exemplars,
    duration: Exemplars,
}

/// From 50 µs to some 13 s.
fn latency_histogram() -> Histogram {
    Histogram::new(exponential_buckets(FIRST_BOUND_SECONDS, 2.0, BOUNDS))
}

impl Metrics {
    /// Registers every metric under `rangecache_`.
    #[must_use]
    pub fn new() -> Metrics {
        let mut registry = Registry::with_prefix("rangecache");
        let r = &mut registry;
        macro_rules! metric {
            ($name:literal, $help:literal) => {{
                let metric = Default::default();
                r.register($name, $help, Clone::clone(&metric));
                metric
            }};
            ($name:literal, $unit:ident, $help:literal) => {{
                let metric = Default::default();
                r.register_with_unit($name, $help, Unit::$unit, Clone::clone(&metric));
                metric
            }};
            (histogram $name:literal, $help:literal) => {{
                let metric = latency_histogram();
                r.register_with_unit($name, $help, Unit::Seconds, metric.clone());
                metric
            }};
        }
        let range: Family<RangeLabels, Counter> = metric!(
            "range",
            "Range calls by how they ended and why; hit and waited were answered from memory"
        );
        let (outcome, reason) = Outcome::Hit(Read::Linearizable).labels();
        let hit_linearizable = range.get_or_create_owned(&RangeLabels { outcome, reason });
        Metrics {
            range,
            range_stream: metric!(
                "range_stream",
                "RangeStream calls by how they ended and why; hit and waited were answered from memory"
            ),
            hit_linearizable,
            range_wait_seconds: metric!(histogram "range_wait", "Time that Ranges and RangeStreams answered from memory waited for their proof"),
            range_duration_seconds: metric!(histogram "range_duration", "Time from the arrival of a Range or RangeStream to the head of its answer"),
            checks: metric!("quorum_checks", "Quorum revision checks by result"),
            check_reads: metric!(
                "quorum_check_reads",
                "Reads that quorum checks served; divide by the checks to see how many share one"
            ),
            check_duration_seconds: metric!(histogram "quorum_check_duration", "Round trip of a quorum check"),
            authorizations: metric!(
                "authorizations",
                "Calls that asked etcd for a caller's right to one range, by result"
            ),
            authorization_duration_seconds: metric!(histogram "authorization_duration", "Round trip of an authorisation"),
            reloads: metric!("mirror_reloads", "Loads of a mirror by what made them necessary"),
            mirror_in_service: metric!(
                "mirror_in_service",
                "1 while reads may be answered from the mirror"
            ),
            mirror_revision: metric!(
                "mirror_revision",
                "Revision up to which the mirror has every event"
            ),
            mirror_lag_revisions: metric!(
                "mirror_lag_revisions",
                "Revisions that the mirror was behind at the last quorum check"
            ),
            mirror_lag_seconds: metric!(
                "mirror_lag",
                Seconds,
                "Age of the oldest revision told by a quorum check that the mirror had not reached at the last one"
            ),
            endpoint_well: metric!(
                "endpoint_well",
                "1 while the endpoint is connected, serves, votes and knows a leader"
            ),
            endpoint_connections: metric!("endpoint_connections", "Connections to the endpoint that stand"),
            endpoint_calls: metric!(
                "endpoint_calls",
                "Calls under way on the endpoint's shared connections"
            ),
            mirror_keys: metric!("mirror_keys", "Keys in the mirror"),
            mirror_memory_bytes: metric!("mirror_memory", Bytes, "Memory of the mirror, history included"),
            mirror_history_bytes: metric!("mirror_history", Bytes, "Memory of the mirror's past revisions"),
            mirror_oldest_revision: metric!(
                "mirror_oldest_revision",
                "Oldest revision that the mirror can answer"
            ),
            mirror_load_keys: metric!(
                "mirror_load_keys",
                "Keys fetched by the load under way or the last one"
            ),
            mirror_load_bytes: metric!(
                "mirror_load",
                Bytes,
                "Bytes fetched by the load under way or the last one"
            ),
            mirror_events: metric!("mirror_events", "Events applied"),
            mirror_events_fenced: metric!(
                "mirror_events_fenced",
                "Events dropped for being at or below the mirror's revision"
            ),
            mirror_progress_requests: metric!("mirror_progress_requests", "Watch progress requests sent"),
            verify_mismatches: metric!(
                "verify_mismatch",
                "Times that verification found the mirror to differ from etcd: alert on any"
            ),
            verify_rounds: metric!("verify_rounds", "Verifications of the mirror by result"),
            verify_bytes: metric!("verify", Bytes, "Bytes that verification has read from etcd"),
            panics: metric!(
                "panics",
                "Panics, each of which is a bug that cost a call or restarted a task"
            ),
            shed_calls: metric!(
                "shed_calls",
                "Calls of all kinds refused because --max-calls were under way"
            ),
            limits: metric!("limit", "Configured bounds, in the unit that each name ends with"),
            range_stream_fallback: metric!(
                "range_stream_fallback",
                "Loads and reads that went to etcd without RangeStream, by why they could not use it"
            ),
            tls_not_after_seconds: metric!(
                "tls_not_after",
                Seconds,
                "When the first certificate of a file expires or its revocation list is due, in seconds since 1970"
            ),
            tls_reloads: metric!(
                "tls_reloads",
                "Replaced certificate files by whether they could be used"
            ),
            tls_handshakes: metric!("tls_handshakes", "Clients' TLS handshakes by how they ended"),
            tls_handshaking: metric!(
                "tls_handshaking",
                "Clients' TLS handshakes under way or waiting their turn"
            ),
            connections: metric!("client_connections", "Client connections open"),
            passed_calls: metric!(
                "passed_calls",
                "Calls other than Range and RangeStream that were passed on as they came"
            ),
            tasks: metric!("tasks", "Tasks alive: connections, calls, mirrors"),
            forward_large: metric!("forward_large", "Large Ranges under way to etcd"),
            forward_waiting: metric!(
                "forward_waiting",
                "Large Ranges waiting for their turn or for an identical one"
            ),
            forward_shared_bytes: metric!(
                "forward_shared",
                Bytes,
                "Answers held for several identical reads"
            ),
            forward_joined: metric!(
                "forward_joined",
                "Large Ranges answered by an upstream call that others share"
            ),
            stream_held_bytes: metric!(
                "stream_held",
                Bytes,
                "RangeStreams from etcd held for unary answers and page series; bounded by --stream-max-bytes"
            ),
            series: metric!("series", "Lists read in pages of which the next page is expected"),
            series_pages: metric!(
                "series_pages",
                "Pages answered from a RangeStream that an earlier page began"
            ),
            slowest: Slowest::default(),
            exemplars: ByHistogram {
                wait: Exemplars::of("rangecache_range_wait_seconds"),
                duration: Exemplars::of("rangecache_range_duration_seconds"),
            },
            tracer: Tracer::default(),
            spans: metric!(
                "trace_spans",
                "Spans by what became of them: exported, dropped for want of room in the queue, or failed to reach the collector"
            ),
            registry,
        }
    }

    /// Counts one Range or RangeStream, once, when its answer's head is known.
    pub fn range_ended(&self, kind: Kind, outcome: Outcome, waited: Duration, total: Duration) {
        if kind == Kind::Stream {
            let (outcome, reason) = outcome.labels();
            self.range_stream
                .get_or_create(&RangeLabels { outcome, reason })
                .inc();
        } else if outcome == Outcome::Hit(Read::Linearizable) {
            self.hit_linearizable.inc();
        } else {
            let (outcome, reason) = outcome.labels();
            self.range.get_or_create(&RangeLabels { outcome, reason }).inc();
        }
        if matches!(outcome, Outcome::Hit(_) | Outcome::Waited(_)) {
            self.range_wait_seconds.observe(waited.as_secs_f64());
        }
        self.range_duration_seconds.observe(total.as_secs_f64());
    }

    /// Notes a Range of a trace beside the buckets that [`Metrics::range_ended`] counted it in.
    pub fn range_traced(&self, trace_id: TraceId, outcome: Outcome, waited: Duration, total: Duration) {
        if matches!(outcome, Outcome::Hit(_) | Outcome::Waited(_)) {
            self.exemplars.wait.note(waited.as_secs_f64(), trace_id);
        }
        self.exemplars.duration.note(total.as_secs_f64(), trace_id);
    }

    /// Counts one quorum check that served `reads` reads.
    pub fn check_ended(&self, result: &'static str, reads: u64, took: Duration) {
        self.checks.get_or_create(&ResultLabels { result }).inc();
        self.check_reads.inc_by(reads);
        self.check_duration_seconds.observe(took.as_secs_f64());
    }

    /// Counts one authorisation by etcd.
    pub fn authorization_ended(&self, result: &'static str, took: Duration) {
        self.authorizations.get_or_create(&ResultLabels { result }).inc();
        self.authorization_duration_seconds.observe(took.as_secs_f64());
    }

    /// Counts a load of a mirror.
    pub fn mirror_reload(&self, mirror: &str, reason: &'static str) {
        self.reloads
            .get_or_create(&ReasonLabels {
                mirror: mirror.to_owned(),
                reason,
            })
            .inc();
    }

    /// Counts something that RangeStream could have done, had it been there.
    pub fn range_stream_fallback(&self, reason: &'static str) {
        self.range_stream_fallback
            .get_or_create(&FallbackLabels { reason })
            .inc();
    }

    /// Counts one verification of a mirror.
    pub fn verify_ended(&self, mirror: &str, result: &'static str) {
        let mirror = mirror.to_owned();
        self.verify_rounds
            .get_or_create(&MirrorResultLabels { mirror, result })
            .inc();
    }

    /// Counts a mirror that differs from etcd.
    pub fn verify_mismatch(&self, mirror: &str) {
        let mirror = mirror.to_owned();
        self.verify_mismatches
            .get_or_create(&MirrorLabels { mirror })
            .inc();
    }

    /// A file of `side` (`etcd` or `clients`) ends then, in seconds since 1970.
    pub fn tls_not_after(&self, side: &'static str, file: &'static str, seconds: i64) {
        self.tls_not_after_seconds
            .get_or_create(&TlsFileLabels { side, file })
            .set(seconds);
    }

    /// Files of `side` were replaced.
    pub fn tls_reloaded(&self, side: &'static str, result: &'static str) {
        self.tls_reloads
            .get_or_create(&TlsReloadLabels { side, result })
            .inc();
    }

    /// A client's handshake ended.
    pub fn tls_handshake_ended(&self, result: &'static str) {
        self.tls_handshakes.get_or_create(&ResultLabels { result }).inc();
    }

    /// What becomes of spans.
    #[must_use]
    pub fn spans(&self) -> SpanMetrics {
        let of = |result| self.spans.get_or_create_owned(&ResultLabels { result });
        SpanMetrics {
            exported: of("exported"),
            dropped: of("dropped"),
            failed: of("failed"),
        }
    }

    /// How an endpoint is, at the moment of a scrape.
    pub fn endpoint(&self, url: &Url, is_well: bool, connections: usize, calls: usize) {
        let labels = EndpointLabels {
            endpoint: url.to_string(),
        };
        let set = |family: &Family<EndpointLabels, Gauge>, value: usize| {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            family.get_or_create(&labels).set(value);
        };
        set(&self.endpoint_well, usize::from(is_well));
        set(&self.endpoint_connections, connections);
        set(&self.endpoint_calls, calls);
    }

    /// Exports a configured bound; the name carries the unit.
    pub fn limit(&self, name: &'static str, value: f64) {
        self.limits.get_or_create(&LimitLabels { limit: name }).set(value);
    }

    /// The metrics of the mirror called `name`.
    #[must_use]
    pub fn mirror(&self, name: &str) -> MirrorMetrics {
        let labels = MirrorLabels {
            mirror: name.to_owned(),
        };
        // An alert wants to see it at 0.
        drop(self.verify_mismatches.get_or_create(&labels));
        let gauge = |family: &Family<MirrorLabels, Gauge>| family.get_or_create_owned(&labels);
        let counter = |family: &Family<MirrorLabels, Counter>| family.get_or_create_owned(&labels);
        MirrorMetrics {
            in_service: gauge(&self.mirror_in_service),
            revision: gauge(&self.mirror_revision),
            lag_revisions: gauge(&self.mirror_lag_revisions),
            lag_seconds: self.mirror_lag_seconds.get_or_create_owned(&labels),
            keys: gauge(&self.mirror_keys),
            memory_bytes: gauge(&self.mirror_memory_bytes),
            history_bytes: gauge(&self.mirror_history_bytes),
            oldest_revision: gauge(&self.mirror_oldest_revision),
            load_keys: gauge(&self.mirror_load_keys),
            load_bytes: gauge(&self.mirror_load_bytes),
            events: counter(&self.mirror_events),
            events_fenced: counter(&self.mirror_events_fenced),
            progress_requests: counter(&self.mirror_progress_requests),
        }
    }

    /// All of it in the OpenMetrics text format.
    #[must_use]
    pub fn encode(&self) -> String {
        self.encode_in(Format::OpenMetrics)
    }

    /// All of it in `format`.
    #[must_use]
    pub fn encode_in(&self, format: Format) -> String {
        let mut text = String::new();
        // Writing into a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &self.registry);
        match format {
            Format::OpenMetrics => {
                let ByHistogram { wait, duration } = &self.exemplars;
                exposition::with_exemplars(&text, &[wait, duration])
            }
            Format::Text => exposition::plain(&text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::outcome::{Kind, Read, Reason};

    #[test]
    fn an_exemplar_stands_beside_its_bucket() {
        let metrics = Metrics::new();
        let (outcome, took) = (Outcome::Hit(Read::Linearizable), Duration::from_millis(3));
        metrics.range_ended(Kind::Unary, outcome, Duration::ZERO, took);
        metrics.range_traced(TraceId(0xabc), outcome, Duration::ZERO, took);
        metrics.range_traced(TraceId(7), outcome, Duration::ZERO, Duration::from_secs(99));
        let text = metrics.encode();
        let exemplar = |bucket: &str, trace_id: u128, seconds: &str| {
            let line = text.lines().find(|line| line.starts_with(bucket));
            let shown = format!(" # {{trace_id=\"{trace_id:032x}\"}} {seconds} ");
            assert!(
                line.is_some_and(|line| line.contains(&shown)),
                "{shown} not in\n{text}"
            );
        };
        exemplar(
            "rangecache_range_duration_seconds_bucket{le=\"0.0032\"} 1",
            0xabc,
            "0.003",
        );
        exemplar(
            "rangecache_range_duration_seconds_bucket{le=\"+Inf\"} 1",
            7,
            "99.0",
        );
        exemplar("rangecache_range_wait_seconds_bucket{le=\"0.00005\"} 1", 7, "0.0");
        assert_eq!(text.matches("trace_id").count(), 3);
        assert!(text.ends_with("# EOF\n"));
        assert!(!metrics.encode_in(Format::Text).contains("trace_id"));
    }

    #[test]
    fn a_range_counts_once_under_its_outcome() {
        let metrics = Metrics::new();
        metrics.range_ended(
            Kind::Unary,
            Outcome::Hit(Read::Linearizable),
            Duration::ZERO,
            Duration::from_millis(1),
        );
        metrics.range_ended(
            Kind::Unary,
            Outcome::Forwarded(Reason::Loading),
            Duration::ZERO,
            Duration::from_millis(1),
        );
        metrics.mirror("/").revision.set(7);
        let text = metrics.encode();
        for line in [
            "rangecache_range_total{outcome=\"hit\",reason=\"linearizable\"} 1",
            "rangecache_range_total{outcome=\"forwarded\",reason=\"loading\"} 1",
            "rangecache_mirror_revision{mirror=\"/\"} 7",
            "rangecache_range_wait_seconds_count 1",
        ] {
            assert!(text.contains(line), "{line} not in\n{text}");
        }
    }
}
