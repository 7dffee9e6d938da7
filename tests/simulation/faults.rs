//! Faults of the model. Each starts, lasts for a while, and is over at its end.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::auth::Auth;
use crate::caller::{HALVES, PREFIX};
use crate::chance::Chance;
use crate::cluster::{MEMBERS, Member, State};
use crate::hub::Tiers;
use crate::members::From;
use crate::proxy::{Rangecache, Settings};
use crate::restore::restore;
use crate::seeds::Job;
use crate::world::World;

/// Bound on the time until a load has begun.
const LOAD_TIMEOUT: Duration = Duration::from_secs(3);

/// Kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    ConnectionsCut,
    LinksDown,
    MemberKilled,
    /// A member is removed, and a new one without data takes its address: a learner at first.
    MemberReplaced,
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
    /// Connections stay open, but nothing arrives on them, in neither direction.
    ConnectionsSilent,
    /// Streams and pages that rangecache reads break off, while it loads its mirrors again.
    LoadsBroken,
    /// A restore in the middle of a load.
    RestoreInLoad,
    /// Users gain or lose rights, or all tokens become invalid.
    RightsChanged,
    /// A hub cannot be reached.
    HubDown,
    /// Connections to a hub stay open, but nothing arrives on them, in neither direction.
    HubSilent,
    /// A hub is stopped, and started again.
    HubRestarted,
}

impl Fault {
    const ALL: [Fault; 18] = [
        Fault::ConnectionsCut,
        Fault::LinksDown,
        Fault::MemberKilled,
        Fault::MemberReplaced,
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
        Fault::ConnectionsSilent,
        Fault::LoadsBroken,
        Fault::RestoreInLoad,
    ];

    /// Faults of what lies between a rangecache and the members.
    const OF_HUBS: [Fault; 3] = [Fault::HubDown, Fault::HubSilent, Fault::HubRestarted];

    /// Faults that are combined with replaced histories.
    const WITH_RESTORES: [Fault; 12] = [
        Fault::ConnectionsCut,
        Fault::LinksDown,
        Fault::MemberReplaced,
        Fault::MemberLags,
        Fault::LinksSlow,
        Fault::WatchesSlow,
        Fault::ProgressUnanswered,
        Fault::Compaction,
        Fault::Restarted,
        Fault::PrefixesChanged,
        Fault::ConnectionsSilent,
        Fault::LoadsBroken,
    ];

    /// The kinds of faults of one simulation of `job`: few, so that the same ones meet more often than if all were possible.
    pub fn kinds(job: Job, settings: &Settings, chance: &Chance) -> Vec<Fault> {
        // As often as all others together, and always.
        let restores_often = job == Job::Restores || job == Job::Hubs && chance.one_in(4);
        let of_members = if restores_often {
            &Self::WITH_RESTORES[..]
        } else {
            &Self::ALL
        };
        let of_hubs = if job == Job::Hubs { &Self::OF_HUBS[..] } else { &[] };
        let mut kinds = [of_members, of_hubs].concat();
        let may_restore = chance.one_in(3);
        kinds.retain(|kind| match kind {
            Fault::Restore | Fault::RestoreInLoad => may_restore && chance.one_in(2),
            _ => chance.one_in(2),
        });
        if restores_often {
            for number in 0..kinds.len().max(1) {
                kinds.push(if number % 3 == 2 {
                    Fault::RestoreInLoad
                } else {
                    Fault::Restore
                });
            }
        }
        if settings.has_auth {
            kinds.extend([Fault::RightsChanged; 2]);
        }
        if settings.has_images {
            kinds.extend([Fault::Restarted; 2]);
        }
        if kinds.is_empty() {
            kinds.push(Fault::ConnectionsCut);
        }
        kinds
    }

