//! Watch streams that are served from memory; all others are forwarded.
//!
//! | file | what it does |
//! |---|---|
//! | `receive` | receives the client's messages |
//! | `request` | decodes them, allocates the ids of watchers |
//! | `plan` | decides how one create request is answered; a pure function |
//! | `start` | proves the revision at which a watcher begins, and joins the hub |
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
//! | `tap` | the beginnings of etcd's responses |
//! | `handover` | watchers that continue at the other source |

mod etcd_stream;
mod handover;
mod message;
mod plan;
mod progress;
mod receive;
mod relay;
mod request;
mod session;
mod start;
mod stream;
mod stream_bytes;
mod tap;
mod watcher;

use std::sync::Arc;
use std::sync::atomic::Ordering;

use http::request::Parts;
use http::{HeaderMap, Request};
use hyper::body::Incoming;
use tokio::time::Instant;

use super::forward::{StopSignal, forward_endless};
use super::handles::Client;
use super::recorder;
use super::response::{CallResult, ResponseBody, status_response};
use super::spans::Trace;
use crate::cache::ResponseHeader;
use crate::grpc::metadata::grpc_content_type;
use crate::grpc::{CallMetadata, Method, Status};
use crate::mirror::watch_hub::Signal;
use crate::telemetry::Reason;
use progress::Progress;
use receive::{Received, Requests};
use request::{Create, WatchRequest};
use session::Session;
use stream::{Planned, Stream};
use stream_bytes::StreamBytes;

/// Whether a Watch stream with these headers may be served from memory, as far as that is known before its first
/// message.
pub(super) fn may_serve(client: &Client, headers: &HeaderMap) -> bool {
    client.proxy.watch_progress_interval.is_some()
        && !client.forwards_watches.load(Ordering::Relaxed)
        && CallMetadata::from_headers(headers).is_some_and(|metadata| !metadata.bypass)
}

/// How the first create request of a stream is answered.
enum First {
    Refuse(plan::Refusal),
    Compacted(i64),
    Started(start::Started),
}

/// Serves a Watch stream. Its first message decides whether from memory: it is read before the response begins, so that
/// the stream can still be forwarded unchanged.
pub(super) async fn watch(client: &Arc<Client>, request: Request<Incoming>) -> CallResult {
    let proxy = &client.proxy;
    let arrived = Instant::now();
    let mut trace = Trace::begin(&proxy.telemetry, Method::Watch, &request);
    let (mut parts, body) = request.into_parts();
    let mut requests = Requests::new(body, proxy.request_timeout);
    let content_type = grpc_content_type(&parts.headers);
    let result = match first_create(client, &parts, &mut requests, trace.as_deref()).await {
        Ok((stream, create, first, bytes, identity)) => {
            requests.consume();
            let timeout = CallMetadata::from_headers(&parts.headers).and_then(|metadata| metadata.timeout);
            let interval = proxy.watch_progress_interval.unwrap_or_default();
            let mut session = Session::new(
                stream,
                requests,
                StopSignal::new(Method::Watch, &proxy.forward.drain),
                timeout.map(|timeout| arrived + timeout),
                Progress::new(interval),
                bytes,
                identity,
            );
            match first {
                First::Refuse(refusal) => session.refuse(refusal),
                First::Compacted(revision) => session.created_compacted(&create, revision),
                First::Started(started) => session.created(&create, started),
            }
            Ok(ResponseBody::from_source(session).into_response(content_type))
        }
        Err(Declined::For(reason)) => {
            let metrics = &proxy.telemetry.metrics;
            metrics.forwarding.calls.inc();
            metrics.watches.record_created("etcd", reason.as_str());
            if let Some(trace) = &mut trace {
                trace.begin_forward(&mut parts.headers);
            }
            let open = metrics.watches.open_etcd(reason.as_str());
            let body = requests.into_outgoing();
            let account = &client.account;
            let response = Box::pin(forward_endless(
                &proxy.forward,
                parts,
                body,
                Method::Watch,
                account,
            ))
            .await;
            response.map(|response| response.map(|body| body.holding(open)))
        }
        Err(Declined::With(status)) => Ok(status_response(&status, content_type)),
    };
    recorder::with_trace(trace, result)
}

/// Why a stream is not served from memory.
enum Declined {
    /// It is forwarded.
    For(Reason),
    /// It ends with this status.
    With(Status),
}

impl From<Reason> for Declined {
    fn from(reason: Reason) -> Declined {
        Declined::For(reason)
    }
}

/// Reads the first request, which stays in `requests`, and starts its watcher.
async fn first_create(
    client: &Arc<Client>,
    parts: &Parts,
    requests: &mut Requests,
    trace: Option<&Trace>,
) -> Result<(Stream, Create, First, StreamBytes, ResponseHeader), Declined> {
    let proxy = &client.proxy;
    let metadata = CallMetadata::from_headers(&parts.headers).ok_or(Reason::Undecodable)?;
    let receiving = std::future::poll_fn(|cx| requests.poll_peek(cx));
    let received = proxy.forward.drain.run_until_cancelled(receiving).await;
    let create = match received {
        None => return Err(Declined::With(Status::StoppingReconnect)),
        Some(Received::Late) => return Err(Declined::With(Status::RequestTimeout)),
        Some(Received::Message(Ok(WatchRequest::Create(create)))) => create,
        Some(_) => return Err(Reason::Undecodable.into()),
    };
    // There is one unless no check has succeeded yet.
    let identity = proxy.mirrors.cluster_state.identity();
    let identity = identity.ok_or(Reason::CheckFailed)?;
    let stream = Stream {
        client: Arc::clone(client),
        parts: parts.clone(),
        // A client is a connection, and its address is no other's while it is open.
        signal: Arc::new(Signal::new(Arc::as_ptr(client).addr())),
        has_credentials: metadata.has_credentials,
        require_leader: metadata.require_leader,
        spans: trace.map(Trace::creates),
    };
    let planned = stream.plan(&create, false);
    if let Planned::Etcd(reason) = planned {
        return Err(reason.into());
    }
    let metrics = &proxy.telemetry.metrics.watches;
    let bytes = StreamBytes::begin(&proxy.watch_bytes, metrics).map_err(|_| Reason::OverBudget)?;
    let first = match planned {
        Planned::Etcd(reason) => return Err(reason.into()),
        Planned::Refuse(refusal) => First::Refuse(refusal),
        Planned::Compacted(revision) => First::Compacted(revision),
        Planned::Start(position) => First::Started(stream.start(position, &create).await?),
    };
    Ok((stream, create, first, bytes, *identity))
}
