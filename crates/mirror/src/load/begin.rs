//! [`Load`]: what a load needs, how it begins, and the causes and failures of loads.

use std::{sync::Arc, time::Duration};

use etcd_store::cache::{MalformedKeyValue, ResponseHeader, TreeBuilder};
use rangecache_base::net::Url;
use rangecache_base::telemetry::{Reason, Telemetry};
use rangecache_upstream::{ConnectError, Connection, ReceiveWindow, Upstream, is_compaction};
use tokio::time::Instant;
use tonic::Code;

use crate::lineage::{Before, Position};
use crate::{set::MirrorSet, view::Mirror};

/// Target size of a page in bytes: large enough that etcd's count of the whole range, which each page costs, is small
/// in comparison; small enough for two pages in memory.
pub(super) const PAGE_TARGET_BYTES: u64 = 8 << 20;
/// Consecutive connections without a new key after which a load fails.
pub(super) const MAX_RESUMES: u32 = 5;
/// Pause before a load continues on another connection.
pub(super) const RESUME_PAUSE: Duration = Duration::from_millis(100);
/// Timeout for connecting to any endpoint.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Load of one mirror.
#[derive(Debug)]
pub(crate) struct Load<'a> {
    /// Every mirror: their memory together, and what drops them.
    pub(crate) set: &'a MirrorSet,
    /// Connections.
    pub(crate) upstream: &'a Arc<Upstream>,
    /// Counts loads without RangeStream.
    pub(crate) telemetry: &'a Telemetry,
    /// Builder of the mirror's tree, without keys.
    pub(crate) builder: TreeBuilder,
    /// The mirror to load.
    pub(crate) mirror: &'a Mirror,
}

impl Load<'_> {
    /// A connection, preferably not to the endpoint `but`, the state before its first read, and the header of that: the
    /// load's revision.
    pub(crate) async fn begin(
        &self,
        but: Option<&Url>,
    ) -> Result<(Arc<Connection>, Before, ResponseHeader), LoadError> {
        let connection = self.connect(but).await?;
        let before = self.set.cluster_state.before_check();
        let raft_index = connection.member_status().await?.raft_index;
        let pinned = self.position(&connection, &before).await?;
        if pinned.cluster_id == 0 {
            return Err(LoadError::NotEtcd);
        }
        // A restore is detected from now on.
        self.set
            .cluster_state
            .note_raft_index(&before, raft_index, pinned.revision);
        Ok((connection, before, pinned))
    }

    pub(super) async fn connect(&self, but: Option<&Url>) -> Result<Arc<Connection>, LoadError> {
        let deadline = Instant::now() + CONNECT_TIMEOUT;
        let connecting = self.upstream.dedicated(ReceiveWindow::LOAD, but, deadline);
        Ok(connecting.await?)
    }

    /// Header of a linearizable read on `connection`, whose history is the one known `before`.
    pub(super) async fn position(
        &self,
        connection: &Arc<Connection>,
        before: &Before,
    ) -> Result<ResponseHeader, LoadError> {
        let position = Position::read(connection, self.mirror.scope.key(), before).await?;
        if self.upstream.is_left_out(connection.cluster_id()) {
            return Err(LoadError::AnotherCluster);
        }
        if position.header.revision <= 0 {
            return Err(LoadError::NoRevision);
        }
        if !position.continues(before) {
            return Err(self.another_history(before, position.header.revision));
        }
        Ok(position.header)
    }

    /// Drops every mirror, because a connection is of another history, at `revision`, than the one known
    /// `before`.
    pub(super) fn another_history(&self, before: &Before, revision: i64) -> LoadError {
        let explanation = "the history behind a connection is not the one in which a load began";
        self.set.replace_history(before, revision, explanation);
        LoadError::HistoryReplaced
    }
}

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
