//! **prove** for a client whose rights must be proven, too (I8): etcd authorises the read, and memory answers it.

use http::HeaderMap;
use tokio::time::Instant;

use super::answer::{Decision, Proven, answer};
use super::plan::PlanInputs;
use crate::cache::{RangeQuery, ResponseHeader};
use crate::mirror::freshness::authorize::Authorization;
use crate::mirror::state::{Mirror, View, ViewAtError};
use crate::proxy::handles::Proxy;
use crate::proxy::recorder::Recorder;
use crate::telemetry::Reason;

/// A read that etcd must authorise.
pub(super) struct Authorized<'a> {
    pub(super) query: &'a RangeQuery,
    /// The client's headers.
    pub(super) metadata: &'a HeaderMap,
    pub(super) inputs: &'a PlanInputs,
    /// See [`Plan::Authorize`](super::plan::Plan::Authorize).
    pub(super) serializable: bool,
    pub(super) floor: i64,
    pub(super) deadline: Instant,
}

impl Authorized<'_> {
    /// Answers the read at the revision at which etcd authorises it.
    ///
    /// # Errors
    /// Why there is no proof. A refusal is one: the read is forwarded, and etcd words its error.
    pub(super) async fn decide(
        self,
        proxy: &Proxy,
        mirror: Option<&Mirror>,
        recorder: &mut Recorder<'_>,
    ) -> Result<Decision, Reason> {
        let mirror = mirror.ok_or(Reason::NotMirrored)?;
        let authorization = Authorization {
            key: self.query.key.clone(),
            range_end: self.query.range_end.clone(),
            caller: Some(self.metadata),
            trace: recorder.trace.as_ref().and_then(|trace| trace.prove_context()),
            serializable: self.serializable,
        };
        let granted = proxy
            .mirrors
            .freshness
            .authorize(&authorization, self.deadline)
            .await?
            .header;
        if granted.revision < self.floor {
            // A member that lags, and was allowed to use its own state.
            return Err(Reason::NotFresh);
        }
        recorder.record_required_revision(granted.revision);
        let (view, waited) = mirror.reach(granted.revision, self.deadline).await?;
        // Exactly that revision: the client may not be allowed to read what was written after the check.
        let view = if view.revision == granted.revision {
            view
        } else {
            let tree = mirror.view_at(granted.revision).map_err(|error| match error {
                ViewAtError::OutOfService(reason) => reason,
                ViewAtError::Unavailable(_) => Reason::HistoryGone,
            })?;
            View {
                tree,
                revision: granted.revision,
            }
        };
        recorder.record_proven(mirror, view.revision, waited);
        tracing::debug!(revision = view.revision, waited, "authorised");
        let header = ResponseHeader {
            revision: view.revision,
            ..granted
        };
        let proven = Proven {
            mirror,
            view,
            header,
            waited,
        };
        let cluster_state = &proxy.mirrors.cluster_state;
        Ok(answer(self.query, &proven, self.inputs.version, cluster_state))
    }
}
