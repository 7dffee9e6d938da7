//! A cluster that is upgraded member by member under load, from etcd 3.5 to 3.6 to 3.7, and taken back to 3.6.

use std::process::Command;

use serde_json::Value;
use testkit::etcd::{Cluster, Version};
use testkit::process::tool;
use testkit::wait::{SOON, until};

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
