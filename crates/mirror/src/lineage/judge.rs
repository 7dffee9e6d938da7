//! The judge: what shows whether the history behind a connection is the known one (I4), and what that misses. `docs/architecture.md`
//! has the same table. Where a member is in etcd's history ([`Position`]) is read here as well.
//!
//! | evidence | asked for | another history if | shows nothing | misses |
//! |---|---|---|---|---|
//! | header of a linearizable read ([`Before::continues_with`]) | by each check, load and feed | its cluster is another one, or its revision is lower than what was known before it | | a replacement whose revisions have caught up |
//! | raft log of the member that has answered it ([`Position`]) | at the first check on a connection, after a lower raft term, by each load and feed | its index is less far ahead of the revision | without raft, and behind a hub | a data directory that was put back, `--force-new-cluster` |
//! | last compaction ([`Position`]) | by each load and feed | etcd has the revisions that it had compacted | before the first one | a replacement without a compaction |
//! | a client's write ([`Before::write_continues`]) | by each write | its revision was known before it was sent | | all before the next write |
//! | connection that has loaded the mirror ([`Evidence::Loader`]) | by the first feed behind a load | its revision is lower than the mirror's | it does not respond, or a hub behind it has had another history | nothing: the process behind it is the same |
//! | newest events, up to 64, delivered again ([`Evidence::Events`]) | by each other feed, and at the first check on a connection | one is missing, is another one, or is one more | compacted, more than [`MAX_REVISIONS_BACK`] back, or none since the load; up to a delete that etcd may have compacted | what was loaded: after few events its keys are compared, too |
//! | newest 64 keys at one revision, and the number of all ([`Evidence::Keys`]) | where the events show nothing, or too little | they differ | compacted, or the last event was a delete | older keys, if they are as many |
//!
//! What the last three miss, verification finds. Where all of them show nothing, the mirror is loaded again. Behind a hub, whose number
//! names a history ([`Lineage`](rangecache_upstream::Lineage)), events and keys decide once for each number.

use std::{iter::once, sync::Arc};

use bytes::Bytes;
use etcd_store::cache::{self, Change, ResponseHeader, StoredEntry, Tree};
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_upstream::{
    Connection, Version, header_request, is_compaction, is_future_revision, proven_header, range,
};

use super::known::{Before, gap};

/// Revisions between an event and the mirror's revision up to which a feed resumes at that event: etcd reads every one of
/// them, and lets writes wait meanwhile (about a microsecond each).
pub(super) const MAX_REVISIONS_BACK: i64 = 10_000;

/// Events that prove as much as events can. Whole revisions are kept alone, so that there may be fewer than the bound.
const ENOUGH_EVENTS: usize = 32;

/// Result of comparing a feed with the mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// The feed continues the mirror's history.
    Continues,
    /// The feed is of another history, for the reason given.
    Another(&'static str),
    /// A delete of this revision is not delivered again; the events before it are the same.
    LacksDelete(i64),
}

impl Verdict {
    /// Explanation of how the feed's events differ; empty if they do not.
    pub(crate) fn explanation(self) -> &'static str {
        match self {
            Verdict::Continues => "",
            Verdict::Another(explanation) => explanation,
            Verdict::LacksDelete(_) => "it lacks one of the mirror's newest events, a delete",
        }
    }
}

/// Evidence that a feed continues the mirror's history.
#[derive(Clone, Debug)]
pub(crate) enum Evidence {
    /// The connection that has just loaded the mirror still responds.
    Loader(Arc<Connection>),
    /// The newest events, from this revision on, are delivered again.
    Events(i64),
    /// etcd's newest keys at the mirror's revision are the mirror's.
    Keys,
}

/// State of a mirror that a resumed feed is compared with.
#[derive(Debug)]
pub(crate) struct Anchor {
    /// Revision of the mirror.
    pub(crate) revision: i64,
    /// A key that the last event changed; `None` if there was none since the load.
    pub(crate) key: Option<Bytes>,
    /// Revision of the last event that changed anything; `None` if there was none since the load.
    pub(crate) last_event: Option<i64>,
    /// The newest events, of whole revisions, oldest first; few or none if there were few since the load.
    pub(crate) recent: Vec<Change>,
    /// Whether there were more events since the load than `recent` keeps.
    pub(crate) recent_is_full: bool,
    /// Keys at `revision`.
    pub(crate) tree: Tree,
    /// The oldest state that memory has, and its revision, if `recent` has every event since.
    pub(crate) base: Option<(Tree, i64)>,
}

