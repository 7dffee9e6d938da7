//! **route**: chooses the handler by the request's path. KV/Range and KV/RangeStream have handlers in `read`; every
//! other request is forwarded.

use std::sync::Arc;
use std::time::Duration;

use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Version};
use hyper::body::Incoming;
use tokio::time::Instant;

use super::access::{AccessCall, follow};
use super::forward::{Upgrade, forward_call, forward_http1, without_share};
use super::handles::{Access, Client, Proxy};
use super::read::{is_json_range, json_range, range, range_stream};
use super::recorder;
use super::refuse::{origin_of, refuse_many_fields, refuse_unwanted, refuse_write};
use super::response::{CALL_BYTES, CallResult, Ended, ResponseBody, grpc_code, record_code, status_response};
use super::spans::Trace;
use super::watch::{may_serve, may_serve_json, watch, watch_json};
use crate::browser::{is_of_a_browser, set_cors};
use crate::faults::{self, Fault};
use crate::grpc::head::head_bytes;
use crate::grpc::metadata::{grpc_content_type, is_grpc, timeout_of};
use crate::grpc::{Method, Status, is_costly};
use crate::limits::{BudgetExceeded, CallBytes, ShareKind};
use crate::net::Transport;
use crate::panics::caught;
use crate::telemetry::metrics::{CallMethod, Code, Source};
use crate::telemetry::outcome::Kind;
use crate::telemetry::{self, Reason};
use crate::upstream::BoxError;

/// Handles one request: gRPC, HTTP/1 or the JSON gateway. `transport` is how it came. A
/// panic fails this request alone, with status `Internal`.
///
/// # Errors
/// Error with which etcd reset the stream; hyper resets the client's stream with the same reason.
pub async fn handle(
    client: Arc<Client>,
    request: Request<Incoming>,
    transport: Transport,
) -> Result<Response<ResponseBody>, BoxError> {
    let proxy = &client.proxy;
    let arrived = Instant::now();
    let mut access = AccessCall::begin(
        &proxy.telemetry.access_log,
        client.caller.of_connection(),
        &request,
    );
    let is_http2 = request.version() == Version::HTTP_2;
    let counted = (is_http2 && is_grpc(request.headers())).then(|| CallMethod::of_path(request.uri().path()));
    let mut refused = refuse_many_fields(&client.account, &request);
    refused = refused.or_else(|| refuse_unwanted(proxy, &request, transport));
    if client.access == Access::ReadOnly {
        refused = refused.or_else(|| refuse_write(proxy, &request));
    }
    if let Some(refused) = refused {
        if let Some(counted) = counted {
            let code = grpc_code(refused.headers()).map_or(Code::UNKNOWN, Code::of);
            let calls = &proxy.telemetry.metrics.calls;
            calls.record(counted, code, Source::Refused, arrived.elapsed());
        }
        return Ok(followed(&mut access, refused));
    }
    let may_be_read_by_pages = is_of_a_browser(&request, transport);
    let origin = origin_of(proxy, &request, transport);
    let method = Method::from_path(request.uri().path());
    let clients = &proxy.telemetry.clients;
    let mut call = client.caller.begin(clients, &client.account, request.headers());
    if let Some(of_client) = call.client_call_mut() {
        of_client.measure(counted, arrived);
        if let Some(access) = &mut access {
            access.record_caller(of_client.client().name());
        }
    }
    if let Err((reason, status)) = admit(&mut call, &request, method, arrived).await {
        let refused = refuse(&client, &request, &call, reason, &status, access.as_deref_mut());
        record_code(&mut call, refused.headers());
        return Ok(followed(&mut access, refused));
    }
    let routed = route(
        &client,
        request,
        method,
        transport,
        &mut call,
        access.as_deref_mut(),
    );
    let response = match caught(routed).await {
        Ok(outcome) => outcome.inspect_err(|_| {
            // etcd has reset the call's stream.
            if let Some(of_client) = call.client_call_mut() {
                of_client.record_no_code();
            }
        })?,
        Err(_) => internal_error(is_http2),
    };
    record_code(&mut call, response.headers());
    if let Some(outcome) = Ended::of(&response) {
        if let Some(of_client) = call.client_call() {
            of_client.record_ended(outcome);
        }
        if let Some(access) = &mut access {
            access.record_labels(outcome.labels());
        }
    }
    let (mut head, body) = response.into_parts();
    let body = follow(&mut access, (head.status, &head.headers), body);
    if may_be_read_by_pages {
        set_cors(&mut head.headers, origin);
    }
    match body.deliver(call, &proxy.responses, is_http2 && method == Method::Range) {
        Ok(body) if head.status == StatusCode::SWITCHING_PROTOCOLS => {
            let body = upgraded(&client, &mut head, body);
            Ok(Response::from_parts(head, body))
        }
        Ok(body) => Ok(Response::from_parts(head, body)),
        Err(BudgetExceeded) => {
            if let Some(access) = &mut access {
                access.record_refused_response();
            }
            let content_type = grpc_content_type(&head.headers);
            Ok(status_response(&Status::BufferBytes, content_type))
        }
    }
}

