//! **answer**: selects the entries of a response at the proven revision, or at the revision that the request names.

use etcd_store::cache::{
    AtError, Dialect, RangeQuery, ResponseHeader, Selected, Selecting, Selection, Tree, begin_select,
};
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::outcome::{Failure, Read};
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_edge::limits::Gate;
use rangecache_mirror::lineage::{ClusterState, HistoryId};
use rangecache_mirror::view::{Mirror, ViewAtError};
use rangecache_upstream::Version;

use super::scan::{STEP_ENTRIES, ScannedEntries, scan_in_turns};

/// Response from memory, whatever its wire format. Throughout the read path the other result is the [`Reason`] for which
/// etcd has to respond.
pub(super) enum MemoryAnswer {
    /// The selected entries, and what keeps those that were scanned for.
    Entries(ResponseHeader, Selection, Outcome, Option<Box<ScannedEntries>>),
    /// The status that etcd would return.
    Refusal(Status, Outcome),
}

impl MemoryAnswer {
    /// A refusal as etcd's.
    pub(super) fn refusal(status: Status) -> MemoryAnswer {
        MemoryAnswer::Refusal(status, Outcome::Hit(Read::Refused))
    }

    /// The refusal of a request that is not valid.
    pub(super) fn invalid(error: &dyn std::error::Error) -> MemoryAnswer {
        MemoryAnswer::refusal(Status::InvalidArgument(error.to_string()))
    }

    /// The end of a read at its client's deadline.
    pub(super) fn deadline_exceeded() -> MemoryAnswer {
        MemoryAnswer::Refusal(Status::DeadlineExceeded, Outcome::Failed(Failure::Deadline))
    }
}

/// Header that was proven for one read, and where its entries are.
pub(super) struct ProvenRead<'a> {
    pub(super) mirror: &'a Mirror,
    /// Keys at the header's revision. Not used by a read at a past revision, whose keys the mirror's history has.
    pub(super) newest: Tree,
    /// The history in which the header was proven.
    pub(super) history: HistoryId,
    /// Header of the response. At the time of the proof etcd was at or below its revision.
    pub(super) header: ResponseHeader,
    /// Whether the read waited for the mirror to catch up.
    pub(super) waited: bool,
    pub(super) basis: Basis,
}

/// Basis on which the answer is permitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Basis {
    /// The proof that the read needs.
    Proof,
    /// An earlier check, within the bounds that the caller set.
    Bounds,
    /// None: no member of etcd answers, and the mirror may be out of service.
    Stale,
}

/// Selects the entries that `query` requests. `version` is the lowest version among the endpoints, whose
/// dialect the response follows. `gate` bounds the scan of a filtered or sorted read.
///
/// # Errors
/// Reason for which etcd has to respond.
pub(super) async fn answer(
    query: &RangeQuery,
    proven: ProvenRead<'_>,
    version: Version,
    cluster_state: &ClusterState,
    gate: Gate<'_>,
) -> Result<MemoryAnswer, Reason> {
    let ProvenRead {
        mirror,
        newest,
        history,
        header,
        waited,
        basis,
    } = proven;
    let outcome = if waited { Outcome::Waited } else { Outcome::Hit };
    if query.revision > header.revision {
        return Ok(MemoryAnswer::Refusal(
            Status::FutureRevision,
            outcome(Read::Refused),
        ));
    }
    let (tree, read) = if query.revision > 0 {
        let tree = match basis {
            Basis::Proof | Basis::Bounds => mirror.view_at(query.revision),
            Basis::Stale => mirror.last_view_at(query.revision),
        };
        match tree {
            Ok(tree) => (tree, Read::Pinned),
            Err(ViewAtError::Unavailable(AtError::Compacted { .. })) => {
                return Ok(MemoryAnswer::Refusal(Status::Compacted, outcome(Read::Refused)));
            }
            Err(ViewAtError::Unavailable(AtError::Future { .. })) => return Err(Reason::NotFresh),
            Err(ViewAtError::Unavailable(AtError::Gone { .. })) => return Err(Reason::HistoryGone),
            Err(ViewAtError::OutOfService(reason)) => return Err(reason),
        }
    } else if query.serializable {
        (newest, Read::Serializable)
    } else {
        (newest, Read::Linearizable)
    };
    let read = match basis {
        Basis::Proof => read,
        Basis::Bounds => Read::Bounded,
        Basis::Stale => Read::Stale,
    };
    let dialect = Dialect::of_version(version.major, version.minor);
    let (selected, scanned) = match begin_select(&tree, query, &dialect) {
        Selecting::Done(selected) => (selected, None),
        Selecting::Scan(scan) if scan.entries() <= STEP_ENTRIES => (scan.run(), None),
        Selecting::Scan(scan) => {
            let view = mirror.hold_view(query.revision > 0);
            // Boxed, so that the future of a read without a scan stays small.
            match Box::pin(scan_in_turns(scan, view, gate)).await {
                Ok((selected, scanned)) => (selected, Some(Box::new(scanned))),
                Err(not_scanned) => {
                    let (status, outcome) = not_scanned.refusal()?;
                    return Ok(MemoryAnswer::Refusal(status, outcome));
                }
            }
        }
    };
    let selection = match selected {
        Selected::Answer(selection) => selection,
        Selected::TiesAreEtcds => return Err(Reason::SortTies),
        Selected::PackedValues => return Err(Reason::PackedValues),
        Selected::ValuesNotHeld => return Err(Reason::ValuesNotHeld),
    };
    // Recorded before the response is sent: no later response of this process may be older (I11). The entries were
    // selected before: if the history is still the same, they are of it, too.
    if !cluster_state.record_served(history, header.revision) {
        return Err(Reason::HistoryReplaced);
    }
    Ok(MemoryAnswer::Entries(header, selection, outcome(read), scanned))
}
