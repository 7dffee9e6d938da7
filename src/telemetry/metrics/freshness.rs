//! Metrics of what proves a read fresh and allowed: quorum checks and authorizations.

use std::time::Duration;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;

use super::labels::ResultLabels;
use super::register::{register, register_latency, start_at_zero};
use crate::telemetry::outcome::Reason;

/// Quorum checks and the reads that they served, since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuorumChecks {
    /// Checks that proved a revision.
    pub proven: u64,
    /// Checks that did not.
    pub failed: u64,
    /// Reads that waited for a check.
    pub reads: u64,
}

/// Quorum checks and authorizations.
#[derive(Debug)]
pub struct FreshnessMetrics {
    checks: Family<ResultLabels, Counter>,
    check_reads: Counter,
    check_duration_seconds: Histogram,
    authorizations: Family<ResultLabels, Counter>,
    authorization_duration_seconds: Histogram,
}

impl FreshnessMetrics {
    pub(super) fn new(registry: &mut Registry) -> FreshnessMetrics {
        let checks = register(registry, "quorum_checks", "Quorum revision checks by result");
        let results = [
            Ok(()),
            Err(Reason::CheckFailed),
            Err(Reason::NotFresh),
            Err(Reason::Auth),
        ];
        start_at_zero(&checks, results.map(check_labels));
        let authorizations = register(
            registry,
            "authorizations",
            "Calls that asked etcd whether a caller may read a range, by result",
        );
        let results = ["granted", Reason::Auth.as_str(), Reason::CheckFailed.as_str()];
        start_at_zero(&authorizations, results.map(|result| ResultLabels { result }));
        FreshnessMetrics {
            checks,
            check_reads: register(
                registry,
                "quorum_check_reads",
                "Reads that quorum checks served; divide by the checks for the reads per check",
            ),
            check_duration_seconds: register_latency(
                registry,
                "quorum_check_duration",
                "Round trip of a quorum check",
            ),
            authorizations,
            authorization_duration_seconds: register_latency(
                registry,
                "authorization_duration",
                "Round trip of an authorization",
            ),
        }
    }

    /// Counts one quorum check that served `reads` reads.
    pub fn record_check(&self, result: Result<(), Reason>, reads: u64, took: Duration) {
        self.checks.get_or_create(&check_labels(result)).inc();
        self.check_reads.inc_by(reads);
        self.check_duration_seconds.observe(took.as_secs_f64());
    }

    /// Quorum checks so far, and the reads that they served.
    #[must_use]
    pub fn checks(&self) -> QuorumChecks {
        let count = |result| {
            self.checks
                .get(&check_labels(result))
                .map_or(0, |counter| counter.get())
        };
        QuorumChecks {
            proven: count(Ok(())),
            failed: Reason::ALL.iter().map(|reason| count(Err(*reason))).sum(),
            reads: self.check_reads.get(),
        }
    }

    /// Counts one authorization by etcd.
    pub fn record_authorization(&self, result: &'static str, took: Duration) {
        self.authorizations.get_or_create(&ResultLabels { result }).inc();
        self.authorization_duration_seconds.observe(took.as_secs_f64());
    }
}

fn check_labels(result: Result<(), Reason>) -> ResultLabels {
    ResultLabels {
        result: result.map_or_else(Reason::as_str, |()| "proven"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn checks_are_read_back_by_result() {
        let metrics = FreshnessMetrics::new(&mut Registry::default());
        metrics.record_check(Ok(()), 5, Duration::ZERO);
        metrics.record_check(Err(Reason::CheckFailed), 2, Duration::ZERO);
        metrics.record_check(Err(Reason::Auth), 1, Duration::ZERO);
        let expected = QuorumChecks {
            proven: 1,
            failed: 2,
            reads: 8,
        };
        assert_eq!(metrics.checks(), expected);
    }
}
