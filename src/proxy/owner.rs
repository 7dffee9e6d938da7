//! Who may go on with what a call began (I8): anybody where etcd tells everybody the same, else the same caller alone.

use http::{HeaderMap, HeaderValue};

use super::Proxy;
use crate::grpc::CallMetadata;
use crate::grpc::metadata::CREDENTIALS;
use crate::mirror::cluster_state::Auth;

/// Whose a series of pages is, or a shared answer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Owner {
    /// etcd's auth is off.
    Anybody,
    /// Who sends these credentials; they are not shown in a log.
    Caller(Vec<HeaderValue>),
}

impl Owner {
    /// `None` where nothing of this call's is for another call: it asks for something special, or who may read what is
    /// not known. A caller's rights are proven by calls beside its own only where rangecache has a user of its own, for
    /// without one it does not learn of compactions.
    pub(super) fn of(proxy: &Proxy, call: &CallMetadata, metadata: &HeaderMap) -> Option<Owner> {
        if call.require_leader || call.bypass {
            return None;
        }
        match (proxy.mirrors.cluster_state.auth(), call.has_credentials) {
            (Auth::Off, false) => Some(Owner::Anybody),
            (Auth::On, true) if proxy.forward.upstream.credentials().are_valid() => {
                let values = CREDENTIALS.iter().flat_map(|name| metadata.get_all(*name));
                let secret = values.cloned().map(|mut value| {
                    value.set_sensitive(true);
                    value
                });
                Some(Owner::Caller(secret.collect()))
            }
            _ => None,
        }
    }

    /// What etcd's auth must be, so that what was begun may be gone on with.
    pub(super) fn auth(&self) -> Auth {
        match self {
            Owner::Anybody => Auth::Off,
            Owner::Caller(_) => Auth::On,
        }
    }
}
