//! Metrics of Range and RangeStream: outcomes, waits and latencies.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::register::{register, register_latency, start_at_zero};
use crate::telemetry::exposition::Exemplars;
use crate::telemetry::outcome::{Kind, Outcome, Read};
use crate::telemetry::trace::TraceId;

/// Labels of `rangecache_range_total` and `rangecache_range_stream_total`. They are made by [`RangeLabels::new`] alone,
/// so that what is counted is what is read back.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct RangeLabels {
    outcome: &'static str,
    reason: &'static str,
}

impl RangeLabels {
    fn new(outcome: Outcome) -> RangeLabels {
        let (outcome, reason) = outcome.labels();
        RangeLabels { outcome, reason }
    }
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ShadowLabels {
    result: &'static str,
}

/// The most frequent outcome: its counter is kept, which saves the lookup by labels.
const MOST_FREQUENT: Outcome = Outcome::Hit(Read::Linearizable);

/// Outcomes and latencies of Range and RangeStream.
#[derive(Debug)]
pub struct ReadMetrics {
    unary: Family<RangeLabels, Counter>,
    stream: Family<RangeLabels, Counter>,
    unary_most_frequent: Counter,
    wait_seconds: Histogram,
    duration_seconds: Histogram,
    stale_age_seconds: Histogram,
    shadow: Family<ShadowLabels, Counter>,
    forward_all: Gauge,
    wait_exemplars: Exemplars,
    duration_exemplars: Exemplars,
}

impl ReadMetrics {
    pub(super) fn new(registry: &mut Registry) -> ReadMetrics {
        let unary: Family<RangeLabels, Counter> = register(
            registry,
            "range",
            "Range calls by outcome and reason; hit and waited were answered from memory",
        );
        let stream: Family<RangeLabels, Counter> = register(
            registry,
            "range_stream",
            "RangeStream calls by outcome and reason; hit and waited were answered from memory",
        );
        for family in [&unary, &stream] {
            let outcomes = Outcome::all().filter(|outcome| !matches!(outcome, Outcome::Paged(_)));
            start_at_zero(family, outcomes.map(RangeLabels::new));
        }
        let shadow = register(
            registry,
            "shadow_reads",
            "Responses of etcd by the result of their comparison with memory's (--shadow)",
        );
        let results = ["equal", "different", "too_large", "not_compared"];
        start_at_zero(&shadow, results.map(|result| ShadowLabels { result }));
        let unary_most_frequent = unary.get_or_create_owned(&RangeLabels::new(MOST_FREQUENT));
        ReadMetrics {
            unary,
            unary_most_frequent,
            stream,
            wait_seconds: register_latency(
                registry,
                "range_wait",
                "Time that Range and RangeStream calls answered from memory waited for their proof",
            ),
            duration_seconds: register_latency(
                registry,
                "range_duration",
                "Time from the arrival of a Range or RangeStream to the head of its response",
            ),
            shadow,
            forward_all: register(
                registry,
                "forward_all",
                "1 while an operator has switched memory off and etcd answers everything",
            ),
            stale_age_seconds: register_latency(
                registry,
                "range_stale_age",
                "Age of the responses of --serve-stale, while no member of etcd answered",
            ),
            wait_exemplars: Exemplars::new("rangecache_range_wait_seconds"),
            duration_exemplars: Exemplars::new("rangecache_range_duration_seconds"),
        }
    }

    /// Shows whether memory is switched off.
    pub fn set_forward_all(&self, is_on: bool) {
        self.forward_all.set(i64::from(is_on));
    }

    /// Counts one Range or RangeStream. To be called once, when the head of its response is known.
    pub fn record(&self, kind: Kind, outcome: Outcome, waited: Duration, total: Duration) {
        match kind {
            Kind::Unary if outcome == MOST_FREQUENT => drop(self.unary_most_frequent.inc()),
            _ => drop(self.family(kind).get_or_create(&RangeLabels::new(outcome)).inc()),
        }
        if outcome.is_from_memory() {
            self.wait_seconds.observe(waited.as_secs_f64());
        }
        self.duration_seconds.observe(total.as_secs_f64());
    }

    /// Counts a comparison of etcd's response with memory's.
    pub fn record_shadow(&self, result: &'static str) {
        self.shadow.get_or_create(&ShadowLabels { result }).inc();
    }

    /// Records the age of a stale response.
    pub fn record_stale(&self, age: Duration) {
        self.stale_age_seconds.observe(age.as_secs_f64());
    }

    /// Adds a traced call as the exemplar of the buckets that [`ReadMetrics::record`] counted it in.
    pub fn record_exemplar(&self, trace_id: TraceId, outcome: Outcome, waited: Duration, total: Duration) {
        if outcome.is_from_memory() {
            self.wait_exemplars.record(waited.as_secs_f64(), trace_id);
        }
        self.duration_exemplars.record(total.as_secs_f64(), trace_id);
    }

    /// Range and RangeStream calls together by outcome, since the start; outcomes without calls are left out.
    #[must_use]
    pub fn by_outcome(&self) -> Vec<(Outcome, u64)> {
        let count = |outcome: Outcome| {
            let labels = RangeLabels::new(outcome);
            let count = |kind| self.family(kind).get(&labels).map_or(0, |counter| counter.get());
            count(Kind::Unary) + count(Kind::Stream)
        };
        Outcome::all()
            .map(|outcome| (outcome, count(outcome)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }

    pub(super) fn exemplars(&self) -> [&Exemplars; 2] {
        [&self.wait_exemplars, &self.duration_exemplars]
    }

    fn family(&self, kind: Kind) -> &Family<RangeLabels, Counter> {
        match kind {
            Kind::Unary => &self.unary,
            Kind::Stream => &self.stream,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::telemetry::outcome::Reason;

    #[test]
    fn every_recorded_outcome_is_read_back() {
        let metrics = ReadMetrics::new(&mut Registry::default());
        let took = Duration::from_millis(1);
        for outcome in Outcome::all() {
            metrics.record(Kind::Unary, outcome, Duration::ZERO, took);
            metrics.record(Kind::Stream, outcome, Duration::ZERO, took);
        }
        assert_eq!(metrics.by_outcome().len(), Outcome::all().count());
        assert!(metrics.by_outcome().iter().all(|(_, count)| *count == 2));
    }

    #[test]
    fn outcomes_without_calls_are_left_out() {
        let metrics = ReadMetrics::new(&mut Registry::default());
        let forwarded = Outcome::Forwarded(Reason::Loading);
        for _ in 0..3 {
            metrics.record(Kind::Unary, forwarded, Duration::ZERO, Duration::ZERO);
        }
        metrics.record(Kind::Unary, MOST_FREQUENT, Duration::ZERO, Duration::ZERO);
        let counts: HashMap<_, _> = metrics
            .by_outcome()
            .into_iter()
            .map(|(outcome, count)| (outcome.labels(), count))
            .collect();
        assert_eq!(
            counts,
            HashMap::from([(forwarded.labels(), 3), (MOST_FREQUENT.labels(), 1)])
        );
    }
}
