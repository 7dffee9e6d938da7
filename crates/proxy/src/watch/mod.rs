//! Watch streams that are served from memory; all others are forwarded.
//!
//! | file | what it does |
//! |---|---|
//! | `json` | `/v3/watch` of the JSON gateway |
//! | `receive` | receives the client's messages |
//! | `request` | decodes them, encodes those for etcd, allocates the ids of watchers |
//! | `plan` | decides how one create request is answered; a pure function |
//! | `start` | proves the revision at which a watcher begins, and joins the hub; etcd's refusal of one create request |
//! | `stream` | one stream as far as it does not change, and plans of its creates |
//! | `stream_bytes` | what the stream holds, as counted against `--watch-max-bytes` |
//! | `session` | the body of the response: polls the source that serves the stream |
//! | `downstream` | the client's side of a stream, which both sources serve |
//! | `memory`, `watchers` | the stream, and what it does while memory serves it: requests, events, progress |
//! | `message` | encodes responses piece by piece |
//! | `progress` | progress notifications that are owed |
//! | `etcd` | the stream while etcd serves it |
//! | `etcd_stream` | the call to etcd that continues a stream |
//! | `relay` | which of etcd's responses reach the client; a pure state machine |
//! | `tap` | the beginnings of etcd's responses |
//! | `returning` | attempts of a stream to return to memory |
//! | `handover` | the ways from one source to the other: the states of a stream |

mod downstream;
mod etcd;
mod etcd_stream;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub(super) mod fuzzing;
mod handover;
mod json;
mod memory;
mod message;
mod plan;
mod progress;
mod receive;
mod relay;
mod request;
mod returning;
mod session;
mod start;
mod stream;
mod stream_bytes;
mod tap;
#[cfg(test)]
mod testing;
mod watchers;

use std::sync::Arc;

use etcd_wire::grpc::{CallMetadata, Method, metadata::HeadFields};
use http::{HeaderMap, Request, request::Parts};
use hyper::body::Incoming;
use rangecache_base::telemetry::{Reason, metrics::Source};

use super::handles::{CallProtocol, Client};
use super::response::{CallResult, ResponseBody, status_response};
use super::{call::CallRecord, forward::forward_endless};
use memory::Session;
use plan::NotServed;
use receive::Requests;
use stream::{StreamContext, record_forwarded};
use stream_bytes::StreamBytes;

pub(super) use json::{may_serve_json, watch_json};

/// The metadata of a Watch stream with these `fields`, those of `headers`, if it may be served from memory, as far as that is known before its
/// first message.
pub(super) fn may_serve(client: &Client, fields: &HeadFields, headers: &HeaderMap) -> Option<CallMetadata> {
    client.proxy.watch_progress_interval?;
    CallMetadata::from_fields(fields, headers).filter(|metadata| !metadata.bypass)
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
    let (parts, body) = request.into_parts();
    let mut requests = Requests::new(body, proxy.request_timeout);
    let content_type = metadata.content_type.clone();
    let mut stream = StreamContext::new(
        client,
        &parts.headers,
        metadata,
        CallProtocol::Grpc,
        record.create_spans(),
    );
    let (create, answer) = stream.first_create(&mut requests, record).await;
    if let Err(NotServed::Etcd(reason)) = answer
        // A server that is not etcd has watcher ids of its own.
        && (!is_passing(reason) || proxy.forward.upstream.is_emulation())
    {
        return forward(client, parts, requests, reason, record).await;
    }
    let Ok(bytes) = StreamBytes::begin(&client.account) else {
        return forward(client, parts, requests, Reason::OverBudget, record).await;
    };
    match &answer {
        Err(NotServed::End(status)) => {
            record.set_source(Source::Refused);
            return Ok(status_response(status, content_type));
        }
        Err(NotServed::Etcd(reason)) => {
            record_forwarded(client, *reason, record);
            record.begin_forward(&mut stream.parts.headers);
        }
        _ => record.record_watch_source("memory", ""),
    }
    let session = Session::begin(stream, requests, bytes, record.deadline(), create, answer);
    Ok(ResponseBody::from_source(session).into_response(content_type))
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
    let forwarding = forward_endless(forward, parts, body, Method::Watch, (account, record.deadline()));
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
