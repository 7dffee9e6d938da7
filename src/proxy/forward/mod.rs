//! **forward**: opaque bytes to etcd and back.
//!
//! | file | what it does |
//! |---|---|
//! | `send` | chooses connections and retries, `error` says why a call failed |
//! | `body` | passes a response through, and records the revisions in it |
//! | `collect` | reads a response to its end |
//! | `range_stream` | sends a RangeStream to an endpoint that has the method |
//! | `side_effects` | Compact and the auth switch, which change what memory may answer |
//! | `shutdown` | ends endless calls when the process stops |
//! | `http1` | HTTP/1 |

mod body;
mod collect;
mod error;
mod http1;
mod range_stream;
mod send;
mod shutdown;
mod side_effects;

pub(super) use collect::ResponseReader;
pub(super) use error::SendError;
pub(super) use http1::forward_http1;
pub(super) use send::{Forward, RequestBody, UpstreamResponse};

use http::Request;
use hyper::body::Incoming;

use super::response::CallResult;
use crate::grpc::Method;
use crate::grpc::metadata::grpc_content_type;
use crate::mirror::Mirrors;
use crate::upstream::Outgoing;

/// Forwards any gRPC call but reads. Compact and AuthEnable/Disable also update cluster state; `is_call` is false for requests
/// that etcd's gRPC server does not take for a call of their path, which have no such effect.
pub(super) async fn forward_call(
    forward: &Forward,
    mirrors: &Mirrors,
    request: Request<Incoming>,
    method: Method,
    is_call: bool,
) -> CallResult {
    if is_call && let Some(effect) = method.side_effect() {
        return side_effects::forward_with_effect(forward, mirrors, request, method, effect).await;
    }
    let (parts, body) = request.into_parts();
    let body = Outgoing::incoming(body);
    if !method.is_endless() {
        return forward.forward(parts, RequestBody::Once(body), method).await;
    }
    let content_type = grpc_content_type(&parts.headers);
    shutdown::end_at_stop(&forward.drain, content_type, |ended| {
        forward.forward(parts, RequestBody::Once(body.until(ended)), method)
    })
    .await
}