    /// Causes the fault, and returns once it is over. Returns false if rangecache did not stop.
    pub async fn apply(self, world: &World, tiers: &Tiers) -> bool {
        let chance = &world.chance;
        let rangecache = tiers.any(chance);
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
            Fault::MemberReplaced => {
                members.kill(member);
                sleep(longer()).await;
                members.replace(member);
                sleep(longer()).await;
                let is_abreast = |state: &State| state.members[member].applied == state.history().len();
                cluster.until(|state| is_abreast(state).then_some(())).await;
                set(&|of| of.is_learner = false);
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
                set(&|of| of.lag = of.healed().lag);
            }
            Fault::LinksSlow => {
                let most = 5 + chance.below(300) as u64;
                set(&|of| of.delay = 0..most);
                sleep(longer()).await;
                set(&|of| of.delay = of.healed().delay);
            }
            Fault::WatchesSlow => {
                let most = 20 + chance.below(1_500) as u64;
                cluster.change(|state| state.members.iter_mut().for_each(|of| of.watch_delay = 0..most));
                sleep(longer()).await;
                let heal = |of: &mut Member| of.watch_delay = of.healed().watch_delay;
                cluster.change(|state| state.members.iter_mut().for_each(heal));
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
            Fault::ConnectionsSilent => {
                let mut links = cluster.links(From::Rangecache);
                links.retain(|_| chance.one_in(3));
                links.iter().for_each(|link| link.lose(true));
                sleep(longer()).await;
                // The others stay as they are: a peer that was switched off says nothing.
                links.retain(|_| chance.one_in(2));
                links.iter().for_each(|link| link.lose(false));
            }
            Fault::LoadsBroken => {
                cluster.change(|state| state.breaks_reads = true);
                let has_ended = reload(rangecache, chance).await;
                sleep(longer()).await;
                cluster.change(|state| state.breaks_reads = false);
                return has_ended;
            }
            Fault::RestoreInLoad => {
                let parts = || cluster.parts.load(Ordering::Relaxed);
                let before = parts();
                let most = 20 + chance.below(60) as u64;
                cluster.change(|state| state.members.iter_mut().for_each(|of| of.delay = most / 2..most));
                let has_ended = reload(rangecache, chance).await;
                let deadline = Instant::now() + LOAD_TIMEOUT;
                while parts() == before && Instant::now() < deadline {
                    sleep(Duration::from_millis(1)).await;
                }
                sleep(chance.millis(0..most)).await;
                let heal = |of: &mut Member| of.delay = of.healed().delay;
                cluster.change(|state| state.members.iter_mut().for_each(heal));
                restore(world).await;
                return has_ended;
            }
            Fault::RightsChanged => {
                let change = |change: &dyn Fn(&mut Auth)| {
                    cluster.change(|state| state.history_mut().change_auth(change));
                };
                match chance.below(6) {
                    0 => change(&|auth| auth.half = None),
                    1 | 2 => change(&|auth| auth.half = Some(auth.half.map_or(0, |half| 1 - half))),
                    3 => change(&|auth| auth.tokens += 1),
                    _ => {
                        change(&|auth| auth.mirror_reads = false);
                        sleep(longer()).await;
                        change(&|auth| auth.mirror_reads = true);
                    }
                }
            }
            Fault::HubDown => {
                let network = &tiers.any_hub(chance).network;
                network.set_down(true);
                sleep(longer()).await;
                network.set_down(false);
            }
            Fault::HubSilent => {
                let network = &tiers.any_hub(chance).network;
                network.set_silent(true);
                sleep(longer()).await;
                network.set_silent(false);
            }
            Fault::HubRestarted => {
                let hub = &tiers.any_hub(chance).rangecache;
                return hub.restart(chance.millis(0..3_000)).await;
            }
        }
        true
    }
}

/// Lets rangecache load its mirrors again. Returns false if it did not stop.
async fn reload(rangecache: &Rangecache, chance: &Chance) -> bool {
    if chance.one_in(2) {
        return rangecache.restart(Duration::ZERO).await;
    }
    rangecache.reload(&[HALVES[chance.below(2)]]).await;
    rangecache.reload_as_started().await;
    true
}
