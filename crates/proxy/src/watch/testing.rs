//! Streams for unit tests.

use bytes::{Buf as _, Bytes};
use etcd_wire::etcdserverpb::{WatchRequest, WatchResponse};
use etcd_wire::grpc::frame::{PREFIX_BYTES, framed};
use etcd_wire::{etcdserverpb::watch_request::RequestUnion, grpc::CallMetadata};
use http::{HeaderMap, HeaderName, HeaderValue};
use prost::Message as _;
use rangecache_edge::limits::Deadline;
use tokio::time::Instant;

use super::{downstream::Downstream, receive::Requests, stream::StreamContext, stream_bytes::StreamBytes};
use crate::{handles::CallProtocol, testing::Scene};

/// Headers of a call, with these in addition.
pub(super) fn headers(more: &[(&'static str, &'static str)]) -> HeaderMap {
    let all = [("content-type", "application/grpc")];
    let all = all.iter().chain(more);
    all.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)))
        .collect()
}

/// The client's side of a stream with these headers, whose client has sent `messages`.
pub(super) fn downstream(
    scene: &Scene,
    more: &[(&'static str, &'static str)],
    messages: impl Into<Bytes>,
) -> Downstream {
    let (client, headers) = (scene.client(), headers(more));
    let metadata = CallMetadata::from_headers(&headers).unwrap();
    let stream = StreamContext::new(&client, &headers, metadata, CallProtocol::Grpc, None);
    let timeout = scene.proxy.request_timeout;
    let requests = Requests::of_message(messages.into(), timeout);
    let bytes = StreamBytes::begin(&stream.client.account).unwrap();
    let deadline = Deadline::after(Instant::now(), stream.metadata.timeout);
    Downstream::new(stream, requests, bytes, deadline)
}

/// A request as a message with its gRPC prefix.
pub(super) fn message(union: RequestUnion) -> Bytes {
    framed(&WatchRequest {
        request_union: Some(union),
    })
}

/// Takes the responses without events that are sent next.
pub(super) fn take_control(down: &mut Downstream) -> Vec<WatchResponse> {
    let taken = down.control.drain(..);
    taken
        .map(|mut rope| {
            let framed = rope.copy_to_bytes(rope.remaining());
            WatchResponse::decode(framed.slice(PREFIX_BYTES..)).unwrap()
        })
        .collect()
}
