//! What the endpoints are together: who is missing, which versions, what etcd itself complains of.

use std::collections::BTreeSet;

use tokio::time::timeout;

use super::CALL_TIMEOUT;
use super::identity::Auth;
use super::members::{Member, best, name};
use super::report::{Area, Report};
use super::text::bytes;
use crate::config::{Config, OldEtcd, RangeStream};
use crate::etcdserverpb::cluster_client::ClusterClient;
use crate::etcdserverpb::{Member as Known, MemberListRequest, StatusResponse};
use crate::upstream::{Role, Version, gates};

/// Findings on the endpoints, the members that are no endpoints, and the version gates.
pub(super) async fn judge(config: &Config, members: &[Member], auth: &Auth, report: &mut Report) {
    for member in members {
        endpoint(member, members, auth, report);
    }
    one_cluster(members, report);
    if let Some(member) = best(members) {
        missing_members(member, members, report).await;
    }
    gates(config, members, report);
}

fn endpoint(member: &Member, members: &[Member], auth: &Auth, report: &mut Report) {
    let url = &member.url;
    if let Err(error) = &member.link {
        let text = format!("{url}: {error}");
        let others = members.iter().any(|other| other.connection().is_some());
        if others {
            let remedy = "rangecache goes on with the others and tries this one again and again; start it, or take it out of --endpoints";
            report.warn(Area::Endpoints, text, remedy);
        } else {
            let remedy = "rangecache would answer nothing: check the address, etcd, the network and TLS";
            report.bad(Area::Endpoints, text, remedy);
        }
        return;
    }
    let status = match &member.status {
        Ok(status) => status,
        // Said once, under auth.
        Err(_) if !auth.may_ask() => {
            report.good(
                Area::Endpoints,
                format!("{url}: answers, but tells its status to users only"),
            );
            return;
        }
        Err(error) => {
            report.bad(
                Area::Endpoints,
                format!("{url}: does not tell its status: {error}"),
                "is this etcd's client URL? Without a version nothing is answered from memory",
            );
            return;
        }
    };
    let role = member.role().unwrap_or(Role::Unknown);
    let text = format!(
        "{url}: etcd {}, {}, database {} ({} in use)",
        status.version,
        name(role),
        bytes(status.db_size),
        bytes(status.db_size_in_use),
    );
    match role {
        Role::Learner => report.warn(
            Area::Endpoints,
            text,
            "a learner does not vote: calls go to it only while there is no other",
        ),
        Role::Leaderless => report.bad(
            Area::Endpoints,
            text,
            "etcd cannot answer linearizable reads: restore the quorum",
        ),
        _ if member.serves != Some(true) => report.warn(
            Area::Endpoints,
            format!("{text}; its health service says that it does not serve"),
            "calls go to others while there are any; look at that member",
        ),
        _ => report.good(Area::Endpoints, text),
    }
    complaints(member, status, report);
}

fn complaints(member: &Member, status: &StatusResponse, report: &mut Report) {
    let url = &member.url;
    for complaint in &status.errors {
        let remedy = if complaint.contains("NOSPACE") {
            "etcd refuses writes: compact, defragment, raise --quota-backend-bytes, then etcdctl alarm disarm"
        } else if complaint.contains("CORRUPT") {
            "this member's data is damaged: replace it; whatever it answers cannot be trusted, with or without rangecache"
        } else {
            "see etcd's log"
        };
        report.warn(Area::Endpoints, format!("{url}: etcd says: {complaint}"), remedy);
    }
    let quota = status.db_size_quota;
    if quota > 0 && status.db_size > quota / 10 * 8 {
        report.warn(
            Area::Endpoints,
            format!(
                "{url}: the database has {} of the {} that its quota allows",
                bytes(status.db_size),
                bytes(quota)
            ),
            "compact and defragment, or raise etcd's --quota-backend-bytes: at the quota etcd refuses writes",
        );
    }
}

/// Endpoints of two clusters would be mixed up; rangecache keeps finding "replaced" histories then.
fn one_cluster(members: &[Member], report: &mut Report) {
    let ids: BTreeSet<u64> = members
        .iter()
        .filter_map(|member| Some(member.status.as_ref().ok()?.header?.cluster_id))
        .collect();
    if ids.len() > 1 {
        report.bad(
            Area::Endpoints,
            format!("--endpoints names members of {} different clusters", ids.len()),
            "name the members of one",
        );
    }
}

/// Members that `--endpoints` does not name: without them, a member cut off from the others takes the proofs with it.
async fn missing_members(asked: &Member, members: &[Member], report: &mut Report) {
    let Some(connection) = asked.connection() else {
        return;
    };
    let (channel, origin) = connection.own_channel();
    let mut client = ClusterClient::with_origin(channel, origin);
    let Ok(Ok(answer)) = timeout(CALL_TIMEOUT, client.member_list(MemberListRequest {})).await else {
        return;
    };
    let known = answer.into_inner().members;
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
        report.good(
            Area::Endpoints,
            match known.len() {
                1 => "the cluster has one member".to_owned(),
                n => format!("all {n} members of the cluster are named"),
            },
        );
        return;
    }
    let names: Vec<_> = missing
        .iter()
        .map(|member| format!("{} ({})", member.name, member.client_urls.join(" ")))
        .collect();
    report.warn(
        Area::Endpoints,
        format!(
            "{} of the cluster's {} members are not in --endpoints: {}",
            missing.len(),
            known.len(),
            names.join(", ")
        ),
        "name all of them, unless one name stands for all: with the named ones cut off or down, memory proves nothing",
    );
}

fn gates(config: &Config, members: &[Member], report: &mut Report) {
    let versions: BTreeSet<Version> = members.iter().filter_map(Member::version).collect();
    let Some(lowest) = versions.first() else {
        return;
    };
    if versions.len() > 1 {
        let list: Vec<_> = versions.iter().map(ToString::to_string).collect();
        report.warn(
            Area::Gates,
            format!("the members have different versions: {}", list.join(", ")),
            "fine during an upgrade; the lowest one decides what is trusted",
        );
    }
    if gates::PROGRESS_NOTIFICATIONS.is_open(*lowest) {
        report.good(
            Area::Gates,
            format!("progress notifications can be trusted (lowest version {lowest})"),
        );
    } else {
        let consequence = match config.etcd.old_etcd {
            OldEtcd::Forward => "linearizable reads would all be forwarded",
            OldEtcd::Refuse => "rangecache would stop at once (--old-etcd=refuse)",
        };
        report.bad(
            Area::Gates,
            format!("etcd {lowest} sends progress notifications that cannot be trusted: {consequence}"),
            "upgrade etcd to 3.4.31, 3.5.13, 3.6.0 or later",
        );
    }
    let have = members
        .iter()
        .filter_map(Member::version)
        .filter(|version| gates::RANGE_STREAM.is_open(*version));
    match (config.etcd.range_stream, have.count()) {
        (RangeStream::Off, _) => report.good(Area::Gates, "etcd's RangeStream is not used (--range-stream=off)"),
        (RangeStream::Auto, 0) => report.good(
            Area::Gates,
            "etcd has no RangeStream (3.7 has): mirrors load by pages, and large reads that memory cannot answer cost etcd what they always did; \
             clients may use it all the same",
        ),
        (RangeStream::Auto, n) => report.good(
            Area::Gates,
            format!("RangeStream: {n} of {} endpoints have it", members.len()),
        ),
    }
}
