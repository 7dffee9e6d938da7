//! A cluster that is upgraded member by member under load, from etcd 3.5 to 3.6 to 3.7, and taken back to 3.6.

use std::collections::BTreeMap;
use std::process::Command;

use serde_json::Value;
use testkit::etcd::{Cluster, Version};
use testkit::grpc::{DEADLINE_EXCEEDED, Status, UNAVAILABLE, UNIMPLEMENTED};
use testkit::kv::RANGE_STREAM;
use testkit::process::tool;
use testkit::wait::{SOON, until};

use crate::client::Failure;
use crate::world::World;

/// Version at the start.
pub const FROM: Version = Version::V3_5;

/// etcd 3.7 cannot apply log entries of etcd 3.5: its members must have taken a snapshot since, as they have after the days
/// that lie between two upgrades.
pub const ETCD_FLAGS: [&str; 1] = ["--snapshot-count=200"];

/// Moves the cluster through the versions, one member at a time, and waits after each member until both rangecaches
/// answer from memory.
pub async fn upgrade_and_back(world: &mut World) {
    for (version, name) in [(Version::V3_6, "3.6"), (Version::V3_7, "3.7")] {
        roll(world, version, name).await;
        cluster_version(&world.cluster, name).await;
    }
    // etcd first lowers the cluster's version and rewrites the storage; members of the older version may start after that.
    let enabled = etcdctl(&world.cluster, &["downgrade", "enable", "3.6.0"]);
    println!("downgrade enabled: {enabled}");
    storage_version(&world.cluster, "3.6.0").await;
    roll(world, Version::V3_6, "back to 3.6").await;
}

/// Prints how often calls failed, by server and method, and checks that calls through rangecache fail only as etcd's own
/// calls do while a member stops. On a busy machine the members may be without a leader for longer than calls wait: then etcd's own
/// clients see that, too.
pub fn judge_failures(failures: &[Failure]) {
    let mut table = BTreeMap::<_, usize>::new();
    for Failure { via, method, status } in failures {
        *table.entry((via, method, format!("{status:?}"))).or_default() += 1;
    }
    for ((via, method, status), count) in table {
        println!("{count:>5} failed calls of {method} through {via}: {status}");
    }
    let (of_etcd, through): (Vec<_>, Vec<_>) = failures.iter().partition(|failure| failure.via == "etcd");
    let is_late = |failure: &Failure| {
        failure
            .status
            .as_ref()
            .is_some_and(|status| status.code == DEADLINE_EXCEEDED)
    };
    let is_etcd_late = of_etcd.iter().any(|failure| is_late(failure));
    let wrong: Vec<_> = through
        .into_iter()
        .filter(|failure| {
            let may_fail =
                is_of_a_stopping_member(failure.status.as_ref()) || is_etcd_late && is_late(failure);
            !may_fail
        })
        .collect();
    assert!(wrong.is_empty(), "no etcd fails a call like this: {wrong:?}");
}

/// Whether etcd ends a call like this when a member stops or the leader changes: `Unavailable`, or a reset with `CANCEL`.
/// rangecache reports a connection that was lost with the call as `Unavailable`, like etcd's own client.
fn is_of_a_stopping_member(status: Option<&Status>) -> bool {
    status.is_some_and(|status| status.code == UNAVAILABLE || status.message.contains("reset Some(8)"))
}

async fn roll(world: &mut World, version: Version, name: &str) {
    for n in 0..world.cluster.members.len() {
        println!("member {n}: {name}");
        let member = &mut world.cluster.members[n];
        member.terminate().await;
        member.switch(version);
        member.run();
        member.ready().await;
        world.recover(name).await;
        let calm = super::random_calm(&mut world.random);
        world.calm(calm).await;
    }
}

/// Waits until every member reports this version of the cluster, which follows that of the oldest member.
async fn cluster_version(cluster: &Cluster, version: &str) {
    for member in &cluster.members {
        let url = format!("{}/version", member.url());
        until(SOON, &format!("the cluster's version is {version}"), async || {
            let body = testkit::http::get(&url).await.ok()?;
            let report: Value = serde_json::from_str(&body.body).ok()?;
            report["etcdcluster"].as_str()?.starts_with(version).then_some(())
        })
        .await;
    }
}

/// Waits until the storage of every member has this version.
async fn storage_version(cluster: &Cluster, version: &str) {
    until(SOON, &format!("the storage has version {version}"), async || {
        let report: Value =
            serde_json::from_str(&etcdctl(cluster, &["endpoint", "status", "-w", "json"])).ok()?;
        let members = report.as_array()?;
        let is_ready = |member: &Value| member["Status"]["storageVersion"] == version;
        members.iter().all(is_ready).then_some(())
    })
    .await;
}

fn etcdctl(cluster: &Cluster, arguments: &[&str]) -> String {
    let run = Command::new(tool("etcdctl"))
        .args(["--endpoints", &cluster.endpoints()])
        .args(arguments)
        .output()
        .expect("etcdctl starts");
    let error = String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "etcdctl {arguments:?}: {error}");
    String::from_utf8(run.stdout).expect("etcdctl prints text")
}

#[test]
#[should_panic(expected = "no etcd fails a call like this")]
fn unimplemented_method_through_rangecache_is_wrong() {
    let status = Status {
        code: UNIMPLEMENTED,
        message: "unknown method RangeStream for service etcdserverpb.KV".to_owned(),
    };
    judge_failures(&[Failure {
        via: "a".to_owned(),
        method: RANGE_STREAM.to_owned(),
        status: Some(status),
    }]);
}
