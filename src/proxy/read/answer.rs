//! **answer**: what the entries at the proven revision, or at the revision asked for, say.

use crate::cache::{AtError, Dialect, RangeQuery, ResponseHeader, Selected, Selection, Tree, select};
use crate::grpc::Status;
use crate::mirror::cluster_state::ClusterState;
use crate::mirror::state::{Mirror, View, ViewAtError};
use crate::telemetry::outcome::Read;
use crate::telemetry::{Outcome, Reason};
use crate::upstream::Version;

/// How a Range or a RangeStream is completed.
pub(super) enum Decision {
    /// From memory, with these entries.
    Answer(ResponseHeader, Selection, Outcome),
    /// With an error, in etcd's words.
    Error(Status, Outcome),
    /// By etcd.
    Forward(Reason),
}

/// A view of a mirror that was proven to be fresh enough for a read.
pub(super) struct Proven<'a> {
    pub(super) mirror: &'a Mirror,
    pub(super) view: View,
    /// For the response.
    pub(super) header: ResponseHeader,
    /// Whether the mirror had to catch up.
    pub(super) waited: bool,
}

/// Selects the entries that `query` asks for. `version` is the lowest of etcd's endpoints.
pub(super) fn answer(
    query: &RangeQuery,
    proven: &Proven<'_>,
    version: Option<Version>,
    cluster_state: &ClusterState,
) -> Decision {
    let Proven {
        mirror,
        view,
        header,
        waited,
    } = proven;
    let outcome = |read: Read| {
        if *waited {
            Outcome::Waited(read)
        } else {
            Outcome::Hit(read)
        }
    };
    if query.revision > view.revision {
        // The view is at or above the proven revision, so the revision is in etcd's future, too.
        return Decision::Error(Status::FutureRevision, outcome(Read::Refused));
    }
    let at: Tree;
    let (tree, read) = if query.revision > 0 {
        at = match mirror.view_at(query.revision) {
            Ok(tree) => tree,
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
        };
        (&at, Read::Pinned)
    } else if query.serializable {
        (&view.tree, Read::Serializable)
    } else {
        (&view.tree, Read::Linearizable)
    };
    let Some(version) = version else {
        return Decision::Forward(Reason::VersionUnknown);
    };
    let selection = match select(tree, query, &Dialect::of_version(version.major, version.minor)) {
        Selected::Answer(selection) => selection,
        Selected::TiesAreEtcds => return Decision::Forward(Reason::SortTies),
    };
    cluster_state.record_served(header.revision);
    Decision::Answer(*header, selection, outcome(read))
}
