//! **plan** and **prove**: decides whether a read is answered from memory, and at which revision. The decision does not
//! depend on the wire format, so Range and RangeStream share it.

use http::HeaderMap;
use tokio::time::Instant;

use super::answer::{Basis, Decision, Proven, answer};
use super::authorize::AuthorizedRead;
use super::past::{answer_proven_past, unproven_result};
use super::plan::{Plan, PlanInputs, plan};
use super::stale::StaleRead;
use crate::cache::{RangeQuery, ResponseHeader};
use crate::grpc::{CallMetadata, InvalidBounds, ReadBounds, Status};
use crate::mirror::cluster_state::Auth;
use crate::mirror::freshness::{Proof, Unproven};
use crate::mirror::state::Mirror;
use crate::proxy::call::CallRecord;
use crate::proxy::handles::{Client, Protocol, Proxy};
use crate::telemetry::outcome::Read;
use crate::telemetry::{Outcome, Reason};

/// Deadlines of one read's wait for its proof.
#[derive(Clone, Copy)]
struct Deadlines {
    /// Deadline from the client's `grpc-timeout`, if it sent one.
    client: Option<Instant>,
    /// Arrival of the read plus `--freshness-timeout`.
    freshness: Instant,
}

impl Deadlines {
    fn earliest(self) -> Instant {
        self.client
            .map_or(self.freshness, |client| client.min(self.freshness))
    }
}

/// Revision that the mirror must reach, and what permits an answer there.
#[derive(Clone, Copy)]
struct Required {
    /// Number of the history that the revision belongs to.
    history: u64,
    revision: i64,
    basis: Basis,
}

impl Required {
    fn of(history: u64, revision: i64, basis: Basis) -> Required {
        Required {
            history,
            revision,
            basis,
        }
    }
}

