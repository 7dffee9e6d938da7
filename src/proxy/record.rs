//! What is noted of a Range or RangeStream on its way, and told at its end: its count, and its phases if it was slow.
//!
//! A read from memory notes a few numbers that are at hand. Its clock is read as often as the histograms need it: on arrival,
//! once proven, and at the head of the answer.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Buf;
use http::{HeaderMap, Request, Response};
use hyper::body::Frame;
use tokio::time::Instant;

use super::body::ResponseBody;
use super::forward;
use super::trace::Trace;
use crate::cache::Rope;
use crate::grpc::Method;
use crate::mirror::state::Mirror;
use crate::telemetry::calls::{Call, Revisions};
use crate::telemetry::outcome::Kind;
use crate::telemetry::{Outcome, Reason, Telemetry};

/// Counts the request exactly once, also when the caller goes away and the future is dropped.
pub(super) struct Record<'a> {
    telemetry: &'a Arc<Telemetry>,
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
    /// If it is traced.
    pub(super) trace: Option<Box<Trace>>,
}

impl<'a> Record<'a> {
    /// The call with this head, which arrives now. Until it has another outcome, its caller has gone away.
    pub(super) fn new<B>(telemetry: &'a Arc<Telemetry>, kind: Kind, request: &Request<B>) -> Record<'a> {
        let method = match kind {
            Kind::Unary => Method::Range,
            Kind::Stream => Method::RangeStream,
        };
        Record {
            trace: Trace::begin(telemetry, method, request),
            telemetry,
            kind,
            arrived: Instant::now(),
            proven: None,
            waited: false,
            outcome: Outcome::Cancelled(Reason::Gone),
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
    pub(super) fn deadline(&self, timeout: Option<Duration>) -> Option<Instant> {
        timeout.map(|timeout| self.arrived + timeout)
    }

    /// It is known what is to be proven.
    pub(super) fn planned(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.planned();
        }
    }

    /// etcd has told the revision to be reached.
    pub(super) fn checked(&mut self, revision: i64) {
        self.revisions.proven = revision;
        if let Some(trace) = &mut self.trace {
            trace.checked();
        }
    }

    /// Memory is at `revision`, which is fresh enough.
    pub(super) fn proven(&mut self, mirror: &Mirror, revision: i64, waited: bool) {
        let now = Instant::now();
        self.proven = Some(now);
        self.waited = waited;
        self.revisions.served = revision;
        if let Some(trace) = &mut self.trace {
            trace.proven(now, waited, mirror.asked_for_progress(), None);
        }
    }

    /// Memory is not fresh enough.
    pub(super) fn not_proven(&mut self, reason: Reason) {
        self.waited = reason == Reason::NotFresh;
        if let Some(trace) = &mut self.trace {
            let asked = self.mirror.and_then(Mirror::asked_for_progress);
            trace.proven(Instant::now(), self.waited, asked, Some(reason));
        }
    }

    /// The call goes to etcd: with these headers, which name the trace that it is part of.
    pub(super) fn forward(&mut self, headers: &mut HeaderMap) {
        if let Some(trace) = &mut self.trace {
            trace.forward(headers);
        }
    }

    /// The head of the answer is here: counts the call. The body of one that is not all here, or that is traced, tells its end.
    pub(super) fn answered(mut self, outcome: forward::Outcome) -> forward::Outcome {
        let first_byte = self.count();
        let trace = self.trace_ended(first_byte);
        let response = outcome?;
        if trace.is_none() && !response.body().is_under_way() {
            self.offer(first_byte);
            return Ok(response);
        }
        let slow = Slow {
            telemetry: Arc::clone(self.telemetry),
            // What has gone is counted.
            call: Call {
                bytes: 0,
                ..self.call(first_byte)
            },
            arrived: self.arrived,
        };
        Ok(told(response, Some(slow), trace))
    }

    /// Lets go of the trace, with all that is known at the answer's head.
    fn trace_ended(&mut self, first_byte: Duration) -> Option<Box<Trace>> {
        let mut trace = self.trace.take()?;
        if matches!(self.outcome, Outcome::Hit(_) | Outcome::Waited(_)) {
            trace.answer(self.proven.unwrap_or_else(Instant::now));
        }
        trace.ended(&self.call(first_byte));
        Some(trace)
    }

    fn count(&mut self) -> Duration {
        self.is_counted = true;
        let waited = self
            .proven
            .map_or(Duration::ZERO, |proven| proven.duration_since(self.arrived));
        let total = self.arrived.elapsed();
        let (outcome, reason) = self.outcome.labels();
        tracing::debug!(outcome, reason, waited = ?waited, total = ?total, "range ended");
        self.telemetry
            .metrics
            .reads
            .record(self.kind, self.outcome, waited, total);
        if let Some(trace) = &self.trace {
            self.telemetry
                .metrics
                .reads
                .record_exemplar(trace.id(), self.outcome, waited, total);
        }
        total
    }

    fn offer(&self, took: Duration) {
        self.telemetry.slowest.offer(took, || self.call(took));
    }

    /// As if it ended now, having taken so long.
    #[cold]
    fn call(&self, took: Duration) -> Call {
        Call {
            kind: self.kind,
            outcome: self.outcome,
            ended_at: SystemTime::now(),
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
            drop(self.trace_ended(took));
        }
    }
}

/// The same answer, whose end is told.
fn told(
    response: Response<ResponseBody>,
    slow: Option<Slow>,
    mut trace: Option<Box<Trace>>,
) -> Response<ResponseBody> {
    if let Some(trace) = &mut trace {
        trace.head(&response);
    }
    response.map(|body| body.told_by(Tail { slow, trace }))
}

/// The same for a call that is only traced.
pub(super) fn traced(trace: Option<Box<Trace>>, outcome: forward::Outcome) -> forward::Outcome {
    match trace {
        None => outcome,
        trace => outcome.map(|response| told(response, None, trace)),
    }
}

/// Goes along with an answer, and tells its end.
#[derive(Debug)]
pub(super) struct Tail {
    slow: Option<Slow>,
    trace: Option<Box<Trace>>,
}

impl Tail {
    /// A frame of the answer goes to the connection.
    pub(super) fn see(&mut self, frame: &Frame<Rope>) {
        if let (Some(slow), Some(data)) = (&mut self.slow, frame.data_ref()) {
            slow.call.bytes += data.remaining() as u64;
        }
        if let Some(trace) = &mut self.trace {
            match (frame.data_ref(), frame.trailers_ref()) {
                (Some(data), _) => trace.sent(data),
                (None, Some(trailers)) => trace.status(trailers),
                (None, None) => {}
            }
        }
    }
}

/// A call that may be one of the slowest once it has ended.
#[derive(Debug)]
struct Slow {
    telemetry: Arc<Telemetry>,
    call: Call,
    arrived: Instant,
}

impl Drop for Slow {
    fn drop(&mut self) {
        let took = self.arrived.elapsed();
        self.telemetry.slowest.offer(took, || Call {
            ended_at: SystemTime::now(),
            ended: took,
            ..self.call.clone()
        });
    }
}
