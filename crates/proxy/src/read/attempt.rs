//! **prove**: one attempt to answer a read from memory. It waits for the proof that the plan requires and for the mirror,
//! and ends with the answer, or with the reason for which etcd has to respond.

use etcd_store::cache::{RangeQuery, ResponseHeader};
use etcd_wire::grpc::{CallMetadata, Status};
use http::HeaderMap;
use rangecache_base::telemetry::Reason;
use rangecache_mirror::freshness::{Proof, Unproven};
use rangecache_mirror::lineage::{Auth, HistoryId};
use rangecache_mirror::view::Mirror;
use rangecache_upstream::Version;
use tokio::time::Instant;

use super::answer::{Basis, MemoryAnswer, ProvenRead, answer};
use crate::{call::CallRecord, handles::Proxy};

/// Request of a read, whatever its wire format.
pub(crate) struct ReadRequest {
    pub(super) query: RangeQuery,
    /// Metadata of the call, from its headers.
    pub(super) metadata: CallMetadata,
    /// Headers of the gRPC call. They carry the caller's credentials to etcd.
    pub(super) headers: HeaderMap,
}

/// Attempt to answer a read from `mirror`.
pub(super) struct ReadAttempt<'a> {
    pub(super) proxy: &'a Proxy,
    pub(super) request: &'a ReadRequest,
    /// The mirror that holds the range.
    pub(super) mirror: &'a Mirror,
    /// Lowest version among the endpoints when the read was planned.
    pub(super) version: Version,
    /// The history in which the read was planned.
    pub(super) history: HistoryId,
    /// Arrival of the read plus `--freshness-timeout`.
    pub(super) latest: Instant,
    pub(super) record: &'a mut CallRecord,
}

impl<'a> ReadAttempt<'a> {
    /// The end of the read's waits.
    pub(super) fn deadline(&self) -> Instant {
        self.record.deadline().at_most(self.latest)
    }

    /// Answers a read of the newest state, which a quorum check proves.
    ///
    /// # Errors
    /// Reason for which there is no proof or no answer.
    pub(super) async fn answer_checked(&mut self) -> Result<MemoryAnswer, Reason> {
        match check(self.proxy, self.record, self.latest, 0).await {
            Ok(Proof { header, history, .. }) => {
                self.answer_at_or_above(history, header.revision, Basis::Proof)
                    .await
            }
            Err(unproven) => answer_unproven(unproven),
        }
    }

    /// Answers a read at a past revision. Its header is that of its check: a later one might be from after a compaction
    /// that etcd has acknowledged meanwhile.
    ///
    /// # Errors
    /// Reason for which there is no proof or no answer.
    pub(super) async fn answer_checked_past(&mut self) -> Result<MemoryAnswer, Reason> {
        let revision = self.request.query.revision;
        let proof = match check(self.proxy, self.record, self.latest, revision).await {
            Ok(proof) => proof,
            Err(unproven) => return answer_unproven(unproven),
        };
        // Checked after the proof, as in `answer_at_or_above`.
        if self.proxy.mirrors.cluster_state.auth() != Auth::Off {
            return Err(Reason::Auth);
        }
        self.answer_past(proof).await
    }

    /// Waits until the mirror is at `revision` of `history` or later, and answers from it.
    ///
    /// # Errors
    /// Reason for which the mirror did not reach the revision in time, or has no answer.
    pub(super) async fn answer_at_or_above(
        &mut self,
        history: HistoryId,
        revision: i64,
        basis: Basis,
    ) -> Result<MemoryAnswer, Reason> {
        self.record.record_required_revision(revision);
        let reaching = self.mirror.reach(history, revision, self.deadline());
        let (view, waited) = reaching.await?;
        self.record.record_proven(self.mirror, view.revision, waited);
        tracing::debug!(at_or_above = revision, revision = view.revision, waited, "proven");
        let cluster_state = &self.proxy.mirrors.cluster_state;
        // Cluster, member and raft term are those of the last check. Auth is checked again here: it may have been
        // unknown when the read was planned, or switched on while the read waited.
        let identity = cluster_state
            .identity()
            .filter(|_| cluster_state.auth() == Auth::Off)
            .ok_or(Reason::Auth)?;
        let proven = ProvenRead {
            mirror: self.mirror,
            history,
            header: ResponseHeader {
                revision: view.revision,
                ..*identity
            },
            newest: view.tree,
            waited,
            basis,
        };
        self.select(proven).await
    }

