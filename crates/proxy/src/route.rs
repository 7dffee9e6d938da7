//! **route**: chooses the handler by the request's path. KV/Range and KV/RangeStream have handlers in `read`; every
//! other request is forwarded.

use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use etcd_wire::grpc::metadata::{grpc_content_type, head_bytes};
use etcd_wire::grpc::{Method, Status, is_costly};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header::DATE};
use httpdate::fmt_http_date;
use hyper::body::Incoming;
use rangecache_base::faults::{self, Fault};
use rangecache_base::telemetry::{Reason, metrics::Source};
use rangecache_base::{net::Transport, panics::caught, unix_time::now_seconds};
use rangecache_edge::browser::{is_of_a_browser, set_cors};
use rangecache_edge::limits::{ByteKind, Exceeded, Slot};
use rangecache_upstream::BoxError;
use tokio::time::Instant;

use super::call::{CallHead, CallRecord};
use super::forward::{Upgrade, forward_call, forward_http1};
use super::handles::{Client, Proxy};
use super::read::{Json, Streaming, Unary, answer_leaf_health, is_json_range, serve};
use super::refuse::{origin_of, refuse};
use super::response::{CALL_BYTES, CallResult, ResponseBody, status_response};
use super::watch::{may_serve, may_serve_json, watch, watch_json};

/// Handles one request: gRPC, HTTP/1 or the JSON gateway. `transport` describes its connection. A panic fails this request
/// alone, with status `Internal`.
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
    let head = CallHead::of(&request, transport);
    let (telemetry, caller) = (&proxy.telemetry, &client.caller);
    let of_client = caller.begin(
        &telemetry.clients,
        &client.account,
        &head.fields,
        request.headers(),
    );
    let from = (&**caller.of_connection(), client.peer);
    let counted = (of_client, client.account.hold(ByteKind::Request));
    let mut record = CallRecord::begin(telemetry, counted, from, (&head, &request), arrived);
    let page = is_of_a_browser(&request, transport).then(|| origin_of(proxy, &request));
    if let Some(refused) = refuse(&client, &head, &request, transport, page.as_ref()) {
        record.record_refused(None, None);
        return Ok(respond(&client, &head, refused, record));
    }
    let response = match admit(proxy, &mut record, &head, &request).await {
        Err((reason, status)) => shed(&head, &request, reason, &status, &mut record),
        Ok(costly) => {
            let routed = route(&client, &head, request, &mut record);
            let response = match caught(routed).await {
                Ok(routed) => routed.inspect_err(|_| record.record_reset())?,
                Err(_) => internal_error(head.is_http2),
            };
            match costly {
                None => response,
                Some(costly) => response.map(|body| body.holding(costly)),
            }
        }
    };
    let mut responded = respond(&client, &head, response, record);
    if head.is_http && head.is_http2 {
        set_date(responded.headers_mut());
    }
    if let Some(origin) = page {
        set_cors(responded.headers_mut(), origin);
    }
    Ok(responded)
}

/// Prepares `response` to be sent, with the record of its call.
fn respond(
    client: &Arc<Client>,
    head: &CallHead,
    mut response: Response<ResponseBody>,
    mut record: CallRecord,
) -> Response<ResponseBody> {
    let proxy = &client.proxy;
    record.record_endpoint(response.body().endpoint());
    let mirror = record.mirror(&proxy.mirrors);
    record.begin_response(&mut response, mirror);
    let (mut parts, body) = response.into_parts();
    let is_read = head.is_http2 && head.method == Method::Range;
    match body.deliver(record, &proxy.responses, is_read) {
        Ok(body) if parts.status == StatusCode::SWITCHING_PROTOCOLS => {
            let body = upgraded(client, &mut parts, body);
            Response::from_parts(parts, body)
        }
        Ok(body) => Response::from_parts(parts, body),
        Err(_) => status_response(&Status::BufferBytes, grpc_content_type(&parts.headers)),
    }
}

