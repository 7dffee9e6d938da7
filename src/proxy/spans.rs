//! The spans of a traced call: its server span and one for each phase, by the names in [`proxy`](super).
//!
//! Only sampled calls have a [`Trace`]; others cost nothing here. Attributes contain neither keys nor values (I10): a range
//! is named by its mirror, which the operator named.

use bytes::Buf;
use http::{HeaderMap, Request, Response};
use tokio::time::Instant;

use super::response::ResponseBody;
use crate::cache::Rope;
use crate::grpc::Method;
use crate::grpc::frame::PrefixReader;
use crate::grpc::status::GRPC_STATUS;
use crate::net::Url;
use crate::telemetry::calls::Call;
use crate::telemetry::trace::{
    Clock, Span, SpanContext, SpanExt as _, SpanKind, TRACEPARENT, TraceId, Tracer, child_context,
    status_code, traceparent,
};
use crate::telemetry::{Outcome, Reason, Telemetry};

/// gRPC's code of a call that its client cancelled.
const CANCELLED: u16 = 1;
/// gRPC's code of a call that failed by a bug.
const INTERNAL: u16 = 13;

/// A traced call in flight; dropping it ends and exports its spans.
#[derive(Debug)]
pub(super) struct Trace {
    tracer: Tracer,
    clock: Clock,
    /// The server span, then the phases in the order of their start.
    spans: Vec<Span>,
    /// Index of the phase that ends with the call.
    last: Option<usize>,
    planned: Option<Instant>,
    checked: Option<Instant>,
    /// Context of the phase **prove**, for the calls to etcd that it makes.
    prove: Option<SpanContext>,
    /// Context of the quorum check that the call waited for.
    link: Option<SpanContext>,
    status: Option<u16>,
    bytes: u64,
    messages: Messages,
}

impl Trace {
    /// Begins the trace of the call with this head, if it is sampled.
    #[inline]
    pub(super) fn begin<B>(
        telemetry: &Telemetry,
        method: Method,
        request: &Request<B>,
    ) -> Option<Box<Trace>> {
        let span = telemetry.tracer.server(request.headers())?;
        let name = method.span_name(request.uri().path());
        Some(Trace::new(&telemetry.tracer, *span, name))
    }

    #[cold]
    fn new(tracer: &Tracer, mut span: Span, name: &str) -> Box<Trace> {
        let method = name.to_owned();
        span.name = method.clone().into();
        span.set("rpc.system.name", "grpc");
        span.set("rpc.method", method);
        Box::new(Trace {
            tracer: tracer.clone(),
            clock: Clock::new(),
            spans: vec![span],
            last: None,
            planned: None,
            checked: None,
            prove: None,
            link: None,
            status: None,
            bytes: 0,
            messages: Messages::default(),
        })
    }

    /// The id of the whole trace.
    pub(super) fn id(&self) -> TraceId {
        self.server().span_context.trace_id()
    }

    fn server(&self) -> &Span {
        &self.spans[0]
    }

    /// The plan is made: **prove** begins.
    pub(super) fn planned(&mut self) {
        self.planned = Some(Instant::now());
        self.prove = Some(child_context(&self.server().span_context));
    }

    /// Context of the phase **prove**, while it lasts.
    pub(super) fn prove(&self) -> Option<SpanContext> {
        self.prove.clone()
    }

    /// Set to the context of the quorum check that the call waits for.
    pub(super) fn link(&mut self) -> &mut Option<SpanContext> {
        &mut self.link
    }

    /// The revision that the mirror must reach is known.
    pub(super) fn checked(&mut self) {
        self.checked = Some(Instant::now());
    }

    /// The phase **prove** ended at `proven`, without a proof if there is a `reason`. `asked` is when the feed last requested
    /// etcd's progress.
    pub(super) fn proven(
        &mut self,
        proven: Instant,
        waited: bool,
        asked: Option<Instant>,
        reason: Option<Reason>,
    ) {
        let (Some(planned), Some(context)) = (self.planned, self.prove.take()) else {
            return;
        };
        let end_time = self.clock.at(proven);
        let mut prove = Span {
            span_context: context,
            end_time,
            ..self.server().child("prove", self.clock.at(planned))
        };
        if let Some(check) = self.link.clone() {
            prove.link(check);
        }
        if let Some(reason) = reason {
            prove.fail(reason.as_str());
        }
        if let Some(checked) = self.checked.filter(|_| waited) {
            let mut wait = prove.child("wait", self.clock.at(checked));
            wait.end_time = end_time;
            if let Some(asked) = asked.filter(|asked| (checked..proven).contains(asked)) {
                let mut progress = wait.child("progress", self.clock.at(asked));
                progress.end_time = end_time;
                self.spans.push(progress);
            }
            self.spans.push(wait);
        }
        self.spans.push(prove);
    }

