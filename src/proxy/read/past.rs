//! Reads at a past revision: the header is that of their check, the entries are the mirror's history.

use tokio::time::Instant;

use super::answer::{Basis, Decision, Proven, answer};
use super::plan::PlanInputs;
use crate::cache::RangeQuery;
use crate::grpc::Status;
use crate::mirror::freshness::{Proof, Unproven};
use crate::mirror::state::Mirror;
use crate::proxy::call::CallRecord;
use crate::proxy::handles::Proxy;
use crate::telemetry::outcome::Read;
use crate::telemetry::{Outcome, Reason};

/// The decision about a read without a proof: a compacted revision is refused, as by etcd.
///
/// # Errors
/// Reason for which there is no proof.
pub(super) fn unproven_result(unproven: Unproven) -> Result<Decision, Reason> {
    match unproven {
        Unproven::Compacted(_) => Ok(Decision::Error(Status::Compacted, Outcome::Hit(Read::Refused))),
        Unproven::For(reason) => Err(reason),
    }
}

/// Answers a read at a past revision with the header of `proof`, for a caller who may read it.
///
/// # Errors
/// Reason for which the mirror did not reach the past revision by `deadline`.
pub(super) async fn answer_proven_past(
    proxy: &Proxy,
    query: &RangeQuery,
    inputs: &PlanInputs,
    mirror: Option<&Mirror>,
    proof: Proof,
    deadline: Instant,
    record: &mut CallRecord,
) -> Result<Decision, Reason> {
    let mirror = mirror.ok_or(Reason::NotMirrored)?;
    // A revision in etcd's future is refused whatever the mirror has.
    let is_future = query.revision > proof.header.revision;
    let required = if is_future { 0 } else { query.revision };
    record.record_required_revision(required);
    let (view, waited) = mirror.reach(proof.history, required, deadline).await?;
    record.record_proven(mirror, proof.header.revision, waited);
    tracing::debug!(
        revision = proof.header.revision,
        waited,
        "proven at a past revision"
    );
    let proven = Proven {
        mirror,
        newest: view.tree,
        history: proof.history,
        header: proof.header,
        waited,
        basis: Basis::Proof,
    };
    let cluster_state = &proxy.mirrors.cluster_state;
    Ok(answer(query, proven, inputs.version, cluster_state))
}
