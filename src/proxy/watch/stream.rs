//! A Watch stream as far as it does not change, and the plans of its create requests.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::HeaderMap;
use http::request::Parts;

use super::plan::{CreatePlan, CreatePlanInputs, Refusal, plan};
use super::request::Create;
use super::start::{CreateAnswer, start};
use crate::proxy::call::CreateSpans;
use crate::proxy::handles::{CallProtocol, Client};
use etcd_store::keyspace::figure_prefix;
use etcd_wire::grpc::fields::HeadFields;
use etcd_wire::grpc::head::{head_bytes, kept_head};
use etcd_wire::grpc::{CallMetadata, WATCH};
use rangecache_base::telemetry::Reason;
use rangecache_mirror::fan_out::Signal;
use rangecache_mirror::lineage::Auth;

/// A stream as far as it does not change.
#[derive(Debug)]
pub(super) struct StreamContext {
    pub(super) client: Arc<Client>,
    /// Wakes the stream.
    pub(super) signal: Arc<Signal>,
    /// Head of the client's request, as far as etcd gets it: for a call to etcd that continues the stream.
    pub(super) parts: Parts,
    pub(super) has_credentials: bool,
    by: CallProtocol,
    /// The client's `grpc-timeout`.
    pub(super) timeout: Option<Duration>,
    /// The client asked for a member that has a leader.
    pub(super) require_leader: bool,
    /// Another rangecache follows this one by the stream.
    pub(super) is_feed: bool,
    /// Spans of its create requests, if the stream is traced.
    pub(super) spans: Option<Box<CreateSpans>>,
}

/// Mirror from which memory can serve a watcher, and whether etcd has to authorize the caller.
#[derive(Clone, Copy, Debug)]
pub(super) struct ServingMirror {
    /// Position of the mirror in [`Mirrors::all`](rangecache_mirror::Mirrors::all).
    pub(super) mirror: usize,
    /// Whether etcd has to authorize the caller first (I8).
    pub(super) authorizes: bool,
}

/// Next step for a create request.
pub(super) enum Planned {
    Refuse(Refusal),
    Compacted(i64),
    /// The watcher is started from memory.
    Start(ServingMirror),
    Etcd(Reason),
}

impl StreamContext {
    /// The stream of a request with these `headers`, which came `by` the gateway or not, and which have this `metadata`.
    pub(super) fn new(
        client: &Arc<Client>,
        headers: &HeaderMap,
        metadata: &CallMetadata,
        by: CallProtocol,
        spans: Option<Box<CreateSpans>>,
    ) -> StreamContext {
        StreamContext {
            client: Arc::clone(client),
            parts: kept_head(WATCH, headers),
            signal: Arc::new(Signal::new(client.account.number())),
            has_credentials: metadata.has_credentials,
            by,
            require_leader: metadata.require_leader,
            is_feed: metadata.is_feed,
            timeout: metadata.timeout,
            spans,
        }
    }

    /// Plans the answer to `create`; `is_id_taken` says whether a watcher has the id that the client chose.
    pub(super) fn plan(&self, create: &Create, is_id_taken: bool) -> Planned {
        let mirrors = &self.client.proxy.mirrors;
        if mirrors.forwards_all() {
            return Planned::Etcd(Reason::ForwardAll);
        }
        let interval = create.interval();
        let position = mirrors.position_holding(&interval);
        let mirror = position.and_then(|position| mirrors.at(position));
        let (auth, upstream) = (mirrors.cluster_state.auth(), &self.client.proxy.forward.upstream);
        let inputs = CreatePlanInputs {
            is_id_taken,
            auth,
            has_own_user: auth == Auth::On && upstream.credentials().are_valid(),
            is_identified: auth != Auth::On || self.client.identifies(self.has_credentials, self.by),
            has_credentials: self.has_credentials,
            mirror_revision: mirror.map(|mirror| mirror.revision()),
            is_checked: mirrors.cluster_state.identity().is_some(),
            version: upstream.lowest_version(),
            compacted: mirrors.cluster_state.compacted(),
        };
        let start = |mirror, authorizes| Planned::Start(ServingMirror { mirror, authorizes });
        match (plan(create, &inputs), position) {
            (CreatePlan::Refuse(refusal), _) => Planned::Refuse(refusal),
            (CreatePlan::Compacted(_), Some(mirror)) => {
                match mirrors.reported_compaction(create.start_revision) {
                    Some(reported) => Planned::Compacted(reported),
                    // Only that it is compacted is known.
                    None => start(mirror, false),
                }
            }
            (CreatePlan::FromNow | CreatePlan::From(_), Some(mirror)) => start(mirror, false),
            (CreatePlan::Authorize, Some(mirror)) => start(mirror, true),
            (CreatePlan::Resume, Some(mirror)) => start(mirror, inputs.authorizes()),
            (CreatePlan::Etcd(reason), _) => Planned::Etcd(reason),
            // Not reached: the plan leaves what no mirror holds to etcd.
            (
                CreatePlan::FromNow
                | CreatePlan::From(_)
                | CreatePlan::Authorize
                | CreatePlan::Resume
                | CreatePlan::Compacted(_),
                None,
            ) => Planned::Etcd(Reason::NotMirrored),
        }
    }

    /// Memory of the head, in bytes.
    pub(super) fn head_bytes(&self) -> u64 {
        head_bytes(&self.parts.uri, &HeadFields::of(&self.parts.headers))
    }

    /// Whether etcd decides about the caller's rights.
    pub(super) fn needs_right(&self) -> bool {
        self.has_credentials || self.client.proxy.mirrors.cluster_state.auth() != Auth::Off
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
        match self.plan(&from_now, false) {
            Planned::Start(place) => {
                let mirror = self.client.proxy.mirrors.at(place.mirror);
                mirror?.revision().ok().map(|_| place)
            }
            Planned::Refuse(_) | Planned::Compacted(_) | Planned::Etcd(_) => None,
        }
    }

    /// Starts the watcher of `create` at `place`.
    pub(super) fn start(
        &self,
        place: ServingMirror,
        create: &Create,
    ) -> Pin<Box<dyn Future<Output = Result<CreateAnswer, Reason>> + Send>> {
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
                span.end(started.as_ref().err().copied());
            }
            started
        })
    }
}
