//! [`Load`]: what a load needs, and how it begins.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::error::LoadError;
use crate::lineage::{Before, Position};
use crate::set::MirrorSet;
use crate::view::Mirror;
use etcd_store::cache::{ResponseHeader, TreeBuilder};
use rangecache_base::net::Url;
use rangecache_base::telemetry::Telemetry;
use rangecache_upstream::{Connection, ReceiveWindow, Upstream};

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
