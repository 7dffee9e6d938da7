//! `/v3/watch` of etcd's JSON gateway: a request that creates one watcher is served like a Watch stream, with etcd's own
//! text. Every other one is forwarded as it is.

mod request;
mod response;

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::Instant;

use super::memory::Session;
use super::plan::NotServed;
use super::receive::Requests;
use super::stream::{StreamContext, record_forwarded};
use super::stream_bytes::StreamBytes;
use crate::call::CallRecord;
use crate::forward::forward_http1_body;
use crate::gateway::{call_metadata, gateway_version, is_protojson};
use crate::handles::{CallProtocol, Client};
use crate::response::{CallResult, ResponseBody};
use etcd_wire::grpc::{CallMetadata, Method, is_json_of};
use rangecache_base::telemetry::Reason;
use rangecache_base::telemetry::metrics::Source;
use rangecache_upstream::Outgoing;
use response::JsonStream;

/// Longest body that is read, in bytes: two keys in base64. Longer ones are forwarded.
const MAX_BODY_BYTES: usize = 64 << 10;

/// Whether the request is a Watch in JSON that memory may serve.
pub(crate) fn may_serve_json<B>(client: &Client, request: &Request<B>) -> bool {
    let uri = request.uri();
    client.proxy.watch_progress_interval.is_some()
        && request.method() == http::Method::POST
        && uri.query().is_none()
        && is_json_of(uri.path(), Method::Watch)
}

/// Serves a Watch in JSON from memory, or forwards it.
pub(crate) async fn watch_json(
    client: &Arc<Client>,
    request: Request<Incoming>,
    record: &mut CallRecord,
) -> CallResult {
    // Until memory does.
    record.set_source(Source::Etcd);
    let arrived = Instant::now();
    let (mut parts, body) = request.into_parts();
    let (body, reason) = match read_body(client, &parts, body, arrived).await {
        Ok(body) => match serve(client, &parts, &body, record).await {
            Ok(response) => return Ok(response),
            Err(reason) => (Outgoing::whole(body), reason),
        },
        Err(unread) => (unread, Reason::Undecodable),
    };
    record.begin_forward(&mut parts.headers);
    Ok(forward(client, parts, body, reason, record).await)
}

/// Serves the watcher that the body asks for from memory.
///
/// # Errors
/// Reason why etcd must serve it.
async fn serve(
    client: &Arc<Client>,
    parts: &Parts,
    body: &[u8],
    record: &mut CallRecord,
) -> Result<Response<ResponseBody>, Reason> {
    let proxy = &client.proxy;
    let version = gateway_version(proxy.forward.upstream.lowest_version())?;
    let is_protojson = is_protojson(version);
    let message = request::parse(body, is_protojson).map_err(|_| Reason::Undecodable)?;
    let (metadata, headers) = grpc_metadata(parts).ok_or(Reason::Undecodable)?;
    let spans = record.create_spans();
    let stream = StreamContext::new(client, &headers, metadata, CallProtocol::Json, spans);
    let mut requests = Requests::of_message(message, proxy.request_timeout);
    let (create, answer) = stream.first_create(&mut requests, record).await;
    match answer {
        Err(NotServed::Etcd(reason)) => return Err(reason),
        // The process stops, which forwarding reports as for every other request.
        Err(NotServed::End(_)) => return Err(Reason::NotFresh),
        _ => {}
    }
    let bytes = StreamBytes::begin(&client.account).map_err(|_| Reason::OverBudget)?;
    let session = Session::begin(stream, requests, bytes, record.deadline(), create, answer);
    let source = JsonStream::new(session, is_protojson);
    let json = HeaderValue::from_static("application/json");
    let mut response = ResponseBody::from_source(source).into_response(json);
    response.headers_mut().insert(
        "grpc-metadata-content-type",
        HeaderValue::from_static("application/grpc"),
    );
    record.record_watch_source("memory", "");
    Ok(response)
}

/// Metadata of the gRPC call that the gateway makes of this request; `None` if only etcd knows it.
fn grpc_metadata(parts: &Parts) -> Option<(CallMetadata, HeaderMap)> {
    let (metadata, mut headers) = call_metadata(&parts.headers)?;
    headers.insert("te", HeaderValue::from_static("trailers"));
    (!metadata.bypass).then_some((metadata, headers))
}

/// Reads the whole body.
///
/// # Errors
/// What to forward instead, of a body that is too long, late or broken.
async fn read_body(
    client: &Client,
    parts: &Parts,
    mut body: Incoming,
    arrived: Instant,
) -> Result<Bytes, Outgoing> {
    // A client that may send more requests on the stream does not say how long its body is.
    let is_long = body
        .size_hint()
        .upper()
        .is_none_or(|length| length > MAX_BODY_BYTES as u64);
    if is_long || parts.headers.contains_key("upgrade") {
        return Err(Outgoing::incoming(body));
    }
    let deadline = arrived + client.proxy.request_timeout;
    let mut read = BytesMut::new();
    loop {
        match tokio::time::timeout_at(deadline, body.frame()).await {
            Ok(None) => return Ok(read.freeze()),
            Ok(Some(Ok(frame))) => read.extend_from_slice(&frame.into_data().unwrap_or_default()),
            Ok(Some(Err(_))) | Err(_) => return Err(Outgoing::resumed(read.freeze(), body)),
        }
    }
}

/// Forwards the request as it is.
async fn forward(
    client: &Client,
    parts: Parts,
    body: Outgoing,
    reason: Reason,
    record: &mut CallRecord,
) -> Response<ResponseBody> {
    record_forwarded(client, reason, record);
    let open = client.proxy.telemetry.metrics.watches.open_etcd(reason.as_str());
    let request = Request::from_parts(parts, body);
    let forwarding = forward_http1_body(&client.proxy.forward, request, Method::JsonWatch, &client.account);
    let response = Box::pin(forwarding).await;
    response.map(|body| body.holding(open))
}
