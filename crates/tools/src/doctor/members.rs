//! Endpoints: connections, health, status, quorum; paced calls, with their cost.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_util::task::TaskTracker;
use tonic::Status;
use tonic::metadata::MetadataMap;

use super::model::{Cost, EndpointFacts, QuorumFacts, Report};
use etcd_wire::etcdserverpb::kv_client::KvClient;
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse, StatusResponse};
use rangecache_base::net::Url;
use rangecache_config::Config;
use rangecache_edge::tls::Connector;
use rangecache_report::FindingId;
use rangecache_report::format::{self, duration};
use rangecache_upstream::{Connection, Credentials, Role, Version, anonymous_check, is_refusal};

/// Timeout of each call, and of each attempt to connect.
pub(super) const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// Time after which no more ranges are divided or sampled.
const TIME_BUDGET: Duration = Duration::from_secs(20);
/// Pause after a call, as a multiple of the call's duration.
const PAUSE_FACTOR: u32 = 4;
/// Longest pause after a call.
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Number of quorum checks, of which the median is reported.
const QUORUM_READS: usize = 5;
/// Round trip above which reads from memory wait long for their proof.
const SLOW_QUORUM: Duration = Duration::from_millis(20);

/// Endpoint of `--endpoints`, with the state of the member behind it.
pub(super) struct Member {
    pub(super) url: Url,
    /// The connection, or why it could not be opened.
    pub(super) link: Result<Link, String>,
    /// Result of gRPC's health service; `None` if it timed out.
    pub(super) serves: Option<bool>,
    /// Result of the status call, or why it failed.
    pub(super) status: Result<StatusResponse, String>,
}

/// A connection, and the task that drives it and returns why it ended.
pub(super) struct Link {
    pub(super) connection: Arc<Connection>,
    driver: JoinHandle<String>,
}

impl Member {
    pub(super) fn connection(&self) -> Option<&Arc<Connection>> {
        self.link.as_ref().ok().map(|link| &link.connection)
    }

    pub(super) fn version(&self) -> Option<Version> {
        self.status.as_ref().ok()?.version.parse().ok()
    }

    /// Role in the cluster, once the status is known.
    pub(super) fn role(&self) -> Option<Role> {
        self.status.as_ref().ok().map(Role::from_status)
    }
}

/// Connects to all endpoints concurrently, and requests each one's health.
pub(super) async fn connect(
    config: &Config,
    connector: &Connector,
    credentials: &Arc<Credentials>,
    tasks: &TaskTracker,
) -> Vec<Member> {
    let endpoints = config.etcd.all_endpoints();
    let each = endpoints.iter().map(async |url| {
        let deadline = Instant::now() + CALL_TIMEOUT;
        let mut link = rangecache_upstream::open_once(connector, url, credentials, tasks, deadline)
            .await
            .map(|(connection, driver)| Link { connection, driver })
            .map_err(|error| without_url(&error.to_string(), url));
        let mut serves = None;
        if let Ok(open) = &mut link {
            serves = timeout(CALL_TIMEOUT, rangecache_upstream::is_serving(&open.connection))
                .await
                .ok();
            // A peer that closes the connection instead of responding is not etcd, or expects TLS.
            if let Ok(Ok(reason)) = timeout(Duration::from_millis(50), &mut open.driver).await {
                link = Err(connector.explain(url, &reason));
            }
        }
        Member {
            url: url.clone(),
            link,
            serves,
            status: Err("not requested".to_owned()),
        }
    });
    join_all(each).await
}

fn without_url(error: &str, url: &Url) -> String {
    let url = format!("{url}: ");
    error.strip_prefix(&url).unwrap_or(error).to_owned()
}

