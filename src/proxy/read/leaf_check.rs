//! Quorum checks of other rangecaches whose endpoint this process is (its leaves). They join the checks that reads of this
//! process wait for, so that many leaves cost etcd no more checks than one: a check is answered by one that was sent after it
//! had arrived (I2 holds through both). No mirror has to hold the key, which no client writes.

use super::answer::MemoryAnswer;
use super::attempt::{Deadlines, ReadRequest, answer_unproven, check};
use crate::proxy::call::CallRecord;
use crate::proxy::handles::Proxy;
use etcd_store::cache::{RangeQuery, Selection};
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::outcome::Read;
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_mirror::history::Auth;
use rangecache_upstream::{gates, is_check_key};

/// Whether a read of another rangecache, with this `query`, is its quorum check.
pub(super) fn is_leaf_check(query: &RangeQuery) -> bool {
    is_check_key(&query.key) && query.range_end.is_empty() && !query.serializable
}

/// Answers the quorum check of a leaf by one of this process. Credentials do not matter: the leaf sends a token that was never
/// issued, so that etcd refuses the check once auth is on.
///
/// # Errors
/// Reason for which etcd has to respond; the leaf then has no proof.
pub(super) async fn answer_leaf_check(
    proxy: &Proxy,
    request: &ReadRequest,
    deadlines: Deadlines,
    record: &mut CallRecord,
) -> Result<MemoryAnswer, Reason> {
    let (query, cluster_state) = (&request.query, &proxy.mirrors.cluster_state);
    let version = proxy.forward.upstream.lowest_version();
    // The leaf trusts progress notifications of what is proven to it.
    if !gates::PROGRESS_NOTIFICATIONS.is_open(version.ok_or(Reason::VersionUnknown)?) {
        return Err(Reason::VersionGate);
    }
    if cluster_state.auth() == Auth::On {
        return Err(Reason::Auth);
    }
    let checked = if request.metadata.is_probe && query.revision <= 0 {
        let proof = proxy.mirrors.freshness.prove_with_others().await;
        // That the leaf lets it wait is no latency.
        record.measure_from_now();
        proof
            .inspect(|proof| record.record_proof(proof))
            .map_err(Into::into)
    } else {
        check(proxy, record, deadlines, query.revision.max(0)).await
    };
    let proof = match checked {
        Ok(proof) => proof,
        Err(unproven) => return answer_unproven(unproven),
    };
    // As for every read: auth may have been switched on while the check was awaited.
    if cluster_state.auth() != Auth::Off {
        return Err(Reason::Auth);
    }
    if query.revision > proof.header.revision {
        return Ok(MemoryAnswer::refusal(Status::FutureRevision));
    }
    if !cluster_state.record_served(proof.history, proof.header.revision) {
        return Err(Reason::HistoryReplaced);
    }
    let read = if query.revision > 0 {
        Read::Pinned
    } else {
        Read::Linearizable
    };
    let nothing = Selection::of_page(Vec::new(), 0, false);
    Ok(MemoryAnswer::Entries(proof.header, nothing, Outcome::Hit(read)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn check_of_a_leaf_is_a_linearizable_read_of_the_check_key() {
        let check = RangeQuery {
            key: "rangecache/quorum-check".into(),
            ..RangeQuery::default()
        };
        assert!(is_leaf_check(&check));
        for change in [
            |query: &mut RangeQuery| query.key = "rangecache/quorum-check2".into(),
            |query: &mut RangeQuery| query.serializable = true,
            |query: &mut RangeQuery| query.range_end = "\0".into(),
        ] {
            let mut other = check.clone();
            change(&mut other);
            assert!(!is_leaf_check(&other), "{other:?}");
        }
    }
}
