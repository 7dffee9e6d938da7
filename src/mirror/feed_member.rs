//! The member that feeds a mirror: its cluster, its history and its version.

use std::sync::Arc;

use super::cluster_state::Before;
use super::continuity::current_revision;
use super::feed_end::FeedEnd;
use super::mirrors::Mirrors;
use super::state::{Anchor, Mirror};
use crate::etcdserverpb::ResponseHeader;
use crate::upstream::{Connection, Version};

/// Attempts at a status of the feed's own member.
const STATUS_ATTEMPTS: u32 = 8;

/// Checks the member that is to feed the mirror, and has responded with the header `created`: it has reached the
/// mirror's revision, and its raft log is that of the history known `before`. Returns its version, if that is known:
/// several members may be behind one URL, and a balancer may send each call to another one.
///
/// # Errors
/// [`FeedEnd::Lost`] if the member cannot be used, [`FeedEnd::StaleEpoch`] if its history is another one.
pub(super) async fn check_member(
    mirrors: &Mirrors,
    before: &Before,
    mirror: &Mirror,
    anchor: &Anchor,
    connection: &Arc<Connection>,
    created: ResponseHeader,
) -> Result<Option<Version>, FeedEnd> {
    let revision = current_revision(connection, mirror).await?;
    let mut status = connection.member_status().await?;
    for cluster_id in [connection.cluster_id(), Some(created.cluster_id)] {
        if mirrors.upstream.is_left_out(cluster_id) {
            return Err(FeedEnd::Lost("the watch's member is of another cluster".into()));
        }
    }
    // Read linearizably, so a lower revision is no lag.
    let is_same_cluster = before.note_cluster(created.cluster_id);
    if !is_same_cluster || revision < anchor.revision || !before.log_continues(revision, status.raft_index) {
        return Err(another_history(mirrors, before, revision));
    }
    for _ in 0..STATUS_ATTEMPTS {
        if status.header.as_ref().map(|header| header.member_id) == Some(created.member_id) {
            return Ok(status.version.parse().ok());
        }
        status = connection.member_status().await?;
    }
    Ok(None)
}

/// Drops every mirror, because a feed is of another history; `revision` is one of that, 0 if none is known.
pub(super) fn another_history(mirrors: &Mirrors, before: &Before, revision: i64) -> FeedEnd {
    mirrors.replace_history(
        before,
        revision,
        "the history behind the watch is not the mirror's",
    );
    FeedEnd::StaleEpoch
}
