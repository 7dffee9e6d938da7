//! Records a Range or RangeStream: its count, and its phases if it was slow or is traced.
//!
//! A read from memory records a few numbers that are at hand. The clock is read as often as the histograms need it: on
//! arrival, once proven, and at the head of the response.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Buf;
use http::{HeaderMap, Request, Response};
use hyper::body::Frame;
use tokio::time::Instant;

use super::response::{CallResult, Observer, ResponseBody};
use super::spans::Trace;
use crate::cache::Rope;
use crate::grpc::Method;
use crate::mirror::state::Mirror;
use crate::telemetry::calls::{Call, Revisions};
use crate::telemetry::outcome::Kind;
use crate::telemetry::{Outcome, Reason, Telemetry};

/// Counts the read exactly once, also when the client cancels it and the future is dropped.
pub(super) struct Recorder<'a> {
    telemetry: &'a Arc<Telemetry>,
    kind: Kind,
    arrived: Instant,
    /// When memory was proven to be fresh enough.
    pub(super) proven: Option<Instant>,
    /// Whether the mirror had to catch up.
    pub(super) waited: bool,
    pub(super) outcome: Outcome,
    /// The mirror that holds the range.
    pub(super) mirror: Option<&'a Mirror>,
    pub(super) revisions: Revisions,
    /// Entries in the response.
    pub(super) keys: u64,
    /// Length of the response from memory.
    pub(super) bytes: u64,
    is_counted: bool,
    /// Set if the call is traced.
    pub(super) trace: Option<Box<Trace>>,
}

impl<'a> Recorder<'a> {
    /// Records the call with this head, which arrives now. Until another outcome is set, it counts as cancelled by its
    /// client.
    pub(super) fn new<B>(telemetry: &'a Arc<Telemetry>, kind: Kind, request: &Request<B>) -> Recorder<'a> {
        let method = match kind {
            Kind::Unary => Method::Range,
            Kind::Stream => Method::RangeStream,
        };
        Recorder {
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

    /// When the call arrived.
    pub(super) fn arrived(&self) -> Instant {
        self.arrived
    }

    /// The client's deadline, by the timeout that it sent.
    pub(super) fn deadline(&self, timeout: Option<Duration>) -> Option<Instant> {
        timeout.map(|timeout| self.arrived + timeout)
    }

    /// The plan is made: **prove** begins.
    pub(super) fn planned(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.planned();
        }
    }

    /// The revision that the mirror must reach is known.
    pub(super) fn checked(&mut self, revision: i64) {
        self.revisions.proven = revision;
        if let Some(trace) = &mut self.trace {
            trace.checked();
        }
    }

    /// The mirror is at `revision`, which is fresh enough.
    pub(super) fn proven(&mut self, mirror: &Mirror, revision: i64, waited: bool) {
        let now = Instant::now();
        self.proven = Some(now);
        self.waited = waited;
        self.revisions.served = revision;
        if let Some(trace) = &mut self.trace {
            trace.proven(now, waited, mirror.last_progress_request(), None);
        }
    }

    /// The mirror is not fresh enough, because of `reason`.
    pub(super) fn not_proven(&mut self, reason: Reason) {
        self.waited = reason == Reason::NotFresh;
        if let Some(trace) = &mut self.trace {
            let asked = self.mirror.and_then(Mirror::last_progress_request);
            trace.proven(Instant::now(), self.waited, asked, Some(reason));
        }
    }

    /// The call is forwarded to etcd with these headers, to which the trace context is added.
    pub(super) fn forward(&mut self, headers: &mut HeaderMap) {
        if let Some(trace) = &mut self.trace {
            trace.forward(headers);
        }
    }

    /// Counts the call when the head of its response is ready. A body that is not complete yet, or that is traced, gets an
    /// observer that records its end.
    pub(super) fn responded(mut self, result: CallResult) -> CallResult {
        let first_byte = self.count();
        let trace = self.trace_ended(first_byte);
        let response = result?;
        if trace.is_none() && response.body().is_complete() {
            self.offer(first_byte);
            return Ok(response);
        }
        let slow = Slow {
            telemetry: Arc::clone(self.telemetry),
            // Counted again as it is sent.
            call: Call {
                bytes: 0,
                ..self.call(first_byte)
            },
            arrived: self.arrived,
        };
        Ok(observed(response, Some(slow), trace))
    }

    /// Gives up the trace, with all that is known at the head of the response.
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

    /// The call as if it ended now, after `took`.
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

impl Drop for Recorder<'_> {
    fn drop(&mut self) {
        if !self.is_counted {
            let took = self.count();
            self.offer(took);
            drop(self.trace_ended(took));
        }
    }
}

/// The same response, whose end is recorded.
fn observed(
    response: Response<ResponseBody>,
    slow: Option<Slow>,
    mut trace: Option<Box<Trace>>,
) -> Response<ResponseBody> {
    if let Some(trace) = &mut trace {
        trace.head(&response);
    }
    response.map(|body| body.observed_by(ResponseObserver { slow, trace }))
}

/// The result of a call that is only traced: `trace` ends with its body.
pub(super) fn traced(trace: Option<Box<Trace>>, result: CallResult) -> CallResult {
    match trace {
        None => result,
        trace => result.map(|response| observed(response, None, trace)),
    }
}

/// Records the end of a response.
#[derive(Debug)]
struct ResponseObserver {
    slow: Option<Slow>,
    trace: Option<Box<Trace>>,
}

impl Observer for ResponseObserver {
    fn frame(&mut self, frame: &Frame<Rope>) {
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
