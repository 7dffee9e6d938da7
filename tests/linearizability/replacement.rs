//! A cluster whose members are replaced one by one by members at other addresses, under load. The first rangecache learns of
//! that by a reload of its flags, the second by comparing its endpoints with the members. Neither is restarted, loads its
//! keys again, or interrupts a watch.

use std::path::{Path, PathBuf};

use serde_json::Value;
use testkit::etcd::{Etcd, Version};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

use crate::history::History;
use crate::world::{Endpoints, World, write_endpoints};

/// The system before its members are replaced.
pub async fn world(folder: &Path, seed: u64) -> World {
    let history = History::new(folder);
    let endpoints = [Endpoints::File(flags_file(folder)), Endpoints::Members];
    let mut world = World::start(history, Version::V3_7, &[], endpoints, seed).await;
    world.spares = ["d", "e", "f"].map(|name| world.cluster.spare(name)).into();
    world
}

/// Replaces one member after the other, and waits after each until both rangecaches use the members of now.
pub async fn replace_all(world: &mut World, folder: &Path) {
    let mut loads = Vec::new();
    for sidecar in &world.sidecars {
        loads.push(count_of_loads(sidecar.running()).await);
    }
    for n in 0..world.cluster.members.len() {
        println!("member {n} is replaced");
        let spare = world.spares.remove(0);
        world.cluster.replace(n, spare).await;
        world.recorder.also_watch(&world.cluster.members[n].url());
        write_endpoints(&flags_file(folder), &world.cluster.endpoints());
        world.sidecars[0].running().signal("HUP");
        let members: Vec<_> = world.cluster.members.iter().map(Etcd::url).collect();
        for sidecar in &world.sidecars {
            let what = format!("{} uses the members of now", sidecar.name);
            until(SOON, &what, async || {
                uses(sidecar.running(), &members).await.then_some(())
            })
            .await;
        }
        world.recover("a replacement").await;
        let calm = super::random_calm(&mut world.random);
        world.calm(calm).await;
    }
    for (sidecar, before) in world.sidecars.iter().zip(loads) {
        let after = count_of_loads(sidecar.running()).await;
        assert_eq!(
            after,
            before,
            "{} has loaded its keys again: {}",
            sidecar.name,
            sidecar.running().log()
        );
    }
}

fn flags_file(folder: &Path) -> PathBuf {
    folder.join("flags")
}

/// Whether a rangecache is connected to these members alone.
async fn uses(rangecache: &Rangecache, members: &[String]) -> bool {
    let status: Value = serde_json::from_str(&rangecache.admin("/status").await.body).expect("is JSON");
    let endpoints = status["endpoints"].as_array().expect("a list");
    let is_member = |endpoint: &Value| {
        members.iter().any(|member| endpoint["url"] == member.as_str()) && endpoint["is_healthy"] == true
    };
    endpoints.len() == members.len() && endpoints.iter().all(is_member)
}

async fn count_of_loads(rangecache: &Rangecache) -> f64 {
    let metrics = rangecache.metrics().await;
    metrics.sum("rangecache_mirror_reloads_total")
}