    /// The call is forwarded to etcd as a part of this trace.
    pub(super) fn forward(&mut self, headers: &mut HeaderMap) {
        let mut forward = self.server().child("forward", self.clock.at(Instant::now()));
        forward.span_kind = SpanKind::Client;
        forward.set("rpc.system.name", "grpc");
        forward.set("rpc.method", self.server().name.to_string());
        headers.insert(TRACEPARENT, traceparent(&forward.span_context));
        self.last = Some(self.spans.len());
        self.spans.push(forward);
    }

    /// A response from memory is being produced since `began`.
    pub(super) fn answer(&mut self, began: Instant) {
        let answer = self.server().child("answer", self.clock.at(began));
        self.last = Some(self.spans.len());
        self.spans.push(answer);
    }

    /// Adds the outcome of a Range or RangeStream.
    pub(super) fn ended(&mut self, call: &Call) {
        let (outcome, reason) = call.outcome.labels();
        if matches!(call.outcome, Outcome::Streamed(_))
            && let Some(last) = self.last
        {
            self.spans[last].name = "stream".into();
        }
        let server = &mut self.spans[0];
        server.set("rangecache.outcome", outcome);
        server.set("rangecache.reason", reason);
        if let Some(mirror) = &call.mirror {
            server.set("rangecache.mirror", mirror.clone());
        }
        for (name, revision) in [
            ("rangecache.revision.asked", call.revisions.asked),
            ("rangecache.revision.proven", call.revisions.proven),
            ("rangecache.revision.served", call.revisions.served),
        ] {
            if revision != 0 {
                server.set(name, revision);
            }
        }
        if call.revisions.served != 0 {
            server.set_count("rangecache.keys", call.keys);
        }
    }

    /// The head of the response is ready.
    pub(super) fn head(&mut self, response: &Response<ResponseBody>) {
        self.status(response.headers());
        let endpoint = response
            .body()
            .endpoint()
            .or_else(|| response.extensions().get::<Url>());
        if let (Some(last), Some(endpoint)) = (self.last, endpoint) {
            self.spans[last].set_endpoint(endpoint);
        }
    }

    /// Reads gRPC's status, if these headers or trailers carry it.
    pub(super) fn status(&mut self, headers: &HeaderMap) {
        let status = headers.get(GRPC_STATUS).and_then(|status| status.to_str().ok());
        self.status = status.and_then(|status| status.parse().ok()).or(self.status);
    }

    /// A piece of the response is sent.
    pub(super) fn sent(&mut self, piece: &Rope) {
        self.bytes += piece.remaining() as u64;
        self.messages.count(piece);
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let code = match self.status {
            Some(code) => code,
            None if std::thread::panicking() => INTERNAL,
            None => CANCELLED,
        };
        let now = self.clock.at(Instant::now());
        let (bytes, chunks) = (self.bytes, self.messages.count);
        for index in [Some(0), self.last].into_iter().flatten() {
            let Some(span) = self.spans.get_mut(index) else {
                continue;
            };
            span.end_time = now.max(span.start_time);
            span.set_count("rangecache.bytes", bytes);
            span.set_count("rangecache.chunks", chunks);
            if span.span_kind != SpanKind::Internal {
                let name = status_code(code);
                span.set("rpc.response.status_code", name);
                // A client's mistake is an error of the client span, not of the server's.
                let is_servers = matches!(code, 2 | 4 | 12..=15);
                if code != 0 && (span.span_kind == SpanKind::Client || is_servers) {
                    span.set("error.type", name);
                    span.fail(name);
                }
            }
        }
        for span in self.spans.drain(..) {
            self.tracer.queue(span);
        }
    }
}

/// Counts the messages of a gRPC stream.
#[derive(Debug, Default)]
struct Messages {
    count: u64,
    /// Bytes of the current message that are still to come.
    left: u64,
    prefix: PrefixReader,
}

impl Messages {
    /// Counts the messages that begin in a frame. A frame in several pieces was made by rangecache, and a message begins
    /// only at its front.
    fn count(&mut self, frame: &Rope) {
        let (length, front) = (frame.remaining() as u64, frame.chunk());
        let mut at = 0;
        while at < length {
            if self.left > 0 {
                let step = self.left.min(length - at);
                (self.left, at) = (self.left - step, at + step);
                continue;
            }
            let rest = usize::try_from(at).ok().and_then(|at| front.get(at..));
            let Some(rest) = rest.filter(|rest| !rest.is_empty()) else {
                return;
            };
            let (taken, prefix) = self.prefix.read(rest);
            at += taken as u64;
            if let Some(prefix) = prefix {
                self.left = prefix.length_bytes.into();
                self.count += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;

    #[test]
    fn messages_are_counted_however_they_are_cut() {
        let mut stream = Vec::new();
        for length in [0_u8, 1, 7, 200] {
            stream.extend([0, 0, 0, 0, length]);
            stream.extend(std::iter::repeat_n(9, length.into()));
        }
        for size in [1, 2, 5, 6, 13, 1000] {
            let mut messages = Messages::default();
            for piece in stream.chunks(size) {
                messages.count(&Bytes::copy_from_slice(piece).into());
            }
            assert_eq!(
                (messages.count, messages.left, messages.prefix.is_empty()),
                (4, 0, true),
                "{size}"
            );
        }
    }
}
