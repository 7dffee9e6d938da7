//! Records each Range and RangeStream: metrics, the trace if it is sampled, and its phases if it is one of the slowest.
//!
//! A fast read from memory is recorded without an allocation. The clock is read only three times, as the histograms
//! require: on arrival, when the mirror is proven fresh, and when the response begins.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Buf;
use http::{HeaderMap, Request, Response};
use hyper::body::Frame;
use tokio::time::Instant;

use super::access::AccessCall;
use super::response::{CallResult, Ended, Observer, ResponseBody};
use super::spans::Trace;
use crate::cache::{RangeQuery, Rope};
use crate::grpc::Method;
use crate::grpc::metadata::AGE_MILLIS;
use crate::limits::CallBytes;
use crate::mirror::state::Mirror;
use crate::telemetry::calls::{Call, Revisions};
use crate::telemetry::outcome::Kind;
use crate::telemetry::{Outcome, Reason, Telemetry};

/// Collects the facts about one read, and records it exactly once: in [`Recorder::finish`], or on drop if the client
/// cancels.
pub(super) struct Recorder<'a> {
    telemetry: &'a Arc<Telemetry>,
    kind: Kind,
    arrived: Instant,
    /// Time at which the mirror was proven fresh enough; `None` before.
    pub(super) proven: Option<Instant>,
    /// Whether the read waited for the mirror to catch up.
    pub(super) waited: bool,
    /// Outcome so far; cancelled by the client until it is set.
    pub(super) outcome: Outcome,
    /// Mirror whose scope contains the range, if any.
    pub(super) mirror: Option<&'a Mirror>,
    pub(super) revisions: Revisions,
    /// Number of entries in a response from memory.
    pub(super) keys: u64,
    /// Length of a response from memory, in bytes.
    pub(super) bytes: u64,
    /// Whether the read may return a whole range.
    pub(super) is_list: bool,
    /// Age of a response from the last view, while no member of etcd answers.
    pub(super) stale_age: Option<Duration>,
    is_counted: bool,
    /// Trace of the call; `None` if it is not sampled.
    pub(super) trace: Option<Box<Trace>>,
    /// The call in the access log; `None` if it is not logged.
    access: Option<&'a mut AccessCall>,
}

