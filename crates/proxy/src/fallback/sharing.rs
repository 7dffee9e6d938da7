//! Clients that may share a response or continue a page series: all clients without credentials, or all with the same
//! credentials (I8); and whether etcd would still return a page of the list, as far as the known cluster state shows.

use std::sync::Arc;

use etcd_store::cache::ResponseHeader;
use etcd_wire::grpc::{CallMetadata, metadata::CREDENTIALS};
use http::{HeaderMap, HeaderValue};
use rangecache_mirror::lineage::{Auth, Before, ClusterState};

use super::reason::StreamFallback;

/// Clients that may use the response, or continue the page series, of a call.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum ShareScope {
    /// All clients without credentials: etcd answers them alike, whether its auth is on or off.
    Everyone,
    /// Clients that send these credentials. The values are marked as sensitive, so that they are not logged (I10).
    Credentials(Vec<HeaderValue>),
}

impl ShareScope {
    /// Returns the scope of a call with this metadata and `headers`, given the state of etcd's `auth`. `None` if no
    /// other call may use its response: its metadata asks for more than a read, or it is unknown which clients may
    /// read its range.
    ///
    /// Calls without credentials have one scope also while auth is unknown, as before the first check and after a call that may
    /// have changed it: etcd may be slow to respond then, and identical calls must not add up (F5).
    ///
    /// While auth is on, `has_own_user` is required: without an etcd user of its own, rangecache is not informed of
    /// compactions, and would continue a series at a compacted revision.
    pub(super) fn from_call(
        metadata: &CallMetadata,
        headers: &HeaderMap,
        auth: Auth,
        has_own_user: bool,
    ) -> Option<ShareScope> {
        if metadata.require_leader || metadata.bypass {
            return None;
        }
        match (auth, metadata.has_credentials) {
            (Auth::Off | Auth::Unknown, false) => Some(ShareScope::Everyone),
            (Auth::On, true) if has_own_user => {
                let values = CREDENTIALS.iter().flat_map(|name| headers.get_all(*name));
                let secret = values.cloned().map(|mut value| {
                    value.set_sensitive(true);
                    value
                });
                Some(ShareScope::Credentials(secret.collect()))
            }
            _ => None,
        }
    }

    /// Bytes of the credentials.
    pub(super) fn bytes(&self) -> u64 {
        match self {
            ShareScope::Everyone => 0,
            ShareScope::Credentials(values) => values.iter().map(|value| value.len() as u64).sum(),
        }
    }

    /// State of etcd's auth in which a list of the scope may be continued. After auth is enabled or disabled, it may not.
    pub(super) fn auth(&self) -> Auth {
        match self {
            ShareScope::Everyone => Auth::Off,
            ShareScope::Credentials(_) => Auth::On,
        }
    }
}

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
    use rangecache_mirror::{Unreadable, lineage::HistoryId};

    use super::*;

    fn scope(headers: &[(&'static str, &'static str)], auth: Auth, has_own_user: bool) -> Option<ShareScope> {
        let mut map = HeaderMap::new();
        map.insert("content-type", HeaderValue::from_static("application/grpc"));
        for (name, value) in headers {
            map.insert(*name, HeaderValue::from_static(value));
        }
        let metadata = CallMetadata::from_headers(&map).unwrap();
        ShareScope::from_call(&metadata, &map, auth, has_own_user)
    }

    #[test]
    fn call_without_credentials_is_shared_unless_auth_is_on() {
        assert_eq!(scope(&[], Auth::Off, false), Some(ShareScope::Everyone));
        assert_eq!(scope(&[], Auth::Unknown, true), Some(ShareScope::Everyone));
        assert_eq!(scope(&[], Auth::On, true), None);
        assert_eq!(scope(&[("token", "a")], Auth::Off, true), None);
        assert_eq!(scope(&[("token", "a")], Auth::Unknown, true), None);
    }

    #[test]
    fn call_with_credentials_is_shared_only_if_rangecache_has_a_user() {
        let one = scope(&[("token", "a")], Auth::On, true).unwrap();
        assert_eq!(Some(&one), scope(&[("token", "a")], Auth::On, true).as_ref());
        assert_ne!(Some(&one), scope(&[("token", "b")], Auth::On, true).as_ref());
        assert_eq!((one.bytes(), ShareScope::Everyone.bytes()), (1, 0));
        assert_eq!(scope(&[("token", "a")], Auth::On, false), None);
        assert!(
            !format!("{one:?}").contains("\"a\""),
            "credentials are not printed"
        );
    }

    #[test]
    fn call_with_leader_or_bypass_metadata_is_not_shared() {
        assert_eq!(scope(&[("hasleader", "true")], Auth::Off, false), None);
        assert_eq!(scope(&[("rangecache-bypass", "true")], Auth::Off, false), None);
    }

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