/// Decides whether `query` gets a response from memory, an error, or etcd's response. `metadata` was parsed from
/// `headers`, which came `by` gRPC or in JSON.
pub(super) async fn decide(
    client: &Client,
    by: Protocol,
    query: &RangeQuery,
    metadata: &CallMetadata,
    headers: &HeaderMap,
    record: &mut CallRecord,
) -> Decision {
    let proxy = &*client.proxy;
    record.record_query(query);
    if proxy.mirrors.forwards_all() {
        return Decision::Forward(Reason::ForwardAll);
    }
    if metadata.bypass {
        return Decision::Forward(Reason::Bypass);
    }
    let bounds = match metadata.bounds {
        Ok(bounds) if query.serializable && !bounds.is_empty() => Err(InvalidBounds::Serializable),
        bounds => bounds,
    };
    let bounds = match bounds {
        Ok(bounds) => bounds,
        Err(error) => {
            let status = Status::InvalidArgument(error.to_string());
            return Decision::Error(status, Outcome::Hit(Read::Refused));
        }
    };
    let deadlines = Deadlines {
        client: record.deadline(metadata.timeout),
        freshness: record.begun() + proxy.freshness_timeout(),
    };
    if deadlines
        .client
        .is_some_and(|deadline| deadline <= Instant::now())
    {
        return Decision::Error(Status::DeadlineExceeded, Outcome::Cancelled(Reason::Deadline));
    }
    let position = proxy.mirrors.position_holding(&query.interval());
    let mirror = position.and_then(|position| proxy.mirrors.at(position));
    // Read before the minimum served revision, which belongs to it.
    let history = proxy.mirrors.cluster_state.history();
    let inputs = plan_inputs(client, by, mirror, metadata, bounds);
    let plan = plan(query, &inputs);
    tracing::debug!(?plan, "planned");
    record.begin_prove(position, mirror);
    if !matches!(plan, Plan::Refuse(_))
        && let Some(stale) = StaleRead::of(proxy, query, metadata).and_then(|read| read.answer())
    {
        return stale.recorded(record).into();
    }
    let decided = match plan {
        Plan::Refuse(error) => {
            let status = Status::InvalidArgument(error.to_string());
            return Decision::Error(status, Outcome::Hit(Read::Refused));
        }
        Plan::Forward(reason) => return Decision::Forward(reason),
        Plan::AtOrAbove(revision) => {
            let at = Required::of(history, revision, Basis::Proof);
            answer_at_or_above(proxy, query, &inputs, mirror, at, deadlines, record).await
        }
        Plan::WithinBounds(revision) => {
            let at = Required::of(history, revision, Basis::Bounds);
            answer_at_or_above(proxy, query, &inputs, mirror, at, deadlines, record).await
        }
        Plan::Prove => match quorum_check(proxy, 0, deadlines, record).await {
            Ok(proof) => {
                let at = Required::of(proof.history, proof.header.revision, Basis::Proof);
                answer_at_or_above(proxy, query, &inputs, mirror, at, deadlines, record).await
            }
            Err(unproven) => unproven_result(unproven),
        },
        // Boxed, so that the future of a read of the newest state stays small.
        Plan::ProvePast => Box::pin(answer_past(proxy, query, &inputs, mirror, deadlines, record)).await,
        Plan::Authorize {
            serializable,
            min_revision,
        } => {
            let read = AuthorizedRead {
                query,
                metadata: headers,
                inputs: &inputs,
                serializable,
                min_revision,
                deadline: deadlines.earliest(),
            };
            // Boxed, so that the future of a read that needs no authorization stays small.
            Box::pin(read.decide(proxy, mirror, record)).await
        }
    };
    match decided.unwrap_or_else(|reason| without_proof(reason, mirror, deadlines, record)) {
        // etcd has never had the revision: the caller has it from another history.
        Decision::Answer(header, ..) if bounds.min_revision.is_some_and(|min| min > header.revision) => {
            Decision::Error(Status::FutureRevision, Outcome::Hit(Read::Refused))
        }
        decision => decision,
    }
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

fn plan_inputs(
    client: &Client,
    by: Protocol,
    mirror: Option<&Mirror>,
    metadata: &CallMetadata,
    bounds: ReadBounds,
) -> PlanInputs {
    let proxy = &*client.proxy;
    let cluster_state = &proxy.mirrors.cluster_state;
    let upstream = &proxy.forward.upstream;
    let auth = cluster_state.auth();
    PlanInputs {
        mirror_revision: mirror.map(Mirror::revision),
        version: upstream.lowest_version(),
        auth,
        has_own_user: auth == Auth::On && upstream.credentials().are_valid(),
        is_identified: auth != Auth::On || client.identifies(metadata.has_credentials, by),
        min_served_revision: cluster_state.min_served_revision(),
        is_within_bounds: is_within(proxy, mirror, bounds),
        has_credentials: metadata.has_credentials,
        require_leader: metadata.require_leader,
    }
}

/// Waits for a quorum check that is sent after this call, and returns its proof for a read at `revision`, or of the
/// newest state if that is 0.
///
/// # Errors
/// Reason for which the check failed; [`Reason::CheckFailed`] if the client's deadline expired first.
async fn quorum_check(
    proxy: &Proxy,
    revision: i64,
    deadlines: Deadlines,
    record: &mut CallRecord,
) -> Result<Proof, Unproven> {
    let link = record.check_context();
    let proving = proxy.mirrors.freshness.prove_at(revision, link);
    // The check has its own timeout (`--freshness-timeout`), so a timer is needed only for an earlier deadline of the
    // client.
    let proof = if deadlines.earliest() < deadlines.freshness {
        match Box::pin(tokio::time::timeout_at(deadlines.earliest(), proving)).await {
            Ok(proof) => proof?,
            Err(_) => return Err(Reason::CheckFailed.into()),
        }
    } else {
        proving.await?
    };
    Ok(proof)
}

/// Answers a read at a past revision. Its header is that of its check: a later one might be from after a compaction
/// that etcd has acknowledged meanwhile.
///
/// # Errors
/// Reason for which there is no proof, or for which the mirror did not reach the past revision in time.
async fn answer_past(
    proxy: &Proxy,
    query: &RangeQuery,
    inputs: &PlanInputs,
    mirror: Option<&Mirror>,
    deadlines: Deadlines,
    record: &mut CallRecord,
) -> Result<Decision, Reason> {
    let proof = match quorum_check(proxy, query.revision, deadlines, record).await {
        Ok(proof) => proof,
        Err(unproven) => return unproven_result(unproven),
    };
    // Checked after the proof, as in `answer_at_or_above`.
    if proxy.mirrors.cluster_state.auth() != Auth::Off {
        return Ok(Decision::Forward(Reason::Auth));
    }
    answer_proven_past(proxy, query, inputs, mirror, proof, deadlines.earliest(), record).await
}

/// Waits until the mirror is at `revision` of `history` or later, and answers from it.
///
/// # Errors
/// Reason for which the mirror did not reach the revision in time.
async fn answer_at_or_above(
    proxy: &Proxy,
    query: &RangeQuery,
    inputs: &PlanInputs,
    mirror: Option<&Mirror>,
    required: Required,
    deadlines: Deadlines,
    record: &mut CallRecord,
) -> Result<Decision, Reason> {
    // Not reached: the plan forwards reads that no mirror holds.
    let Some(mirror) = mirror else {
        return Ok(Decision::Forward(Reason::NotMirrored));
    };
    let Required {
        history,
        revision,
        basis,
    } = required;
    record.record_required_revision(revision);
    let (view, waited) = mirror.reach(history, revision, deadlines.earliest()).await?;
    record.record_proven(mirror, view.revision, waited);
    tracing::debug!(at_or_above = revision, revision = view.revision, waited, "proven");
    let cluster_state = &proxy.mirrors.cluster_state;
    // Cluster, member and raft term are those of the last check. Auth is checked again here: it may have been unknown
    // when the read was planned, or switched on while the read waited.
    let Some(identity) = cluster_state
        .identity()
        .filter(|_| cluster_state.auth() == Auth::Off)
    else {
        return Ok(Decision::Forward(Reason::Auth));
    };
    let header = ResponseHeader {
        revision: view.revision,
        ..*identity
    };
    let proven = Proven {
        mirror,
        newest: view.tree,
        history,
        header,
        waited,
        basis,
    };
    Ok(answer(query, proven, inputs.version, cluster_state))
}

/// Returns `DeadlineExceeded` if the client's own deadline has expired; otherwise the read is forwarded.
fn without_proof(
    reason: Reason,
    mirror: Option<&Mirror>,
    deadlines: Deadlines,
    record: &mut CallRecord,
) -> Decision {
    record.record_not_proven(mirror, reason);
    match deadlines.client {
        Some(client) if Instant::now() >= client => {
            Decision::Error(Status::DeadlineExceeded, Outcome::Cancelled(Reason::Deadline))
        }
        _ => Decision::Forward(reason),
    }
}
