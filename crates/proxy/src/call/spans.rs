//! Spans of a sampled call, gRPC or HTTP: a server span, and one child span for each phase named in [`rangecache_proxy`](crate).
//!
//! Calls that are not sampled have no [`Trace`] and allocate nothing here. Attributes contain neither keys nor values
//! (I10): a range is identified by the mirror's name, which consists of configured prefixes, and by the first two parts of its
//! keys, and a path is named only if it is etcd's own.

use std::{net::IpAddr, time::SystemTime};

use bytes::Buf;
use etcd_store::cache::{RangeQuery, Rope};
use etcd_wire::grpc::{frame::PrefixReader, http_route};
use http::{HeaderMap, HeaderName, Request, StatusCode};
use rangecache_base::net::Url;
use rangecache_base::telemetry::trace::{
    Clock, Span, SpanContext, SpanExt as _, SpanKind, TRACEPARENT, TraceId, Tracer, child_context,
    status_code, traceparent,
};
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_base::telemetry::{calls::Revisions, clients::ClientName};
use tokio::time::Instant;

use super::access::{CallHead, logged_prefix};

/// gRPC code of a call whose client cancelled it: dropped before a status was sent.
const CANCELLED: u16 = 1;
/// gRPC code of a call that panicked.
const INTERNAL: u16 = 13;
/// Header that etcd's JSON gateway passes on as the metadata `traceparent` of the gRPC call that it makes.
const GATEWAY_TRACEPARENT: HeaderName = HeaderName::from_static("grpc-metadata-traceparent");
/// Method of the call to etcd when a Range becomes a stream.
const RANGE_STREAM: &str = "etcdserverpb.KV/RangeStream";
/// Methods of HTTP that OpenTelemetry knows.
const HTTP_METHODS: [&str; 9] = [
    "GET", "HEAD", "POST", "PUT", "DELETE", "CONNECT", "OPTIONS", "TRACE", "PATCH",
];

/// OpenTelemetry's conventions that name the call and its end.
#[derive(Clone, Debug)]
enum Convention {
    /// Conventions of gRPC, with the method.
    Grpc(String),
    /// Conventions of HTTP, with the method.
    Http(&'static str),
}

/// Trace of a call in flight. Dropping it ends its spans and queues them for export.
#[derive(Debug)]
pub(super) struct Trace {
    tracer: Tracer,
    clock: Clock,
    convention: Convention,
    /// The server span, which is always first, then the spans of the phases.
    spans: Vec<Span>,
    /// Index of the span that ends with the call: **answer**, **forward** or **stream**.
    last_phase: Option<usize>,
    prove_began: Option<Instant>,
    /// Time at which the required revision was known; **wait** begins there if the mirror is behind.
    wait_began: Option<Instant>,
    /// Context of **prove** while it lasts: parent of the calls to etcd that it makes.
    prove: Option<SpanContext>,
    /// Context of the quorum check that the call waited for. Linked, because several reads share a check.
    check: Option<SpanContext>,
    /// gRPC code of the response, or HTTP's; `None` until it is sent.
    status: Option<u16>,
    /// Bytes sent to the client.
    bytes: u64,
    messages: Messages,
}

impl Trace {
    /// Begins the trace of a sampled call with the head of `request`. `span` is its server span.
    #[cold]
    pub(super) fn begin<B>(
        tracer: &Tracer,
        mut span: Span,
        head: &CallHead,
        request: &Request<B>,
    ) -> Box<Trace> {
        let path = request.uri().path();
        if head.is_http {
            span.set("url.scheme", if head.is_tls { "https" } else { "http" });
            Trace::of_http(tracer, span, request.method().as_str(), path)
        } else {
            Trace::of_grpc(tracer, span, head.method.span_name(path))
        }
    }

    fn of_grpc(tracer: &Tracer, mut span: Span, name: &str) -> Box<Trace> {
        let method = name.to_owned();
        span.name = method.clone().into();
        span.set("rpc.system.name", "grpc");
        span.set("rpc.method", method.clone());
        Trace::new(tracer, span, Convention::Grpc(method))
    }

