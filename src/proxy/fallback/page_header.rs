//! Whether etcd would still return a page of a list, and with which header.

use super::reason::StreamFallback;
use super::sharing::ShareScope;
use crate::cache::ResponseHeader;
use crate::mirror::cluster_state::ClusterState;

/// State of etcd from which a list's first page was read.
pub(super) struct ListOrigin {
    /// Number of etcd's history.
    pub(super) history: u64,
    pub(super) cluster_id: u64,
    /// Revision at which the list is read.
    pub(super) revision: i64,
}

/// The header with which etcd would return a page of the list now, by the known cluster state alone.
///
/// # Errors
/// Why etcd would not return the page, or why that is not known.
pub(super) fn page_header(
    cluster_state: &ClusterState,
    list: &ListOrigin,
    scope: &ShareScope,
) -> Result<ResponseHeader, StreamFallback> {
    let min_served = cluster_state
        .min_served_revision()
        .ok_or(StreamFallback::NotProven)?;
    let known = cluster_state.known().max(min_served);
    let identity = cluster_state.identity().ok_or(StreamFallback::NotProven)?;
    if cluster_state.auth() != scope.auth() {
        return Err(StreamFallback::Auth);
    }
    let is_same = cluster_state.history() == list.history && identity.cluster_id == list.cluster_id;
    if !is_same || known < list.revision {
        return Err(StreamFallback::HistoryReplaced);
    }
    if list.revision < cluster_state.compacted() {
        return Err(StreamFallback::Compacted);
    }
    Ok(ResponseHeader {
        revision: known,
        ..*identity
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHECKED: ResponseHeader = ResponseHeader {
        cluster_id: 1,
        member_id: 2,
        revision: 100,
        raft_term: 3,
    };

    /// Cluster state after a quorum check, with auth known to be off.
    fn checked() -> ClusterState {
        let state = ClusterState::default();
        let before = state.before_check();
        state.auth_seems_off(before);
        state.after_check(state.before_check(), CHECKED);
        state
    }

    fn list(state: &ClusterState) -> ListOrigin {
        ListOrigin {
            history: state.history(),
            cluster_id: 1,
            revision: 90,
        }
    }

    fn header(state: &ClusterState, list: &ListOrigin) -> Result<ResponseHeader, StreamFallback> {
        page_header(state, list, &ShareScope::Everyone)
    }

    #[test]
    fn page_has_the_newest_revision_that_is_known() {
        let state = checked();
        assert_eq!(header(&state, &list(&state)), Ok(CHECKED));
        state.record_served(120);
        let expected = ResponseHeader {
            revision: 120,
            ..CHECKED
        };
        assert_eq!(
            header(&state, &list(&state)),
            Ok(expected),
            "time must not run backwards"
        );
    }

    #[test]
    fn compacted_list_is_not_continued() {
        let state = checked();
        state.note_compacted(90);
        assert!(
            header(&state, &list(&state)).is_ok(),
            "the compacted revision itself is still readable"
        );
        state.note_compacted(91);
        assert_eq!(header(&state, &list(&state)), Err(StreamFallback::Compacted));
    }

    #[test]
    fn replaced_history_ends_the_list() {
        let state = checked();
        let list = list(&state);
        let other_cluster = ListOrigin {
            cluster_id: 9,
            ..list
        };
        assert_eq!(
            header(&state, &other_cluster),
            Err(StreamFallback::HistoryReplaced)
        );
        let restored = ResponseHeader {
            revision: 95,
            ..CHECKED
        };
        state.after_check(state.before_check(), restored);
        assert_eq!(header(&state, &list), Err(StreamFallback::HistoryReplaced));
    }

    #[test]
    fn auth_switch_ends_the_list() {
        let state = checked();
        let list = list(&state);
        state.auth_is_on();
        assert_eq!(header(&state, &list), Err(StreamFallback::Auth));
        let owner = ShareScope::Credentials(Vec::new());
        assert!(page_header(&state, &list, &owner).is_ok());
    }

    #[test]
    fn unknown_served_revision_needs_a_proof() {
        let state = checked();
        state.note_unreadable();
        assert_eq!(header(&state, &list(&state)), Err(StreamFallback::NotProven));
        assert_eq!(
            header(&ClusterState::default(), &list(&state)),
            Err(StreamFallback::NotProven)
        );
    }
}
