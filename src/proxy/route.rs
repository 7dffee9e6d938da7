//! **route**: chooses the handler by the request's path. KV/Range and KV/RangeStream have handlers in `read`; every
//! other request is forwarded.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::Incoming;

use super::forward::{forward_call, forward_http1};
use super::handles::Proxy;
use super::read::{range, range_stream};
use super::recorder;
use super::response::{CallResult, ResponseBody, status_response};
use super::spans::Trace;
use crate::faults::{self, Fault};
use crate::grpc::metadata::{grpc_content_type, is_grpc};
use crate::grpc::{Method, Status};
use crate::panics::caught;
use crate::telemetry::outcome::Kind;
use crate::telemetry::{self, Reason};
use crate::upstream::BoxError;

/// Handles one request: gRPC, HTTP/1 or the JSON gateway. `over_tls` is whether the client's connection has TLS. A
/// panic fails this request alone, with status `Internal`.
///
/// # Errors
/// Error with which etcd reset the stream; hyper resets the client's stream with the same reason.
pub async fn handle(
    proxy: Arc<Proxy>,
    request: Request<Incoming>,
    over_tls: bool,
) -> Result<Response<ResponseBody>, BoxError> {
    let is_http2 = request.version() == Version::HTTP_2;
    match caught(route(&proxy, request, over_tls)).await {
        Ok(outcome) => outcome,
        Err(_) => Ok(internal_error(is_http2)),
    }
}

/// Counts a call beyond `--max-calls` as shed, and returns its response: `Unavailable`, or 503 for HTTP/1.
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
        return status_response(&Status::TooManyCalls, grpc_content_type(request.headers()));
    }
    let text = Status::TooManyCalls.to_string();
    let mut response = Response::new(ResponseBody::whole(text.into(), HeaderMap::new()));
    *response.status_mut() = StatusCode::SERVICE_UNAVAILABLE;
    response
}

/// Returns the response to a request whose handler panicked: status `Internal`, or 500 for HTTP/1.
fn internal_error(is_http2: bool) -> Response<ResponseBody> {
    if is_http2 {
        return status_response(&Status::Internal, HeaderValue::from_static("application/grpc"));
    }
    let text = Status::Internal.to_string();
    let mut response = Response::new(ResponseBody::whole(text.into(), HeaderMap::new()));
    *response.status_mut() = StatusCode::INTERNAL_SERVER_ERROR;
    response
}

/// Passes the request to its handler. Every handler's future except that of a Range is boxed: hyper moves this
/// function's future, so it must not be as large as the largest handler's.
async fn route(proxy: &Proxy, request: Request<Incoming>, over_tls: bool) -> CallResult {
    #[cfg(debug_assertions)]
    arm_faults(proxy, request.headers());
    faults::trip(Fault::Request);
    let method = Method::from_path(request.uri().path());
    if proxy.admission.is_full() {
        return Ok(shed(proxy, &request, method));
    }
    // With TLS, etcd serves /health and the JSON gateway over HTTP/2, too. Without TLS, its HTTP/2 is gRPC only.
    if request.version() != Version::HTTP_2 || (over_tls && !is_grpc(request.headers())) {
        proxy.telemetry.metrics.forwarding.calls.inc();
        return Ok(Box::pin(forward_http1(&proxy.forward, request, method)).await);
    }
    // etcd's gRPC server takes the query for a part of the path, so such a request names an unknown method.
    let is_grpc_call = request.method() == http::Method::POST && request.uri().query().is_none();
    if is_grpc_call && method == Method::Range {
        return range(proxy, request).await;
    }
    if is_grpc_call && method == Method::RangeStream {
        return Box::pin(range_stream(proxy, request)).await;
    }
    proxy.telemetry.metrics.forwarding.calls.inc();
    let mut request = request;
    let mut trace = Trace::begin(&proxy.telemetry, method, &request);
    if let Some(trace) = &mut trace {
        trace.begin_forward(request.headers_mut());
    }
    let forwarding = forward_call(&proxy.forward, &proxy.mirrors, request, method, is_grpc_call);
    recorder::with_trace(trace, Box::pin(forwarding).await)
}

/// Injects the faults that the request's headers name; for tests, in debug builds only.
#[cfg(debug_assertions)]
fn arm_faults(proxy: &Proxy, headers: &HeaderMap) {
    faults::arm(headers);
    if faults::is_armed(Fault::Corrupt) {
        proxy.mirrors.corrupt();
    }
}
