//! A Watch stream as far as it does not change, and the plans of its create requests.

use std::sync::Arc;

use etcd_store::keyspace::figure_prefix;
use etcd_wire::grpc::metadata::{HeadFields, head_bytes, kept_head};
use etcd_wire::grpc::{CallMetadata, Status, WATCH};
use http::{HeaderMap, request::Parts};
use rangecache_base::telemetry::Reason;
use rangecache_mirror::{fan_out::Signal, lineage::Auth};

use super::plan::{CreatePlanInputs, NotServed, ServingMirror, plan};
use super::receive::{Received, Requests};
use super::request::{Create, WatchRequest};
use super::start::{Answer, Answering, refusal, start};
use crate::call::{CallRecord, CreateSpans};
use crate::handles::{CallProtocol, Client};

/// A stream as far as it does not change.
#[derive(Debug)]
pub(super) struct StreamContext {
    pub(super) client: Arc<Client>,
    /// Wakes the stream.
    pub(super) signal: Arc<Signal>,
    /// Head of the client's request, as far as etcd gets it: for a call to etcd that continues the stream.
    pub(super) parts: Parts,
    pub(super) metadata: CallMetadata,
    by: CallProtocol,
    /// Spans of its create requests, if the stream is traced.
    pub(super) spans: Option<Box<CreateSpans>>,
}

impl StreamContext {
    /// The stream of a request with these `headers`, which came `by` the gateway or not, and which have this `metadata`.
    pub(super) fn new(
        client: &Arc<Client>,
        headers: &HeaderMap,
        metadata: CallMetadata,
        by: CallProtocol,
        spans: Option<Box<CreateSpans>>,
    ) -> StreamContext {
        StreamContext {
            client: Arc::clone(client),
            parts: kept_head(WATCH, headers),
            signal: Arc::new(Signal::new(client.account.number())),
            metadata,
            by,
            spans,
        }
    }

    /// Plans the answer to `create`; `is_id_taken` says whether a watcher has the id that the client chose.
    pub(super) fn plan(&self, create: &Create, is_id_taken: bool) -> Result<ServingMirror, NotServed> {
        let mirrors = &self.client.proxy.mirrors;
        if mirrors.forwards_all() {
            return Err(Reason::ForwardAll.into());
        }
        let position = mirrors.position_holding(&create.interval());
        let mirror = position.and_then(|position| mirrors.at(position));
        let (auth, upstream) = (mirrors.cluster_state.auth(), &self.client.proxy.forward.upstream);
        let has_credentials = self.metadata.has_credentials;
        let inputs = CreatePlanInputs {
            is_id_taken,
            auth,
            has_own_user: auth == Auth::On && upstream.credentials().are_valid(),
            is_identified: auth != Auth::On || self.client.identifies(has_credentials, self.by),
            has_credentials,
            mirror: position.filter(|_| mirror.is_some()),
            out_of_service: mirror.and_then(|mirror| mirror.revision().err()),
            is_checked: mirrors.cluster_state.identity().is_some(),
            version: upstream.lowest_version(),
            compacted: mirrors.cluster_state.compacted(),
            reported_compaction: mirrors.reported_compaction(create.start_revision),
        };
        plan(create, &inputs)
    }

    /// Reads the first create request, which decides whether memory or etcd serves the stream, and starts its watcher. The request
    /// stays in `requests`. Without a create request the answer is one for the stream.
    pub(super) async fn first_create(
        &self,
        requests: &mut Requests,
        record: &mut CallRecord,
    ) -> (Create, Answer) {
        let drain = &self.client.proxy.forward.drain;
        let receiving = drain.run_until_cancelled(std::future::poll_fn(|cx| requests.poll_first(cx)));
        let not_served = match receiving.await {
            None => NotServed::End(Status::StoppingReconnect),
            Some(Received::Late) => NotServed::End(Status::RequestTimeout),
            Some(Received::Message(Ok(WatchRequest::Create(create)))) => {
                record.record_watcher(&create.key, &create.range_end, create.start_revision);
                let answer = match self.plan(&create, false) {
                    Err(not_served) => Err(not_served),
                    Ok(place) => {
                        let mut starting = self.start(place, &create);
                        std::future::poll_fn(|cx| {
                            requests.read_ahead(cx);
                            starting.as_mut().poll(cx)
                        })
                        .await
                    }
                };
                return (create, answer);
            }
            Some(_) => NotServed::Etcd(Reason::Undecodable),
        };
        (Create::default(), Err(not_served))
    }

    /// Memory of the head, in bytes.
    pub(super) fn head_bytes(&self) -> u64 {
        head_bytes(&self.parts.uri, &HeadFields::of(&self.parts.headers))
    }

    /// Whether etcd decides about the caller's rights.
    pub(super) fn needs_right(&self) -> bool {
        self.metadata.has_credentials || self.client.proxy.mirrors.cluster_state.auth() != Auth::Off
    }

    /// Metadata by which etcd authorizes the caller at `place`, if it has to.
    pub(super) fn caller(&self, place: ServingMirror) -> Option<HeaderMap> {
        place.authorizes.then(|| self.parts.headers.clone())
    }

    /// Place at which the watcher of `create` can be continued now; `None` if only etcd can.
    pub(super) fn place(&self, create: &Create) -> Option<ServingMirror> {
        let from_now = Create {
            start_revision: 0,
            watch_id: 0,
            ..create.clone()
        };
        let place = self.plan(&from_now, false).ok()?;
        let mirror = self.client.proxy.mirrors.at(place.mirror)?;
        mirror.revision().ok().map(|_| place)
    }

    /// Starts the watcher of `create` at `place`.
    pub(super) fn start(&self, place: ServingMirror, create: &Create) -> Answering {
        let (client, signal) = (Arc::clone(&self.client), Arc::clone(&self.signal));
        if let Some(prefix) = figure_prefix(&create.key) {
            client.proxy.telemetry.metrics.prefixes.record_watch(prefix);
        }
        let mirror = client.proxy.mirrors.at(place.mirror);
        let spans = self.spans.as_ref().zip(mirror);
        let mut span = spans.map(|(spans, mirror)| spans.begin(&mirror.name));
        let (create, caller) = (create.clone(), self.caller(place));
        Box::pin(async move {
            let check = span.as_mut().map(|span| &mut span.check);
            let started = start(client, signal, place.mirror, create, caller.as_ref(), check).await;
            if let Some(span) = span {
                span.end(match started {
                    Err(NotServed::Etcd(reason)) => Some(reason),
                    _ => None,
                });
            }
            started
        })
    }

    /// Lets etcd decide about `create`, which memory does not serve for `reason`.
    pub(super) fn ask_etcd(&self, create: &Create, reason: Reason) -> Answering {
        let (client, parts) = (Arc::clone(&self.client), self.parts.clone());
        let refusal = refusal(client, parts, create.clone(), reason);
        Box::pin(async move { Err(refusal.await) })
    }
}

/// Counts and logs a stream that etcd serves from its beginning.
pub(super) fn record_forwarded(client: &Client, reason: Reason, record: &mut CallRecord) {
    record.record_watch_source("etcd", reason.as_str());
    let metrics = &client.proxy.telemetry.metrics;
    metrics.forwarding.calls.inc();
    metrics.watches.record_created("etcd", reason.as_str());
}
