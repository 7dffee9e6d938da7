//! Faults of etcd, rangecache and the links between them. Each starts, lasts for a while, and is over at its end.

use std::sync::atomic::Ordering;
use std::time::Duration;

use rand::Rng;

use crate::recorder::Recorder;
use crate::world::{World, newest};
use testkit::fault_link::Condition;
use testkit::pb::{Empty, MoveLeaderRequest};
use testkit::wait::{SOON, until};

/// Kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    MemberKilled,
    MemberPaused,
    LeaderMoved,
    NoQuorum,
    LinksCut,
    LinksHalfOpen,
    LinksSlow,
    LinksLossy,
    FeedsSlow,
    /// A member cannot reach the other members, nor they it; clients and rangecaches still reach it.
    MemberIsolated,
    /// All messages between members are delayed.
    MembersSlow,
    Compaction,
    Defragmentation,
    MembersRolled,
    RangecachesRolled,
    RangecachePaused,
    /// All data directories are put back from a disk snapshot: the cluster keeps its id and its raft log, and loses the
    /// writes since. It ends one history and starts another.
    Rollback,
    /// Not part of the mix: it ends one history and starts another.
    Restore,
}

impl Fault {
    /// All faults, by name.
    pub const ALL: [(&'static str, Fault); 18] = [
        ("member-killed", Fault::MemberKilled),
        ("member-paused", Fault::MemberPaused),
        ("leader-moved", Fault::LeaderMoved),
        ("no-quorum", Fault::NoQuorum),
        ("links-cut", Fault::LinksCut),
        ("links-half-open", Fault::LinksHalfOpen),
        ("links-slow", Fault::LinksSlow),
        ("links-lossy", Fault::LinksLossy),
        ("feeds-slow", Fault::FeedsSlow),
        ("member-isolated", Fault::MemberIsolated),
        ("members-slow", Fault::MembersSlow),
        ("compaction", Fault::Compaction),
        ("defragmentation", Fault::Defragmentation),
        ("members-rolled", Fault::MembersRolled),
        ("rangecaches-rolled", Fault::RangecachesRolled),
        ("rangecache-paused", Fault::RangecachePaused),
        ("rollback", Fault::Rollback),
        ("restore", Fault::Restore),
    ];

    /// Causes the fault, and returns once it is over.
    pub async fn apply(self, world: &mut World) {
        let member = world.random.random_range(0..3);
        let (sidecars, members) = (world.some_sidecars(), world.some_members());
        match self {
            Fault::MemberKilled => {
                world.cluster.members[member].stop();
                world.last(500..4_000).await;
                world.cluster.members[member].run();
                world.cluster.members[member].ready().await;
            }
            Fault::MemberPaused => {
                world.cluster.members[member].pause();
                world.last(200..5_000).await;
                world.cluster.members[member].resume();
            }
            Fault::LeaderMoved => move_leader(world, member).await,
            Fault::NoQuorum => {
                let silent = [member, (member + 1) % 3];
                silent.iter().for_each(|n| world.cluster.members[*n].pause());
                world.last(500..4_000).await;
                silent.iter().for_each(|n| world.cluster.members[*n].resume());
                world.members_serve().await;
            }
            Fault::LinksCut => under(world, &sidecars, &members, Condition::Cut).await,
            Fault::LinksHalfOpen => {
                under(world, &sidecars, &members, Condition::HalfOpen).await;
            }
            Fault::LinksSlow => {
                let late = Duration::from_millis(world.random.random_range(5..300));
                under(world, &sidecars, &members, Condition::Slow(late)).await;
            }
            Fault::LinksLossy => under(world, &sidecars, &[0, 1, 2], Condition::Lossy).await,
            Fault::FeedsSlow => {
                let late = Duration::from_millis(world.random.random_range(20..1_500));
                // The links of a rangecache behind another one are its fallback, and may not have been used.
                for sidecar in world
                    .sidecars
                    .iter()
                    .filter(|sidecar| sidecar.is_before_members())
                {
                    let feeds: usize = sidecar.links.iter().map(|link| link.feeds()).sum();
                    assert!(feeds > 0, "no feed of {} was recognised", sidecar.name);
                }
                under(world, &sidecars, &[0, 1, 2], Condition::SlowFeeds(late)).await;
            }
            Fault::MemberIsolated => isolate(world, member).await,
            Fault::MembersSlow => {
                let late = Duration::from_millis(world.random.random_range(2..40));
                world
                    .peer_links
                    .iter()
                    .for_each(|link| link.set(Condition::Slow(late)));
                world.last(500..6_000).await;
                world
                    .peer_links
                    .iter()
                    .for_each(|link| link.set(Condition::Normal));
            }
            Fault::Compaction => compact(world).await,
            Fault::Defragmentation => {
                let client = world.cluster.members[member].client().await;
                let done = client.unary::<Empty>("/etcdserverpb.Maintenance/Defragment", &Empty {});
                done.await.expect("etcd defragments");
            }
            Fault::MembersRolled => {
                for n in 0..3 {
                    world.cluster.members[n].terminate().await;
                    world.cluster.members[n].run();
                    world.cluster.members[n].ready().await;
                }
            }
            Fault::RangecachesRolled => {
                for sidecar in &mut world.sidecars {
                    let running = sidecar.rangecache.take().expect("runs");
                    if world.random.random() {
                        let status = running.terminate().await;
                        assert!(status.success(), "{status}");
                    } else {
                        // SIGKILL.
                        drop(running);
                    }
                    sidecar.start().await;
                    sidecar.running().warm().await;
                }
            }
            Fault::RangecachePaused => {
                for sidecar in &sidecars {
                    world.sidecars[*sidecar].running().pause();
                }
                world.last(50..3_000).await;
                for sidecar in &sidecars {
                    world.sidecars[*sidecar].running().resume();
                }
            }
            Fault::Rollback => roll_back(world).await,
            Fault::Restore => restore(world).await,
        }
    }
}

/// Sets a condition on links for a while.
async fn under(world: &mut World, sidecars: &[usize], members: &[usize], condition: Condition) {
    println!("  {condition:?} from rangecaches {sidecars:?} to members {members:?}");
    world.set_links(sidecars, members, condition);
    world.last(500..6_000).await;
    world.set_links(sidecars, members, Condition::Normal);
}

/// In half of the cases the isolated member is the leader, which keeps its role until it notices the lack of
/// followers.
async fn isolate(world: &mut World, member: usize) {
    let leader = world.cluster.leader().await.unwrap_or(member);
    let member = if world.random.random() { leader } else { member };
    let id = id(world, member).await;
    println!("  member {member} is isolated; {leader} leads");
    for (n, link) in world.peer_links.iter().enumerate() {
        link.set(if n == member {
            Condition::Cut
        } else {
            Condition::CutFrom(id)
        });
    }
    world.last(500..6_000).await;
    world
        .peer_links
        .iter()
        .for_each(|link| link.set(Condition::Normal));
    world.members_serve().await;
}

async fn id(world: &World, member: usize) -> u64 {
    let status = world.cluster.members[member].client().await.status().await;
    status.expect("a status").header.expect("a header").member_id
}

/// Moves leadership to another member.
async fn move_leader(world: &World, to: usize) {
    let leader = async || world.cluster.leader().await;
    let (from, _) = until(SOON, "the cluster has a leader", leader).await;
    let to = if to == from { (to + 1) % 3 } else { to };
    let target = id(world, to).await;
    let leader = world.cluster.members[from].client().await;
    // The member may have lost an election in the meantime; then the leader has changed as well.
    let _ = leader
        .unary::<Empty>(
            "/etcdserverpb.Maintenance/MoveLeader",
            &MoveLeaderRequest { target_id: target },
        )
        .await;
}

/// Compacts to a recent revision, through a rangecache or directly.
async fn compact(world: &mut World) {
    // Only revisions that the recorder has seen.
    let revision = world.recorder.revision() - world.random.random_range(0..100);
    let client = match world.random.random_range(0..3) {
        2 => world.cluster.members[0].client().await,
        n => world.sidecars[n].running().client().await,
    };
    world.history.compact(revision);
    // A later revision may have been compacted before.
    let _ = client.compact(revision).await;
}

/// Puts all data directories back, and then writes past the lost revisions. In half of the cases no rangecache sees etcd
/// before that.
async fn roll_back(world: &mut World) {
    world.cluster.copy_data();
    world.last(500..2_500).await;
    let forgotten = end_history(world).await;
    let is_hidden = world.random.random();
    if is_hidden {
        world.set_links(&[0, 1], &[0, 1, 2], Condition::Cut);
    }
    for member in &mut world.cluster.members {
        member.stop();
    }
    world.stop_recording().await;
    for member in &mut world.cluster.members {
        member.roll_back();
    }
    begin_history(world, forgotten).await;
    if is_hidden {
        let direct = world.cluster.members[0].client().await;
        until(SOON, "the lost revisions are written again", async || {
            (newest(&direct).await > forgotten).then_some(())
        })
        .await;
        world.set_links(&[0, 1], &[0, 1, 2], Condition::Normal);
    }
}

/// Restores all members from a snapshot that lacks recent writes, and then writes past the lost revisions.
async fn restore(world: &mut World) {
    let snapshot = world.cluster.members[0].save_snapshot().await;
    world.last(500..2_500).await;
    let forgotten = end_history(world).await;
    let token = if world.random.random() {
        "rangecache"
    } else {
        "another"
    };
    println!("  cluster {token}");
    for member in &mut world.cluster.members {
        member.stop();
    }
    world.stop_recording().await;
    for member in &mut world.cluster.members {
        member.restore(&snapshot, token, &[]);
    }
    begin_history(world, forgotten).await;
}

/// Suspends writes, and returns the last revision of the history that is about to end.
async fn end_history(world: &World) -> i64 {
    world.shared.writes_suspended.store(true, Ordering::SeqCst);
    until(SOON, "no write is in flight", async || {
        (world.shared.writing.load(Ordering::SeqCst) == 0).then_some(())
    })
    .await;
    let forgotten = newest(&world.cluster.members[0].client().await).await;
    world.recorder.reaches(forgotten).await;
    forgotten
}

/// Starts the members, which are stopped and have other data now, and lets clients write again.
async fn begin_history(world: &mut World, forgotten: i64) {
    // No process of the old history runs any more: calls from now on must not see that history.
    let cut = world.history.now();
    for member in &mut world.cluster.members {
        member.run();
    }
    world.members_serve().await;
    let revision = newest(&world.cluster.members[0].client().await).await;
    println!("  continued at {revision}, {forgotten} was the last revision of the old history");
    assert!(revision < forgotten, "nothing was lost");
    let segment = world.shared.segment.fetch_add(1, Ordering::SeqCst) + 1;
    world.history.cut(cut, revision);
    world.continue_events(revision);
    world.recorder = Recorder::start(&world.history, &world.members(), segment, revision);
    world.shared.writes_suspended.store(false, Ordering::SeqCst);
}
