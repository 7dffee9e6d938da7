//! **prove** for a caller whose permissions must be checked (I8): etcd authorizes the read, memory answers it.

use http::HeaderMap;
use tokio::time::Instant;

use super::answer::{Basis, Decision, Proven, answer};
use super::past::{answer_proven_past, unproven_result};
use super::plan::PlanInputs;
use crate::cache::RangeQuery;
use crate::mirror::freshness::authorize::Authorization;
use crate::mirror::state::{Mirror, ViewAtError};
use crate::proxy::call::CallRecord;
use crate::proxy::handles::Proxy;
use crate::telemetry::Reason;

/// Read that etcd must authorize before it is answered from memory.
pub(super) struct AuthorizedRead<'a> {
    pub(super) query: &'a RangeQuery,
    /// Headers of the request. They carry the caller's credentials to etcd.
    pub(super) metadata: &'a HeaderMap,
    pub(super) inputs: &'a PlanInputs,
    /// Whether one member's local state suffices; see [`Plan::Authorize`](super::plan::Plan::Authorize).
    pub(super) serializable: bool,
    /// Lowest acceptable revision of the authorization; see [`Plan::Authorize`](super::plan::Plan::Authorize).
    pub(super) min_revision: i64,
    /// Bound on the authorization and on the wait for the mirror together.
    pub(super) deadline: Instant,
}

impl AuthorizedRead<'_> {
    /// Answers the read at the revision at which etcd authorizes it.
    ///
    /// # Errors
    /// Reason for which there is no proof. A refusal by etcd is such a reason, too: the read is forwarded, so that the
    /// client gets etcd's own error.
    pub(super) async fn decide(
        self,
        proxy: &Proxy,
        mirror: Option<&Mirror>,
        record: &mut CallRecord,
    ) -> Result<Decision, Reason> {
        let mirror = mirror.ok_or(Reason::NotMirrored)?;
        let authorization = Authorization {
            key: self.query.key.clone(),
            range_end: self.query.range_end.clone(),
            caller: Some(self.metadata),
            revision: if self.serializable { 0 } else { self.query.revision },
            trace: record.propagated_context(),
            serializable: self.serializable,
        };
        let authorized = proxy.mirrors.freshness.authorize(&authorization, self.deadline);
        let proof = match authorized.await {
            Ok(proof) => proof,
            Err(unproven) => return unproven_result(unproven),
        };
        if authorization.revision > 0 {
            let (query, inputs) = (self.query, self.inputs);
            return answer_proven_past(proxy, query, inputs, Some(mirror), proof, self.deadline, record)
                .await;
        }
        let granted = proof.header;
        if granted.revision < self.min_revision {
            // The permission was checked against the local state of a member that lags behind a revision which clients
            // of this process have seen already (I11).
            return Err(Reason::NotFresh);
        }
        record.record_required_revision(granted.revision);
        let (view, waited) = mirror
            .reach(proof.history, granted.revision, self.deadline)
            .await?;
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
        record.record_proven(mirror, granted.revision, waited);
        tracing::debug!(revision = granted.revision, waited, "authorized");
        let proven = Proven {
            mirror,
            newest,
            history: proof.history,
            header: granted,
            waited,
            basis: Basis::Proof,
        };
        let cluster_state = &proxy.mirrors.cluster_state;
        Ok(answer(self.query, proven, self.inputs.version, cluster_state))
    }
}
