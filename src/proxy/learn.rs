//! Calls that pass through and, when etcd has carried them out, change what memory may answer: Compact and the switch of
//! auth. What they change is known before the caller sees the answer, so that its next read finds it.

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use prost::Message as _;

use super::Proxy;
use super::body::{self, ResponseBody};
use super::forward::{Body, NotAnswered, Outcome};
use crate::etcdserverpb::CompactionRequest;
use crate::grpc::frame::{PREFIX_BYTES, RequestMessage, read_message};
use crate::grpc::metadata::grpc_content_type;
use crate::grpc::status::is_ok;
use crate::grpc::{HeaderScanner, Method, SideEffect};
use crate::upstream::{ConnectionClass, Outgoing};

/// Longer requests than this are none of these calls'.
const MAX_REQUEST_BYTES: usize = 1024;
/// The answers are a header and little else.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// Passes the call on, and learns from its success.
pub(super) async fn pass(
    proxy: &Proxy,
    request: Request<Incoming>,
    method: Method,
    effect: SideEffect,
) -> Outcome {
    let (parts, body) = request.into_parts();
    let content_type = grpc_content_type(&parts.headers);
    let (framed, outgoing) = match read_message(body, MAX_REQUEST_BYTES).await {
        RequestMessage::Whole { framed, body } => (Some(framed.clone()), Outgoing::resumed(framed, body)),
        RequestMessage::Other { read, body } => (None, Outgoing::resumed(read, body)),
        RequestMessage::Broken => return Ok(Response::new(ResponseBody::empty())),
    };
    if matches!(effect, SideEffect::Auth) {
        // From the moment that etcd may have switched it.
        proxy.mirrors.cluster_state.auth_may_have_changed();
    }
    let answered = match proxy
        .forward
        .send(parts, Body::Once(outgoing), ConnectionClass::Unary)
        .await
    {
        Ok(answered) => answered,
        Err(not) => return not.outcome(content_type),
    };
    let (head, mut incoming) = answered.response.into_parts();
    let (mut data, mut trailers) = (BytesMut::new(), None);
    let mut scanner = HeaderScanner::new(method);
    while let Some(frame) = incoming.frame().await {
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => return NotAnswered::Lost(error).outcome(content_type),
        };
        match frame.into_data() {
            Ok(piece) => {
                if data.len() + piece.len() > MAX_ANSWER_BYTES {
                    break;
                }
                if let Some(scanner) = &mut scanner {
                    body::record(scanner, &piece, &proxy.mirrors.cluster_state);
                }
                data.extend_from_slice(&piece);
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    if is_ok(trailers.as_ref().unwrap_or(&head.headers)) {
        learn(proxy, effect, framed.as_ref());
    }
    let body = match trailers {
        Some(trailers) => ResponseBody::whole(data.freeze(), trailers),
        None => ResponseBody::empty(),
    };
    Ok(Response::from_parts(head, body))
}

fn learn(proxy: &Proxy, effect: SideEffect, framed: Option<&Bytes>) {
    match effect {
        SideEffect::Auth => proxy.mirrors.cluster_state.auth_may_have_changed(),
        SideEffect::Compaction => {
            let request = framed.map(|framed| CompactionRequest::decode(framed.slice(PREFIX_BYTES..)));
            if let Some(Ok(request)) = request {
                proxy.mirrors.compacted(request.revision);
            }
        }
    }
}