/// Makes quorum checks without credentials through the first member that responds. With auth on etcd refuses them,
/// but only after asking the quorum.
pub(super) async fn check_quorum(members: &[Member], report: &mut Report) -> QuorumFacts {
    let mut quorum = QuorumFacts::default();
    let mut reason = None;
    for member in members {
        let Some(connection) = member.connection() else {
            continue;
        };
        let mut took = Vec::new();
        while took.len() < QUORUM_READS {
            let began = Instant::now();
            match in_time(anonymous_check(connection, 0, false, MetadataMap::new())).await {
                Ok(_) => quorum.auth_is_on = Some(false),
                Err(status) if is_refusal(&status) => quorum.auth_is_on = Some(true),
                Err(status) => {
                    reason = Some(format!("{}: {}", member.url, describe_status(&status)));
                    break;
                }
            }
            took.push(began.elapsed());
            // One is enough: etcd logs each refused attempt.
            if quorum.auth_is_on == Some(true) {
                break;
            }
        }
        if quorum.auth_is_on.is_some() {
            took.sort_unstable();
            quorum.round_trip = took.get(took.len() / 2).copied();
            break;
        }
    }
    if let Some(took) = quorum.round_trip {
        let id = if took > SLOW_QUORUM {
            FindingId::QuorumSlow
        } else {
            FindingId::QuorumAnswers
        };
        let took = duration(took);
        report.find(id, format!("the quorum answers a linearizable read in {took}"));
    } else if let Some(reason) = reason {
        let text = format!("no member answers a linearizable read: {reason}");
        report.find(FindingId::NoQuorum, text);
    }
    quorum
}

/// Requests every member's status, as rangecache's own user if there is one.
pub(super) async fn read_status(members: &mut [Member]) {
    let each = members.iter_mut().map(async |member| {
        let Ok(link) = &member.link else {
            return;
        };
        let status = in_time(link.connection.member_status()).await;
        member.status = status.map_err(|status| describe_status(&status));
    });
    join_all(each).await;
}

/// The member to read from: one that serves and votes, a follower rather than the leader.
pub(super) fn best(members: &[Member]) -> Option<&Member> {
    let usable = members.iter().filter(|member| member.connection().is_some());
    usable.min_by_key(|member| {
        let role = member.role();
        let is_healthy = matches!(role, Some(Role::Leader | Role::Follower)) && member.serves == Some(true);
        (!is_healthy, role == Some(Role::Leader))
    })
}

/// Endpoints for the report.
pub(super) fn facts(members: &[Member]) -> Vec<EndpointFacts> {
    let describe = |member: &Member| {
        let status = member.status.as_ref().ok();
        EndpointFacts {
            url: member.url.to_string(),
            error: member
                .link
                .as_ref()
                .err()
                .or(member.status.as_ref().err())
                .cloned(),
            version: status.map(|status| status.version.clone()),
            role: member.role().map(format::role),
            db_bytes: status.map_or(0, |status| status.db_size),
            db_in_use_bytes: status.map_or(0, |status| status.db_size_in_use),
        }
    };
    members.iter().map(describe).collect()
}

/// Client that reads as rangecache's own user, pauses after each call, and counts what the calls cost etcd.
pub(super) struct PacedClient<'a> {
    connection: &'a Arc<Connection>,
    started: Instant,
    pub(super) cost: Cost,
}

impl PacedClient<'_> {
    /// Starts the time budget of 20 s.
    pub(super) fn new(connection: &Arc<Connection>) -> PacedClient<'_> {
        PacedClient {
            connection,
            started: Instant::now(),
            cost: Cost::default(),
        }
    }

    /// Reads one Range, then pauses.
    ///
    /// # Errors
    /// etcd's status or a timeout, in words.
    pub(super) async fn range(&mut self, request: RangeRequest) -> Result<RangeResponse, String> {
        let (channel, origin) = self.connection.own_channel();
        let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
        let began = Instant::now();
        let response = in_time(client.range(request)).await;
        let took = began.elapsed();
        self.cost.calls += 1;
        self.cost.took += took;
        let response = response.map_err(|status| describe_status(&status))?.into_inner();
        self.cost.read_bytes += response.kvs.iter().map(|kv| kv.len() as u64).sum::<u64>();
        tokio::time::sleep((took * PAUSE_FACTOR).min(MAX_PAUSE)).await;
        Ok(response)
    }

    /// Whether the time budget is not used up.
    pub(super) fn has_time(&self) -> bool {
        self.started.elapsed() < TIME_BUDGET
    }
}

