//! The endpoints: connections, health, versions, quorum.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use tonic::metadata::MetadataMap;

use super::CALL_TIMEOUT;
use super::report::{Area, Report};
use crate::config::Config;
use crate::etcdserverpb::StatusResponse;
use crate::net::Url;
use crate::tls::Connector;
use crate::upstream::{self, Connection, Credentials, Role, Version, anonymous_check, is_refusal};

/// How often the quorum is asked, for a median.
const QUORUM_READS: usize = 5;
/// Above this, reads from memory wait long for their proof.
const SLOW_QUORUM: Duration = Duration::from_millis(20);

/// One endpoint.
pub(super) struct Member {
    pub(super) url: Url,
    /// The connection, or why there is none.
    pub(super) link: Result<Link, String>,
    /// gRPC's health service; `None` if it did not answer.
    pub(super) serves: Option<bool>,
    /// What it tells of itself, or why it does not.
    pub(super) status: Result<StatusResponse, String>,
}

/// A connection, and the task that ends with it and says why.
pub(super) struct Link {
    pub(super) connection: Arc<Connection>,
    driver: JoinHandle<String>,
}

/// What the report says of an endpoint.
#[derive(Debug)]
pub(super) struct Described {
    pub(super) url: String,
    pub(super) error: Option<String>,
    pub(super) version: Option<String>,
    pub(super) role: Option<&'static str>,
    pub(super) db_bytes: i64,
    pub(super) db_in_use_bytes: i64,
}

/// The quorum, asked as nobody.
#[derive(Debug)]
pub(super) struct Quorum {
    /// Whether etcd's auth is on; `None` where nobody told.
    pub(super) auth: Option<bool>,
    /// The median of the round trips.
    pub(super) took: Option<Duration>,
}

impl Member {
    pub(super) fn connection(&self) -> Option<&Arc<Connection>> {
        self.link.as_ref().ok().map(|link| &link.connection)
    }

    pub(super) fn version(&self) -> Option<Version> {
        self.status.as_ref().ok()?.version.parse().ok()
    }

    /// What it is in the cluster.
    pub(super) fn role(&self) -> Option<Role> {
        self.status.as_ref().ok().map(Role::from_status)
    }
}

/// In the report.
pub(super) fn name(role: Role) -> &'static str {
    match role {
        Role::Unknown => "",
        Role::Leader => "leader",
        Role::Follower => "follower",
        Role::Learner => "learner",
        Role::Leaderless => "without a leader",
    }
}

/// Connects to all endpoints at once, and asks each whether it serves.
pub(super) async fn connect(
    config: &Config,
    connector: &Connector,
    credentials: &Arc<Credentials>,
    tasks: &TaskTracker,
) -> Vec<Member> {
    let each = config.etcd.endpoints.iter().map(async |url| {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let mut link = upstream::open_once(connector, url, credentials, tasks, deadline)
            .await
            .map(|(connection, driver)| Link { connection, driver })
            .map_err(|error| without_url(&error.to_string(), url));
        let mut serves = None;
        if let Ok(open) = &mut link {
            serves = timeout(CALL_TIMEOUT, upstream::is_serving(&open.connection))
                .await
                .ok();
            // What ends the connection instead of an answer is no etcd, or wants TLS.
            if let Ok(Ok(reason)) = timeout(Duration::from_millis(50), &mut open.driver).await {
                link = Err(connector.explain(url, &reason));
            }
        }
        Member {
            url: url.clone(),
            link,
            serves,
            status: Err("it was not asked".to_owned()),
        }
    });
    join_all(each).await
}

fn without_url(error: &str, url: &Url) -> String {
    let url = format!("{url}: ");
    error.strip_prefix(&url).unwrap_or(error).to_owned()
}

/// Asks the quorum, as nobody, for one key, by the first member that answers. Where etcd's auth is on it refuses, but only after it has
/// asked the quorum.
pub(super) async fn quorum(members: &[Member], report: &mut Report) -> Quorum {
    let mut quorum = Quorum {
        auth: None,
        took: None,
    };
    let mut reason = None;
    for member in members {
        let Some(connection) = member.connection() else {
            continue;
        };
        let mut took = Vec::new();
        for _ in 0..QUORUM_READS {
            let began = Instant::now();
            match timeout(CALL_TIMEOUT, anonymous_check(connection, MetadataMap::new())).await {
                Ok(Ok(_)) => quorum.auth = Some(false),
                Ok(Err(status)) if is_refusal(&status) => {
                    quorum.auth = Some(true);
                    took.push(began.elapsed());
                    // etcd notes each such attempt in its log.
                    break;
                }
                Ok(Err(status)) => {
                    reason = Some(format!(
                        "{}: {} ({:?})",
                        member.url,
                        status.message(),
                        status.code()
                    ));
                    break;
                }
                Err(_) => {
                    reason = Some(format!("{}: no answer within {CALL_TIMEOUT:?}", member.url));
                    break;
                }
            }
            took.push(began.elapsed());
        }
        if quorum.auth.is_some() {
            took.sort_unstable();
            quorum.took = took.get(took.len() / 2).copied();
            break;
        }
    }
    match (&quorum.took, reason) {
        (Some(took), _) if *took > SLOW_QUORUM => report.warn(
            Area::Endpoints,
            format!("the quorum answers a linearizable read in {took:.1?}"),
            "each read from memory waits that long for its proof: look at etcd's disks and network",
        ),
        (Some(took), _) => report.good(
            Area::Endpoints,
            format!("the quorum answers a linearizable read in {took:.1?}"),
        ),
        (None, Some(reason)) => report.bad(
            Area::Endpoints,
            format!("no member answers a linearizable read: {reason}"),
            "etcd has no leader or no quorum, or is no etcd: look at etcd first (etcdctl endpoint status --cluster)",
        ),
        (None, None) => {}
    }
    quorum
}

/// Asks each for its status, as rangecache's own user if there is one.
pub(super) async fn ask_status(members: &mut [Member]) {
    let each = members.iter_mut().map(async |member| {
        let Ok(link) = &member.link else {
            return;
        };
        member.status = match timeout(CALL_TIMEOUT, link.connection.member_status()).await {
            Ok(Ok(status)) => Ok(status),
            Ok(Err(status)) => Err(format!("{} ({:?})", status.message(), status.code())),
            Err(_) => Err(format!("no answer within {CALL_TIMEOUT:?}")),
        };
    });
    join_all(each).await;
}

/// The member that is best asked for much: one that serves and votes, a follower rather than the leader.
pub(super) fn best(members: &[Member]) -> Option<&Member> {
    let usable = members.iter().filter(|member| member.connection().is_some());
    usable.min_by_key(|member| {
        let role = member.role();
        let sound = matches!(role, Some(Role::Leader | Role::Follower)) && member.serves == Some(true);
        (!sound, role == Some(Role::Leader))
    })
}

/// For the report.
pub(super) fn described(members: &[Member]) -> Vec<Described> {
    let describe = |member: &Member| {
        let status = member.status.as_ref().ok();
        Described {
            url: member.url.to_string(),
            error: match (&member.link, &member.status) {
                (Err(error), _) | (Ok(_), Err(error)) => Some(error.clone()),
                _ => None,
            },
            version: status.map(|status| status.version.clone()),
            role: member.role().map(name),
            db_bytes: status.map_or(0, |status| status.db_size),
            db_in_use_bytes: status.map_or(0, |status| status.db_size_in_use),
        }
    };
    members.iter().map(describe).collect()
}