impl Anchor {
    /// The state after a load.
    pub(crate) fn loaded(tree: Tree, revision: i64) -> Anchor {
        Anchor {
            revision,
            key: None,
            last_event: None,
            recent: Vec::new(),
            recent_is_full: false,
            tree,
            base: None,
        }
    }

    /// Evidence in the order in which it is asked for, each if those before it show nothing. Events begin behind the oldest state, if
    /// that is known, so that they are all since; of later ones etcd still has some where it has compacted the first.
    pub(crate) fn evidence(&self, loaded_by: Option<Arc<Connection>>) -> Vec<Evidence> {
        let base = self.base.iter().map(|(_, revision)| *revision);
        let base = base.filter(|base| self.last_event.is_some_and(|last| last > *base));
        let recent = self.recent.iter().map(Change::revision);
        let events = base.map(|base| base + 1).chain(recent).chain(self.last_event);
        let mut near: Vec<_> = events
            .filter(|event| self.revision - event <= MAX_REVISIONS_BACK)
            .collect();
        near.dedup();
        let loader = loaded_by.map(Evidence::Loader).into_iter();
        loader
            .chain(near.into_iter().map(Evidence::Events))
            .chain(once(Evidence::Keys))
            .collect()
    }

    /// Whether the events from revision `first` on prove as much as events can: all that are kept, which are many.
    pub(crate) fn proves_by_events_from(&self, first: i64) -> bool {
        let oldest = self.recent.first().map(Change::revision);
        self.recent_is_full && self.recent.len() >= ENOUGH_EVENTS && oldest >= Some(first)
    }

    /// Whether the last event that was delivered is a delete, which leaves nothing to compare.
    pub(crate) fn ends_with_a_delete(&self) -> bool {
        let last = self.key.as_ref().and_then(|key| self.tree.get(key));
        self.last_event.is_some() && last.map(StoredEntry::mod_revision) != self.last_event
    }
}

impl Before {
    /// Whether a quorum check's `header` has to be compared by the member's raft index, too: its raft term is lower than
    /// known. That is so after a restore, but also on a member that has installed a snapshot and applied no entry since
    /// (etcd reports the term of the last entry that it has applied).
    #[must_use]
    pub fn needs_raft_index(&self, header: &ResponseHeader) -> bool {
        let known = self.identity.as_ref();
        known.is_some_and(|known| header.raft_term < known.raft_term)
    }

    /// Whether a quorum check's `header` is one of the known history, given the `raft_index` of a later status if it was
    /// read: the same cluster, no lower revision, and no other raft log.
    pub(crate) fn continues_with(&self, header: &ResponseHeader, raft_index: Option<u64>) -> bool {
        let is_same_cluster = self.history.note_cluster(header.cluster_id);
        let is_same_log = match raft_index {
            // A server that implements etcd's API without raft reports 0: only the term is left.
            Some(0) => !self.needs_raft_index(header),
            Some(raft_index) => self.log_continues(header.revision, raft_index),
            None => true,
        };
        is_same_cluster && header.revision >= self.revision && is_same_log
    }

    /// Whether a member's raft log is that of the known history, given the `revision` of a linearizable read and the
    /// `raft_index` of a later status.
    #[must_use]
    pub fn log_continues(&self, revision: i64, raft_index: u64) -> bool {
        raft_index == 0 || gap(raft_index, revision) >= self.raft_gap
    }

    /// Whether a write's response, which had the `revision` in the cluster `cluster_id`, is one of the history in which it was sent. A
    /// write that has changed something has a higher revision than all that was known before, and one that has changed nothing has no
    /// lower one.
    pub(crate) fn write_continues(&self, cluster_id: u64, revision: i64, has_changed: bool) -> bool {
        let lowest = self.revision + i64::from(has_changed);
        revision == 0 || revision >= lowest || !self.history.may_be_of_cluster(cluster_id)
    }
}

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
