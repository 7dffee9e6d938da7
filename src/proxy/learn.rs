//! Calls that pass through and, when etcd has carried them out, change what memory may answer: Compact and the switch of
//! auth. What they change is known before the caller sees the answer, so that its next read finds it.

use bytes::{Bytes, BytesMut};
use http::{Request, Response};
use http_body_util::BodyExt;
use hyper::body::Incoming;
use prost::Message as _;

use super::Proxy;
use super::body::ResponseBody;
use super::forward::{Body, NotAnswered, Outcome, grpc_content_type};
use super::message::{self, Message, PREFIX_BYTES};
use super::passed::Passed;
use super::status::succeeded;
use crate::etcdserverpb::CompactionRequest;
use crate::upstream::{ConnectionClass, Outgoing};

/// Longer requests than this are none of these calls'.
const MAX_REQUEST_BYTES: usize = 1024;
/// The answers are a header and little else.
const MAX_ANSWER_BYTES: usize = 64 << 10;

/// What the success of a call teaches.
#[derive(Clone, Copy, Debug)]
pub(super) enum SideEffect {
    Compaction,
    Auth,
}

/// Whether the call to `path` teaches anything.
pub(super) fn lesson(path: &str) -> Option<SideEffect> {
    match path {
        "/etcdserverpb.KV/Compact" => Some(SideEffect::Compaction),
        "/etcdserverpb.Auth/AuthEnable" | "/etcdserverpb.Auth/AuthDisable" => Some(SideEffect::Auth),
        _ => None,
    }
}

/// Passes the call on, and learns from its success.
pub(super) async fn pass(proxy: &Proxy, request: Request<Incoming>, lesson: SideEffect) -> Outcome {
    let (parts, body) = request.into_parts();
    let path = parts.uri.path().to_owned();
    let content_type = grpc_content_type(&parts.headers);
    let (framed, outgoing) = match message::read(body, MAX_REQUEST_BYTES).await {
        Message::Whole { framed, body } => (Some(framed.clone()), Outgoing::resumed(framed, body)),
        Message::Other { read, body } => (None, Outgoing::resumed(read, body)),
        Message::Broken => return Ok(Response::new(ResponseBody::empty())),
    };
    if matches!(lesson, SideEffect::Auth) {
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
    let (head, mut body) = answered.response.into_parts();
    let (mut data, mut trailers) = (BytesMut::new(), None);
    let mut passed = Passed::of(&path);
    while let Some(frame) = body.frame().await {
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => return NotAnswered::Lost(error).outcome(content_type),
        };
        match frame.into_data() {
            Ok(piece) => {
                if data.len() + piece.len() > MAX_ANSWER_BYTES {
                    break;
                }
                if let Some(passed) = &mut passed {
                    passed.see(&piece, &proxy.mirrors.cluster_state);
                }
                data.extend_from_slice(&piece);
            }
            Err(frame) => trailers = frame.into_trailers().ok(),
        }
    }
    if succeeded(trailers.as_ref().unwrap_or(&head.headers)) {
        learn(proxy, lesson, framed.as_ref());
    }
    let body = match trailers {
        Some(trailers) => ResponseBody::whole(data.freeze(), trailers),
        None => ResponseBody::empty(),
    };
    Ok(Response::from_parts(head, body))
}

fn learn(proxy: &Proxy, lesson: SideEffect, framed: Option<&Bytes>) {
    match lesson {
        SideEffect::Auth => proxy.mirrors.cluster_state.auth_may_have_changed(),
        SideEffect::Compaction => {
            let request = framed.map(|framed| CompactionRequest::decode(framed.slice(PREFIX_BYTES..)));
            if let Some(Ok(request)) = request {
                proxy.mirrors.compacted(request.revision);
            }
        }
    }
}
