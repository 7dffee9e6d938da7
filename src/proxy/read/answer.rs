//! **answer**: selects the entries of a response at the proven revision, or at the revision that the request names.

use crate::cache::{AtError, Dialect, RangeQuery, ResponseHeader, Selected, Selection, Tree, select};
use crate::grpc::Status;
use crate::mirror::cluster_state::ClusterState;
use crate::mirror::state::{Mirror, ViewAtError};
use crate::telemetry::outcome::Read;
use crate::telemetry::{Outcome, Reason};
use crate::upstream::Version;

/// Result of **plan**, **prove** and **answer** for a Range or RangeStream.
pub(super) enum Decision {
    /// Responds from memory with the selected entries.
    Answer(ResponseHeader, Selection, Outcome),
    /// Responds with the status that etcd would return.
    Error(Status, Outcome),
    /// Gets the response from etcd.
    Forward(Reason),
}

/// Response from memory.
pub(super) enum Answered {
    /// The selected entries.
    Entries(ResponseHeader, Selection, Outcome),
    /// The status that etcd would return.
    Error(Status, Outcome),
}

impl From<Answered> for Decision {
    fn from(answered: Answered) -> Decision {
        match answered {
            Answered::Entries(header, selection, outcome) => Decision::Answer(header, selection, outcome),
            Answered::Error(status, outcome) => Decision::Error(status, outcome),
        }
    }
}

impl Decision {
    /// The response from memory.
    ///
    /// # Errors
    /// Reason for which the response is got from etcd.
    pub(super) fn into_answered(self) -> Result<Answered, Reason> {
        match self {
            Decision::Answer(header, selection, outcome) => Ok(Answered::Entries(header, selection, outcome)),
            Decision::Error(status, outcome) => Ok(Answered::Error(status, outcome)),
            Decision::Forward(reason) => Err(reason),
        }
    }
}

/// Header that was proven for one read, and where its entries are.
pub(super) struct Proven<'a> {
    pub(super) mirror: &'a Mirror,
    /// Keys at the header's revision. Not used by a read at a past revision, whose keys the mirror's history has.
    pub(super) newest: Tree,
    /// Number of the history in which the header was proven.
    pub(super) history: u64,
    /// Header of the response. At the time of the proof etcd was at or below its revision.
    pub(super) header: ResponseHeader,
    /// Whether the read waited for the mirror to catch up.
    pub(super) waited: bool,
    pub(super) basis: Basis,
}

/// What permits the answer.
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
pub(super) fn answer(
    query: &RangeQuery,
    proven: Proven<'_>,
    version: Option<Version>,
    cluster_state: &ClusterState,
) -> Decision {
    let Proven {
        mirror,
        newest,
        history,
        header,
        waited,
        basis,
    } = proven;
    let outcome = |read: Read| {
        if waited {
            Outcome::Waited(read)
        } else {
            Outcome::Hit(read)
        }
    };
    if query.revision > header.revision {
        return Decision::Error(Status::FutureRevision, outcome(Read::Refused));
    }
    let (tree, read) = if query.revision > 0 {
        let tree = match basis {
            Basis::Proof | Basis::Bounds => mirror.view_at(query.revision),
            Basis::Stale => mirror.last_view_at(query.revision),
        };
        match tree {
            Ok(tree) => (tree, Read::Pinned),
            Err(ViewAtError::Unavailable(AtError::Compacted { .. })) => {
                return Decision::Error(Status::Compacted, outcome(Read::Refused));
            }
            Err(ViewAtError::Unavailable(AtError::Future { .. })) => {
                return Decision::Forward(Reason::NotFresh);
            }
            Err(ViewAtError::Unavailable(AtError::Gone { .. })) => {
                return Decision::Forward(Reason::HistoryGone);
            }
            Err(ViewAtError::OutOfService(reason)) => return Decision::Forward(reason),
        }
    } else if query.serializable {
        (newest, Read::Serializable)
    } else {
        (newest, Read::Linearizable)
    };
    let Some(version) = version else {
        return Decision::Forward(Reason::VersionUnknown);
    };
    let read = match basis {
        Basis::Proof => read,
        Basis::Bounds => Read::Bounded,
        Basis::Stale => Read::Stale,
    };
    let selection = match select(&tree, query, &Dialect::of_version(version.major, version.minor)) {
        Selected::Answer(selection) => selection,
        Selected::TiesAreEtcds => return Decision::Forward(Reason::SortTies),
    };
    // Recorded before the response is sent: no later response of this process may be older (I11). The entries were
    // selected before: if the history is still the same, they are of it, too.
    if !cluster_state.record_served(history, header.revision) {
        return Decision::Forward(Reason::HistoryReplaced);
    }
    Decision::Answer(header, selection, outcome(read))
}
