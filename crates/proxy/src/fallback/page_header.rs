//! Check that etcd would still return a page of a list, as far as the known cluster state shows.

use std::sync::Arc;

use super::reason::StreamFallback;
use super::sharing::ShareScope;
use etcd_store::cache::ResponseHeader;
use rangecache_mirror::lineage::{Before, ClusterState};

/// A list, of which a page is to be served.
#[derive(Clone, Copy)]
pub(super) struct List<'a> {
    /// State before the first page was read.
    pub(super) before: &'a Before,
    /// Cluster id in the first page's header.
    pub(super) cluster_id: u64,
    /// Revision of all pages of the list.
    pub(super) revision: i64,
    pub(super) scope: &'a ShareScope,
}

/// Returns the header of a serializable page of the list. Makes no call to etcd.
///
/// # Errors
/// [`StreamFallback`] if etcd would refuse the page, or if the cluster state is unknown.
pub(super) fn page_header(
    cluster_state: &ClusterState,
    list: &List<'_>,
) -> Result<ResponseHeader, StreamFallback> {
    let min_served = cluster_state
        .min_served_revision()
        .ok_or(StreamFallback::NotProven)?;
    let identity = check_list(cluster_state, list)?;
    Ok(ResponseHeader {
        revision: cluster_state.known().max(min_served),
        ..*identity
    })
}

/// Checks that etcd would still return pages of the list, and returns the header of the last quorum check.
///
/// # Errors
/// [`StreamFallback`] if etcd would refuse a page, or if the cluster state is unknown.
pub(super) fn check_list(
    cluster_state: &ClusterState,
    list: &List<'_>,
) -> Result<Arc<ResponseHeader>, StreamFallback> {
    let identity = cluster_state.identity().ok_or(StreamFallback::NotProven)?;
    if cluster_state.auth() != list.scope.auth() {
        return Err(StreamFallback::Auth);
    }
    let is_same_history =
        cluster_state.history() == list.before.history_id() && identity.cluster_id == list.cluster_id;
    if !is_same_history || cluster_state.known() < list.revision {
        return Err(StreamFallback::HistoryReplaced);
    }
    if list.revision < cluster_state.compacted() {
        return Err(StreamFallback::Compacted);
    }
    Ok(identity)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rangecache_mirror::Unreadable;
    use rangecache_mirror::lineage::HistoryId;

    const CHECKED: ResponseHeader = ResponseHeader {
        cluster_id: 1,
        member_id: 2,
        revision: 100,
        raft_term: 3,
        leader_id: 4,
    };

    /// Cluster state after a quorum check, with auth known to be off.
    fn checked() -> ClusterState {
        let state = ClusterState::default();
        let before = state.before_check();
        state.auth_seems_off(&before);
        state.after_check(&state.before_check(), CHECKED, None);
        state
    }

    fn list(before: &Before) -> List<'_> {
        List {
            before,
            cluster_id: 1,
            revision: 90,
            scope: &ShareScope::Everyone,
        }
    }

    fn header(state: &ClusterState) -> Result<ResponseHeader, StreamFallback> {
        page_header(state, &list(&state.before_check()))
    }

    #[test]
    fn page_header_has_the_newest_known_revision() {
        let state = checked();
        assert_eq!(header(&state), Ok(CHECKED));
        assert!(state.record_served(HistoryId::FIRST, 120));
        let expected = ResponseHeader {
            revision: 120,
            ..CHECKED
        };
        assert_eq!(
            header(&state),
            Ok(expected),
            "revisions in headers must not decrease"
        );
    }

    #[test]
    fn compacted_list_is_not_continued() {
        let state = checked();
        state.note_compacted(HistoryId::FIRST, 90);
        assert!(
            header(&state).is_ok(),
            "the compacted revision itself is still readable"
        );
        state.note_compacted(HistoryId::FIRST, 91);
        assert_eq!(header(&state), Err(StreamFallback::Compacted));
    }

    #[test]
    fn list_is_not_continued_after_history_is_replaced() {
        let state = checked();
        let before = state.before_check();
        let list = list(&before);
        let other_cluster = List {
            cluster_id: 9,
            ..list
        };
        assert_eq!(
            page_header(&state, &other_cluster),
            Err(StreamFallback::HistoryReplaced)
        );
        let restored = ResponseHeader {
            revision: 95,
            ..CHECKED
        };
        state.after_check(&state.before_check(), restored, None);
        assert_eq!(page_header(&state, &list), Err(StreamFallback::HistoryReplaced));
    }

    #[test]
    fn list_is_not_continued_after_auth_is_enabled() {
        let state = checked();
        let before = state.before_check();
        let list = list(&before);
        state.auth_is_on();
        assert_eq!(page_header(&state, &list), Err(StreamFallback::Auth));
        let scope = &ShareScope::Credentials(Vec::new());
        assert!(page_header(&state, &List { scope, ..list }).is_ok());
    }

    #[test]
    fn unknown_minimum_served_revision_is_not_proven() {
        let state = checked();
        state.note_unreadable(Unreadable::Json);
        let before = state.before_check();
        assert_eq!(header(&state), Err(StreamFallback::NotProven));
        assert!(
            check_list(&state, &list(&before)).is_ok(),
            "a page with a check of its own"
        );
        assert_eq!(header(&ClusterState::default()), Err(StreamFallback::NotProven));
    }
}
