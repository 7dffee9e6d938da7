//! The member that feeds a mirror: its cluster, its history and its version, and the reasons for which its feed ends.

use std::sync::Arc;

use etcd_wire::etcdserverpb::ResponseHeader;
use rangecache_upstream::{Connection, Lineage, Upstream, gates};

use crate::lineage::{Before, Position};
use crate::view::{Epoch, Mirror, StaleEpoch};
use crate::{load::LoadCause, set::MirrorSet};

/// A mirror, and the connection to the member that feeds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Feeding<'a> {
    /// Every mirror: their memory together, and what drops them.
    pub(crate) set: &'a MirrorSet,
    /// The other members.
    pub(crate) upstream: &'a Upstream,
    /// The mirror to feed.
    pub(crate) mirror: &'a Mirror,
    /// Once it has ended, the feed changes nothing.
    pub(crate) epoch: Epoch,
    /// Dedicated to the feed, except for comparisons.
    pub(crate) connection: &'a Arc<Connection>,
}

/// Abilities of the member that feeds a mirror.
#[derive(Clone, Copy, Debug)]
pub(super) struct FeedMember {
    /// Whether its progress notifications can be trusted. Where raft logs cannot be compared they can: a rangecache in the place of etcd
    /// proves nothing in front of one whose notifications cannot be trusted.
    pub(super) has_true_progress: bool,
    /// Whether a watch that begins at its compaction revision may lack deletes.
    pub(super) may_lack_deletes: bool,
}

impl Feeding<'_> {
    /// Checks the member that is to feed the mirror, and has responded with the header `created`: the history behind the
    /// connection is the one known `before`, which has reached the mirror's revision. Returns what the member can do: several
    /// members may be behind one URL, and a balancer may send each call to another one.
    ///
    /// # Errors
    /// [`FeedEnd::Lost`] if the member cannot be used, [`FeedEnd::StaleEpoch`] if its history is another one.
    pub(super) async fn check_member(
        &self,
        before: &Before,
        created: ResponseHeader,
    ) -> Result<FeedMember, FeedEnd> {
        let position = Position::read(self.connection, self.mirror.scope.key(), before).await?;
        for cluster_id in [self.connection.cluster_id(), Some(created.cluster_id)] {
            if self.upstream.is_left_out(cluster_id) {
                return Err(FeedEnd::Lost("the watch's member is of another cluster".into()));
            }
        }
        if !before.note_cluster(created.cluster_id) || !position.continues(before) {
            return Err(self.another_history(before, position.header.revision));
        }
        let has_log = position.raft_index.is_some();
        let version = if position.header.member_id == created.member_id {
            position.version
        } else if has_log {
            let status = self.connection.status_of(created.member_id).await?;
            status.and_then(|status| status.version.parse().ok())
        } else {
            None
        };
        Ok(FeedMember {
            has_true_progress: !has_log
                || version.is_some_and(|version| gates::PROGRESS_NOTIFICATIONS.is_open(version)),
            may_lack_deletes: version.is_none_or(|version| !gates::DELETES_AT_COMPACTION.is_open(version)),
        })
    }

    /// Records that the mirror's contents were found in `lineage`; `None` if it is not known in which.
    pub(super) fn note_lineage(&self, lineage: Option<Lineage>) -> Result<(), StaleEpoch> {
        lineage.map_or(Ok(()), |lineage| self.mirror.note_lineage(self.epoch, lineage))
    }

    /// Drops every mirror, because the feed is of another history; `revision` is one of that, 0 if none is known.
    pub(super) fn another_history(&self, before: &Before, revision: i64) -> FeedEnd {
        self.set.replace_history(
            before,
            revision,
            "the history behind the watch is not the mirror's",
        );
        FeedEnd::StaleEpoch
    }
}

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
