//! Metrics of Range and RangeStream: outcomes, waits and latencies.

use std::sync::OnceLock;
use std::time::Duration;

use rangecache_base::telemetry::metrics::{By, Counter, Latency, LatencyCounts, TracedLatency, metric_group};
use rangecache_base::telemetry::outcome::{Failure, Kind, Outcome, Read, Reason};
use rangecache_base::telemetry::trace::TraceId;

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

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use rangecache_base::telemetry::outcome::Reason;

    #[test]
    fn every_recorded_outcome_is_read_back() {
        let metrics = ReadMetrics::default();
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
        let metrics = ReadMetrics::default();
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