/// Sets the date of a response without one, as etcd does in all but gRPC. Over HTTP/1 hyper does.
fn set_date(headers: &mut HeaderMap) {
    let seconds = u64::try_from(now_seconds()).unwrap_or_default();
    let now = fmt_http_date(UNIX_EPOCH + Duration::from_secs(seconds));
    if let Ok(now) = HeaderValue::try_from(now) {
        headers.entry(DATE).or_insert(now);
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

/// Waits until the call may begin: for room for its head, and for its client's other costly calls if it is one.
///
/// # Errors
/// Why the call is refused.
async fn admit(
    proxy: &Proxy,
    record: &mut CallRecord,
    head: &CallHead,
    request: &Request<Incoming>,
) -> Result<Option<Slot>, (Reason, Status)> {
    let head_bytes = head_bytes(request.uri(), &head.fields);
    let admitted = record.bytes.admit(CALL_BYTES + head_bytes).await;
    admitted.map_err(|_| (Reason::BufferBytes, Status::BufferBytes))?;
    let mut slot = None;
    if is_costly_call(head.method, request.uri().path()) {
        let acquired = proxy.costly.acquire(record.bytes.account(), record.deadline());
        slot = Some(acquired.await.map_err(|cause| match cause {
            Exceeded::Deadline => (Reason::Deadline, Status::DeadlineExceeded),
            _ => (Reason::TooManyCalls, Status::TooManyCalls),
        })?);
    }
    match proxy.admission.is_full() {
        true => Err((Reason::TooManyCalls, Status::TooManyCalls)),
        false => Ok(slot),
    }
}

/// Whether a call is costly for etcd.
fn is_costly_call(method: Method, path: &str) -> bool {
    matches!(method, Method::Authenticate | Method::EtcdUnary | Method::Json) && is_costly(path)
}

/// Counts a call beyond a bound as shed, and returns its response: `status`, or 503 for HTTP/1.
#[cold]
fn shed(
    head: &CallHead,
    request: &Request<Incoming>,
    reason: Reason,
    status: &Status,
    record: &mut CallRecord,
) -> Response<ResponseBody> {
    record.record_refused(head.read_kind(), Some(reason));
    if head.is_http2 {
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
    head: &CallHead,
    mut request: Request<Incoming>,
    record: &mut CallRecord,
) -> CallResult {
    let proxy = &*client.proxy;
    #[cfg(debug_assertions)]
    arm_faults(proxy, request.headers());
    faults::trip(Fault::Request);
    faults::block(Fault::Block);
    let is_called = head.is_grpc_call && !head.is_http;
    match head.method {
        Method::Range if is_called => {
            return serve::<Unary>(client, &head.fields, request, record).await;
        }
        Method::RangeStream if is_called => {
            return Box::pin(serve::<Streaming>(client, &head.fields, request, record)).await;
        }
        Method::Json if head.is_http && is_json_range(&request) => {
            return Box::pin(serve::<Json>(client, &head.fields, request, record)).await;
        }
        Method::Watch => {
            record.set_watch();
            if is_called && let Some(metadata) = may_serve(client, &head.fields, request.headers()) {
                return Box::pin(watch(client, request, metadata, record)).await;
            }
        }
        Method::JsonWatch => {
            record.set_watch();
            if head.is_http && may_serve_json(client, &request) {
                return Box::pin(watch_json(client, request, record)).await;
            }
        }
        Method::Json | Method::EtcdUnary | Method::Health => {
            if let Some(response) = answer_itself(proxy, head, &request) {
                record.set_source(Source::Memory);
                return Ok(response);
            }
        }
        _ => {}
    }
    record.record_forwarded(request.headers_mut());
    let (forward, mirrors, account) = (&proxy.forward, &proxy.mirrors, &client.account);
    if head.is_http {
        return Ok(Box::pin(forward_http1(forward, request, head.method, account)).await);
    }
    let forwarding = forward_call(
        forward,
        mirrors,
        request,
        head.method,
        head.is_grpc_call,
        (account, record.deadline()),
    );
    Box::pin(forwarding).await
}

/// The response to a MemberList (`--advertise-client-urls`), or to the health check of another rangecache; `None` if etcd has to answer.
fn answer_itself(
    proxy: &Proxy,
    head: &CallHead,
    request: &Request<Incoming>,
) -> Option<Response<ResponseBody>> {
    match head.method {
        Method::Health => answer_leaf_health(&proxy.forward.upstream, head, request),
        _ => proxy
            .advertised
            .as_ref()?
            .response(request, &proxy.mirrors.cluster_state),
    }
}

/// Injects the faults that the request's headers name; for tests, in debug builds only.
#[cfg(debug_assertions)]
fn arm_faults(proxy: &Proxy, headers: &HeaderMap) {
    let Some(name) = faults::named(headers) else {
        return;
    };
    proxy.mirrors.inject(name);
    faults::arm(name);
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;

    use super::*;

    #[test]
    fn checks_of_passwords_and_hashes_are_costly() {
        for (path, expected) in [
            ("/etcdserverpb.KV/Range", false),
            ("/etcdserverpb.KV/Put", false),
            ("/etcdserverpb.Watch/Watch", false),
            ("/etcdserverpb.Maintenance/HashKV", true),
            ("/etcdserverpb.Auth/Authenticate", true),
            ("/v3/auth/authenticate", true),
            ("/health", false),
        ] {
            assert_eq!(is_costly_call(Method::from_path(path), path), expected, "{path}");
        }
    }

    #[tokio::test]
    async fn panic_of_a_handler_is_a_status_for_grpc_and_a_text_for_http1() {
        let grpc = internal_error(true);
        assert_eq!(grpc.status(), StatusCode::OK);
        assert_eq!(grpc.headers()["grpc-status"], "13");
        let http1 = internal_error(false);
        assert_eq!(http1.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let text = http1.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(text, Status::Internal.to_string());
    }
}