/// Starts what follows a response that upgrades its connection: `body` is sent after the response. Returns the response's own body.
fn upgraded(client: &Arc<Client>, head: &mut http::response::Parts, body: ResponseBody) -> ResponseBody {
    let Some(upgrade) = head.extensions.remove::<Upgrade>() else {
        return body;
    };
    let of_connection = Arc::clone(client);
    upgrade.start(&client.proxy.forward, body, move || {
        of_connection.record_received()
    });
    ResponseBody::empty()
}

/// The response to a request that is not routed, with its record in the access log.
fn followed(access: &mut Option<Box<AccessCall>>, refused: Response<ResponseBody>) -> Response<ResponseBody> {
    let (head, body) = refused.into_parts();
    let body = follow(access, (head.status, &head.headers), body);
    Response::from_parts(head, body)
}

/// Waits until the call may begin: for room for its head, and for its client's share.
///
/// # Errors
/// Why the call is refused.
async fn admit(
    call: &mut CallBytes,
    request: &Request<Incoming>,
    method: Method,
    arrived: Instant,
) -> Result<(), (Reason, Status)> {
    let head_bytes = head_bytes(request.uri(), request.headers());
    let admitted = call.admit(CALL_BYTES + head_bytes).await;
    admitted.map_err(|_| (Reason::BufferBytes, Status::BufferBytes))?;
    let deadline = timeout_of(request.headers()).map(|timeout| arrived + timeout);
    let kind = share_kind(method, request.uri().path());
    let begun = call.begin_share(kind, deadline).await;
    begun.map_err(without_share)
}

/// What a call counts as in its client's share.
fn share_kind(method: Method, path: &str) -> ShareKind {
    match method {
        Method::Authenticate | Method::EtcdUnary | Method::Json if is_costly(path) => ShareKind::Costly,
        Method::Watch | Method::JsonWatch => ShareKind::Watch,
        _ if method.is_endless() => ShareKind::Endless,
        _ => ShareKind::Call,
    }
}

