//! Samples of the last fifteen minutes, so that a page that is opened now shows the past, too.
//!
//! Every [`INTERVAL`] the counters are read, and what was added since is kept as a [`ReadSample`]; there are never more
//! than [`SAMPLES`] of them. Requests only increase the counters.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use parking_lot::Mutex;
use rangecache_base::telemetry::metrics::{CodeCounts, LatencyCounts, Source, unsigned};
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_mirror::{Mirrors, QuorumChecks};
use serde::Serialize;
use tokio::time::Instant;

use crate::metrics::ShownMetrics;
use rangecache_report::reasons::OutcomeClass;

/// Time that one sample spans.
pub(crate) const INTERVAL: Duration = Duration::from_secs(5);
/// Number of samples that are kept: fifteen minutes.
pub(crate) const SAMPLES: usize = 180;

/// Values of counters: since the start of the process, or added in one interval.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadCounts {
    /// Ranges and RangeStreams by outcome.
    pub(crate) reads: Vec<(Outcome, u64)>,
    pub(crate) checks: QuorumChecks,
    /// Events applied by all mirrors.
    pub(crate) events: u64,
    /// Forwarded calls that are not reads.
    pub(crate) forwarded: u64,
    /// gRPC calls of every method by code.
    pub(crate) codes: Vec<CodeCounts>,
    /// Time that reads took.
    pub(crate) latency: ReadLatency,
    /// Open watch streams at that time.
    pub(crate) watches: OpenWatches,
    /// Why each mirror is out of service, in order; `None` for a mirror in service.
    pub(crate) mirrors: Vec<Option<Reason>>,
}

/// Time that gRPC reads took until their last byte, by what answered them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct ReadLatency {
    pub(crate) memory: LatencyCounts,
    pub(crate) etcd: LatencyCounts,
    /// The part that reads from memory waited for their proof.
    pub(crate) proof: LatencyCounts,
}

/// Open watch streams by what serves them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct OpenWatches {
    pub(crate) memory: u64,
    pub(crate) etcd: u64,
}

/// Increase of the counters in one interval; mirrors at its end.
#[derive(Clone, Debug)]
pub(crate) struct ReadSample {
    /// Length of the interval: longer if the machine slept, shorter for the current one.
    pub(crate) seconds: f64,
    pub(crate) added: ReadCounts,
}

/// Samples of the last fifteen minutes.
#[derive(Debug)]
pub(crate) struct Recent(Mutex<KeptSamples>);

#[derive(Debug)]
struct KeptSamples {
    last: ReadCounts,
    last_at: Instant,
    samples: VecDeque<Arc<ReadSample>>,
}

impl ReadCounts {
    /// Current values: some thousands of counters.
    pub(crate) fn now(metrics: &ShownMetrics, mirrors: &Mirrors) -> ReadCounts {
        ReadCounts {
            reads: metrics.proxy.reads.by_outcome(),
            checks: metrics.freshness.checks(),
            events: mirrors.all().map(|mirror| mirror.metrics.events.get()).sum(),
            forwarded: metrics.proxy.forwarding.calls.get(),
            codes: metrics.process.calls.by_code(),
            latency: ReadLatency {
                memory: metrics.process.calls.read_latency(Source::Memory),
                etcd: metrics.process.calls.read_latency(Source::Etcd),
                proof: metrics.proxy.reads.waits(),
            },
            watches: OpenWatches::now(metrics),
            mirrors: mirrors.reasons_out().collect(),
        }
    }

    /// Number of reads with this outcome.
    pub(crate) fn by_outcome(&self, outcome: Outcome) -> u64 {
        let found = self.reads.iter().find(|(other, _)| *other == outcome);
        found.map_or(0, |(_, count)| *count)
    }

    /// Number of reads that `source` answered.
    pub(crate) fn by_source(&self, source: OutcomeClass) -> u64 {
        let answered = self
            .reads
            .iter()
            .filter(|(outcome, _)| OutcomeClass::from_outcome(*outcome) == source);
        answered.map(|(_, count)| count).sum()
    }

    /// Number of reads with any outcome.
    pub(crate) fn total(&self) -> u64 {
        self.reads.iter().map(|(_, count)| count).sum()
    }

    fn since(&self, before: &ReadCounts) -> ReadCounts {
        let added = self
            .reads
            .iter()
            .map(|(outcome, count)| (*outcome, count.saturating_sub(before.by_outcome(*outcome))))
            .filter(|(_, count)| *count > 0);
        ReadCounts {
            reads: added.collect(),
            checks: QuorumChecks {
                proven: self.checks.proven.saturating_sub(before.checks.proven),
                failed: self.checks.failed.saturating_sub(before.checks.failed),
                reads: self.checks.reads.saturating_sub(before.checks.reads),
            },
            events: self.events.saturating_sub(before.events),
            forwarded: self.forwarded.saturating_sub(before.forwarded),
            codes: added_codes(&self.codes, &before.codes),
            latency: ReadLatency {
                memory: self.latency.memory.since(&before.latency.memory),
                etcd: self.latency.etcd.since(&before.latency.etcd),
                proof: self.latency.proof.since(&before.latency.proof),
            },
            watches: self.watches,
            mirrors: self.mirrors.clone(),
        }
    }
}

