//! etcd's auth: whether it is on, and whether rangecache's own user may read what is to be mirrored.

use std::sync::Arc;

use tonic::Code;

use super::members::{Member, in_time};
use super::model::{AuthFacts, QuorumFacts, Report};
use etcd_store::keyspace::scope::{Scope, scopes};
use etcd_wire::etcdserverpb::RangeRequest;
use rangecache_config::Config;
use rangecache_edge::tls::Connector;
use rangecache_report::{FindingId, Severity, no_own_user, user_problem};
use rangecache_upstream::{
    Connection, Credentials, UserProblem, authenticate_once, check_read_permission, is_refusal,
};

/// Authenticates `credentials`, and finds out which scopes may be read.
pub(super) async fn examine(
    config: &Config,
    connector: &Connector,
    credentials: &Arc<Credentials>,
    members: &[Member],
    quorum: &QuorumFacts,
    report: &mut Report,
) -> AuthFacts {
    let scopes = scopes(&config.mirror.cache_prefix, &config.mirror.no_cache_prefix);
    let is_off = quorum.auth_is_on != Some(true);
    let mut auth = AuthFacts {
        is_accepted: is_off,
        readable: vec![is_off; scopes.len()],
        scopes,
    };
    let connection = members.iter().find_map(Member::connection);
    let (Some(is_on), Some(connection)) = (quorum.auth_is_on, connection) else {
        return auth;
    };
    if credentials.common_name().is_none()
        && let Some(name) = connector.common_name()
    {
        let text = format!("the certificate in --cert has the common name {name:?}");
        report.find(FindingId::CertificateHasCommonName, text);
    }
    if !is_on {
        let user = if credentials.is_configured() {
            "; the user of --user is not needed"
        } else {
            ""
        };
        report.find(FindingId::AuthOff, format!("etcd's auth is off{user}"));
    } else if !credentials.name_a_user() {
        report.add(no_own_user().with_severity(Severity::Bad));
    } else if authenticate(credentials, connection, report).await {
        auth.is_accepted = true;
        for (scope, readable) in auth.scopes.iter().zip(&mut auth.readable) {
            *readable = may_read(credentials, connection, scope, report).await;
        }
        if auth.readable.iter().all(|readable| *readable) {
            let text = format!(
                "etcd's auth is on, and the user {:?} may read all that is to be mirrored; each read is authorised by etcd, with \
                 its client's credentials",
                credentials.name()
            );
            report.find(FindingId::UserAccepted, text);
        }
    }
    auth
}

/// Gets a token; returns whether etcd issued one.
async fn authenticate(
    credentials: &Arc<Credentials>,
    connection: &Arc<Connection>,
    report: &mut Report,
) -> bool {
    let Err(status) = in_time(authenticate_once(credentials, connection)).await else {
        return true;
    };
    let (user, message) = (credentials.name().to_owned(), status.message().to_owned());
    if status.code() == Code::DeadlineExceeded {
        report.find(
            FindingId::UserNotChecked,
            format!("etcd issued no token: {message}"),
        );
    } else {
        let problem = UserProblem::Rejected { user, message };
        report.add(user_problem(&problem).with_severity(Severity::Bad));
    }
    false
}

/// Whether rangecache's own user may read all of `scope`.
async fn may_read(
    credentials: &Credentials,
    connection: &Arc<Connection>,
    scope: &Scope,
    report: &mut Report,
) -> bool {
    let range = RangeRequest {
        key: scope.key(),
        range_end: scope.range_end(),
        ..RangeRequest::default()
    };
    let Err(status) = in_time(check_read_permission(connection, range, 0, None)).await else {
        return true;
    };
    if is_refusal(&status) {
        let problem = credentials.no_permission(scope.name());
        report.add(user_problem(&problem).with_severity(Severity::Bad));
    } else {
        let (name, error) = (scope.name(), status.message());
        let text = format!("the permission to read {name} could not be checked: {error}");
        report.find(FindingId::UserNotChecked, text);
    }
    false
}
