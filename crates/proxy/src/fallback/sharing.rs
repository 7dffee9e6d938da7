//! Clients that may share a response or continue a page series: all clients without credentials, or all with the same
//! credentials (I8).

use http::{HeaderMap, HeaderValue};

use etcd_wire::grpc::CallMetadata;
use etcd_wire::grpc::fields::CREDENTIALS;
use rangecache_mirror::lineage::Auth;

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

#[cfg(test)]
mod tests {
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
}