    fn of_http(tracer: &Tracer, mut span: Span, method: &str, path: &str) -> Box<Trace> {
        let known = HTTP_METHODS.into_iter().find(|known| *known == method);
        let named = known.unwrap_or("HTTP");
        let method = known.unwrap_or("_OTHER");
        span.set("http.request.method", method);
        // A path that is not etcd's own may be a secret.
        span.set("url.path", http_route(path).unwrap_or("REDACTED").to_owned());
        match http_route(path) {
            Some(route) => {
                span.name = format!("{named} {route}").into();
                span.set("http.route", route.to_owned());
            }
            None => span.name = named.into(),
        }
        Trace::new(tracer, span, Convention::Http(method))
    }

    fn new(tracer: &Tracer, span: Span, convention: Convention) -> Box<Trace> {
        Box::new(Trace {
            tracer: tracer.clone(),
            clock: Clock::new(),
            convention,
            spans: vec![span],
            last_phase: None,
            prove_began: None,
            wait_began: None,
            prove: None,
            check: None,
            status: None,
            bytes: 0,
            messages: Messages::default(),
        })
    }

    /// Adds the address of the client.
    pub(super) fn record_peer(&mut self, peer: Option<IpAddr>) {
        if let (Some(peer), Some(server)) = (peer, self.spans.first_mut()) {
            // The client as far as it is known: a load balancer may be between them.
            let address = peer.to_canonical().to_string();
            server.set("client.address", address.clone());
            server.set("network.peer.address", address);
        }
    }

    /// Spans below this trace for the create requests of a Watch stream.
    pub(super) fn creates(&self) -> Box<CreateSpans> {
        Box::new(CreateSpans {
            tracer: self.tracer.clone(),
            parent: self.server().clone(),
        })
    }

    /// Adds what a read asks for: its options, and the first parts of its keys, as the access log has them.
    #[cold]
    pub(super) fn record_query(&mut self, query: &RangeQuery) {
        self.record_range(&query.key, &query.range_end);
        let server = &mut self.spans[0];
        if query.limit > 0 {
            server.set("rangecache.limit", query.limit);
        }
        for (name, is_set) in [
            ("rangecache.keys_only", query.keys_only),
            ("rangecache.count_only", query.count_only),
            ("rangecache.serializable", query.serializable),
        ] {
            if is_set {
                server.set(name, true);
            }
        }
    }

    /// Adds the first parts of the keys of a read, or of the first watcher of a stream.
    pub(super) fn record_range(&mut self, key: &[u8], range_end: &[u8]) {
        let prefix = logged_prefix(key, range_end);
        self.spans[0].set("rangecache.prefix", String::from_utf8_lossy(prefix).into_owned());
    }

    /// Adds who makes the call.
    pub(super) fn record_client(&mut self, client: &ClientName) {
        self.spans[0].set("rangecache.client", client.to_string());
    }

    /// Returns the trace id, for exemplars.
    pub(super) fn id(&self) -> TraceId {
        self.server().span_context.trace_id()
    }

    fn server(&self) -> &Span {
        &self.spans[0]
    }

    /// Begins the phase **prove**, for a read of `mirror`.
    pub(super) fn begin_prove(&mut self, mirror: Option<&str>) {
        if let (Some(mirror), Some(server)) = (mirror, self.spans.first_mut()) {
            server.set("rangecache.mirror", mirror.to_owned());
        }
        self.prove_began = Some(Instant::now());
        self.prove = Some(child_context(&self.server().span_context));
    }

    /// Returns the context of **prove** for a call to etcd; `None` outside of the phase, and if traces end here.
    pub(super) fn propagated_context(&self) -> Option<SpanContext> {
        self.prove.clone().filter(|_| self.tracer.propagates())
    }

    /// Returns the place for the context of the quorum check that the call waits for.
    pub(super) fn check_context(&mut self) -> &mut Option<SpanContext> {
        &mut self.check
    }

    /// Records the time at which the required revision is known: **wait** begins here if the mirror is behind.
    pub(super) fn record_required_revision(&mut self) {
        self.wait_began = Some(Instant::now());
    }