    /// Answers a read at a past revision with the header of `proof`, for a caller who may read it.
    ///
    /// # Errors
    /// Reason for which the mirror did not reach the past revision in time, or has no answer.
    pub(super) async fn answer_past(&mut self, proof: Proof) -> Result<MemoryAnswer, Reason> {
        let asked = self.request.query.revision;
        // A revision in etcd's future is refused whatever the mirror has.
        let is_future = asked > proof.header.revision;
        let required = if is_future { 0 } else { asked };
        self.record.record_required_revision(required);
        let reaching = self.mirror.reach(proof.history, required, self.deadline());
        let (view, waited) = reaching.await?;
        let revision = proof.header.revision;
        self.record.record_proven(self.mirror, revision, waited);
        tracing::debug!(revision, waited, "proven at a past revision");
        let proven = ProvenRead {
            mirror: self.mirror,
            newest: view.tree,
            history: proof.history,
            header: proof.header,
            waited,
            basis: Basis::Proof,
        };
        self.select(proven).await
    }

    /// Selects the entries of the answer.
    ///
    /// # Errors
    /// Reason for which etcd has to respond.
    pub(super) async fn select(&self, proven: ProvenRead<'a>) -> Result<MemoryAnswer, Reason> {
        let cluster_state = &self.proxy.mirrors.cluster_state;
        let (account, deadline) = (self.record.bytes.account(), self.record.deadline());
        let gate = self.proxy.scan_gate(account, deadline);
        answer(&self.request.query, proven, self.version, cluster_state, gate).await
    }
}

/// Waits for a quorum check that is sent after this call, for the read of `record`, until `latest` at most, and returns its
/// proof for a read at `revision`, or of the newest state if that is 0.
///
/// # Errors
/// Reason for which the check failed; [`Reason::CheckFailed`] if the client's deadline expired first.
pub(super) async fn check(
    proxy: &Proxy,
    record: &mut CallRecord,
    latest: Instant,
    revision: i64,
) -> Result<Proof, Unproven> {
    // The check has its own timeout (`--freshness-timeout`), so a timer is needed only for an earlier deadline of
    // the client.
    let earliest = record.deadline().at_most(latest);
    let proving = proxy.mirrors.freshness.prove_at(revision, record.check_context());
    let proof = if earliest == latest {
        proving.await?
    } else {
        match Box::pin(tokio::time::timeout_at(earliest, proving)).await {
            Ok(proof) => proof?,
            Err(_) => return Err(Reason::CheckFailed.into()),
        }
    };
    record.record_proof(&proof);
    Ok(proof)
}

/// The result for a read without a proof: a compacted revision is refused, as by etcd.
///
/// # Errors
/// Reason for which there is no proof.
pub(super) fn answer_unproven(unproven: Unproven) -> Result<MemoryAnswer, Reason> {
    match unproven {
        Unproven::Compacted(_) => Ok(MemoryAnswer::refusal(Status::Compacted)),
        Unproven::For(reason) => Err(reason),
    }
}

#[cfg(test)]
mod tests {
    use rangecache_base::telemetry::{Outcome, outcome::Read};

    use super::*;

    #[test]
    fn compacted_revision_is_refused_from_memory_and_other_reads_without_proof_are_etcds() {
        let refused = answer_unproven(Unproven::Compacted(5));
        assert!(matches!(
            refused,
            Ok(MemoryAnswer::Refusal(
                Status::Compacted,
                Outcome::Hit(Read::Refused)
            ))
        ));
        let failed = answer_unproven(Unproven::For(Reason::CheckFailed));
        assert!(matches!(failed, Err(Reason::CheckFailed)));
    }
}
