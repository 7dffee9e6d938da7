//! Causes and failures of loads.

use std::time::Duration;

use tonic::Code;

use etcd_store::cache::MalformedKeyValue;
use rangecache_base::telemetry::Reason;
use rangecache_upstream::{ConnectError, is_compaction};

/// Timeout for the next page or chunk.
pub(super) const PIECE_TIMEOUT: Duration = Duration::from_secs(30);

/// Failure of a load.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LoadError {
    /// etcd refused, or the connection was lost.
    #[error("etcd: {} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
    /// No page or chunk arrived in time.
    #[error("etcd sent nothing for {PIECE_TIMEOUT:?}")]
    TimedOut,
    /// The keys exceed the budget.
    #[error("the keys take more than the {max_bytes} bytes that --cache-max-bytes allows")]
    OverBudget {
        /// Bytes that the other mirrors leave of `--cache-max-bytes`.
        max_bytes: u64,
        /// Mean memory of the keys that have arrived.
        mean_bytes: u64,
    },
    /// An invalid KeyValue.
    #[error("etcd sent a key-value that is not understood: {0}")]
    Malformed(#[from] MalformedKeyValue),
    /// A response without a header or revision.
    #[error("etcd's response carries no revision")]
    NoRevision,
    /// A server with etcd's interface that is not etcd.
    #[error("the server has no cluster id, so it is not etcd")]
    NotEtcd,
    /// No endpoint could be connected to.
    #[error(transparent)]
    Connect(#[from] ConnectError),
    /// The member is of another cluster than the one that most endpoints lead to.
    #[error("the connection leads to another cluster")]
    AnotherCluster,
    /// The history behind the new connection differs from that of the load.
    #[error("etcd's history was replaced meanwhile")]
    HistoryReplaced,
    /// Two reads at one revision contradict each other.
    #[error("etcd's responses at one revision contradict each other")]
    Inconsistent,
    /// The keys of a neighbour or an image are not of etcd's history.
    #[error("the keys of the neighbour or image are of another cluster or history")]
    Foreign,
    /// The mirror's keys from before differ so much that a load costs little more than the difference, or that this does not fit.
    #[error("too much has changed")]
    TooDifferent,
    /// The task that builds the tree panicked.
    #[error("building the tree failed")]
    Build,
}

impl LoadError {
    /// Whether the connection or the member failed, so that the load can continue on another.
    pub(super) fn is_broken(&self) -> bool {
        match self {
            LoadError::TimedOut | LoadError::Connect(_) | LoadError::AnotherCluster => true,
            LoadError::Status(status) => !matches!(
                status.code(),
                // OutOfRange: compacted, above all.
                Code::OutOfRange | Code::InvalidArgument | Code::PermissionDenied | Code::Unauthenticated
            ),
            _ => false,
        }
    }

    /// Whether etcd has compacted the revision of the load.
    pub(super) fn is_compaction(&self) -> bool {
        matches!(self, LoadError::Status(status) if is_compaction(status))
    }

    /// Whether a load of everything may do better than one of what has changed.
    pub(super) fn may_be_avoided(&self) -> bool {
        !self.is_broken() && !matches!(self, LoadError::HistoryReplaced | LoadError::NotEtcd)
    }
}

/// Cause of a load: the label `reason` of `rangecache_mirror_reloads_total`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LoadCause {
    /// The first load of the process.
    Start,
    /// The load before failed.
    LoadFailed,
    /// The mirror was over budget and may fit now.
    MayFit,
    /// etcd has compacted this revision, past that of the mirror.
    Compacted(i64),
    /// Continuity of etcd's history with the mirror's cannot be proven.
    Unproven,
    /// etcd sent an event that is not understood.
    Malformed,
    /// The contents were dropped, for this reason.
    Dropped(Reason),
}

impl LoadCause {
    /// Value of the label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            LoadCause::Start => "start",
            LoadCause::LoadFailed => "load_failed",
            LoadCause::MayFit => "may_fit",
            LoadCause::Compacted(_) => "compacted",
            LoadCause::Unproven => "unproven",
            LoadCause::Malformed => "malformed",
            LoadCause::Dropped(reason) => reason.as_str(),
        }
    }
}
