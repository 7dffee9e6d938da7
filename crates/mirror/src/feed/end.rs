//! Reasons for which a feed ends.

use crate::load::LoadCause;
use crate::view::StaleEpoch;

/// etcd's message to a watch with `hasleader` on a member without a leader.
const NO_LEADER: &str = "etcdserver: no leader";

/// End of a feed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FeedEnd {
    /// Connection, stream or member lost: the next feed resumes where this one was.
    #[error("{0}")]
    Lost(String),
    /// The watch's member has no leader; otherwise like [`FeedEnd::Lost`].
    #[error("{NO_LEADER}")]
    NoLeader,
    /// The contents cannot be resumed and have to be loaded again.
    #[error("{1}")]
    Reload(LoadCause, String),
    /// The mirror has outgrown its budget.
    #[error("the mirror takes more memory than --cache-max-bytes allows")]
    OverBudget,
    /// The epoch ended: history was replaced, or the contents were dropped.
    #[error("history was replaced")]
    StaleEpoch,
}

impl From<StaleEpoch> for FeedEnd {
    fn from(_: StaleEpoch) -> Self {
        FeedEnd::StaleEpoch
    }
}

impl From<tonic::Status> for FeedEnd {
    fn from(status: tonic::Status) -> Self {
        if status.message() == NO_LEADER {
            return FeedEnd::NoLeader;
        }
        FeedEnd::Lost(format!("{} ({:?})", status.message(), status.code()))
    }
}
