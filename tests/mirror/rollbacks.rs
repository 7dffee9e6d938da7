//! Lossy recoveries that keep the cluster's id and the raft log: a data directory put back from a disk snapshot, and
//! `--force-new-cluster` on a member that was behind. What a mirror held of the lost history is never served once etcd
//! answers again.

use std::time::Instant;

use testkit::etcd::{Cluster, Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::Client;
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, put_when_possible, recovers};
use testkit::wait::{SOON, until};

use super::EXCLUSIVE;

/// Scope of the prefix mirror.
const PREFIX: &str = "/rolled/";
/// Keys outside that scope.
const OTHER: &str = "/other/";
const KEYS: usize = 20;
/// Writes that a rollback loses.
const LOST: usize = 40;
/// Events that suffice to prove a feed: more than it compares.
const EVENTS: usize = 70;
/// Revisions of the new history past the last one of the lost history.
const PAST: i64 = 5;

/// Scope of the mirrors, which determines the changes that the lost writes must make to stay unnoticed.
#[derive(Clone, Copy, PartialEq)]
enum Mirrored {
    /// Every key. The last lost change is the delete of a key that the new history never has.
    Everything,
    /// A single prefix, which the lost writes do not touch.
    Prefix,
}

/// Rangecaches between the client and etcd.
#[derive(Clone, Copy, PartialEq)]
enum Tiers {
    One,
    /// Two, of which one is the hub of the other.
    Two,
}

/// Cluster of one or three members, and a rangecache behind a link to each.
struct Scene {
    members: Vec<Etcd>,
    links: Vec<FaultLink>,
    rangecache: Rangecache,
    through: Client,
}

impl Scene {
    async fn start(members: Vec<Etcd>, mirrored: Mirrored, tiers: Tiers) -> Scene {
        let direct = members[0].client().await;
        for n in 0..KEYS {
            put_when_possible(&direct, &format!("{PREFIX}{n:02}"), "first").await;
            put_when_possible(&direct, &format!("{OTHER}{n:02}"), "first").await;
        }
        let mut links = Vec::new();
        for member in &members {
            links.push(FaultLink::to(&member.url(), 0).await);
        }
        let urls: Vec<_> = links.iter().map(FaultLink::url).collect();
        let mut rangecache = Rangecache::at(&urls.join(","));
        if tiers == Tiers::Two {
            rangecache = Rangecache::before_another(rangecache.start().await);
        }
        if mirrored == Mirrored::Prefix {
            rangecache = rangecache.with("--cache-prefix", PREFIX);
        }
        let rangecache = rangecache.start().await;
        let through = rangecache.client().await;
        // The feed has delivered an event of its own: the mirror's last one.
        recovers(
            "the start",
            PREFIX,
            &direct,
            &rangecache,
            &through,
            Reads::MayFail,
        )
        .await;
        Scene {
            members,
            links,
            rangecache,
            through,
        }
    }

    /// Writes what will be lost to the member `n`, and returns the last revision once the mirror has reached it.
    async fn write_lost(&self, n: usize, mirrored: Mirrored) -> i64 {
        let direct = self.members[n].client().await;
        for n in 0..LOST {
            put_when_possible(&direct, &format!("{OTHER}lost/{n}"), "lost").await;
        }
        if mirrored == Mirrored::Everything {
            put_when_possible(&direct, &format!("{PREFIX}brief"), "lost").await;
            direct
                .delete(format!("{PREFIX}brief"))
                .await
                .expect("etcd deletes");
        }
        let last = current(&direct).await;
        self.is_mirrored_up_to(last).await;
        last
    }

    /// Waits until reads from memory are of the revision `last`.
    async fn is_mirrored_up_to(&self, last: i64) {
        until(
            SOON,
            "the mirror has reached the last lost revision",
            async || {
                let before = self.rangecache.outcomes().await;
                let list = self.through.range(&RangeRequest::prefix(PREFIX)).await.ok()?;
                let outcomes = self.rangecache.outcomes_since(&before, 1).await;
                (outcomes.memory_answers() == 1 && list.revision() == last).then_some(())
            },
        )
        .await;
    }

