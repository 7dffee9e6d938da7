//! Forwards calls that change cluster state: Compact, AuthEnable and AuthDisable; and Authenticate, whose token will name
//! the client. The change is recorded before the client gets the response, so that it applies to the client's next call.

use bytes::{Bytes, BytesMut};
use etcd_wire::etcdserverpb::{AuthenticateRequest, AuthenticateResponse, CompactionRequest};
use etcd_wire::grpc::frame::{PREFIX_BYTES, RequestMessage, read_message};
use etcd_wire::grpc::metadata::grpc_content_type;
use etcd_wire::grpc::status::{is_ok, is_refused};
use etcd_wire::grpc::{Method, SideEffect, Status};
use http::{Request, Response, header::CONTENT_LENGTH};
use hyper::body::Incoming;
use prost::Message as _;
use rangecache_base::telemetry::clients::ClientRegistry;
use rangecache_mirror::{Mirrors, lineage::HistoryId};
use rangecache_upstream::{ConnectionClass, Outgoing};

use super::send::{Forward, RequestBody};
use super::{body::ResponseReader, error::SendError};
use crate::response::{CallResult, ResponseBody, status_response};

/// Longest request that is decoded, in bytes; longer ones are forwarded unread.
const MAX_REQUEST_BYTES: usize = 1024;
/// Longest response that is read, in bytes. Responses of these methods are little more than a header.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Forwards a call of `method`, and records `effect` before the response is returned if the call succeeds.
pub(super) async fn forward_with_effect(
    forward: &Forward,
    mirrors: &Mirrors,
    request: Request<Incoming>,
    method: Method,
    effect: SideEffect,
) -> CallResult {
    let (parts, body) = request.into_parts();
    let content_type = grpc_content_type(&parts.headers);
    // At most a frame longer than the bound, which the bytes of the call cover.
    let reading = read_message(body, MAX_REQUEST_BYTES, |_| true);
    let message = tokio::time::timeout(forward.request_timeout, reading).await;
    let (framed, outgoing) = match message.unwrap_or(RequestMessage::Late) {
        RequestMessage::Whole { framed, body } => (Some(framed.clone()), Outgoing::resumed(framed, body)),
        RequestMessage::Other { read, body } => (None, Outgoing::resumed(read, body)),
        RequestMessage::Late => return Ok(status_response(&Status::RequestTimeout, content_type)),
        RequestMessage::Broken | RequestMessage::Refused => {
            return Ok(Response::new(ResponseBody::empty()));
        }
    };
    // etcd may switch auth at any moment from now on, and the response may be lost, so auth counts as unknown already
    // before the call is sent.
    let auth_change = (effect == SideEffect::Auth).then(|| mirrors.cluster_state.auth_may_have_changed());
    let history = mirrors.cluster_state.history();
    let upstream_response = match forward
        .send(parts, RequestBody::Once(outgoing), ConnectionClass::Unary)
        .await
    {
        Ok(upstream_response) => upstream_response,
        Err(error) => return error.into_result(content_type),
    };
    let (mut head, body) = upstream_response.response.into_parts();
    // The data is merged, and may be cut.
    head.headers.remove(CONTENT_LENGTH);
    let mut reader = ResponseReader::new(body, method, &mirrors.cluster_state);
    let mut data = BytesMut::new();
    loop {
        match reader.data().await {
            Ok(Some(piece)) if data.len() + piece.len() <= MAX_RESPONSE_BYTES => {
                data.extend_from_slice(&piece)
            }
            Ok(_) => break,
            Err(error) => return SendError::Lost(error).into_result(content_type),
        }
    }
    let trailers = reader.into_trailers();
    if is_ok(trailers.as_ref().unwrap_or(&head.headers)) {
        if effect == SideEffect::LogIn {
            record_log_in(&forward.telemetry.clients, framed.as_ref(), &data);
        } else {
            record_effect(mirrors, effect, history, framed.as_ref());
        }
    } else if let Some(change) = auth_change
        && is_refused(trailers.as_ref().unwrap_or(&head.headers))
    {
        mirrors.cluster_state.auth_was_refused(change);
    }
    let body = match trailers {
        Some(trailers) => ResponseBody::whole(data.freeze(), trailers),
        None => ResponseBody::empty(),
    };
    Ok(Response::from_parts(head, body))
}

/// Records whose token etcd has issued.
fn record_log_in(clients: &ClientRegistry, framed: Option<&Bytes>, data: &[u8]) {
    let request = framed.and_then(|framed| AuthenticateRequest::decode(framed.slice(PREFIX_BYTES..)).ok());
    let response = data
        .get(PREFIX_BYTES..)
        .and_then(|message| AuthenticateResponse::decode(message).ok());
    if let (Some(request), Some(response)) = (request, response)
        && !response.token.is_empty()
    {
        clients.record_token(response.token.as_bytes(), &request.name);
    }
}

/// Records `effect` of a call that began in `history`.
fn record_effect(mirrors: &Mirrors, effect: SideEffect, history: HistoryId, framed: Option<&Bytes>) {
    match effect {
        // Recorded a second time: a check during the call may have seen the state before the switch.
        SideEffect::Auth => {
            mirrors.cluster_state.auth_may_have_changed();
        }
        SideEffect::LogIn => {}
        SideEffect::Compaction => {
            let request = framed.map(|framed| CompactionRequest::decode(framed.slice(PREFIX_BYTES..)));
            if let Some(Ok(request)) = request {
                mirrors.compacted(history, request.revision);
            }
        }
    }
}
