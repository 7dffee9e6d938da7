//! **answer**: selects the entries of a response at the proven revision, or at the revision that the request names.

use etcd_store::cache::{AtError, Dialect, RangeQuery, ResponseHeader, Selected, Selection, Tree, select};
use etcd_wire::grpc::Status;
use rangecache_base::telemetry::outcome::{Failure, Read};
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_mirror::history::{ClusterState, HistoryId};
use rangecache_mirror::view::{Mirror, ViewAtError};
use rangecache_upstream::Version;

/// Response from memory, whatever its wire format. Throughout the read path the other result is the [`Reason`] for which
/// etcd has to respond.
pub(super) enum MemoryAnswer {
    /// The selected entries.
    Entries(ResponseHeader, Selection, Outcome),
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
/// dialect the response follows.
///
/// # Errors
/// Reason for which etcd has to respond.
pub(super) fn answer(
    query: &RangeQuery,
    proven: ProvenRead<'_>,
    version: Version,
    cluster_state: &ClusterState,
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
    let selection = match select(&tree, query, &dialect) {
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
    Ok(MemoryAnswer::Entries(header, selection, outcome(read)))
}
