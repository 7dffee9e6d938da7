//! The member that feeds a mirror: its cluster, its history and its version.

use std::sync::Arc;

use super::end::FeedEnd;
use crate::etcdserverpb::ResponseHeader;
use crate::mirror::history::{Before, Position};
use crate::mirror::mirrors::Mirrors;
use crate::mirror::view::Mirror;
use crate::upstream::{Connection, Version};

/// Checks the member that is to feed the mirror, and has responded with the header `created`: the history behind the
/// connection is the one known `before`, which has reached the mirror's revision. Returns the member's version, if that is
/// known: several members may be behind one URL, and a balancer may send each call to another one.
///
/// # Errors
/// [`FeedEnd::Lost`] if the member cannot be used, [`FeedEnd::StaleEpoch`] if its history is another one.
pub(super) async fn check_member(
    mirrors: &Mirrors,
    before: &Before,
    mirror: &Mirror,
    connection: &Arc<Connection>,
    created: ResponseHeader,
) -> Result<Option<Version>, FeedEnd> {
    let position = Position::read(connection, mirror.scope.key(), before).await?;
    for cluster_id in [connection.cluster_id(), Some(created.cluster_id)] {
        if mirrors.upstream.is_left_out(cluster_id) {
            return Err(FeedEnd::Lost("the watch's member is of another cluster".into()));
        }
    }
    if !before.note_cluster(created.cluster_id) || !position.continues(before) {
        return Err(another_history(mirrors, before, position.header.revision));
    }
    let status = if position.header.member_id == created.member_id {
        Some(position.status)
    } else {
        connection.status_of(created.member_id).await?
    };
    Ok(status.and_then(|status| status.version.parse().ok()))
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
