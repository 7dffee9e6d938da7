//! The first create request of a stream, which decides whether memory or etcd serves the stream.

use super::receive::{Received, Requests};
use super::request::{Create, WatchRequest};
use super::session::First;
use super::start::CreateAnswer;
use super::stream::{Planned, StreamContext};
use crate::proxy::call::CallRecord;
use crate::proxy::handles::Client;
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::Reason;

/// Why a stream is not served from memory.
pub(super) enum Declined {
    /// etcd serves it.
    For(Reason),
    /// The stream ends with this status.
    With(Status),
}

impl From<Reason> for Declined {
    fn from(reason: Reason) -> Declined {
        Declined::For(reason)
    }
}

/// Reads the first request and starts its watcher. The request stays in `requests`.
pub(super) async fn first_create(
    stream: &StreamContext,
    requests: &mut Requests,
    record: &mut CallRecord,
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
    record.record_watcher(&create.key, &create.range_end, create.start_revision);
    let first = match stream.plan(&create, false) {
        Planned::Etcd(reason) => return Err(reason.into()),
        Planned::Refuse(refusal) => First::Refuse(refusal),
        Planned::Compacted(revision) => First::Compacted(revision),
        Planned::Start(place) => {
            let mut starting = stream.start(place, &create);
            let started = std::future::poll_fn(|cx| {
                requests.read_ahead(cx);
                starting.as_mut().poll(cx)
            });
            match started.await? {
                CreateAnswer::Started(started) => First::Started(started),
                CreateAnswer::Compacted(revision) => First::Compacted(revision),
            }
        }
    };
    Ok((create, first))
}

/// Counts and logs a stream that etcd serves from its beginning.
pub(super) fn record_forwarded(client: &Client, reason: Reason, record: &mut CallRecord) {
    record.record_watch_source("etcd", reason.as_str());
    let metrics = &client.proxy.telemetry.metrics;
    metrics.forwarding.calls.inc();
    metrics.watches.record_created("etcd", reason.as_str());
}
