//! **prove** for a caller whose rights have to be proven, too (I8): etcd authorises it, and memory answers.

use http::HeaderMap;
use tokio::time::Instant;

use super::Proxy;
use super::plan::Facts;
use super::range::{Ended, answer};
use super::record::Record;
use crate::cache::{RangeQuery, ResponseHeader};
use crate::mirror::freshness::authorize::Authorization;
use crate::mirror::state::{Mirror, View};
use crate::telemetry::Reason;

/// A read that waits for etcd's word.
pub(super) struct Authorized<'a> {
    pub(super) query: &'a RangeQuery,
    /// As the caller sent it.
    pub(super) metadata: &'a HeaderMap,
    pub(super) facts: &'a Facts,
    /// See [`Plan::Authorize`](super::plan::Plan::Authorize).
    pub(super) serializable: bool,
    pub(super) floor: i64,
    pub(super) deadline: Instant,
}

impl Authorized<'_> {
    /// Ends the read. A refusal is an `Err`, too: the read is forwarded as it came, and etcd words its error.
    pub(super) async fn end(
        self,
        proxy: &Proxy,
        mirror: Option<&Mirror>,
        record: &mut Record<'_>,
    ) -> Result<Ended, Reason> {
        let mirror = mirror.ok_or(Reason::NotMirrored)?;
        let authorization = Authorization {
            key: self.query.key.clone(),
            range_end: self.query.range_end.clone(),
            caller: Some(self.metadata),
            trace: record.trace.as_ref().and_then(|trace| trace.prove()),
            serializable: self.serializable,
        };
        let granted = proxy
            .mirrors
            .freshness
            .authorize(&authorization, self.deadline)
            .await?
            .header;
        if granted.revision < self.floor {
            // A member that lags, asked for its own word.
            return Err(Reason::NotFresh);
        }
        record.checked(granted.revision);
        let (view, waited) = mirror.reach(granted.revision, self.deadline).await?;
        // Exactly there: what was written after etcd's word may not be this caller's to read.
        let view = if view.revision == granted.revision {
            view
        } else {
            let tree = mirror
                .view_at(granted.revision)?
                .map_err(|_| Reason::HistoryGone)?;
            View {
                tree,
                revision: granted.revision,
            }
        };
        record.proven(mirror, view.revision, waited);
        tracing::debug!(revision = view.revision, waited, "authorised");
        let header = ResponseHeader {
            revision: view.revision,
            ..granted
        };
        Ok(answer(
            self.query, mirror, &view, header, self.facts, waited, proxy,
        ))
    }
}
