//! Faults of the model. Each starts, lasts for a while, and is over at its end.

use std::time::Duration;

use tokio::time::sleep;

use crate::caller::{HALVES, KEYS, PREFIX, connect, key};
use crate::chance::Chance;
use crate::cluster::{MEMBERS, Member, State};
use crate::members::From;
use crate::proxy::Rangecache;
use crate::seeds::Job;
use crate::store::Change;
use crate::world::World;

/// One kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    ConnectionsCut,
    LinksDown,
    MemberKilled,
    MemberPaused,
    MemberIsolated,
    MemberLags,
    LinksSlow,
    WatchesSlow,
    ProgressUnanswered,
    LeaderLost,
    Compaction,
    /// All members are restored from a backup: the newest writes are lost, and others take their revisions.
    Restore,
    /// Rangecache is stopped, and started again.
    Restarted,
    /// Rangecache is reloaded with other prefixes, and with its own again.
    PrefixesChanged,
}

impl Fault {
    const ALL: [Fault; 14] = [
        Fault::ConnectionsCut,
        Fault::LinksDown,
        Fault::MemberKilled,
        Fault::MemberPaused,
        Fault::MemberIsolated,
        Fault::MemberLags,
        Fault::LinksSlow,
        Fault::WatchesSlow,
        Fault::ProgressUnanswered,
        Fault::LeaderLost,
        Fault::Compaction,
        Fault::Restore,
        Fault::Restarted,
        Fault::PrefixesChanged,
    ];

    /// What meets a replaced history.
    const WITH_RESTORES: [Fault; 9] = [
        Fault::ConnectionsCut,
        Fault::LinksDown,
        Fault::MemberLags,
        Fault::LinksSlow,
        Fault::WatchesSlow,
        Fault::ProgressUnanswered,
        Fault::Compaction,
        Fault::Restarted,
        Fault::PrefixesChanged,
    ];

    /// The kinds of faults of one simulation of `job`: few, so that the same ones meet more often than if all were possible.
    pub fn kinds(job: Job, chance: &Chance) -> Vec<Fault> {
        let mut kinds = match job {
            Job::Mixed => Self::ALL.to_vec(),
            Job::Restores => Self::WITH_RESTORES.to_vec(),
        };
        let may_restore = chance.one_in(3);
        kinds.retain(|kind| match kind {
            Fault::Restore => may_restore,
            _ => chance.one_in(2),
        });
        if job == Job::Restores {
            // As often as all others together, but always.
            kinds.resize((2 * kinds.len()).max(1), Fault::Restore);
        }
        if kinds.is_empty() {
            kinds.push(Fault::ConnectionsCut);
        }
        kinds
    }

    /// Causes the fault, and returns once it is over. Returns false if rangecache did not stop.
    pub async fn apply(self, world: &World, rangecache: &Rangecache) -> bool {
        let chance = &world.chance;
        let member = chance.below(MEMBERS);
        let (cluster, members) = (&world.cluster, &world.members);
        let set = |set: &dyn Fn(&mut Member)| cluster.change(|state| set(&mut state.members[member]));
        let longer = || chance.millis(300..6_000);
        match self {
            Fault::ConnectionsCut => {
                let times = u32::try_from(1 + chance.below(3)).expect("is small");
                From::BOTH
                    .iter()
                    .for_each(|from| cluster.cut(member, *from, times));
            }
            Fault::LinksDown => {
                let many = chance.below(MEMBERS) + 1;
                for down in 0..many {
                    members.cut_off((member + down) % MEMBERS, From::Rangecache);
                }
                sleep(longer()).await;
                for up in 0..many {
                    members.reconnect((member + up) % MEMBERS, From::Rangecache);
                }
            }
            Fault::MemberKilled => {
                members.kill(member);
                sleep(longer()).await;
                members.restart(member);
            }
            Fault::MemberPaused => {
                set(&|of| of.is_paused = true);
                sleep(longer()).await;
                set(&|of| of.is_paused = false);
            }
            Fault::MemberIsolated => {
                set(&|of| of.is_isolated = true);
                sleep(longer()).await;
                set(&|of| of.is_isolated = false);
            }
            Fault::MemberLags => {
                let most = 20 + chance.below(1_500) as u64;
                set(&|of| of.lag = most / 4..most);
                sleep(longer()).await;
                set(&|of| of.lag = Member::new().lag);
            }
            Fault::LinksSlow => {
                let most = 5 + chance.below(300) as u64;
                set(&|of| of.delay = 0..most);
                sleep(longer()).await;
                set(&|of| of.delay = Member::new().delay);
            }
            Fault::WatchesSlow => {
                let most = 20 + chance.below(1_500) as u64;
                cluster.change(|state| state.members.iter_mut().for_each(|of| of.watch_delay = 0..most));
                sleep(longer()).await;
                let usual = Member::new().watch_delay;
                cluster.change(|state| {
                    state
                        .members
                        .iter_mut()
                        .for_each(|of| of.watch_delay = usual.clone());
                });
            }
            Fault::ProgressUnanswered => {
                cluster.change(|state| state.members.iter_mut().for_each(|of| of.is_silent = true));
                sleep(longer()).await;
                cluster.change(|state| state.members.iter_mut().for_each(|of| of.is_silent = false));
            }
            Fault::LeaderLost => cluster.change(|state| state.leader = None),
            Fault::Compaction => {
                let back = chance.within(0..25);
                cluster.change(|state| {
                    let newest = state.history().newest();
                    let revision = (newest.revision - back).min(state.history().compactable);
                    if revision > newest.compacted {
                        state.history_mut().compact(revision);
                    }
                });
            }
            Fault::Restore => restore(world).await,
            Fault::Restarted => return rangecache.restart(chance.millis(0..3_000)).await,
            Fault::PrefixesChanged => {
                let half = HALVES[chance.below(2)];
                let prefixes = [&[half][..], &HALVES, &[PREFIX], &[]];
                rangecache.reload(prefixes[chance.below(prefixes.len())]).await;
                sleep(longer()).await;
                rangecache.reload_as_started().await;
            }
        }
        true
    }
}

