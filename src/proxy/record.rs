//! What is noted of a Range or RangeStream on its way, and told at its end: its count, and its phases if it was slow.
//!
//! A read from memory notes a few numbers that are at hand. Its clock is read as often as the histograms need it: on arrival,
//! once proven, and at the head of the answer.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use tokio::time::Instant;

use super::{forward, range};
use crate::mirror::state::Mirror;
use crate::telemetry::calls::{Call, Revisions};
use crate::telemetry::outcome::Kind;
use crate::telemetry::{Metrics, Outcome, Why};

/// Counts the request exactly once, also when the caller goes away and the future is dropped.
pub(super) struct Record<'a> {
    metrics: &'a Arc<Metrics>,
    kind: Kind,
    arrived: Instant,
    pub(super) proven: Option<Instant>,
    /// Whether the mirror had to catch up.
    pub(super) waited: bool,
    pub(super) outcome: Outcome,
    pub(super) mirror: Option<&'a Mirror>,
    pub(super) revisions: Revisions,
    pub(super) keys: u64,
    pub(super) bytes: u64,
    is_counted: bool,
}

impl<'a> Record<'a> {
    /// A call that arrives now. Until it has another outcome, its caller has gone away.
    pub(super) fn new(metrics: &'a Arc<Metrics>, kind: Kind) -> Record<'a> {
        Record {
            metrics,
            kind,
            arrived: Instant::now(),
            proven: None,
            waited: false,
            outcome: Outcome::Cancelled(Why::Gone),
            mirror: None,
            revisions: Revisions::default(),
            keys: 0,
            bytes: 0,
            is_counted: false,
        }
    }

    pub(super) fn arrived(&self) -> Instant {
        self.arrived
    }

    /// When the caller stops to wait.
    pub(super) fn deadline(&self, call: &range::Call) -> Option<Instant> {
        call.timeout.map(|timeout| self.arrived + timeout)
    }

    /// The head of the answer is here: counts the call. The body of one that is not all here tells its end.
    pub(super) fn answered(mut self, outcome: forward::Outcome) -> forward::Outcome {
        let first_byte = self.count();
        let mut response = outcome?;
        if response.body().is_under_way() {
            let tail = Tail {
                metrics: Arc::clone(self.metrics),
                // What has gone is counted.
                call: Call {
                    bytes: 0,
                    ..self.call(first_byte)
                },
                arrived: self.arrived,
            };
            response = response.map(|body| body.told_by(tail));
        } else {
            self.offer(first_byte);
        }
        Ok(response)
    }

    fn count(&mut self) -> Duration {
        self.is_counted = true;
        let waited = self
            .proven
            .map_or(Duration::ZERO, |proven| proven.duration_since(self.arrived));
        let total = self.arrived.elapsed();
        let (outcome, reason) = self.outcome.labels();
        tracing::debug!(outcome, reason, waited = ?waited, total = ?total, "range ended");
        self.metrics.range_ended(self.kind, self.outcome, waited, total);
        total
    }

    fn offer(&self, took: Duration) {
        self.metrics.slowest.offer(took, || self.call(took));
    }

    /// As if it ended now, having taken so long.
    #[cold]
    fn call(&self, took: Duration) -> Call {
        Call {
            kind: self.kind,
            outcome: self.outcome,
            ended_at: SystemTime::now(),
            planned: None,
            proven: self.proven.map(|proven| proven.duration_since(self.arrived)),
            waited: self.waited,
            first_byte: took,
            ended: took,
            mirror: self.mirror.map(|mirror| mirror.name.clone()),
            revisions: self.revisions,
            keys: self.keys,
            bytes: self.bytes,
        }
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        if !self.is_counted {
            let took = self.count();
            self.offer(took);
        }
    }
}

/// Goes along with an answer that is under way, and tells its end.
#[derive(Debug)]
pub(super) struct Tail {
    metrics: Arc<Metrics>,
    call: Call,
    arrived: Instant,
}

impl Tail {
    /// So many bytes of the answer have gone to the connection.
    pub(super) fn sent(&mut self, bytes: u64) {
        self.call.bytes += bytes;
    }
}

impl Drop for Tail {
    fn drop(&mut self) {
        let took = self.arrived.elapsed();
        self.metrics.slowest.offer(took, || Call {
            ended_at: SystemTime::now(),
            ended: took,
            ..self.call.clone()
        });
    }
}
