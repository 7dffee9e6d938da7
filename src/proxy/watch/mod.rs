//! Watch streams that are served from memory; all others are forwarded.
//!
//! | file | what it does |
//! |---|---|
//! | `json` | `/v3/watch` of the JSON gateway |
//! | `receive` | receives the client's messages |
//! | `request` | decodes them, allocates the ids of watchers |
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

use super::access::AccessCall;
use super::forward::forward_endless;
use super::handles::Client;
use super::recorder;
use super::response::{CallResult, ResponseBody, status_response};
use super::spans::Trace;
use crate::grpc::metadata::grpc_content_type;
use crate::grpc::{CallMetadata, Method, Status};
use crate::telemetry::Reason;
pub(super) use json::{may_serve_json, watch_json};
use receive::{Received, Requests};
use request::{Create, WatchRequest};
use session::{First, Session};
use stream::{Planned, Stream};
use stream_bytes::StreamBytes;

/// Whether a Watch stream with these headers may be served from memory, as far as that is known before its first
/// message.
pub(super) fn may_serve(client: &Client, headers: &HeaderMap) -> bool {
    client.proxy.watch_progress_interval.is_some()
        && CallMetadata::from_headers(headers).is_some_and(|metadata| !metadata.bypass)
}

/// Serves a Watch stream. Its first message decides whether from memory: it is read before the response begins, so that
/// the stream can still be forwarded unchanged.
pub(super) async fn watch(
    client: &Arc<Client>,
    request: Request<Incoming>,
    mut access: Option<&mut AccessCall>,
) -> CallResult {
    let proxy = &client.proxy;
    let arrived = Instant::now();
    let mut trace = Trace::begin(&proxy.telemetry, Method::Watch, &request);
    let (parts, body) = request.into_parts();
    let mut requests = Requests::new(body, proxy.request_timeout);
    let content_type = grpc_content_type(&parts.headers);
    // `may_serve` has read the metadata.
    let Some(mut stream) = Stream::new(client, &parts, trace.as_deref()) else {
        return forward(client, parts, requests, Reason::Undecodable, (trace, access)).await;
    };
    let first = first_create(&stream, &mut requests, access.as_deref_mut()).await;
    if let Err(Declined::For(reason)) = &first
        && !is_passing(*reason)
    {
        return forward(client, parts, requests, *reason, (trace, access)).await;
    }
    let Ok(bytes) = StreamBytes::begin(&proxy.watch_budgets) else {
        return forward(client, parts, requests, Reason::OverBudget, (trace, access)).await;
    };
    let result = match first {
        Err(Declined::With(status)) => Ok(status_response(&status, content_type)),
        Ok((create, first)) => {
            if let Some(access) = access {
                access.record_labels(("memory", ""));
            }
            let mut session = Session::new(stream, requests, bytes, arrived);
            session.begin(&create, first);
            Ok(ResponseBody::from_source(session).into_response(content_type))
        }
        Err(Declined::For(reason)) => {
            record_forwarded(client, reason, access);
            if let Some(trace) = &mut trace {
                trace.begin_forward(&mut stream.parts.headers);
            }
            let mut session = Session::new(stream, requests, bytes, arrived);
            session.begin_at_etcd(reason);
            Ok(ResponseBody::from_source(session).into_response(content_type))
        }
    };
    recorder::with_trace(trace, result)
}

/// Forwards a stream that memory cannot serve, unchanged.
async fn forward(
    client: &Arc<Client>,
    mut parts: Parts,
    requests: Requests,
    reason: Reason,
    (mut trace, access): (Option<Box<Trace>>, Option<&mut AccessCall>),
) -> CallResult {
    record_forwarded(client, reason, access);
    if let Some(trace) = &mut trace {
        trace.begin_forward(&mut parts.headers);
    }
    let (forward, account) = (&client.proxy.forward, &client.account);
    let body = requests.into_outgoing();
    let open = client.proxy.telemetry.metrics.watches.open_etcd(reason.as_str());
    let forwarding = forward_endless(forward, parts, body, Method::Watch, account);
    let response = Box::pin(forwarding).await;
    let response = response.map(|response| response.map(|body| body.holding(open)));
    recorder::with_trace(trace, response)
}

fn record_forwarded(client: &Client, reason: Reason, access: Option<&mut AccessCall>) {
    if let Some(access) = access {
        access.record_labels(("etcd", reason.as_str()));
    }
    let metrics = &client.proxy.telemetry.metrics;
    metrics.forwarding.calls.inc();
    metrics.watches.record_created("etcd", reason.as_str());
}

/// Why a stream is not served from memory.
enum Declined {
    /// etcd serves it.
    For(Reason),
    /// It ends with this status.
    With(Status),
}

impl From<Reason> for Declined {
    fn from(reason: Reason) -> Declined {
        Declined::For(reason)
    }
}

/// Reads the first request and starts its watcher. The request stays in `requests`.
async fn first_create(
    stream: &Stream,
    requests: &mut Requests,
    access: Option<&mut AccessCall>,
) -> Result<(Create, First), Declined> {
    let proxy = &stream.client.proxy;
    let receiving = std::future::poll_fn(|cx| requests.poll_peek(cx));
    let received = proxy.forward.drain.run_until_cancelled(receiving).await;
    let create = match received {
        None => return Err(Declined::With(Status::StoppingReconnect)),
        Some(Received::Late) => return Err(Declined::With(Status::RequestTimeout)),
        Some(Received::Message(Ok(WatchRequest::Create(create)))) => create,
        Some(_) => return Err(Reason::Undecodable.into()),
    };
    if let Some(access) = access {
        access.record_watcher(&create.key, &create.range_end, create.start_revision);
    }
    // There is one unless no check has succeeded yet.
    if proxy.mirrors.cluster_state.identity().is_none() {
        return Err(Reason::CheckFailed.into());
    }
    let first = match stream.plan(&create, false) {
        Planned::Etcd(reason) => return Err(reason.into()),
        Planned::Refuse(refusal) => First::Refuse(refusal),
        Planned::Compacted(revision) => First::Compacted(revision),
        Planned::Start(place) => First::Started(stream.start(place, &create).await?),
    };
    Ok((create, first))
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
    )
}
