//! Watch streams that are served from memory; all others are forwarded.
//!
//! | file | what it does |
//! |---|---|
//! | `json` | `/v3/watch` of the JSON gateway |
//! | `receive` | receives the client's messages |
//! | `request` | decodes them, allocates the ids of watchers |
//! | `first` | the first create request of a stream, which decides who serves it |
//! | `plan` | decides how one create request is answered; a pure function |
//! | `start` | proves the revision at which a watcher begins, and joins the hub |
//! | `refusal` | etcd's refusal of one create request |
//! | `stream` | one stream as far as it does not change, and plans of its creates |
//! | `stream_bytes` | what the stream holds, as counted against `--watch-max-bytes` |
//! | `session` | one stream: what it sends next |
//! | `session/creating` | watchers of a stream: created, refused, cancelled |
//! | `session/events` | events of a stream |
//! | `session/notify` | progress notifications of a stream |
//! | `watcher` | one watcher of a stream |
//! | `message` | encodes responses piece by piece |
//! | `progress` | progress notifications that are owed |
//! | `session/leaving` | the stream once etcd serves it |
//! | `etcd_stream` | the call to etcd that continues a stream |
//! | `relay` | which of etcd's responses reach the client; a pure state machine |
//! | `relay/returning` | how a relayed stream comes back to memory |
//! | `tap` | the beginnings of etcd's responses |
//! | `handover` | watchers that continue at the other source |

mod etcd_stream;
mod first;
#[cfg(any(test, fuzzing))]
pub(super) mod fuzzing;
mod handover;
mod json;
mod message;
mod plan;
mod progress;
mod receive;
mod refusal;
mod relay;
mod request;
mod session;
mod start;
mod stream;
mod stream_bytes;
mod tap;
mod watcher;

use std::sync::Arc;

use http::request::Parts;
use http::{HeaderMap, Request};
use hyper::body::Incoming;
use tokio::time::Instant;

use super::call::CallRecord;
use super::forward::forward_endless;
use super::handles::{Client, Protocol};
use super::response::{CallResult, ResponseBody, status_response};
use crate::grpc::{CallMetadata, Method};
use crate::telemetry::Reason;
use crate::telemetry::metrics::Source;
use first::{Declined, first_create, record_forwarded};
pub(super) use json::{may_serve_json, watch_json};
use receive::Requests;
use session::Session;
use stream::Stream;
use stream_bytes::StreamBytes;

/// The metadata of a Watch stream with these headers, if it may be served from memory, as far as that is known before its
/// first message.
pub(super) fn may_serve(client: &Client, headers: &HeaderMap) -> Option<CallMetadata> {
    client.proxy.watch_progress_interval?;
    CallMetadata::from_headers(headers).filter(|metadata| !metadata.bypass)
}

/// Serves a Watch stream. Its first message decides whether from memory: it is read before the response begins, so that
/// the stream can still be forwarded unchanged.
pub(super) async fn watch(
    client: &Arc<Client>,
    request: Request<Incoming>,
    metadata: CallMetadata,
    record: &mut CallRecord,
) -> CallResult {
    let proxy = &client.proxy;
    // Until memory serves the stream.
    record.set_source(Source::Etcd);
    let arrived = Instant::now();
    let (parts, body) = request.into_parts();
    let mut requests = Requests::new(body, proxy.request_timeout);
    let mut stream = Stream::new(
        client,
        &parts.headers,
        &metadata,
        Protocol::Grpc,
        record.create_spans(),
    );
    let content_type = metadata.content_type;
    let first = first_create(&stream, &mut requests, record).await;
    if let Err(Declined::For(reason)) = &first
        // A server that is not etcd has watcher ids of its own.
        && (!is_passing(*reason) || proxy.forward.upstream.is_emulation())
    {
        return forward(client, parts, requests, *reason, record).await;
    }
    let Ok(bytes) = StreamBytes::begin(&proxy.watch_budgets) else {
        return forward(client, parts, requests, Reason::OverBudget, record).await;
    };
    match first {
        Err(Declined::With(status)) => {
            record.set_source(Source::Refused);
            Ok(status_response(&status, content_type))
        }
        Ok((create, first)) => {
            record.record_watch_source("memory", "");
            let mut session = Session::new(stream, requests, bytes, arrived);
            session.begin(&create, first);
            Ok(ResponseBody::from_source(session).into_response(content_type))
        }
        Err(Declined::For(reason)) => {
            record_forwarded(client, reason, record);
            record.begin_forward(&mut stream.parts.headers);
            let mut session = Session::new(stream, requests, bytes, arrived);
            session.begin_at_etcd(reason);
            Ok(ResponseBody::from_source(session).into_response(content_type))
        }
    }
}

/// Forwards a stream that memory cannot serve, unchanged.
async fn forward(
    client: &Arc<Client>,
    mut parts: Parts,
    requests: Requests,
    reason: Reason,
    record: &mut CallRecord,
) -> CallResult {
    record_forwarded(client, reason, record);
    record.begin_forward(&mut parts.headers);
    let (forward, account) = (&client.proxy.forward, &client.account);
    let body = requests.into_outgoing();
    let open = client.proxy.telemetry.metrics.watches.open_etcd(reason.as_str());
    let forwarding = forward_endless(forward, parts, body, Method::Watch, account);
    let response = Box::pin(forwarding).await;
    response.map(|response| response.map(|body| body.holding(open)))
}

/// Whether memory may be able to serve a stream later that it cannot serve for this reason.
fn is_passing(reason: Reason) -> bool {
    matches!(
        reason,
        Reason::Loading
            | Reason::FeedLost
            | Reason::OverBudget
            | Reason::VersionUnknown
            | Reason::CheckFailed
            | Reason::NotFresh
            | Reason::HistoryGone
            | Reason::HistoryReplaced
            | Reason::Mismatch
            | Reason::Panicked
            | Reason::ForwardAll
    )
}
