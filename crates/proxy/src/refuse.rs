//! Requests that are refused before they are routed: those that a web page may have caused, those that this process has
//! sent itself, those with too many header fields, and those that may write on a read-only listener.

use etcd_wire::grpc::metadata::{MAX_FIELDS, grpc_content_type};
use etcd_wire::grpc::{Status, is_read_only};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use rangecache_base::net::Transport;
use rangecache_edge::{browser::set_cors, limits::ClientAccount};

use super::call::CallHead;
use super::handles::{Access, Client, Proxy};
use super::response::{ResponseBody, status_response};

/// The response to a request that has no handler; `None` if it has one. If a browser can send the request, `page` is the origin
/// of the permitted page that caused it, if there is one.
pub(super) fn refuse(
    client: &Client,
    head: &CallHead,
    request: &Request<Incoming>,
    transport: Transport,
    page: Option<&Option<HeaderValue>>,
) -> Option<Response<ResponseBody>> {
    let (proxy, headers) = (&client.proxy, request.headers());
    if headers.len() > MAX_FIELDS {
        return Some(refuse_many_fields(&client.account, head, request));
    }
    let instance = proxy.forward.upstream.credentials().instance();
    if head.fields.is_of_rangecache && instance.has_passed(headers) {
        return Some(refuse_loop(proxy, head, request));
    }
    if let Some(origin) = page
        && let Some(refused) = refuse_page(proxy, request, transport, origin.as_ref())
    {
        return Some(refused);
    }
    match client.access {
        Access::ReadOnly => refuse_write(proxy, head, request),
        Access::Full => None,
    }
}

/// The response to a request of a browser that is not handled; `None` if it is. The page at `origin` has caused it, if there is
/// one, and it is permitted.
fn refuse_page(
    proxy: &Proxy,
    request: &Request<Incoming>,
    transport: Transport,
    origin: Option<&HeaderValue>,
) -> Option<Response<ResponseBody>> {
    if let Err(refusal) = proxy.browser.check(request, transport) {
        let text = refusal.to_string();
        tracing::warn!(
            reason = text.trim_end(),
            "a request that a web page may have caused was refused"
        );
        return Some(text_response(StatusCode::FORBIDDEN, text));
    }
    let origin = origin?;
    // A page's question whether it may send the request itself; etcd answers it in the same way.
    if request.method() == Method::OPTIONS {
        let mut response = text_response(StatusCode::OK, String::new());
        set_cors(response.headers_mut(), Some(origin.clone()));
        return Some(response);
    }
    None
}

/// The response to a request with too many header fields. HTTP/1 has a lower bound of the library.
#[cold]
fn refuse_many_fields(
    account: &ClientAccount,
    head: &CallHead,
    request: &Request<Incoming>,
) -> Response<ResponseBody> {
    account.delay_after_refusal();
    let status = Status::TooManyFields;
    if head.fields.is_grpc() {
        return status_response(&status, grpc_content_type(request.headers()));
    }
    let code = StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE;
    text_response(code, format!("{status}\n"))
}

/// The response to a request that may write, on a listener that is read-only; `None` if it only reads.
fn refuse_write(
    proxy: &Proxy,
    head: &CallHead,
    request: &Request<Incoming>,
) -> Option<Response<ResponseBody>> {
    let uri = request.uri();
    // etcd's gRPC server takes the query for a part of the path.
    if is_read_only(uri.path()) && !(head.fields.is_grpc() && uri.query().is_some()) {
        return None;
    }
    proxy.telemetry.metrics.refusals.read_only_refused.inc();
    if head.fields.is_grpc() {
        let content_type = grpc_content_type(request.headers());
        return Some(status_response(&Status::ReadOnly, content_type));
    }
    let text = format!("{}\n", Status::ReadOnly);
    Some(text_response(StatusCode::FORBIDDEN, text))
}

/// Origin of the web page that caused a request of a browser, if there is one and it is permitted.
pub(super) fn origin_of(proxy: &Proxy, request: &Request<Incoming>) -> Option<HeaderValue> {
    let origin = request.headers().get(header::ORIGIN)?;
    proxy.browser.permitted(origin).cloned()
}

/// `FailedPrecondition`, or 508 for HTTP/1: the request has come back.
#[cold]
fn refuse_loop(proxy: &Proxy, head: &CallHead, request: &Request<Incoming>) -> Response<ResponseBody> {
    proxy.telemetry.metrics.refusals.looped_calls.inc();
    let endpoints: Vec<_> = proxy
        .forward
        .upstream
        .endpoints()
        .into_iter()
        .map(|view| view.url.to_string())
        .collect();
    tracing::error!(
        endpoints = endpoints.join(","),
        "a request of this rangecache has come back to it: --endpoints leads to itself, or to a rangecache whose \
         --endpoints leads here; point --endpoints at etcd"
    );
    if head.is_http2 {
        return status_response(&Status::Loop, grpc_content_type(request.headers()));
    }
    text_response(StatusCode::LOOP_DETECTED, Status::Loop.to_string())
}

fn text_response(status: StatusCode, text: String) -> Response<ResponseBody> {
    let mut response = Response::new(ResponseBody::whole(text.into(), HeaderMap::new()));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("text/plain; charset=utf-8"),
    );
    headers.insert(
        header::X_CONTENT_TYPE_OPTIONS,
        HeaderValue::from_static("nosniff"),
    );
    response
}
