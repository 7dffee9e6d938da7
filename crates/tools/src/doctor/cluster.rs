//! Findings on the cluster: each endpoint, members that are not named, versions, etcd's alarms.

use std::collections::BTreeSet;

use tokio::time::timeout;

use super::members::{CALL_TIMEOUT, Member, best};
use super::model::{AuthFacts, Report};
use etcd_wire::etcdserverpb::{Member as Known, StatusResponse};
use rangecache_config::Config;
use rangecache_report::format::{self, bytes};
use rangecache_report::{Finding, FindingId, Severity, different_clusters};
use rangecache_upstream::gates::{self, EndpointReport};
use rangecache_upstream::{ClusterOfEndpoint, OldEtcd, RangeStream, Role, Version};

/// Adds findings on the endpoints, the members that are not endpoints, and the version gates.
pub(super) async fn examine(config: &Config, members: &[Member], auth: &AuthFacts, report: &mut Report) {
    for member in members {
        let find = |id, text: String| Finding::new(id, format!("{}: {text}", member.url)).about(&member.url);
        report.add(endpoint(member, members, auth, find));
        if let Ok(status) = &member.status {
            errors(status, |id, text| report.add(find(id, text)));
        }
    }
    one_cluster(members, report);
    if let Some(member) = best(members) {
        missing_members(member, members, report).await;
    }
    gates(config, members, report);
}

/// The finding on an endpoint; `find` makes those about it.
fn endpoint(
    member: &Member,
    members: &[Member],
    auth: &AuthFacts,
    find: impl Fn(FindingId, String) -> Finding,
) -> Finding {
    if let Err(error) = &member.link {
        let others = members.iter().any(|other| other.connection().is_some());
        let (id, remedy) = if others {
            let remedy =
                "start it, or remove it from --endpoints; rangecache uses the others and keeps retrying";
            (FindingId::MemberNotConnected, remedy)
        } else {
            let remedy = "rangecache could not answer any call: check the address, etcd, the network and TLS";
            (FindingId::EtcdUnreachable, remedy)
        };
        return find(id, error.clone()).with_remedy(remedy);
    }
    let status = match &member.status {
        Ok(status) => status,
        // Reported once, under auth.
        Err(_) if !auth.is_accepted => {
            let text = "connected; etcd reports its status to users only";
            return find(FindingId::StatusForUsersOnly, text.to_owned());
        }
        Err(error) => {
            return find(
                FindingId::StatusCallFailed,
                format!("the status call failed: {error}"),
            );
        }
    };
    let role = member.role().unwrap_or(Role::Unknown);
    let [size, in_use] = [status.db_size, status.db_size_in_use].map(db_bytes);
    let (version, name) = (&status.version, format::role(role).replace('_', " "));
    let text = format!("etcd {version}, {name}, database {size} ({in_use} in use)");
    match role {
        Role::Learner => find(FindingId::MemberIsLearner, text),
        Role::Leaderless => find(FindingId::MemberWithoutLeader, text),
        _ if member.serves != Some(true) => {
            let text = format!("{text}; its health service reports that it does not serve");
            let remedy = "check that member; other endpoints are preferred";
            find(FindingId::MemberUnhealthy, text).with_remedy(remedy)
        }
        _ => find(FindingId::MemberHealthy, text),
    }
}

fn errors(status: &StatusResponse, mut find: impl FnMut(FindingId, String)) {
    for error in &status.errors {
        let id = if error.contains("NOSPACE") {
            FindingId::AlarmNoSpace
        } else if error.contains("CORRUPT") {
            FindingId::AlarmCorrupt
        } else {
            FindingId::MemberReportsError
        };
        find(id, format!("etcd reports: {error}"));
    }
    let quota = status.db_size_quota;
    if quota > 0 && status.db_size > quota / 10 * 8 {
        let [size, quota] = [status.db_size, quota].map(db_bytes);
        let text = format!("the database uses {size} of its quota of {quota}");
        find(FindingId::DatabaseNearQuota, text);
    }
}

/// Database sizes of etcd are signed.
fn db_bytes(size: i64) -> String {
    bytes(u64::try_from(size).unwrap_or(0))
}

