//! **route**: by path only. KV/Range and KV/RangeStream have a handler each, two calls are listened to, everything else is forwarded as it is.

use std::sync::Arc;
use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use tokio_util::sync::CancellationToken;

use super::body::ResponseBody;
use super::forward::{Body, Outcome, connection_class, grpc_content_type};
use super::status::{Code, Status};
use super::trace::Trace;
use super::{Proxy, drain, http1, learn, range, range_stream, record};
use crate::faults::{self, Fault};
use crate::panics::caught;
use crate::telemetry::outcome::Kind;
use crate::telemetry::{self, Reason};
use crate::upstream::Outgoing;

pub(super) const RANGE: &str = "/etcdserverpb.KV/Range";
pub(super) const RANGE_STREAM: &str = "/etcdserverpb.KV/RangeStream";

/// Answers one request, whatever it is; a panic on the way is this request's alone.
/// `over_tls` says how it came.
pub(super) async fn answer(proxy: Arc<Proxy>, request: Request<Incoming>, over_tls: bool) -> Outcome {
    let is_http2 = request.version() == Version::HTTP_2;
    match caught(route(&proxy, request, over_tls)).await {
        Ok(outcome) => outcome,
        Err(_) => Ok(panicked(is_http2)),
    }
}

/// The refusal of one call too many.
#[cold]
fn shed(proxy: &Proxy, request: &Request<Incoming>) -> Response<ResponseBody> {
    const SAYS: &str = "rangecache: too many calls are under way; try again";
    proxy.telemetry.metrics.connections.shed_calls.inc();
    let kind = match request.uri().path() {
        RANGE => Some(Kind::Unary),
        RANGE_STREAM => Some(Kind::Stream),
        _ => None,
    };
    if let Some(kind) = kind {
        let outcome = telemetry::Outcome::Shed(Reason::TooManyCalls);
        proxy
            .telemetry
            .metrics
            .reads
            .record(kind, outcome, Duration::ZERO, Duration::ZERO);
    }
    if request.version() == Version::HTTP_2 {
        return Status::new(Code::Unavailable, SAYS).response(grpc_content_type(request.headers()));
    }
    let mut response = Response::new(ResponseBody::whole(SAYS.into(), HeaderMap::new()));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

fn panicked(is_http2: bool) -> Response<ResponseBody> {
    const SAYS: &str = "rangecache: internal error; its log says where";
    if is_http2 {
        return Status::new(Code::Internal, SAYS).response(HeaderValue::from_static("application/grpc"));
    }
    let mut response = Response::new(ResponseBody::whole(SAYS.into(), HeaderMap::new()));
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response
}

/// All but reads are boxed: hyper moves this future about, so it had better be small.
async fn route(proxy: &Proxy, request: Request<Incoming>, over_tls: bool) -> Outcome {
    #[cfg(debug_assertions)]
    plant(proxy, request.headers());
    faults::trip(Fault::Request);
    if proxy.is_full() {
        return Ok(shed(proxy, &request));
    }
    // With TLS etcd serves its health and its gateway over HTTP/2 too; without, its HTTP/2 is gRPC alone.
    if request.version() != Version::HTTP_2 || (over_tls && !is_grpc(&request)) {
        proxy.telemetry.metrics.forwarding.calls.inc();
        return Ok(Box::pin(http1::pass(proxy, request)).await);
    }
    // A path with a query names another method to etcd's gRPC server.
    let is_call = request.method() == Method::POST && request.uri().query().is_none();
    if is_call && request.uri().path() == RANGE {
        return range::range(proxy, request).await;
    }
    if is_call && request.uri().path() == RANGE_STREAM {
        return Box::pin(range_stream::range_stream(proxy, request)).await;
    }
    proxy.telemetry.metrics.forwarding.calls.inc();
    let mut request = request;
    let mut trace = Trace::begin(&proxy.telemetry, request.uri().path(), request.headers());
    if let Some(trace) = &mut trace {
        trace.forward(request.headers_mut());
    }
    let outcome = Box::pin(pass(proxy, request, is_call)).await;
    record::traced(trace, outcome)
}

/// **forward**: a call that is none of the above, with an ear for those that teach something.
async fn pass(proxy: &Proxy, request: Request<Incoming>, is_call: bool) -> Outcome {
    if is_call && let Some(lesson) = learn::lesson(request.uri().path()) {
        return learn::pass(proxy, request, lesson).await;
    }
    let (parts, body) = request.into_parts();
    let class = connection_class(parts.uri.path());
    if !drain::is_endless(parts.uri.path()) {
        let body = Body::Once(Outgoing::incoming(body));
        return proxy.forward.pass(parts, body, class).await;
    }
    let content_type = grpc_content_type(&parts.headers);
    // The request ends with the answer, and with this call if there is none.
    let answered = CancellationToken::new();
    let alive = answered.clone().drop_guard();
    let body = Body::Once(Outgoing::incoming(body).until(answered));
    let passing = proxy.forward.pass(parts, body, class);
    // Until etcd has answered: from then on the answer's body sees to it.
    match proxy.drain.run_until_cancelled(passing).await {
        Some(outcome) => outcome.map(|response| response.map(|body| body.keeping(Some(alive)))),
        None => Ok(drain::status().response(content_type)),
    }
}

/// Plants what the request asks for.
#[cfg(debug_assertions)]
fn plant(proxy: &Proxy, headers: &HeaderMap) {
    faults::arm(headers);
    if faults::is_armed(Fault::Corrupt) {
        proxy.mirrors.corrupt();
    }
}

fn is_grpc(request: &Request<Incoming>) -> bool {
    let content_type = request.headers().get(CONTENT_TYPE);
    content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}