    /// Writes other keys to the member `n` until the revision is past `lost`, and lets rangecache see etcd again. Each
    /// answer is etcd's from now on.
    async fn overtake(&self, n: usize, lost: i64) {
        let direct = self.members[n].client().await;
        let rolled_back_to = current(&direct).await;
        put_when_possible(&direct, &format!("{PREFIX}new"), "new").await;
        direct.delete(format!("{PREFIX}07")).await.expect("etcd deletes");
        for turn in 0.. {
            put_when_possible(&direct, &format!("{OTHER}new/{turn}"), "new").await;
            if current(&direct).await >= lost + PAST {
                break;
            }
        }
        let expected = direct
            .range(&RangeRequest::prefix(PREFIX))
            .await
            .expect("etcd answers");
        println!(
            "rolled back from {lost} to {rolled_back_to}, now at {}",
            expected.revision()
        );
        self.links.iter().for_each(|link| link.set(Condition::Normal));
        let started = Instant::now();
        let serializable = RangeRequest {
            serializable: true,
            ..RangeRequest::prefix(PREFIX)
        };
        // Nothing is written meanwhile, so every answer of the new history is the same.
        until(SOON, "both kinds of reads come from memory", async || {
            let before = self.rangecache.outcomes().await;
            for list in [&serializable, &RangeRequest::prefix(PREFIX)] {
                // A read fails as long as rangecache has no connection.
                let Ok(got) = self.through.range(list).await else {
                    continue;
                };
                assert_eq!(
                    (got.count, &got.kvs),
                    (expected.count, &expected.kvs),
                    "stale {:?} after etcd answered again (serializable: {})",
                    started.elapsed(),
                    list.serializable
                );
            }
            let outcomes = self.rangecache.outcomes_since(&before, 2).await;
            (outcomes.memory_answers() == 2).then_some(())
        })
        .await;
        recovers(
            "the rollback",
            PREFIX,
            &direct,
            &self.rangecache,
            &self.through,
            Reads::MayFail,
        )
        .await;
    }

    async fn is_rolled_back(&self, n: usize, lost: i64) {
        let revision = current(&self.members[n].client().await).await;
        assert!(revision < lost, "nothing was lost");
    }

    fn cut(&self) {
        self.links.iter().for_each(|link| link.set(Condition::Cut));
    }
}

async fn current(client: &Client) -> i64 {
    let read = RangeRequest::one("any");
    until(SOON, "etcd answers", async || client.range(&read).await.ok())
        .await
        .0
        .revision()
}

async fn data_directories_are_rolled_back(members: Vec<Etcd>, mirrored: Mirrored, tiers: Tiers) {
    let mut scene = Scene::start(members, mirrored, tiers).await;
    for member in &scene.members {
        member.copy_data();
    }
    let lost = scene.write_lost(0, mirrored).await;
    scene.cut();
    for member in &mut scene.members {
        member.roll_back();
    }
    for member in &mut scene.members {
        member.run();
    }
    for member in &scene.members {
        member.ready().await;
    }
    scene.is_rolled_back(0, lost).await;
    scene.overtake(0, lost).await;
}

/// The lost history and the new one end with the same event at the same revision, after different ones: a put, or a delete.
async fn last_events_are_the_same(version: Version, tiers: Tiers) {
    for ends_with_a_delete in [false, true] {
        last_event_is_the_same(version, ends_with_a_delete, tiers).await;
    }
}

async fn last_event_is_the_same(version: Version, ends_with_a_delete: bool, tiers: Tiers) {
    let members = vec![Etcd::start(version).await];
    let mut scene = Scene::start(members, Mirrored::Everything, tiers).await;
    // After fewer events the newest keys are compared as well.
    let direct = scene.members[0].client().await;
    for turn in 0..EVENTS {
        put_when_possible(&direct, &format!("{PREFIX}02"), &turn.to_string()).await;
    }
    scene.members[0].copy_data();
    let writes = async |direct: &Client, key: &str| {
        for value in ["1", "2", "3"] {
            put_when_possible(direct, &format!("{PREFIX}{key}"), value).await;
        }
        put_when_possible(direct, &format!("{PREFIX}brief"), "same").await;
        if ends_with_a_delete {
            direct
                .delete(format!("{PREFIX}brief"))
                .await
                .expect("etcd deletes");
        }
        current(direct).await
    };
    let lost = writes(&scene.members[0].client().await, "00").await;
    scene.is_mirrored_up_to(lost).await;
    scene.cut();
    scene.members[0].roll_back();
    scene.members[0].run();
    scene.members[0].ready().await;
    scene.is_rolled_back(0, lost).await;
    let again = writes(&scene.members[0].client().await, "01").await;
    assert_eq!(again, lost, "the last events are of one revision");
    scene.overtake(0, lost).await;
}