/// Adds a finding if the endpoints belong to several clusters.
fn one_cluster(members: &[Member], report: &mut Report) {
    let of_each: Vec<_> = members
        .iter()
        .filter_map(|member| Some((member, member.status.as_ref().ok()?.header?.cluster_id)))
        .collect();
    let size = |id| of_each.iter().filter(|(_, of)| *of == id).count();
    // The first one of the largest, as in the order of --endpoints.
    let Some(used) = of_each.iter().map(|(_, id)| *id).rev().max_by_key(|id| size(*id)) else {
        return;
    };
    if size(used) < of_each.len() {
        let mixed: Vec<_> = of_each
            .iter()
            .map(|(member, cluster_id)| ClusterOfEndpoint {
                url: member.url.to_string(),
                cluster_id: *cluster_id,
                is_used: *cluster_id == used,
            })
            .collect();
        if let Some(finding) = different_clusters(&mixed) {
            report.add(finding);
        }
    }
}

/// Adds a finding on members that `--endpoints` does not name: without them, a member that is cut off from the others
/// leaves rangecache without proofs.
async fn missing_members(through: &Member, members: &[Member], report: &mut Report) {
    let Some(connection) = through.connection() else {
        return;
    };
    let listing = rangecache_upstream::members(connection, false);
    let Ok(Ok(known)) = timeout(CALL_TIMEOUT, listing).await else {
        return;
    };
    let reached: BTreeSet<u64> = members
        .iter()
        .filter_map(|member| Some(member.status.as_ref().ok()?.header?.member_id))
        .collect();
    let is_named = |known: &Known| {
        reached.contains(&known.id)
            || members
                .iter()
                .any(|member| known.client_urls.contains(&member.url.to_string()))
    };
    let missing: Vec<_> = known.iter().filter(|known| !is_named(known)).collect();
    if missing.is_empty() {
        let text = match known.len() {
            1 => "the cluster has one member".to_owned(),
            n => format!("all {n} members of the cluster are named"),
        };
        return report.find(FindingId::MembersNamed, text);
    }
    let names: Vec<_> = missing
        .iter()
        .map(|member| format!("{} ({})", member.name, member.client_urls.join(" ")))
        .collect();
    let (n, all, names) = (missing.len(), known.len(), names.join(", "));
    let text = format!("{n} of the cluster's {all} members are not in --endpoints: {names}");
    report.find(FindingId::MembersNotNamed, text);
}