/// etcd's message with the code of a status.
fn describe_status(status: &Status) -> String {
    format!("{} ({:?})", status.message(), status.code())
}

/// Result of a call to etcd, which has [`CALL_TIMEOUT`].
pub(super) async fn in_time<T>(call: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = |_| {
        Err(Status::deadline_exceeded(format!(
            "no response within {CALL_TIMEOUT:?}"
        )))
    };
    timeout(CALL_TIMEOUT, call).await.unwrap_or_else(late)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::testing::{connected, etcd, nothing, status};
    use rangecache_report::Severity;

    #[tokio::test]
    async fn follower_that_serves_is_read_rather_than_the_leader_or_a_learner() {
        let (leader, follower) = (etcd(status(1), &[]).await, etcd(status(2), &[]).await);
        let learner = StatusResponse {
            is_learner: true,
            ..status(3)
        };
        let learner = etcd(learner, &[]).await;
        let urls = [&learner, &leader, &follower].map(|etcd| etcd.url.to_string());
        let best_of = async |urls: &[String]| {
            let (_, members) = connected(urls, &[]).await;
            best(&members).map(|member| member.url.to_string())
        };
        assert_eq!(best_of(&urls).await.as_ref(), Some(&urls[2]));
        assert_eq!(best_of(&urls[..2]).await.as_ref(), Some(&urls[1]));
        assert_eq!(best_of(&urls[..1]).await.as_ref(), Some(&urls[0]));
        assert_eq!(best_of(&[nothing()]).await, None);
    }

    #[tokio::test]
    async fn report_has_the_error_of_each_endpoint_or_its_status() {
        let etcd = etcd(status(2), &[]).await;
        let (_, members) = connected(&[etcd.url.to_string(), nothing()], &[]).await;
        let [first, second] = &facts(&members)[..] else {
            panic!("two endpoints")
        };
        assert_eq!((first.error.as_deref(), first.role), (None, Some("follower")));
        assert_eq!(first.version.as_deref(), Some("3.7.3"));
        assert_eq!((first.db_bytes, first.db_in_use_bytes), (4 << 20, 1 << 20));
        let error = second.error.as_deref().unwrap();
        assert!(
            error.contains("refused") && !error.contains(&second.url),
            "{error}"
        );
        assert_eq!((second.version.as_deref(), second.role), (None, None));
    }

    #[tokio::test]
    async fn quorum_is_bad_only_if_no_member_answers() {
        let etcd = etcd(status(1), &[]).await;
        let check = async |urls: &[String]| {
            let (_, members) = connected(urls, &[]).await;
            let mut report = Report::default();
            let quorum = check_quorum(&members, &mut report).await;
            (quorum.auth_is_on, quorum.round_trip.is_some(), report.result)
        };
        let (auth, is_measured, severity) = check(&[nothing(), etcd.url.to_string()]).await;
        assert_eq!((auth, is_measured), (Some(false), true));
        assert_ne!(severity, Severity::Bad);
        // That nothing listens is the finding of another step.
        let none = check(&[nothing()]).await;
        assert_eq!(none, (None, false, Severity::Good));
        let refusing = rangecache_upstream::fake::FakeEtcd::start(async |_, _| Err((14, "no leader"))).await;
        let (auth, is_measured, severity) = check(&[refusing.url.to_string()]).await;
        assert_eq!((auth, is_measured, severity), (None, false, Severity::Bad));
    }
}