    /// Ends **prove** at `proven`; with a `reason`, it failed. If the call `waited` for the mirror, adds the span
    /// **wait**, and **progress** from `progress_requested`, the time at which the feed last requested a progress
    /// notification.
    pub(super) fn end_prove(
        &mut self,
        proven: Instant,
        waited: bool,
        progress_requested: Option<Instant>,
        reason: Option<Reason>,
    ) {
        let (Some(began), Some(context)) = (self.prove_began, self.prove.take()) else {
            return;
        };
        let end_time = self.clock.at(proven);
        let mut prove = Span {
            span_context: context,
            end_time,
            ..self.server().child("prove", self.clock.at(began))
        };
        if let Some(check) = self.check.clone() {
            prove.link(check);
        }
        if let Some(reason) = reason {
            prove.fail(reason.as_str());
        }
        if let Some(wait_began) = self.wait_began.filter(|_| waited) {
            let mut wait = prove.child("wait", self.clock.at(wait_began));
            wait.end_time = end_time;
            if let Some(requested) =
                progress_requested.filter(|requested| (wait_began..proven).contains(requested))
            {
                let mut progress = wait.child("progress", self.clock.at(requested));
                progress.end_time = end_time;
                self.spans.push(progress);
            }
            self.spans.push(wait);
        }
        self.spans.push(prove);
    }

    /// Begins the phase **forward**, and sets its context in the `headers` of the call to etcd.
    pub(super) fn begin_forward(&mut self, headers: &mut HeaderMap) {
        let mut forward = self.server().child("forward", self.clock.at(Instant::now()));
        forward.span_kind = SpanKind::Client;
        let propagated = self
            .tracer
            .propagates()
            .then(|| traceparent(&forward.span_context));
        match &self.convention {
            Convention::Grpc(method) => {
                forward.set("rpc.system.name", "grpc");
                forward.set("rpc.method", method.clone());
            }
            Convention::Http(method) => {
                forward.set("http.request.method", *method);
                if let Some(propagated) = propagated.clone() {
                    headers.insert(GATEWAY_TRACEPARENT, propagated);
                }
            }
        }
        if let Some(propagated) = propagated {
            headers.insert(TRACEPARENT, propagated);
        }
        self.last_phase = Some(self.spans.len());
        self.spans.push(forward);
    }

    /// Adds the phase **answer**, in which a response from memory is produced since `began`.
    pub(super) fn begin_answer(&mut self, began: Instant) {
        let answer = self.server().child("answer", self.clock.at(began));
        self.last_phase = Some(self.spans.len());
        self.spans.push(answer);
    }

    /// Adds the attributes of a Range or RangeStream. Renames **forward** to **stream** if the outcome is streamed.
    pub(super) fn record_read(&mut self, outcome: Outcome, revisions: Revisions, keys: u64) {
        if matches!(outcome, Outcome::Streamed(_))
            && let Some(last) = self.last_phase
        {
            let stream = &mut self.spans[last];
            stream.name = "stream".into();
            stream.set("rpc.method", RANGE_STREAM);
        }
        self.set_outcome(outcome);
        let server = &mut self.spans[0];
        for (name, revision) in [
            ("rangecache.revision.asked", revisions.asked),
            ("rangecache.revision.proven", revisions.proven),
            ("rangecache.revision.served", revisions.served),
        ] {
            if revision != 0 {
                server.set(name, revision);
            }
        }
        if revisions.served != 0 {
            server.set_count("rangecache.keys", keys);
        }
    }

    /// Sets outcome and reason, also again: a response that does not fit was counted as another one before.
    pub(super) fn set_outcome(&mut self, outcome: Outcome) {
        let (outcome, reason) = outcome.labels();
        let server = &mut self.spans[0];
        server.set("rangecache.outcome", outcome);
        server.set("rangecache.reason", reason);
    }

    /// Records the HTTP status.
    pub(super) fn record_head(&mut self, status: StatusCode) {
        if let Convention::Http(_) = self.convention {
            self.status = Some(status.as_u16());
        }
    }

    /// Records the endpoint of etcd that responds.
    pub(super) fn record_endpoint(&mut self, endpoint: &Url) {
        if let Some(last) = self.last_phase {
            self.spans[last].set_endpoint(endpoint);
        }
    }

    /// Records the status of a gRPC call.
    pub(super) fn record_code(&mut self, code: u16) {
        if let Convention::Grpc(_) = self.convention {
            self.status = Some(code);
        }
    }

    /// Counts the bytes and messages of a frame that is sent to the client.
    pub(super) fn record_data(&mut self, piece: &Rope) {
        self.bytes += piece.remaining() as u64;
        if let Convention::Grpc(_) = self.convention {
            self.messages.count(piece);
        }
    }

