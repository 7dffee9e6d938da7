//! **route**: by path only. KV/Range and KV/RangeStream have a handler each, two calls are listened to, everything else is forwarded as it is.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use tokio_util::sync::CancellationToken;

use super::body::ResponseBody;
use super::forward::{Body, Outcome};
use super::trace::Trace;
use super::{Proxy, body, http1, learn, range, range_stream, record};
use crate::faults::{self, Fault};
use crate::grpc::metadata::{grpc_content_type, is_grpc};
use crate::grpc::{Method, Status};
use crate::panics::caught;
use crate::telemetry::outcome::Kind;
use crate::telemetry::{self, Reason};
use crate::upstream::{BoxError, Outgoing};

/// Handles one request, of whatever kind. `over_tls`: the client's connection has TLS.
///
/// # Errors
/// The error with which etcd reset the stream: hyper resets the client's stream with the same reason. A panic is no error: it
/// fails this call alone, with `Internal`.
pub async fn handle(
    proxy: Arc<Proxy>,
    request: Request<Incoming>,
    over_tls: bool,
) -> Result<Response<ResponseBody>, BoxError> {
    let is_http2 = request.version() == Version::HTTP_2;
    match caught(route(&proxy, request, over_tls)).await {
        Ok(outcome) => outcome,
        Err(_) => Ok(panicked(is_http2)),
    }
}

/// The refusal of one call too many.
#[cold]
fn shed(proxy: &Proxy, request: &Request<Incoming>, method: Method) -> Response<ResponseBody> {
    proxy.telemetry.metrics.connections.shed_calls.inc();
    let kind = match method {
        Method::Range => Some(Kind::Unary),
        Method::RangeStream => Some(Kind::Stream),
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
        return body::status(&Status::TooManyCalls, grpc_content_type(request.headers()));
    }
    let text = Status::TooManyCalls.to_string();
    let mut response = Response::new(ResponseBody::whole(text.into(), HeaderMap::new()));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

fn panicked(is_http2: bool) -> Response<ResponseBody> {
    if is_http2 {
        return body::status(&Status::Internal, HeaderValue::from_static("application/grpc"));
    }
    let text = Status::Internal.to_string();
    let mut response = Response::new(ResponseBody::whole(text.into(), HeaderMap::new()));
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response
}

/// All but reads are boxed: hyper moves this future about, so it had better be small.
async fn route(proxy: &Proxy, request: Request<Incoming>, over_tls: bool) -> Outcome {
    #[cfg(debug_assertions)]
    plant(proxy, request.headers());
    faults::trip(Fault::Request);
    let method = Method::from_path(request.uri().path());
    if proxy.is_full() {
        return Ok(shed(proxy, &request, method));
    }
    // With TLS etcd serves its health and its gateway over HTTP/2 too; without, its HTTP/2 is gRPC alone.
    if request.version() != Version::HTTP_2 || (over_tls && !is_grpc(request.headers())) {
        proxy.telemetry.metrics.forwarding.calls.inc();
        return Ok(Box::pin(http1::pass(proxy, request, method)).await);
    }
    // A path with a query names another method to etcd's gRPC server.
    let is_call = request.method() == http::Method::POST && request.uri().query().is_none();
    if is_call && method == Method::Range {
        return range::range(proxy, request).await;
    }
    if is_call && method == Method::RangeStream {
        return Box::pin(range_stream::range_stream(proxy, request)).await;
    }
    proxy.telemetry.metrics.forwarding.calls.inc();
    let mut request = request;
    let mut trace = Trace::begin(&proxy.telemetry, method, &request);
    if let Some(trace) = &mut trace {
        trace.forward(request.headers_mut());
    }
    let outcome = Box::pin(pass(proxy, request, method, is_call)).await;
    record::traced(trace, outcome)
}

/// **forward**: a call that is none of the above, with an ear for those that teach something.
async fn pass(proxy: &Proxy, request: Request<Incoming>, method: Method, is_call: bool) -> Outcome {
    if is_call && let Some(effect) = method.side_effect() {
        return learn::pass(proxy, request, method, effect).await;
    }
    let (parts, body) = request.into_parts();
    if !method.is_endless() {
        let body = Body::Once(Outgoing::incoming(body));
        return proxy.forward.pass(parts, body, method).await;
    }
    let content_type = grpc_content_type(&parts.headers);
    // The request ends with the answer, and with this call if there is none.
    let answered = CancellationToken::new();
    let alive = answered.clone().drop_guard();
    let body = Body::Once(Outgoing::incoming(body).until(answered));
    let passing = proxy.forward.pass(parts, body, method);
    // Until etcd has answered: from then on the answer's body sees to it.
    match proxy.drain.run_until_cancelled(passing).await {
        Some(outcome) => outcome.map(|response| response.map(|body| body.keeping(Some(alive)))),
        None => Ok(body::status(&Status::StoppingReconnect, content_type)),
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
