//! etcd's auth: whether it is on, and whether rangecache's own user may read what is to be mirrored.

use std::sync::Arc;

use tokio::time::timeout;

use super::CALL_TIMEOUT;
use super::members::{Member, Quorum};
use super::report::{Area, Report};
use crate::config::Config;
use crate::etcdserverpb::RangeRequest;
use crate::keyspace::scope::{Scope, scopes};
use crate::tls::Connector;
use crate::upstream::{Connection, Credentials, authenticate_once, check_read_permission};

/// What auth lets us do.
#[derive(Debug)]
pub(super) struct Auth {
    /// etcd accepts the user of `--user`, or needs none.
    is_known: bool,
    /// Scopes that may be read, of those to be mirrored.
    pub(super) readable: Vec<bool>,
}

impl Auth {
    /// Whether a member tells us its status.
    pub(super) fn may_ask(&self) -> bool {
        self.is_known
    }

    /// Whether anything may be read.
    pub(super) fn may_read(&self) -> bool {
        self.is_known && self.readable.contains(&true)
    }
}

/// Finds out, and makes `credentials` known to etcd.
pub(super) async fn look(
    config: &Config,
    connector: &Connector,
    credentials: &Arc<Credentials>,
    members: &[Member],
    quorum: &Quorum,
    report: &mut Report,
) -> Auth {
    let scopes = scopes(&config.mirror.cache_prefix, &config.mirror.no_cache_prefix);
    let mut auth = Auth {
        is_known: quorum.auth != Some(true),
        readable: vec![quorum.auth != Some(true); scopes.len()],
    };
    let connection = members.iter().find_map(Member::connection);
    let (Some(is_on), Some(connection)) = (quorum.auth, connection) else {
        return auth;
    };
    let introduced = timeout(CALL_TIMEOUT, authenticate_once(credentials, connection)).await;
    if let Some(name) = connector.common_name() {
        let text = format!("the certificate in --cert has the common name {name:?}");
        let remedy = "where etcd runs with --client-cert-auth and auth, every caller without a token acts as that user: give a certificate without a CN";
        report.warn(Area::Auth, text, remedy);
    }
    if !is_on {
        let user = if credentials.is_configured() {
            "; the user of --user is not needed"
        } else {
            ""
        };
        report.good(Area::Auth, format!("etcd's auth is off{user}"));
        return auth;
    }
    if !credentials.is_configured() {
        report.bad(
            Area::Auth,
            "etcd's auth is on and there is no --user: every read would be forwarded",
            "give --user and --password-file: a user that may read what is mirrored (docs/security.md has the four commands)",
        );
        return auth;
    }
    let user = credentials.name().to_owned();
    match introduced {
        Ok(Ok(())) => {}
        Ok(Err(status)) => {
            report.bad(
                Area::Auth,
                format!(
                    "etcd does not accept the user {user:?} of --user: {}",
                    status.message()
                ),
                "mend the user, or the password (--password, --password-file)",
            );
            return auth;
        }
        Err(_) => {
            report.bad(Area::Auth, "etcd gave no token in time", "look at etcd first");
            return auth;
        }
    }
    auth.is_known = true;
    for (scope, readable) in scopes.iter().zip(&mut auth.readable) {
        *readable = match timeout(CALL_TIMEOUT, may_read(connection, scope)).await {
            Ok(Ok(())) => true,
            Ok(Err(status)) => {
                report.bad(
                    Area::Auth,
                    format!("the user {user:?} may not read all of {}: {}", scope.name(), status.message()),
                    "grant it a role with the right to read that prefix (read on everything without --cache-prefix)",
                );
                false
            }
            Err(_) => {
                report.bad(
                    Area::Auth,
                    "etcd did not judge the user's rights in time",
                    "look at etcd first",
                );
                false
            }
        };
    }
    if auth.readable.iter().all(|readable| *readable) {
        report.good(
            Area::Auth,
            format!("etcd's auth is on, and the user {user:?} may read all that is to be mirrored; each read is authorised by etcd, with its caller's credentials"),
        );
    }
    auth
}

/// Checks permission to read `scope` without reading a key.
async fn may_read(connection: &Arc<Connection>, scope: &Scope) -> Result<(), tonic::Status> {
    let range = RangeRequest {
        key: scope.key(),
        range_end: scope.range_end(),
        ..RangeRequest::default()
    };
    check_read_permission(connection, range, None).await.map(drop)
}
