//! Figures that rangecache itself reads back, for its page.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;

use super::Metrics;
use super::labels::{LimitLabels, MirrorLabels, RangeLabels, ResultLabels};
use crate::telemetry::outcome::{Outcome, Reason};

/// See [`Metrics::quorum_checks`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuorumChecks {
    /// Those that proved a revision.
    pub proven: u64,
    /// Those that did not.
    pub failed: u64,
    /// Reads that waited for them.
    pub reads: u64,
}

impl Metrics {
    /// A bound that was exported by this name.
    #[must_use]
    pub fn limit_of(&self, name: &'static str) -> Option<f64> {
        self.limits
            .get(&LimitLabels { limit: name })
            .map(|value| value.get())
    }

    /// Ranges and RangeStreams together by how they ended and why, as many as have ended so far; those that never
    /// happened are left out.
    #[must_use]
    pub fn reads(&self) -> Vec<(Outcome, u64)> {
        let count = |outcome: Outcome| {
            let (label, reason) = outcome.labels();
            let labels = RangeLabels {
                outcome: label,
                reason,
            };
            let of =
                |family: &Family<RangeLabels, Counter>| family.get(&labels).map_or(0, |count| count.get());
            of(&self.range) + of(&self.range_stream)
        };
        Outcome::all()
            .map(|outcome| (outcome, count(outcome)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }

    /// Quorum checks so far, and the reads that they served.
    #[must_use]
    pub fn quorum_checks(&self) -> QuorumChecks {
        let of = |result| {
            self.checks
                .get(&ResultLabels { result })
                .map_or(0, |count| count.get())
        };
        QuorumChecks {
            proven: of("proven"),
            failed: Reason::ALL.into_iter().map(|reason| of(reason.as_str())).sum(),
            reads: self.check_reads.get(),
        }
    }

    /// How often verification found the mirror called `name` to differ from etcd.
    #[must_use]
    pub fn verify_mismatches(&self, name: &str) -> u64 {
        let labels = MirrorLabels {
            mirror: name.to_owned(),
        };
        self.verify_mismatches.get(&labels).map_or(0, |count| count.get())
    }
}
