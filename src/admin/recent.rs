//! What happened in the last quarter of an hour, so that a page that is opened now shows the past, too.
//!
//! Every [`INTERVAL`] the counters are read, and what was added since is kept as a [`Sample`]; there are never more than
//! [`SAMPLES`] of them. Requests know nothing of this.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::advice::Group;
use crate::mirror::Mirrors;
use crate::telemetry::metrics::QuorumChecks;
use crate::telemetry::{Metrics, Outcome, Reason};

/// What one sample spans.
pub(super) const INTERVAL: Duration = Duration::from_secs(5);
/// How many are kept: fifteen minutes of them.
pub(super) const SAMPLES: usize = 180;

/// The counters at one moment, since the start of the process.
#[derive(Clone, Debug, Default)]
pub(super) struct Counts {
    /// Ranges and RangeStreams, by how they ended.
    pub(super) reads: Vec<(Outcome, u64)>,
    pub(super) checks: QuorumChecks,
    /// Events applied by all mirrors.
    pub(super) events: u64,
    /// Calls that are no reads, passed on to etcd.
    pub(super) passed: u64,
    /// Each mirror, in order: `None` while it is in service.
    pub(super) mirrors: Vec<Option<Reason>>,
}

/// What was added to the counters in one interval; the mirrors as they were at its end.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// How long it was: a machine that sleeps makes it longer, and the one under way is shorter.
    pub(super) seconds: f64,
    pub(super) added: Counts,
}

/// The samples of the last quarter of an hour.
#[derive(Debug)]
pub(super) struct Recent(Mutex<Kept>);

#[derive(Debug)]
struct Kept {
    last: Counts,
    last_at: Instant,
    samples: VecDeque<Arc<Sample>>,
}

impl Counts {
    /// As they are now: some two hundred look-ups.
    pub(super) fn now(metrics: &Metrics, mirrors: &Mirrors) -> Counts {
        let all = mirrors.all();
        Counts {
            reads: metrics.reads.by_outcome(),
            checks: metrics.freshness.checks(),
            events: all.iter().map(|mirror| mirror.metrics.events.get()).sum(),
            passed: metrics.forwarding.calls.get(),
            mirrors: all.iter().map(|mirror| mirror.revision().err()).collect(),
        }
    }

    /// How many reads ended so.
    pub(super) fn of(&self, outcome: Outcome) -> u64 {
        let found = self.reads.iter().find(|(other, _)| *other == outcome);
        found.map_or(0, |(_, count)| *count)
    }

    /// How many reads `group` answered.
    pub(super) fn of_group(&self, group: Group) -> u64 {
        let of_it = self
            .reads
            .iter()
            .filter(|(outcome, _)| Group::of(*outcome) == group);
        of_it.map(|(_, count)| count).sum()
    }

    /// How many reads ended in any way.
    pub(super) fn total(&self) -> u64 {
        self.reads.iter().map(|(_, count)| count).sum()
    }

    fn since(&self, before: &Counts) -> Counts {
        let added = self
            .reads
            .iter()
            .map(|(outcome, count)| (*outcome, count.saturating_sub(before.of(*outcome))))
            .filter(|(_, count)| *count > 0);
        Counts {
            reads: added.collect(),
            checks: QuorumChecks {
                proven: self.checks.proven.saturating_sub(before.checks.proven),
                failed: self.checks.failed.saturating_sub(before.checks.failed),
                reads: self.checks.reads.saturating_sub(before.checks.reads),
            },
            events: self.events.saturating_sub(before.events),
            passed: self.passed.saturating_sub(before.passed),
            mirrors: self.mirrors.clone(),
        }
    }
}

impl Sample {
    /// `count` of it, per second.
    #[allow(clippy::cast_precision_loss, reason = "a rate shows magnitudes")]
    pub(super) fn rate(&self, count: u64) -> f64 {
        // The interval under way has just begun at times; a rate over less than a second says nothing.
        count as f64 / self.seconds.max(1.0)
    }
}

impl Recent {
    /// Counting from `counts` at `now` on.
    pub(super) fn new(now: Instant, counts: Counts) -> Recent {
        Recent(Mutex::new(Kept {
            last: counts,
            last_at: now,
            samples: VecDeque::with_capacity(SAMPLES),
        }))
    }

    /// An interval has ended.
    pub(super) fn beat(&self, now: Instant, counts: Counts) {
        let mut kept = self.0.lock();
        let sample = kept.under_way(now, &counts);
        if kept.samples.len() == SAMPLES {
            kept.samples.pop_front();
        }
        kept.samples.push_back(Arc::new(sample));
        (kept.last, kept.last_at) = (counts, now);
    }

    /// The samples, the oldest first; the last is the interval under way.
    pub(super) fn samples(&self, now: Instant, counts: &Counts) -> Vec<Arc<Sample>> {
        let kept = self.0.lock();
        let under_way = Arc::new(kept.under_way(now, counts));
        kept.samples.iter().cloned().chain([under_way]).collect()
    }
}

impl Kept {
    fn under_way(&self, now: Instant, counts: &Counts) -> Sample {
        Sample {
            seconds: now.saturating_duration_since(self.last_at).as_secs_f64(),
            added: counts.since(&self.last),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::outcome::Read;

    const HIT: Outcome = Outcome::Hit(Read::Linearizable);
    const LOST: Outcome = Outcome::Forwarded(Reason::FeedLost);

    fn counts(hits: u64, forwarded: u64) -> Counts {
        Counts {
            reads: vec![(HIT, hits), (LOST, forwarded)],
            ..Counts::default()
        }
    }

    #[test]
    fn samples_hold_what_was_added_and_the_last_is_under_way() {
        let start = Instant::now();
        let recent = Recent::new(start, counts(100, 0));
        recent.beat(start + INTERVAL, counts(110, 3));
        let now = start + INTERVAL + Duration::from_secs(2);
        let samples = recent.samples(now, &counts(150, 3));
        let seen: Vec<_> = samples
            .iter()
            .map(|sample| (sample.seconds, sample.added.of(HIT), sample.added.of(LOST)))
            .collect();
        assert_eq!(seen, [(5.0, 10, 3), (2.0, 40, 0)]);
        assert_eq!(samples[0].added.total(), 13);
        assert!((samples[1].rate(40) - 20.0).abs() < 1e-9);
        assert!(
            samples[1].added.reads.iter().all(|(_, count)| *count > 0),
            "what did not happen takes no room"
        );
    }

    #[test]
    fn the_past_is_bounded() {
        let start = Instant::now();
        let recent = Recent::new(start, counts(0, 0));
        let mut now = start;
        for n in 1..=2 * SAMPLES as u64 {
            now += INTERVAL;
            recent.beat(now, counts(n * n, 0));
        }
        let samples = recent.samples(now, &counts(4 * (SAMPLES * SAMPLES) as u64, 0));
        assert_eq!(samples.len(), SAMPLES + 1);
        let newest = 2 * SAMPLES as u64;
        assert_eq!(samples[SAMPLES - 1].added.of(HIT), 2 * newest - 1);
        assert_eq!(samples[SAMPLES].added.total(), 0);
    }
}
