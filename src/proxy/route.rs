//! **route**: by path only. KV/Range and KV/RangeStream have a handler each, two calls are listened to, everything else is forwarded as it is.

use std::sync::Arc;

use http::header::CONTENT_TYPE;
use http::{Method, Request, Version};
use hyper::body::Incoming;

use super::forward::{Body, Outcome, class_of};
use super::{Proxy, http1, learn, range, range_stream};
use crate::upstream::Outgoing;

pub(super) const RANGE: &str = "/etcdserverpb.KV/Range";
const RANGE_STREAM: &str = "/etcdserverpb.KV/RangeStream";

/// Answers one request, whatever it is; `over_tls` says how it came. All but reads are boxed: hyper moves this future about, so it had better be small.
pub(super) async fn route(proxy: Arc<Proxy>, request: Request<Incoming>, over_tls: bool) -> Outcome {
    // With TLS etcd serves its health and its gateway over HTTP/2 too; without, its HTTP/2 is gRPC alone.
    if request.version() != Version::HTTP_2 || (over_tls && !is_grpc(&request)) {
        proxy.metrics.passed_calls.inc();
        return Ok(Box::pin(http1::pass(&proxy, request)).await);
    }
    // A path with a query names another method to etcd's gRPC server.
    let is_call = request.method() == Method::POST && request.uri().query().is_none();
    if is_call && request.uri().path() == RANGE {
        return range::range(&proxy, request).await;
    }
    if is_call && request.uri().path() == RANGE_STREAM {
        return Box::pin(range_stream::range_stream(&proxy, request)).await;
    }
    proxy.metrics.passed_calls.inc();
    if is_call && let Some(lesson) = learn::lesson(request.uri().path()) {
        return Box::pin(learn::pass(&proxy, request, lesson)).await;
    }
    let (parts, body) = request.into_parts();
    let class = class_of(parts.uri.path());
    Box::pin(
        proxy
            .forward
            .pass(parts, Body::Once(Outgoing::incoming(body)), class),
    )
    .await
}

fn is_grpc(request: &Request<Incoming>) -> bool {
    let content_type = request.headers().get(CONTENT_TYPE);
    content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}
