//! **prove** for a caller whose permissions must be checked (I8): etcd authorizes the read, memory answers it.

use rangecache_base::telemetry::Reason;
use rangecache_mirror::{freshness::authorize::Authorization, view::ViewAtError};

use super::answer::{Basis, MemoryAnswer, ProvenRead};
use super::attempt::{ReadAttempt, answer_unproven};

/// Answers the read of `attempt` at the revision at which etcd authorizes it.
/// [`RequiredProof::Authorization`](super::plan::RequiredProof) describes the other parameters.
///
/// # Errors
/// Reason for which there is no proof. A refusal by etcd is such a reason, too: the read is forwarded, so that the
/// client gets etcd's own error.
pub(super) async fn answer_authorized(
    attempt: &mut ReadAttempt<'_>,
    serializable: bool,
    min_revision: i64,
) -> Result<MemoryAnswer, Reason> {
    let (request, mirror) = (attempt.request, attempt.mirror);
    // Bounds the authorization and the wait for the mirror together.
    let deadline = attempt.deadline();
    let authorization = Authorization {
        key: request.query.key.clone(),
        range_end: request.query.range_end.clone(),
        caller: Some(&request.headers),
        revision: if serializable { 0 } else { request.query.revision },
        trace: attempt.record.propagated_context(),
        serializable,
    };
    let freshness = &attempt.proxy.mirrors.freshness;
    let proof = match freshness.authorize(&authorization, deadline).await {
        Ok(proof) => proof,
        Err(unproven) => return answer_unproven(unproven),
    };
    if !serializable {
        attempt.record.record_proof(&proof);
    }
    if authorization.revision > 0 {
        return attempt.answer_past(proof).await;
    }
    let granted = proof.header;
    if granted.revision < min_revision {
        // The permission was checked against the local state of a member that lags behind a revision which clients
        // of this process have seen already (I11).
        return Err(Reason::NotFresh);
    }
    attempt.record.record_required_revision(granted.revision);
    let (view, waited) = mirror.reach(proof.history, granted.revision, deadline).await?;
    // The view must be at exactly the authorized revision: the caller may have lost its permission since, and later
    // writes may be ones that it must not read.
    let newest = if view.revision == granted.revision {
        view.tree
    } else {
        mirror.view_at(granted.revision).map_err(|error| match error {
            ViewAtError::OutOfService(reason) => reason,
            ViewAtError::Unavailable(_) => Reason::HistoryGone,
        })?
    };
    attempt.record.record_proven(mirror, granted.revision, waited);
    tracing::debug!(revision = granted.revision, waited, "authorized");
    let proven = ProvenRead {
        mirror,
        newest,
        history: proof.history,
        header: granted,
        waited,
        basis: Basis::Proof,
    };
    attempt.select(proven).await
}
