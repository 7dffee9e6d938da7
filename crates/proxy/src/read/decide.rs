//! **plan** and **prove**: decides whether a read is answered from memory, and makes the attempt. The decision does not
//! depend on the wire format.

use etcd_wire::grpc::{CallMetadata, InvalidBounds, ReadBounds, Status};
use rangecache_base::telemetry::Reason;
use rangecache_mirror::{lineage::Auth, view::Mirror};

use super::answer::{Basis, MemoryAnswer};
use super::attempt::{ReadAttempt, ReadRequest};
use super::leaf::{answer_leaf_check, is_leaf_check};
use super::plan::{Plan, PlanInputs, RequiredProof, plan};
use super::{authorize::answer_authorized, stale::StaleRead};
use crate::call::CallRecord;
use crate::handles::{CallProtocol, Client, Proxy};

/// Answers the read from memory if it may be. It came by `protocol`.
///
/// # Errors
/// Reason for which etcd has to respond.
pub(super) async fn decide(
    client: &Client,
    protocol: CallProtocol,
    request: &ReadRequest,
    record: &mut CallRecord,
) -> Result<MemoryAnswer, Reason> {
    let proxy = &*client.proxy;
    let (query, metadata) = (&request.query, &request.metadata);
    record.record_query(query);
    if proxy.mirrors.forwards_all() {
        return Err(Reason::ForwardAll);
    }
    if metadata.bypass {
        return Err(Reason::Bypass);
    }
    let bounds = match metadata.bounds {
        Ok(bounds) if query.serializable && !bounds.is_empty() => Err(InvalidBounds::Serializable),
        bounds => bounds,
    };
    let bounds = match bounds {
        Ok(bounds) => bounds,
        Err(error) => return Ok(MemoryAnswer::invalid(&error)),
    };
    if record.deadline().has_expired() {
        return Ok(MemoryAnswer::deadline_exceeded());
    }
    let latest = record.begun() + proxy.mirrors.freshness_timeout();
    if is_leaf_check(request) {
        return Box::pin(answer_leaf_check(proxy, request, latest, record)).await;
    }
    let position = proxy.mirrors.position_holding(&query.interval());
    let mirror = position.and_then(|position| proxy.mirrors.at(position));
    // Read before the minimum served revision, which belongs to it.
    let history = proxy.mirrors.cluster_state.history();
    let planned = plan(query, &plan_inputs(client, protocol, mirror, metadata, bounds));
    record.begin_prove(position, mirror);
    if !matches!(planned, Plan::Refuse(_))
        && let Some(read) = StaleRead::of(proxy, request, &client.account)
        && let Some(stale) = Box::pin(read.answer()).await
    {
        return Ok(stale.recorded(record));
    }
    let answered = match planned {
        Plan::Refuse(error) => return Ok(MemoryAnswer::invalid(&error)),
        Plan::Forward(reason) => return Err(reason),
        Plan::Answer {
            mirror,
            version,
            proof,
        } => {
            tracing::debug!(?proof, "planned");
            let attempt = ReadAttempt {
                proxy,
                request,
                mirror,
                version,
                history,
                latest,
                record,
            };
            prove(attempt, proof).await?
        }
    };
    match answered {
        // etcd has never had the revision: the caller has it from another history.
        MemoryAnswer::Entries(header, ..) if bounds.min_revision.is_some_and(|min| min > header.revision) => {
            Ok(MemoryAnswer::refusal(Status::FutureRevision))
        }
        answered => Ok(answered),
    }
}

/// Answers the read of `attempt` once there is the proof that it requires.
///
/// # Errors
/// Reason for which there is no proof or no answer, unless the client's own deadline has expired.
async fn prove(mut attempt: ReadAttempt<'_>, required: RequiredProof) -> Result<MemoryAnswer, Reason> {
    let answered = match required {
        RequiredProof::QuorumCheck => attempt.answer_checked().await,
        // Boxed, so that the future of a read of the newest state stays small.
        RequiredProof::PastCheck => Box::pin(attempt.answer_checked_past()).await,
        RequiredProof::AtOrAbove(revision) => {
            attempt
                .answer_at_or_above(attempt.history, revision, Basis::Proof)
                .await
        }
        RequiredProof::WithinBounds(revision) => {
            attempt
                .answer_at_or_above(attempt.history, revision, Basis::Bounds)
                .await
        }
        // Boxed, so that the future of a read that needs no authorization stays small.
        RequiredProof::Authorization {
            serializable,
            min_revision,
        } => Box::pin(answer_authorized(&mut attempt, serializable, min_revision)).await,
    };
    answered.or_else(|reason| {
        attempt.record.record_not_proven(attempt.mirror, reason);
        if attempt.record.deadline().has_expired() {
            Ok(MemoryAnswer::deadline_exceeded())
        } else {
            Err(reason)
        }
    })
}

/// Whether the view of `mirror` is proven to lie within `bounds`, all of which must hold; `false` without any.
fn is_within(proxy: &Proxy, mirror: Option<&Mirror>, bounds: ReadBounds) -> bool {
    if bounds.is_empty() {
        return false;
    }
    let Some(Ok(view)) = mirror.map(Mirror::view) else {
        return false;
    };
    let is_young = |longest| proxy.mirrors.age(&view).is_some_and(|age| age <= longest);
    bounds.min_revision.is_none_or(|min| min <= view.revision) && bounds.max_staleness.is_none_or(is_young)
}

fn plan_inputs<'a>(
    client: &Client,
    protocol: CallProtocol,
    mirror: Option<&'a Mirror>,
    metadata: &CallMetadata,
    bounds: ReadBounds,
) -> PlanInputs<&'a Mirror> {
    let proxy = &*client.proxy;
    let cluster_state = &proxy.mirrors.cluster_state;
    let upstream = &proxy.forward.upstream;
    let auth = cluster_state.auth();
    PlanInputs {
        mirror: mirror.map(|mirror| (mirror, mirror.revision())),
        version: upstream.lowest_version(),
        auth,
        has_own_user: auth == Auth::On && upstream.credentials().are_valid(),
        is_identified: auth != Auth::On || client.identifies(metadata.has_credentials, protocol),
        min_served_revision: cluster_state.min_served_revision(),
        is_within_bounds: is_within(proxy, mirror, bounds),
        has_credentials: metadata.has_credentials,
        require_leader: metadata.require_leader,
    }
}