fn added_codes(now: &[CodeCounts], before: &[CodeCounts]) -> Vec<CodeCounts> {
    let added = now.iter().map(|counts| {
        let before = before.iter().find(|before| before.code == counts.code);
        counts.since(before)
    });
    added.filter(|added| added.total() > 0).collect()
}

impl OpenWatches {
    fn now(metrics: &ShownMetrics) -> OpenWatches {
        let memory = unsigned(metrics.proxy.watches.memory_streams());
        let counted: i64 = metrics.proxy.watches.etcd_streams().map(|(_, count)| count).sum();
        // With --watch-cache=off streams are counted only as calls in flight, and those in JSON not at all.
        let all = metrics
            .process
            .calls
            .open_watches()
            .max(memory + unsigned(counted));
        OpenWatches {
            memory,
            etcd: all - memory,
        }
    }
}

impl ReadSample {
    /// `count` as a rate per second.
    #[allow(clippy::cast_precision_loss, reason = "a rate shows magnitudes")]
    pub(crate) fn rate(&self, count: u64) -> f64 {
        // The current interval may just have begun; a rate over less than a second says nothing.
        count as f64 / self.seconds.max(1.0)
    }
}

impl Recent {
    /// Starts at `now` with the counters at `counts`.
    pub(crate) fn new(now: Instant, counts: ReadCounts) -> Recent {
        Recent(Mutex::new(KeptSamples {
            last: counts,
            last_at: now,
            samples: VecDeque::with_capacity(SAMPLES),
        }))
    }

    /// Ends the current interval.
    pub(crate) fn record(&self, now: Instant, counts: ReadCounts) {
        let mut kept = self.0.lock();
        let sample = kept.current(now, &counts);
        if kept.samples.len() == SAMPLES {
            kept.samples.pop_front();
        }
        kept.samples.push_back(Arc::new(sample));
        (kept.last, kept.last_at) = (counts, now);
    }

    /// Samples, the oldest first; the last one is the current interval.
    pub(crate) fn samples(&self, now: Instant, counts: &ReadCounts) -> Vec<Arc<ReadSample>> {
        let kept = self.0.lock();
        let current = Arc::new(kept.current(now, counts));
        kept.samples.iter().cloned().chain([current]).collect()
    }
}

impl KeptSamples {
    fn current(&self, now: Instant, counts: &ReadCounts) -> ReadSample {
        ReadSample {
            seconds: now.saturating_duration_since(self.last_at).as_secs_f64(),
            added: counts.since(&self.last),
        }
    }
}

#[cfg(test)]
mod tests {
    use rangecache_base::telemetry::outcome::Read;

    use super::*;

    const HIT: Outcome = Outcome::Hit(Read::Linearizable);
    const LOST: Outcome = Outcome::Forwarded(Reason::FeedLost);

    fn counts(hits: u64, forwarded: u64) -> ReadCounts {
        ReadCounts {
            reads: vec![(HIT, hits), (LOST, forwarded)],
            ..ReadCounts::default()
        }
    }

    #[test]
    fn samples_hold_increases_and_the_last_is_the_current_interval() {
        let start = Instant::now();
        let recent = Recent::new(start, counts(100, 0));
        recent.record(start + INTERVAL, counts(110, 3));
        let now = start + INTERVAL + Duration::from_secs(2);
        let samples = recent.samples(now, &counts(150, 3));
        let seen: Vec<_> = samples
            .iter()
            .map(|sample| {
                (
                    sample.seconds,
                    sample.added.by_outcome(HIT),
                    sample.added.by_outcome(LOST),
                )
            })
            .collect();
        assert_eq!(seen, [(5.0, 10, 3), (2.0, 40, 0)]);
        assert_eq!(samples[0].added.total(), 13);
        assert!((samples[1].rate(40) - 20.0).abs() < 1e-9);
        assert!(
            samples[1].added.reads.iter().all(|(_, count)| *count > 0),
            "outcomes without reads are not stored"
        );
    }

    #[test]
    fn number_of_samples_is_bounded() {
        let start = Instant::now();
        let recent = Recent::new(start, counts(0, 0));
        let mut now = start;
        for n in 1..=2 * SAMPLES as u64 {
            now += INTERVAL;
            recent.record(now, counts(n * n, 0));
        }
        let samples = recent.samples(now, &counts(4 * (SAMPLES * SAMPLES) as u64, 0));
        assert_eq!(samples.len(), SAMPLES + 1);
        let newest = 2 * SAMPLES as u64;
        assert_eq!(samples[SAMPLES - 1].added.by_outcome(HIT), 2 * newest - 1);
        assert_eq!(samples[SAMPLES].added.total(), 0);
    }
}