fn gates(config: &Config, members: &[Member], report: &mut Report) {
    let versions: BTreeSet<Version> = members.iter().filter_map(Member::version).collect();
    if versions.is_empty() {
        return;
    }
    if versions.len() > 1 {
        let list: Vec<_> = versions.iter().map(ToString::to_string).collect();
        let text = format!("the members have different versions: {}", list.join(", "));
        report.find(FindingId::VersionsDiffer, text);
    }
    let endpoints: Vec<_> = members
        .iter()
        .map(|member| EndpointReport {
            version: member.version(),
            is_unimplemented: false,
        })
        .collect();
    for gate in gates::ALL {
        let is_off = **gate == gates::RANGE_STREAM && config.etcd.range_stream == RangeStream::Off;
        let (_, mut finding) = rangecache_report::judge_gate(gate, gate.assess(is_off, &endpoints));
        // The title says what is done without the capability.
        finding.meaning.clear();
        if finding.severity == Severity::Warning {
            finding = finding.with_severity(Severity::Bad);
            if config.etcd.old_etcd == OldEtcd::Refuse {
                finding.meaning = "rangecache would stop at once (--old-etcd=refuse)".to_owned();
            }
        }
        report.add(finding);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::testing::{connected, etcd, nothing, status};

    const MAY_READ: AuthFacts = AuthFacts {
        is_accepted: true,
        scopes: Vec::new(),
        readable: Vec::new(),
    };

    async fn examined(urls: &[String], flags: &[&str], auth: &AuthFacts) -> Report {
        let (config, members) = connected(urls, flags).await;
        let mut report = Report::default();
        examine(&config, &members, auth, &mut report).await;
        report
    }

    /// Severity of the finding with this text, which there must be.
    fn severity(report: &Report, text: &str) -> Severity {
        let mut all = report.findings.iter();
        all.find(|finding| finding.text().contains(text) || finding.remedy.contains(text))
            .unwrap_or_else(|| panic!("nothing about {text}: {report:?}"))
            .severity
    }

    #[tokio::test]
    async fn endpoint_that_is_away_is_bad_only_if_there_is_no_other() {
        let etcd = etcd(status(1), &[]).await;
        let away = nothing();
        let report = examined(&[away.clone(), etcd.url.to_string()], &[], &MAY_READ).await;
        assert_eq!(severity(&report, &away), Severity::Warning);
        let report = examined(std::slice::from_ref(&away), &[], &MAY_READ).await;
        assert_eq!(severity(&report, &away), Severity::Bad);
    }

    #[tokio::test]
    async fn state_of_a_member_decides_what_is_found() {
        let of = |change: fn(&mut StatusResponse)| {
            let mut status = status(2);
            change(&mut status);
            status
        };
        for (status, text, expected) in [
            (of(|_| ()), "etcd 3.7.3, follower", Severity::Good),
            (
                of(|status| status.is_learner = true),
                "a learner does not vote",
                Severity::Warning,
            ),
            (
                of(|status| status.leader = 0),
                "restore the quorum",
                Severity::Bad,
            ),
            (
                of(|status| status.errors = vec!["alarm:NOSPACE".into()]),
                "alarm disarm",
                Severity::Warning,
            ),
            (
                of(|status| status.errors = vec!["alarm:CORRUPT".into()]),
                "replace this member",
                Severity::Warning,
            ),
            (
                of(|status| status.db_size_quota = 4 << 20),
                "of its quota",
                Severity::Warning,
            ),
            (
                of(|status| status.db_size_quota = 1 << 30),
                "database 4 MiB",
                Severity::Good,
            ),
            (
                of(|status| status.version = "3.4.2".into()),
                "stop at once",
                Severity::Bad,
            ),
        ] {
            let etcd = etcd(status, &[]).await;
            let report = examined(&[etcd.url.to_string()], &["--old-etcd=refuse"], &MAY_READ).await;
            assert_eq!(severity(&report, text), expected, "{text}");
        }
    }

    #[tokio::test]
    async fn status_that_users_alone_may_read_is_not_a_fault_of_the_member() {
        let refusing = rangecache_upstream::fake::FakeEtcd::start(async |_, _| Err((16, "no token"))).await;
        let urls = [refusing.url.to_string()];
        let refused = AuthFacts {
            is_accepted: false,
            ..MAY_READ
        };
        let report = examined(&urls, &[], &refused).await;
        assert_eq!(severity(&report, "to users only"), Severity::Good);
        let report = examined(&urls, &[], &MAY_READ).await;
        assert_eq!(severity(&report, "the status call failed"), Severity::Bad);
    }

    #[tokio::test]
    async fn members_that_are_not_named_and_foreign_ones_are_found() {
        let known = |id, url: &str| Known {
            id,
            name: format!("member-{id}"),
            client_urls: vec![url.to_owned()],
            is_learner: false,
        };
        let all = [known(1, "http://a:2379"), known(2, "http://b:2379")];
        let (first, second) = (etcd(status(1), &all).await, etcd(status(2), &all).await);
        let (first, second) = (first.url.to_string(), second.url.to_string());
        let report = examined(std::slice::from_ref(&first), &[], &MAY_READ).await;
        assert_eq!(severity(&report, "member-2 (http://b:2379)"), Severity::Warning);
        let report = examined(&[first.clone(), second], &[], &MAY_READ).await;
        assert_eq!(
            severity(&report, "all 2 members of the cluster are named"),
            Severity::Good
        );

        let mut foreign = status(2);
        foreign.header.as_mut().unwrap().cluster_id = 8;
        let foreign = etcd(foreign, &all).await;
        let report = examined(&[first, foreign.url.to_string()], &[], &MAY_READ).await;
        assert_ne!(severity(&report, &foreign.url.to_string()), Severity::Bad);
        assert!(report.result >= Severity::Warning, "{report:?}");
    }
}