/// Stops all members, puts an older state in place of theirs, and starts them again. In half of the cases rangecache
/// sees none of them before the lost revisions were written again, in others it loses them once more.
async fn restore(world: &World) {
    let (chance, cluster, members) = (&world.chance, &world.cluster, &world.members);
    (0..MEMBERS).for_each(|member| members.kill(member));
    let lost = 1 + chance.below(40);
    let (is_new_cluster, is_hidden) = (chance.one_in(3), chance.one_in(2));
    let before = cluster.change(|state| {
        let newest = state.history().newest().revision;
        let entries = state.history().len().saturating_sub(lost).max(1);
        let mut history = state.history().truncated(entries);
        if is_new_cluster {
            // Its raft log has nothing to do with the one before.
            state.term = 1 + chance.below(20) as u64;
            history.begin_cluster(state.term, chance.below(60) as u64);
        } else if is_hidden {
            // The newest events are all that shows such a restore: docs/consistency.md says what follows without them.
            history.compactable = history.newest().revision;
        }
        let (from, to) = (state.history().newest(), history.newest());
        cluster.trace.line(format!(
            "restored: {from:?} becomes {to:?}, hidden: {is_hidden}, another cluster: {is_new_cluster}"
        ));
        state.replace_history(history);
        newest
    });
    for member in 0..MEMBERS {
        members.restart(member);
        cluster.change(|state| state.members[member].applied = state.history().len());
        if is_hidden {
            members.cut_off(member, From::Rangecache);
        }
    }
    if is_hidden {
        if chance.one_in(2) {
            cluster.change(|state| repeat_lost(state, chance));
        }
        // In case that no client writes directly.
        let writing = async {
            while cluster.look(|state| state.history().newest().revision) <= before + 1 {
                if let Some(client) = connect(&From::Clients.authority(0)).await {
                    let _ = client.put(key(0), "again").await;
                }
                sleep(Duration::from_millis(10)).await;
            }
        };
        writing.await;
        if chance.one_in(3) {
            // So long that watches are continued at etcd.
            sleep(Duration::from_secs(11)).await;
        }
    } else if chance.one_in(3) {
        // Rangecache reaches the members for a moment.
        sleep(chance.millis(0..100)).await;
        (0..MEMBERS).for_each(|member| members.cut_off(member, From::Rangecache));
        sleep(chance.millis(500..4_000)).await;
    }
    (0..MEMBERS).for_each(|member| members.reconnect(member, From::Rangecache));
}

/// Writes what was lost again, as clients do that repeat what was not acknowledged, except for one revision.
fn repeat_lost(state: &mut State, chance: &Chance) {
    let before = &state.histories[state.histories.len() - 2];
    let revisions = state.history().newest().revision + 1..=before.newest().revision;
    let mut lost: Vec<_> = revisions
        .clone()
        .map(|revision| before.changes_at(revision))
        .collect();
    // The newest event stays the same. What is below a compaction that was known before is not compared.
    let first = usize::try_from(before.newest().compacted - revisions.start()).unwrap_or(0);
    if first + 1 < lost.len() {
        let other = first + chance.below(lost.len() - 1 - first);
        lost[other] = vec![Change::Put(key(chance.below(KEYS)).into(), b"another".to_vec())];
    }
    for changes in lost {
        state.history_mut().commit(&changes);
    }
}