/// Counts a call beyond a bound as shed, and returns its response: `status`, or 503 for HTTP/1.
#[cold]
fn refuse(
    client: &Client,
    request: &Request<Incoming>,
    call: &CallBytes,
    reason: Reason,
    status: &Status,
    access: Option<&mut AccessCall>,
) -> Response<ResponseBody> {
    let proxy = &client.proxy;
    proxy.telemetry.metrics.connections.shed_calls.inc();
    if let Some(access) = access {
        access.record_shed(reason);
    }
    if let Some(of_client) = call.client_call() {
        of_client.record_refused();
    }
    let kind = match Method::from_path(request.uri().path()) {
        Method::Range => Some(Kind::Unary),
        Method::RangeStream => Some(Kind::Stream),
        _ => None,
    };
    if let Some(kind) = kind {
        let outcome = match reason {
            Reason::Deadline => telemetry::Outcome::Cancelled(reason),
            _ => telemetry::Outcome::Shed(reason),
        };
        proxy
            .telemetry
            .metrics
            .reads
            .record(kind, outcome, Duration::ZERO, Duration::ZERO);
    }
    if request.version() == Version::HTTP_2 {
        return status_response(status, grpc_content_type(request.headers()));
    }
    let text = status.to_string();
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

/// Passes the request to its handler. Every handler's future except that of a Range is boxed, so that a Range does not
/// take the memory of the largest handler.
async fn route(
    client: &Arc<Client>,
    mut request: Request<Incoming>,
    method: Method,
    transport: Transport,
    call: &mut CallBytes,
    access: Option<&mut AccessCall>,
) -> CallResult {
    let proxy = &*client.proxy;
    #[cfg(debug_assertions)]
    arm_faults(proxy, request.headers());
    faults::trip(Fault::Request);
    if proxy.admission.is_full() {
        let (status, reason) = (Status::TooManyCalls, Reason::TooManyCalls);
        return Ok(refuse(client, &request, call, reason, &status, access));
    }
    if let Some(advertised) = &proxy.advertised
        && let Some(response) = advertised.response(&request, &proxy.mirrors.cluster_state)
    {
        if let Some(of_client) = call.client_call() {
            of_client.set_source(Source::Memory);
        }
        return Ok(response);
    }
    // With TLS, etcd serves /health and the JSON gateway over HTTP/2, too. Without TLS, its HTTP/2 is gRPC only.
    if request.version() != Version::HTTP_2 || (transport.tls && !is_grpc(request.headers())) {
        if is_json_range(&request) {
            return Box::pin(json_range(client, request, call, access)).await;
        }
        if method == Method::JsonWatch
            && let Some(of_client) = call.client_call_mut()
        {
            of_client.set_watch();
        }
        if may_serve_json(client, &request) {
            if let Some(of_client) = call.client_call() {
                // Until memory does.
                of_client.set_source(Source::Etcd);
            }
            return Box::pin(watch_json(client, request, access)).await;
        }
        record_forwarded(proxy, call);
        let trace = Trace::begin_http(&proxy.telemetry, &request);
        let trace = begin_forward(client, trace, request.headers_mut(), access);
        let response = Box::pin(forward_http1(&proxy.forward, request, method, call.account())).await;
        return recorder::with_trace(trace, Ok(response));
    }
    if method == Method::Watch
        && let Some(of_client) = call.client_call_mut()
    {
        of_client.set_watch();
    }
    // etcd's gRPC server takes the query for a part of the path, so such a request names an unknown method.
    let is_grpc_call = request.method() == http::Method::POST && request.uri().query().is_none();
    if is_grpc_call && method == Method::Range {
        return range(client, request, call, access).await;
    }
    if is_grpc_call && method == Method::RangeStream {
        return Box::pin(range_stream(client, request, call, access)).await;
    }
    if is_grpc_call && method == Method::Watch && may_serve(client, request.headers()) {
        return Box::pin(watch(client, request, call, access)).await;
    }
    record_forwarded(proxy, call);
    let trace = Trace::begin(&proxy.telemetry, method, &request);
    let trace = begin_forward(client, trace, request.headers_mut(), access);
    let (forward, mirrors, account) = (&proxy.forward, &proxy.mirrors, call.account());
    let forwarding = forward_call(forward, mirrors, request, method, is_grpc_call, account);
    recorder::with_trace(trace, Box::pin(forwarding).await)
}

/// Begins the span of a call that is forwarded, if it is traced, and sets its context in the call's headers.
fn begin_forward(
    client: &Client,
    trace: Option<Box<Trace>>,
    headers: &mut HeaderMap,
    access: Option<&mut AccessCall>,
) -> Option<Box<Trace>> {
    let mut trace = trace?;
    trace.record_peer(client.peer);
    trace.begin_forward(headers);
    if let Some(access) = access {
        access.record_trace(trace.id());
    }
    Some(trace)
}

/// Counts a call that is neither a read nor a watch from memory.
fn record_forwarded(proxy: &Proxy, call: &CallBytes) {
    proxy.telemetry.metrics.forwarding.calls.inc();
    if let Some(of_client) = call.client_call() {
        of_client.record_from_etcd();
    }
}

/// Injects the faults that the request's headers name; for tests, in debug builds only.
#[cfg(debug_assertions)]
fn arm_faults(proxy: &Proxy, headers: &HeaderMap) {
    faults::arm(headers);
    if faults::is_armed(Fault::Corrupt) {
        proxy.mirrors.corrupt();
    }
}