impl<'a> Recorder<'a> {
    /// Creates a recorder for a gRPC call that arrives now with the head of `request`, and begins its trace. `access` is
    /// the call in the access log.
    pub(super) fn new<B>(
        telemetry: &'a Arc<Telemetry>,
        kind: Kind,
        request: &Request<B>,
        access: Option<&'a mut AccessCall>,
    ) -> Recorder<'a> {
        let method = match kind {
            Kind::Unary => Method::Range,
            Kind::Stream => Method::RangeStream,
        };
        Recorder::with_trace(telemetry, kind, Trace::begin(telemetry, method, request), access)
    }

    /// Creates a recorder for a Range in JSON, and begins its trace.
    pub(super) fn of_json<B>(
        telemetry: &'a Arc<Telemetry>,
        request: &Request<B>,
        access: Option<&'a mut AccessCall>,
    ) -> Recorder<'a> {
        Recorder::with_trace(
            telemetry,
            Kind::Unary,
            Trace::begin_http(telemetry, request),
            access,
        )
    }

    fn with_trace(
        telemetry: &'a Arc<Telemetry>,
        kind: Kind,
        trace: Option<Box<Trace>>,
        access: Option<&'a mut AccessCall>,
    ) -> Recorder<'a> {
        Recorder {
            trace,
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
            is_list: false,
            stale_age: None,
            is_counted: false,
            access,
        }
    }

    /// Records the address of the client.
    pub(super) fn record_peer(&mut self, peer: Option<IpAddr>) {
        if let Some(trace) = &mut self.trace {
            trace.record_peer(peer);
        }
    }

    /// Returns the time of arrival.
    pub(super) fn arrived(&self) -> Instant {
        self.arrived
    }

    /// Returns the deadline for the `timeout` in the client's metadata.
    pub(super) fn deadline(&self, timeout: Option<Duration>) -> Option<Instant> {
        timeout.map(|timeout| self.arrived + timeout)
    }

    /// Records what the call asks for.
    pub(super) fn record_query(&mut self, query: &RangeQuery) {
        self.revisions.asked = query.revision;
        if let Some(access) = &mut self.access {
            access.record_query(query);
        }
    }

    /// Begins the phase **prove**, after the plan is made.
    pub(super) fn begin_prove(&mut self) {
        if let Some(trace) = &mut self.trace {
            trace.begin_prove();
        }
    }

    /// Records the revision that the mirror must reach, for which the call may have to wait from now on.
    pub(super) fn record_required_revision(&mut self, revision: i64) {
        self.revisions.proven = revision;
        if let Some(trace) = &mut self.trace {
            trace.record_required_revision();
        }
    }

    /// Records that `mirror` is at `revision`, which is fresh enough. Ends **prove**.
    pub(super) fn record_proven(&mut self, mirror: &Mirror, revision: i64, waited: bool) {
        let now = Instant::now();
        self.proven = Some(now);
        self.waited = waited;
        self.revisions.served = revision;
        if let Some(trace) = &mut self.trace {
            trace.end_prove(now, waited, mirror.last_progress_request(), None);
        }
    }

    /// Records that the mirror was not proven fresh, for `reason`. Ends **prove**.
    pub(super) fn record_not_proven(&mut self, reason: Reason) {
        self.waited = reason == Reason::NotFresh;
        if let Some(trace) = &mut self.trace {
            let progress_requested = self.mirror.and_then(Mirror::last_progress_request);
            trace.end_prove(Instant::now(), self.waited, progress_requested, Some(reason));
        }
    }

    /// Begins the phase **forward** and adds the trace context to the `headers` of the call to etcd.
    pub(super) fn begin_forward(&mut self, headers: &mut HeaderMap) {
        if let Some(trace) = &mut self.trace {
            trace.begin_forward(headers);
        }
    }

    /// Records the call when its response begins. If the body is incomplete or the call is traced, an observer on the
    /// body records the end. `call` counts the outcome for its client.
    pub(super) fn finish(mut self, result: CallResult, call: &CallBytes) -> CallResult {
        if let Some(outcome) = result.as_ref().ok().and_then(Ended::of) {
            self.outcome = outcome;
        }
        if let Some(of_client) = call.client_call() {
            of_client.record_read(self.outcome, self.is_list);
        }
        let first_byte = self.count();
        let trace = self.finish_trace(first_byte);
        let mut response = result?;
        if let Some(age) = self.stale_age {
            self.telemetry.metrics.reads.record_stale(age);
            let millis = u64::try_from(age.as_millis()).unwrap_or(u64::MAX);
            response.headers_mut().insert(AGE_MILLIS, millis.into());
        }
        if trace.is_none() && response.body().is_complete() {
            self.offer_to_slowest(first_byte);
            return Ok(response);
        }
        let slow = SlowCall {
            telemetry: Arc::clone(self.telemetry),
            // The observer counts the bytes as they are sent.
            call: Call {
                bytes: 0,
                ..self.to_call(first_byte)
            },
            arrived: self.arrived,
        };
        Ok(observe_end(response, Some(slow), trace))
    }

    /// Adds the outcome to the trace and returns it; the owner ends it by dropping it.
    fn finish_trace(&mut self, first_byte: Duration) -> Option<Box<Trace>> {
        let mut trace = self.trace.take()?;
        if matches!(self.outcome, Outcome::Hit(_) | Outcome::Waited(_)) {
            trace.begin_answer(self.proven.unwrap_or_else(Instant::now));
        }
        trace.record_outcome(&self.to_call(first_byte));
        Some(trace)
    }

    /// Records metrics, and returns the time since arrival.
    fn count(&mut self) -> Duration {
        self.is_counted = true;
        let waited = self
            .proven
            .map_or(Duration::ZERO, |proven| proven.duration_since(self.arrived));
        let total = self.arrived.elapsed();
        let (outcome, reason) = self.outcome.labels();
        tracing::debug!(outcome, reason, waited = ?waited, total = ?total, "read finished");
        self.telemetry
            .metrics
            .reads
            .record(self.kind, self.outcome, waited, total);
        if let Some(mirror) = self.mirror.filter(|_| self.outcome.is_from_memory()) {
            mirror.metrics.read_wait.observe(waited);
        }
        if let Some(trace) = &self.trace {
            self.telemetry
                .metrics
                .reads
                .record_exemplar(trace.id(), self.outcome, waited, total);
        }
        if let Some(access) = &mut self.access {
            let proven = self.proven.map(|_| waited);
            access.record_read(self.outcome, proven, self.revisions.served);
            if let Some(trace) = &self.trace {
                access.record_trace(trace.id());
            }
        }
        total
    }

    /// Keeps the call if it is one of the slowest; it ended after `took`.
    fn offer_to_slowest(&self, took: Duration) {
        self.telemetry.slowest.offer(took, || self.to_call(took));
    }

    /// Returns the facts of a call that ends now, after `took`.
    #[cold]
    fn to_call(&self, took: Duration) -> Call {
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
        // Not finished: the client cancelled the call and hyper dropped its future.
        if !self.is_counted {
            let took = self.count();
            self.offer_to_slowest(took);
            drop(self.finish_trace(took));
        }
    }
}

/// Adds an observer that records the end of `response`.
fn observe_end(
    response: Response<ResponseBody>,
    slow: Option<SlowCall>,
    mut trace: Option<Box<Trace>>,
) -> Response<ResponseBody> {
    if let Some(trace) = &mut trace {
        trace.record_head(&response);
    }
    response.map(|body| body.observed_by(ResponseObserver { slow, trace }))
}

/// Keeps the `trace` of a call that has no recorder until the response's body is dropped.
pub(super) fn with_trace(trace: Option<Box<Trace>>, result: CallResult) -> CallResult {
    match trace {
        None => result,
        trace => result.map(|response| observe_end(response, None, trace)),
    }
}

/// Observer that records the end of a response when the body drops it.
#[derive(Debug)]
struct ResponseObserver {
    slow: Option<SlowCall>,
    trace: Option<Box<Trace>>,
}

impl Observer for ResponseObserver {
    fn frame(&mut self, frame: &Frame<Rope>) {
        if let (Some(slow), Some(data)) = (&mut self.slow, frame.data_ref()) {
            slow.call.bytes += data.remaining() as u64;
        }
        if let Some(trace) = &mut self.trace {
            match (frame.data_ref(), frame.trailers_ref()) {
                (Some(data), _) => trace.record_sent(data),
                (None, Some(trailers)) => trace.record_status(trailers),
                (None, None) => {}
            }
        }
    }
}

/// Facts of a call whose response is being sent; dropped at its end, and then kept if it is one of the slowest.
#[derive(Debug)]
struct SlowCall {
    telemetry: Arc<Telemetry>,
    call: Call,
    arrived: Instant,
}

impl Drop for SlowCall {
    fn drop(&mut self) {
        let took = self.arrived.elapsed();
        self.telemetry.slowest.offer(took, || Call {
            ended_at: SystemTime::now(),
            ended: took,
            ..self.call.clone()
        });
    }
}