    /// Adds status and error of the call to a server or client span.
    fn end(&self, span: &mut Span) {
        let is_client = span.span_kind == SpanKind::Client;
        let is_panic = std::thread::panicking();
        let error = match self.convention {
            Convention::Grpc(_) => {
                let unsent = if is_panic { INTERNAL } else { CANCELLED };
                let code = self.status.unwrap_or(unsent);
                span.set("rpc.response.status_code", status_code(code));
                // OpenTelemetry's rule for gRPC: codes for mistakes of the client are errors of client spans only.
                let is_error = code != 0 && (is_client || matches!(code, 2 | 4 | 12..=15));
                is_error.then(|| status_code(code).to_owned())
            }
            Convention::Http(_) => match self.status {
                Some(code) => {
                    span.set("http.response.status_code", i64::from(code));
                    let is_error = code >= 500 || (is_client && code >= 400);
                    is_error.then(|| code.to_string())
                }
                None if is_panic => Some("panic".to_owned()),
                None => is_client.then(|| "cancelled".to_owned()),
            },
        };
        if let Some(error) = error {
            span.set("error.type", error.clone());
            span.fail(error);
        }
    }
}

/// Spans of the create requests of one traced Watch stream.
#[derive(Debug)]
pub(crate) struct CreateSpans {
    tracer: Tracer,
    /// The stream's server span as it began.
    parent: Span,
}

/// Span of one create request.
#[derive(Debug)]
pub(crate) struct CreateSpan {
    tracer: Tracer,
    span: Span,
    /// Context of the quorum check that the request waited for.
    pub(crate) check: Option<SpanContext>,
}

impl CreateSpans {
    /// Begins the span of a request for keys of `mirror`.
    pub(crate) fn begin(&self, mirror: &str) -> Box<CreateSpan> {
        let mut span = self.parent.child("create", SystemTime::now());
        span.set("rangecache.mirror", mirror.to_owned());
        Box::new(CreateSpan {
            tracer: self.tracer.clone(),
            span,
            check: None,
        })
    }
}

impl CreateSpan {
    /// Ends the span; with a `reason`, memory does not serve the watcher.
    pub(crate) fn end(mut self, reason: Option<Reason>) {
        if let Some(check) = self.check {
            self.span.link(check);
        }
        if let Some(reason) = reason {
            self.span.set("rangecache.reason", reason.as_str());
        }
        self.tracer.end(self.span);
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        let now = self.clock.at(Instant::now());
        let (bytes, chunks) = (self.bytes, self.messages.count);
        let mut spans = std::mem::take(&mut self.spans);
        for index in [Some(0), self.last_phase].into_iter().flatten() {
            let Some(span) = spans.get_mut(index) else {
                continue;
            };
            span.end_time = now.max(span.start_time);
            span.set_count("rangecache.bytes", bytes);
            if let Convention::Grpc(_) = self.convention {
                span.set_count("rangecache.chunks", chunks);
            }
            if span.span_kind != SpanKind::Internal {
                self.end(span);
            }
        }
        for span in spans {
            self.tracer.queue(span);
        }
    }
}

/// Counter of the messages in a gRPC stream whose frames may split messages anywhere.
#[derive(Debug, Default)]
struct Messages {
    count: u64,
    /// Remaining bytes of the current message.
    bytes_left: u64,
    prefix: PrefixReader,
}

impl Messages {
    /// Counts the messages that begin in `frame`. Only the first piece is scanned for prefixes: frames of several
    /// pieces are created by rangecache itself, which begins messages only at the front.
    fn count(&mut self, frame: &Rope) {
        let (length, front) = (frame.remaining() as u64, frame.chunk());
        // Position in the frame.
        let mut at = 0;
        while at < length {
            if self.bytes_left > 0 {
                let step = self.bytes_left.min(length - at);
                (self.bytes_left, at) = (self.bytes_left - step, at + step);
                continue;
            }
            let rest = usize::try_from(at).ok().and_then(|at| front.get(at..));
            let Some(rest) = rest.filter(|rest| !rest.is_empty()) else {
                return;
            };
            let (taken, prefix) = self.prefix.read(rest);
            at += taken as u64;
            if let Some(prefix) = prefix {
                self.bytes_left = prefix.length_bytes.into();
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
    fn messages_split_at_any_byte_are_counted() {
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
                (messages.count, messages.bytes_left, messages.prefix.is_empty()),
                (4, 0, true),
                "{size}"
            );
        }
    }
}
