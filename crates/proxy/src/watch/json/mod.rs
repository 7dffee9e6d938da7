//! `/v3/watch` of etcd's JSON gateway: a request that creates one watcher is served like a Watch stream, with etcd's own
//! text. Every other one is forwarded as it is. The JSON of a WatchRequest is read as far as every version of etcd understands it in the
//! same way.

mod response;

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use etcd_wire::etcdserverpb::{WatchCreateRequest, WatchRequest};
use etcd_wire::grpc::{CallMetadata, Method, is_json_of};
use etcd_wire::{etcdserverpb::watch_request::RequestUnion, grpc::frame::framed};
use http::{HeaderMap, HeaderValue, Request, Response, request::Parts};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use rangecache_base::telemetry::{Reason, metrics::Source};
use rangecache_upstream::Outgoing;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use super::stream::{StreamContext, record_forwarded};
use super::{memory::Session, plan::NotServed, receive::Requests, stream_bytes::StreamBytes};
use crate::gateway::{Enum, Int64, NotUnderstood, call_metadata, decode, gateway_version, is_protojson};
use crate::handles::{CallProtocol, Client};
use crate::response::{CallResult, ResponseBody};
use crate::{call::CallRecord, forward::forward_http1_body};
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
    let message = parse(body, is_protojson).map_err(|_| Reason::Undecodable)?;
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

/// Names of the request that creates a watcher.
const NAMES: [&str; 2] = ["create_request", "createRequest"];
/// Names of the filters, in the order of their numbers.
const FILTERS: [&str; 2] = ["NOPUT", "NODELETE"];

/// A request that creates a watcher.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CreateMessage {
    #[serde(alias = "createRequest")]
    create_request: CreateFields,
}

/// The fields under both of their names.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct CreateFields {
    key: String,
    #[serde(alias = "rangeEnd")]
    range_end: String,
    #[serde(alias = "startRevision")]
    start_revision: Int64,
    #[serde(alias = "progressNotify")]
    progress_notify: bool,
    filters: Vec<Enum>,
    #[serde(alias = "prevKv")]
    prev_kv: bool,
    #[serde(alias = "watchId")]
    watch_id: Int64,
    fragment: bool,
}

/// Reads a body with one request, which creates a watcher, and returns the same request as a gRPC message. `any_base64` is
/// that of [`decode`].
///
/// # Errors
/// [`NotUnderstood`] if only etcd can read it.
pub(super) fn parse(body: &[u8], any_base64: bool) -> Result<Bytes, NotUnderstood> {
    // serde reads a list as the fields in their order, too.
    let value: Value = serde_json::from_slice(body).map_err(|_| NotUnderstood)?;
    if !NAMES.iter().any(|name| value[name].is_object()) {
        return Err(NotUnderstood);
    }
    let CreateMessage { create_request } = serde_json::from_slice(body).map_err(|_| NotUnderstood)?;
    let filters: Result<Vec<i32>, NotUnderstood> = create_request
        .filters
        .iter()
        .map(|filter| filter.value(&FILTERS))
        .collect();
    let create = WatchCreateRequest {
        key: decode(&create_request.key, any_base64)?,
        range_end: decode(&create_request.range_end, any_base64)?,
        start_revision: create_request.start_revision.value()?,
        progress_notify: create_request.progress_notify,
        filters: filters?,
        prev_kv: create_request.prev_kv,
        watch_id: create_request.watch_id.value()?,
        fragment: create_request.fragment,
    };
    Ok(framed(&WatchRequest {
        request_union: Some(RequestUnion::CreateRequest(create)),
    }))
}

#[cfg(test)]
mod tests {
    use etcd_wire::grpc::frame::PREFIX_BYTES;
    use prost::Message as _;

    use super::*;

    fn parsed(body: &str) -> Result<WatchCreateRequest, NotUnderstood> {
        let message = parse(body.as_bytes(), true)?;
        let request = WatchRequest::decode(&message[PREFIX_BYTES..]).unwrap();
        match request.request_union {
            Some(RequestUnion::CreateRequest(create)) => Ok(create),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn fields_are_read_under_both_names_and_in_all_forms() {
        let create = WatchCreateRequest {
            key: "a".into(),
            range_end: "\0".into(),
            start_revision: 7,
            progress_notify: true,
            filters: vec![0, 1],
            prev_kv: true,
            watch_id: 3,
            fragment: true,
        };
        for body in [
            r#"{"create_request":{"key":"YQ==","range_end":"AA==","start_revision":"7","progress_notify":true,
                "filters":["NOPUT","NODELETE"],"prev_kv":true,"watch_id":"3","fragment":true}}"#,
            r#" {"createRequest":{"rangeEnd":"AA==","key":"YQ","startRevision":7,"progressNotify":true,"filters":[0,1],
                "prevKv":true,"watchId":3,"fragment":true}} "#,
        ] {
            assert_eq!(parsed(body), Ok(create.clone()), "{body}");
        }
        assert_eq!(
            parsed(r#"{"create_request":{}}"#),
            Ok(WatchCreateRequest::default())
        );
    }

    #[test]
    fn what_is_not_one_create_request_is_left_to_etcd() {
        for body in [
            "",
            "{",
            "{}",
            r#"[{"key":"YQ=="}]"#,
            r#"{"create_request":[]}"#,
            r#"{"create_request":null}"#,
            r#"{"create_request":{"key":"YQ=="}}{"create_request":{"key":"YQ=="}}"#,
            r#"{"create_request":{},"createRequest":{}}"#,
            r#"{"create_request":{"other":1}}"#,
            r#"{"create_request":{"filters":null}}"#,
            r#"{"create_request":{"filters":["NONE"]}}"#,
            r#"{"create_request":{"filters":[2]}}"#,
            r#"{"create_request":{"key":"!"}}"#,
            r#"{"cancel_request":{"watch_id":"1"}}"#,
            r#"{"progress_request":{}}"#,
        ] {
            assert_eq!(parsed(body), Err(NotUnderstood), "{body}");
        }
    }
}
