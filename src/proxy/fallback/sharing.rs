//! Which clients may share a response or continue a page series: all when auth is off, otherwise only the same credentials (I8).

use http::{HeaderMap, HeaderValue};

use crate::grpc::CallMetadata;
use crate::grpc::metadata::CREDENTIALS;
use crate::mirror::cluster_state::Auth;

/// The clients that may use what a call began.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum ShareScope {
    /// Every client: etcd's auth is off.
    Everyone,
    /// Clients that send these credentials; the values are marked as sensitive, so that no log shows them.
    Credentials(Vec<HeaderValue>),
}

impl ShareScope {
    /// The scope of a call, while etcd's auth is `auth`. `None` where nothing of the call may be used by another: it has special
    /// metadata, or it is not known which clients may read what it reads. Rights of a client with credentials are proven by
    /// further calls only with `has_own_user`, because rangecache without a user learns of no compactions while auth is on.
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
            (Auth::Off, false) => Some(ShareScope::Everyone),
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

    /// The auth state in which the scope holds; after a switch nothing may be shared or continued.
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
    fn everyone_shares_only_without_auth_and_credentials() {
        assert_eq!(scope(&[], Auth::Off, false), Some(ShareScope::Everyone));
        assert_eq!(scope(&[], Auth::Unknown, true), None);
        assert_eq!(scope(&[], Auth::On, true), None);
        assert_eq!(scope(&[("token", "a")], Auth::Off, true), None);
    }

    #[test]
    fn same_credentials_share_only_with_a_user_of_our_own() {
        let one = scope(&[("token", "a")], Auth::On, true).unwrap();
        assert_eq!(Some(&one), scope(&[("token", "a")], Auth::On, true).as_ref());
        assert_ne!(Some(&one), scope(&[("token", "b")], Auth::On, true).as_ref());
        assert_eq!(scope(&[("token", "a")], Auth::On, false), None);
        assert!(!format!("{one:?}").contains("\"a\""), "credentials are not shown");
    }

    #[test]
    fn special_metadata_is_not_shared() {
        assert_eq!(scope(&[("hasleader", "true")], Auth::Off, false), None);
        assert_eq!(scope(&[("rangecache-bypass", "true")], Auth::Off, false), None);
    }
}