async fn one_member_is_rolled_back(version: Version, tiers: Tiers) {
    for mirrored in [Mirrored::Prefix, Mirrored::Everything] {
        data_directories_are_rolled_back(vec![Etcd::start(version).await], mirrored, tiers).await;
    }
}

async fn three_members_are_rolled_back(version: Version, tiers: Tiers) {
    let _exclusive = EXCLUSIVE.lock().await;
    for mirrored in [Mirrored::Prefix, Mirrored::Everything] {
        let cluster = Cluster::start(version).await;
        data_directories_are_rolled_back(cluster.members, mirrored, tiers).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_of_one_member_is_never_served_stale_3_7() {
    one_member_is_rolled_back(Version::V3_7, Tiers::One).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn rollback_of_one_member_is_never_served_stale_3_6() {
    one_member_is_rolled_back(Version::V3_6, Tiers::One).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_of_one_member_is_never_served_stale_3_5() {
    one_member_is_rolled_back(Version::V3_5, Tiers::One).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_of_three_members_is_never_served_stale_3_7() {
    three_members_are_rolled_back(Version::V3_7, Tiers::One).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn rollback_of_three_members_is_never_served_stale_3_6() {
    three_members_are_rolled_back(Version::V3_6, Tiers::One).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn rollback_of_three_members_is_never_served_stale_3_5() {
    three_members_are_rolled_back(Version::V3_5, Tiers::One).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_with_the_same_last_event_is_never_served_stale_3_7() {
    last_events_are_the_same(Version::V3_7, Tiers::One).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn rollback_with_the_same_last_event_is_never_served_stale_3_6() {
    last_events_are_the_same(Version::V3_6, Tiers::One).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_with_the_same_last_event_is_never_served_stale_3_5() {
    last_events_are_the_same(Version::V3_5, Tiers::One).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_of_one_member_is_never_served_stale_behind_a_hub() {
    one_member_is_rolled_back(Version::V3_7, Tiers::Two).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_of_three_members_is_never_served_stale_behind_a_hub() {
    three_members_are_rolled_back(Version::V3_6, Tiers::Two).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rollback_with_the_same_last_event_is_never_served_stale_behind_a_hub() {
    last_events_are_the_same(Version::V3_7, Tiers::Two).await;
}

/// A member that was down while the others wrote becomes the whole cluster: it keeps the cluster's id and its log.
async fn new_cluster_is_forced(version: Version) {
    let _exclusive = EXCLUSIVE.lock().await;
    for mirrored in [Mirrored::Prefix, Mirrored::Everything] {
        let cluster = Cluster::start(version).await;
        let mut scene = Scene::start(cluster.members, mirrored, Tiers::One).await;
        let revision = current(&scene.members[1].client().await).await;
        let behind = scene.members[0].client().await;
        let serializable = RangeRequest {
            serializable: true,
            ..RangeRequest::one("any")
        };
        until(SOON, "the member has every write so far", async || {
            let reached = behind.range(&serializable).await.ok()?.revision();
            (reached == revision).then_some(())
        })
        .await;
        scene.members[0].stop();
        let lost = scene.write_lost(1, mirrored).await;
        scene.cut();
        for member in &mut scene.members {
            member.stop();
        }
        scene.members[0].run_with(&["--force-new-cluster"]);
        scene.members[0].ready().await;
        scene.overtake(0, lost).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forced_new_cluster_is_never_served_stale_3_7() {
    new_cluster_is_forced(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn forced_new_cluster_is_never_served_stale_3_6() {
    new_cluster_is_forced(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn forced_new_cluster_is_never_served_stale_3_5() {
    new_cluster_is_forced(Version::V3_5).await;
}
