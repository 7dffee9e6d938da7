//! **forward**: sends calls to etcd and passes requests and responses through as opaque bytes.
//!
//! | file | what it does |
//! |---|---|
//! | `send` | chooses connections and retries |
//! | `opening` | a new watch's slot, from its first message to etcd's response |
//! | `error` | errors of calls to which etcd did not respond |
//! | `body` | passes a response through, or reads it to its end, and records the revisions in it |
//! | `range_stream` | sends a RangeStream to an endpoint that implements it |
//! | `side_effects` | forwards Compact, AuthEnable, AuthDisable and Authenticate, and updates state |
//! | `shutdown` | ends endless calls when the process stops |
//! | `http1` | forwards HTTP/1: health, metrics, JSON gateway |
//! | `http1_pool` | kept-alive HTTP/1 connections |
//! | `upgraded` | WebSockets |

mod body;
mod error;
mod http1;
mod http1_pool;
mod opening;
mod range_stream;
mod send;
mod shutdown;
mod side_effects;
mod upgraded;

use std::sync::Arc;

use etcd_wire::grpc::{Method, metadata::grpc_content_type};
use http::{Request, request::Parts};
use hyper::body::Incoming;
use rangecache_edge::limits::{ClientAccount, Deadline, Gate};
use rangecache_mirror::Mirrors;
use rangecache_upstream::{LimitCovers, MessageLimit, Outgoing};
use tokio_util::sync::CancellationToken;

use super::response::{CallResult, status_response};
use opening::Opening;

pub(super) use body::ResponseReader;
pub(super) use error::{SendError, outcome_of, status_of};
pub(super) use http1::{forward_http1, forward_http1_body};
pub(super) use http1_pool::Http1Pool;
pub(super) use send::{Forward, RequestBody, UpstreamResponse};
pub(super) use shutdown::StopSignal;
pub(super) use upgraded::Upgrade;

/// Forwards a gRPC call that is not a read. Compact, AuthEnable, AuthDisable and Authenticate also update state, unless
/// `is_grpc_call` is false: etcd's gRPC server then refuses the request (not a POST, or a path with a query).
pub(super) async fn forward_call(
    forward: &Forward,
    mirrors: &Mirrors,
    request: Request<Incoming>,
    method: Method,
    is_grpc_call: bool,
    (account, deadline): (&Arc<ClientAccount>, Deadline),
) -> CallResult {
    if is_grpc_call && let Some(effect) = method.side_effect() {
        return side_effects::forward_with_effect(forward, mirrors, request, method, effect).await;
    }
    let (parts, body) = request.into_parts();
    let body = Outgoing::incoming(body);
    if !method.is_endless() {
        return forward.forward_incoming(parts, body, method, account).await;
    }
    forward_endless(forward, parts, body, method, (account, deadline)).await
}

/// Forwards a call that may last until its client ends it.
pub(super) async fn forward_endless(
    forward: &Forward,
    parts: Parts,
    body: Outgoing,
    method: Method,
    (account, deadline): (&Arc<ClientAccount>, Deadline),
) -> CallResult {
    let content_type = grpc_content_type(&parts.headers);
    // An endless call may be without a message for as long as it likes, but not in mid-message.
    let body = body.limited(MessageLimit {
        timeout: forward.request_timeout,
        covers: LimitCovers::BegunMessages,
        late: CancellationToken::new(),
    });
    shutdown::end_at_stop(&forward.drain, content_type.clone(), async |call_ended| {
        let body = body.until(call_ended);
        if method != Method::Watch {
            return forward
                .forward(parts, RequestBody::Once(body), method, account)
                .await;
        }
        let opening = Opening::new(Gate {
            slots: &forward.small,
            account,
            deadline,
        });
        let body = RequestBody::Once(body.gated(opening.slot()));
        opening
            .run(Box::pin(forward.forward(parts, body, method, account)))
            .await
            .unwrap_or_else(|cause| Ok(status_response(&status_of(cause), content_type)))
    })
    .await
}
