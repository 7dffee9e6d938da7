//! **prove**: one attempt to answer a read from memory. It waits for the proof that the plan requires and for the mirror,
//! and ends with the answer, or with the reason for which etcd has to respond.

use std::sync::Arc;

use http::HeaderMap;
use tokio::time::Instant;

use super::answer::{Basis, MemoryAnswer, ProvenRead, answer};
use crate::proxy::call::CallRecord;
use crate::proxy::handles::Proxy;
use etcd_store::cache::{RangeQuery, ResponseHeader};
use etcd_wire::grpc::{CallMetadata, Status};
use rangecache_base::telemetry::Reason;
use rangecache_edge::limits::ClientAccount;
use rangecache_mirror::freshness::{Proof, Unproven};
use rangecache_mirror::lineage::{Auth, HistoryId};
use rangecache_mirror::view::Mirror;
use rangecache_upstream::Version;

/// Request of a read, whatever its wire format.
pub(in crate::proxy) struct ReadRequest {
    pub(super) query: RangeQuery,
    /// Metadata of the call, from its headers.
    pub(super) metadata: CallMetadata,
    /// Headers of the gRPC call. They carry the caller's credentials to etcd.
    pub(super) headers: HeaderMap,
}

/// Deadlines of one read's wait for its proof.
#[derive(Clone, Copy)]
pub(super) struct Deadlines {
    /// Deadline from the client's `grpc-timeout`, if it sent one.
    pub(super) client: Option<Instant>,
    /// Arrival of the read plus `--freshness-timeout`.
    pub(super) freshness: Instant,
}

impl Deadlines {
    /// Whether the client's own deadline has expired.
    pub(super) fn client_has_expired(self) -> bool {
        self.client.is_some_and(|client| client <= Instant::now())
    }

    pub(super) fn earliest(self) -> Instant {
        self.client
            .map_or(self.freshness, |client| client.min(self.freshness))
    }
}

/// Attempt to answer a read from `mirror`.
pub(super) struct ReadAttempt<'a> {
    pub(super) proxy: &'a Proxy,
    /// Account of the client's connection.
    pub(super) account: &'a Arc<ClientAccount>,
    pub(super) request: &'a ReadRequest,
    /// The mirror that holds the range.
    pub(super) mirror: &'a Mirror,
    /// Lowest version among the endpoints when the read was planned.
    pub(super) version: Version,
    /// The history in which the read was planned.
    pub(super) history: HistoryId,
    pub(super) deadlines: Deadlines,
    pub(super) record: &'a mut CallRecord,
}

impl<'a> ReadAttempt<'a> {
    /// Answers a read of the newest state, which a quorum check proves.
    ///
    /// # Errors
    /// Reason for which there is no proof or no answer.
    pub(super) async fn answer_checked(&mut self) -> Result<MemoryAnswer, Reason> {
        match check(self.proxy, self.record, self.deadlines, 0).await {
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
        let proof = match check(self.proxy, self.record, self.deadlines, revision).await {
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
        let reaching = self.mirror.reach(history, revision, self.deadlines.earliest());
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
        let reaching = self
            .mirror
            .reach(proof.history, required, self.deadlines.earliest());
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
        let gate = self.proxy.scan_gate(self.account, self.deadlines.client);
        answer(&self.request.query, proven, self.version, cluster_state, gate).await
    }
}

/// Waits for a quorum check that is sent after this call, for the read of `record`, and returns its proof for a read at
/// `revision`, or of the newest state if that is 0.
///
/// # Errors
/// Reason for which the check failed; [`Reason::CheckFailed`] if the client's deadline expired first.
pub(super) async fn check(
    proxy: &Proxy,
    record: &mut CallRecord,
    deadlines: Deadlines,
    revision: i64,
) -> Result<Proof, Unproven> {
    let link = record.check_context();
    let proving = proxy.mirrors.freshness.prove_at(revision, link);
    // The check has its own timeout (`--freshness-timeout`), so a timer is needed only for an earlier deadline of
    // the client.
    let earliest = deadlines.earliest();
    let proof = if earliest == deadlines.freshness {
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
    use std::time::Duration;

    use super::*;
    use rangecache_base::telemetry::Outcome;
    use rangecache_base::telemetry::outcome::Read;

    #[tokio::test(start_paused = true)]
    async fn read_waits_until_the_earlier_of_its_two_deadlines() {
        let freshness = Instant::now() + Duration::from_secs(2);
        let of = |client| Deadlines { client, freshness };
        let second = Duration::from_secs(1);
        assert_eq!(of(None).earliest(), freshness);
        assert_eq!(of(Some(freshness + second)).earliest(), freshness);
        assert_eq!(of(Some(freshness - second)).earliest(), freshness - second);
        let client = of(Some(freshness - second));
        assert!(!client.client_has_expired());
        tokio::time::advance(second).await;
        assert!(client.client_has_expired(), "at the deadline");
        tokio::time::advance(second).await;
        assert!(!of(None).client_has_expired(), "the client has set none");
    }

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
