//! Position of a member in etcd's history, by which the history behind a connection is compared with the known one (I4).

use std::sync::Arc;

use bytes::Bytes;

use super::known::Before;
use etcd_store::cache;
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_upstream::{
    Connection, Version, header_request, is_compaction, is_future_revision, proven_header, range,
};

/// Result of a linearizable read, and a later status of the very member that answered it.
#[derive(Debug)]
pub(crate) struct Position {
    /// Header of the read.
    pub(crate) header: cache::ResponseHeader,
    /// Raft index in the status; `None` where raft logs cannot be compared.
    pub(crate) raft_index: Option<u64>,
    /// Version in the status, if it is known.
    pub(crate) version: Option<Version>,
    /// Whether etcd still refuses what it is known to have compacted.
    holds_compaction: bool,
}

impl Position {
    /// Reads the position of a member behind `connection`, to be compared with the state `before`. `key` is one that
    /// rangecache's own user may read.
    ///
    /// # Errors
    /// etcd's status; `Unavailable` if only other members responded to the requests for a status.
    pub(crate) async fn read(
        connection: &Arc<Connection>,
        key: Bytes,
        before: &Before,
    ) -> Result<Position, tonic::Status> {
        let request = header_request(key);
        let header = proven_header(connection, request.clone()).await?;
        let position = Position::of(connection, header.into()).await?;
        // Revision 0 would be the newest one.
        let compacted = before.compacted().saturating_sub(1);
        let holds_compaction = if compacted > 0 {
            let request = RangeRequest {
                revision: compacted,
                ..request
            };
            match range(connection, request).await {
                Ok(_) => false,
                Err(status) if is_compaction(&status) => true,
                Err(status) if is_future_revision(&status) => false,
                Err(status) => return Err(status),
            }
        } else {
            true
        };
        Ok(Position {
            holds_compaction,
            ..position
        })
    }

    /// The position of the member that has answered a linearizable read with `header`. Another member's raft index proves
    /// nothing: a follower that is one entry behind looks like a replaced history.
    ///
    /// # Errors
    /// As [`Position::read`].
    pub(crate) async fn of(
        connection: &Arc<Connection>,
        header: cache::ResponseHeader,
    ) -> Result<Position, tonic::Status> {
        let status = connection.raft_status(header.member_id).await?;
        Ok(Position {
            header,
            raft_index: status.as_ref().map(|status| status.raft_index),
            version: status.and_then(|status| status.version.parse().ok()),
            holds_compaction: true,
        })
    }

    /// Whether the history behind the connection is that of `before`, the state before the position was read.
    pub(crate) fn continues(&self, before: &Before) -> bool {
        self.holds_compaction && before.continues_with(&self.header, self.raft_index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lineage::{ClusterState, Transition};

    const CLUSTER: u64 = 7;

    /// State at revision 100, whose raft index is 10 higher.
    fn before() -> Before {
        let state = ClusterState::default();
        let header = position(CLUSTER, 100, 110).header;
        let checked = state.after_check(&state.before_check(), header, Some(110));
        assert_eq!(checked, Transition::Continues);
        state.note_raft_index(&state.before_check(), 110, 100);
        state.before_check()
    }

    fn position(cluster_id: u64, revision: i64, raft_index: u64) -> Position {
        Position {
            header: cache::ResponseHeader {
                cluster_id,
                revision,
                ..cache::ResponseHeader::default()
            },
            raft_index: Some(raft_index),
            version: None,
            holds_compaction: true,
        }
    }

    #[test]
    fn history_continues_in_the_same_cluster_at_no_lower_revision_with_its_raft_log_and_compaction() {
        let before = before();
        for (position, expected) in [
            (position(CLUSTER, 100, 110), true),
            (position(CLUSTER, 130, 145), true),
            (position(CLUSTER, 99, 120), false),
            (position(CLUSTER, 130, 139), false),
            (position(CLUSTER + 1, 130, 145), false),
            (
                Position {
                    holds_compaction: false,
                    ..position(CLUSTER, 130, 145)
                },
                false,
            ),
        ] {
            assert_eq!(position.continues(&before), expected, "{position:?}");
        }
    }
}
