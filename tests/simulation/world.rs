//! Simulation from one seed: the model, a rangecache, clients and faults.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use testkit::pb::RangeRequest;
use testkit::watch_rules::{Rules, Truth, violations};
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;

use crate::auth::User;
use crate::caller::{Caller, HALVES, KEYS, authenticated, connect, key, write_last};
use crate::chance::Chance;
use crate::cluster::{Cluster, MEMBERS, Member};
use crate::faults::Fault;
use crate::hub::{Hub, Tiers};
use crate::known::Known;
use crate::members::{From, Members};
use crate::memory;
use crate::proxy::{self, Place, Rangecache, Settings};
use crate::read::{CHECK_KEY, Read};
use crate::seeds::Job;
use crate::store::Change;
use crate::trace::{self, Trace};
use crate::watcher::{Watched, Watcher};

/// Keys of a page of rangecache, at most.
const PAGE_KEYS: i64 = 2;
/// Bound on the time until memory serves, and until the cluster serves again after the last fault.
const RECOVERY_TIMEOUT: Duration = Duration::from_secs(150);
/// Bound on the time until watches have got the last writes.
const LAST_WRITES_TIMEOUT: Duration = Duration::from_secs(120);
/// Bound on that time for users behind hubs: a watch that etcd serves may be at the stuck member until memory serves everything.
const USERS_LAST_WRITES_TIMEOUT: Duration = Duration::from_secs(900);

/// The parts that faults change.
pub struct World {
    pub cluster: Arc<Cluster>,
    pub members: Members,
    pub chance: Chance,
}

/// Result of a simulation.
pub struct Outcome {
    pub violations: Vec<String>,
    pub trace: Trace,
    /// Virtual time that it took, in milliseconds.
    pub millis: u128,
}

impl World {
    /// A cluster of members that run `version`, and links to them that buffer `buffer_bytes`.
    pub fn new(seed: u64, version: &'static str, buffer_bytes: usize, trace: &Trace) -> Self {
        rangecache_base::simulated::begin(buffer_bytes, PAGE_KEYS);
        let cluster = Cluster::new(seed, version, trace);
        Self {
            members: Members::start(&cluster),
            cluster,
            chance: Chance::new(seed, 2),
        }
    }

    /// Ends every fault. Afterwards the member `stuck` applies nothing.
    fn heal(&self, stuck: Option<usize>) {
        for member in 0..MEMBERS {
            self.cluster.change(|state| {
                let of = &mut state.members[member];
                *of = Member {
                    is_stuck: stuck == Some(member),
                    ..of.healed()
                };
            });
            From::BOTH
                .iter()
                .for_each(|from| self.members.reconnect(member, *from));
        }
        self.cluster.change(|state| {
            // After a restore, too.
            if !state.history().newest().auth.mirror_reads {
                state.history_mut().change_auth(|auth| auth.mirror_reads = true);
            }
        });
    }
}

/// Simulates `seed` of `job`. `prints` shows the trace while it grows.
pub async fn simulate(job: Job, seed: u64, prints: bool) -> Outcome {
    let chance = Chance::new(seed, 0);
    let buffer_bytes = 1 << (6 + chance.below(11));
    let version = if chance.one_in(3) { "3.6.14" } else { "3.7.3" };
    let trace = trace::CURRENT.get_or_init(|| Trace::new(prints)).clone();
    let world = World::new(seed, version, buffer_bytes, &trace);
    let mut settings = Settings::random(&world.chance);
    if job == Job::Hubs {
        settings = settings.behind_hub();
    }
    trace.line(format!("seed {seed}, etcd {version}, {settings:?}"));
    let kinds = Fault::kinds(job, &settings, &world.chance);
    // Clients write one half of the keys alone, so that a mirror of the other half gets no events.
    let is_quiet = world.chance.one_in(3);
    trace.line(format!("faults: {kinds:?}, quiet: {is_quiet}"));
    let known = Known::new(&world.cluster, settings.serve_stale, job == Job::Hubs);
    fill(&world, settings.has_auth);
    let tiers = start(job, &world, &settings).await;
    let stop = CancellationToken::new();
    let mut clients = JoinSet::new();
    let watched = Arc::new(Watched::default());
    let direct: Vec<_> = (0..MEMBERS)
        .map(|member| From::Clients.authority(member))
        .collect();
    for number in 0..5 {
        let is_direct = number >= 3;
        let servers = if is_direct {
            direct.clone()
        } else {
            vec![proxy::AUTHORITY.to_owned()]
        };
        let caller = Caller {
            name: format!("{} {number}", if is_direct { "direct" } else { "client" }),
            servers,
            from: if is_direct {
                From::Clients
            } else {
                From::Rangecache
            },
            known: Arc::clone(&known),
            trace: trace.clone(),
            chance: Chance::new(seed, 10 + number),
            streams: version >= "3.7",
            pause: [20, 100, 400][world.chance.below(3)],
            has_long_values: settings.is_watch_memory_small(),
            leaves_values_out: settings.leaves_values_out,
            first_written: if is_quiet { KEYS / 2 } else { 0 },
            user: settings.user(&world.chance),
            identity: Mutex::default(),
            wants_token: AtomicBool::default(),
        };
        clients.spawn(caller.run(stop.clone()));
    }
    let mut watchers = JoinSet::new();
    for number in 0..3 {
        let watcher = Watcher {
            name: format!("watcher {number}"),
            server: proxy::AUTHORITY.to_owned(),
            known: Arc::clone(&known),
            watched: Arc::clone(&watched),
            trace: trace.clone(),
            chance: Chance::new(seed, 20 + number),
            has_long_keys: settings.is_watch_memory_small(),
            user: settings.user(&world.chance),
            last_writes_timeout: if job == Job::Hubs && settings.has_auth {
                USERS_LAST_WRITES_TIMEOUT
            } else {
                LAST_WRITES_TIMEOUT
            },
        };
        watchers.spawn(watcher.run(stop.clone()));
    }
    for _ in 0..1 + world.chance.below(5) {
        cause_fault(&world, &tiers, &known, &kinds).await;
        memory::judge(&known, &settings, &tiers.front);
    }
    let stuck = world.chance.one_in(3).then(|| world.chance.below(MEMBERS));
    world.heal(stuck);
    trace.line(format!(
        "every fault is over, but this member is stuck: {stuck:?}"
    ));
    stop.cancel();
    while let Some(ended) = clients.join_next().await {
        ended.expect("no client panics");
    }
    end(&world, &tiers, &settings, &known, &watched).await;
    world.heal(None);
    while let Some(ended) = watchers.join_next().await {
        ended.expect("no watch client panics");
    }
    judge_watches(&world, &known, &watched);
    memory::judge_end(&known, &settings, &tiers.front).await;
    if !tiers.stop().await {
        known.violation("rangecache does not stop");
    }
    Outcome {
        violations: known.violations(),
        millis: trace.millis(),
        trace,
    }
}

/// Starts the rangecaches of `job`; the one that clients use has these settings.
async fn start(job: Job, world: &World, settings: &Settings) -> Tiers {
    if job != Job::Hubs {
        return Tiers {
            front: Rangecache::start(settings.clone()).await,
            hubs: Vec::new(),
        };
    }
    let chance = &world.chance;
    let is_balanced = chance.one_in(3);
    world
        .cluster
        .trace
        .line(format!("one address for all hubs: {is_balanced}"));
    let hubs = Hub::start_some(chance, settings, is_balanced).await;
    let has_fallbacks = chance.one_in(3);
    for hub in &hubs {
        world
            .cluster
            .trace
            .line(format!("a hub: {:?}", hub.rangecache.settings()));
    }
    world
        .cluster
        .trace
        .line(format!("members are fallbacks: {has_fallbacks}"));
    let neighbours = 0..if chance.one_in(2) { hubs.len() } else { 0 };
    world.cluster.trace.line(format!("neighbours: {neighbours:?}"));
    let endpoints = 0..if is_balanced { 1 } else { hubs.len() };
    let place = Place::before_hubs(endpoints, has_fallbacks).with_neighbours(neighbours);
    Tiers {
        front: Rangecache::start_at(place, settings.clone()).await,
        hubs,
    }
}

/// Writes what the store has before rangecache starts: in most simulations some of it, of which mirrors get no events.
fn fill(world: &World, has_auth: bool) {
    let chance = &world.chance;
    let commits = if chance.one_in(4) {
        0
    } else {
        20 + chance.below(41)
    };
    world.cluster.change(|state| {
        for number in 0..commits {
            let key = key(chance.below(KEYS)).into();
            let change = if chance.one_in(5) {
                Change::Delete(key)
            } else {
                Change::Put(key, format!("before {number}").into(), 0)
            };
            state.history_mut().commit(&[change]);
        }
        if chance.one_in(3) {
            let key = CHECK_KEY.into();
            let value = b"of a client".to_vec();
            state.history_mut().commit(&[Change::Put(key, value, 0)]);
        }
        let newest = state.history().newest().revision;
        if chance.one_in(4) && newest > 2 {
            state.history_mut().compact(chance.within(2..newest + 1));
        }
        if has_auth && !chance.one_in(4) {
            state.history_mut().change_auth(|auth| auth.switch(true));
        }
        let applied = state.history().len();
        state
            .members
            .iter_mut()
            .for_each(|member| member.applied = applied);
    });
}

/// Causes a fault of one of `kinds` after a while, and waits until it is over.
async fn cause_fault(world: &World, tiers: &Tiers, known: &Known, kinds: &[Fault]) {
    let (chance, trace) = (&world.chance, &world.cluster.trace);
    sleep(chance.millis(0..2_000)).await;
    let fault = kinds[chance.below(kinds.len())];
    trace.line(format!("fault: {fault:?}"));
    if !fault.apply(world, tiers).await {
        known.violation("rangecache does not stop");
    }
    trace.line(format!("fault is over: {fault:?}"));
}

/// Writes to every key, and waits until memory has served each half of the result: that of the front, unless a hub has to ask for
/// the rights of each caller.
async fn end(world: &World, tiers: &Tiers, settings: &Settings, known: &Known, watched: &Watched) {
    let deadline = Instant::now() + RECOVERY_TIMEOUT;
    let mut revisions = None;
    let mut unserved = HALVES.to_vec();
    while Instant::now() < deadline && !unserved.is_empty() {
        sleep(Duration::from_millis(100)).await;
        let Some(client) = connect(proxy::AUTHORITY).await else {
            continue;
        };
        let (client, identity) = authenticated(client, settings.has_auth.then_some(User::All)).await;
        if revisions.is_none() {
            revisions = write_last(&client).await.ok();
            *watched.last_writes.lock() = revisions;
            continue;
        }
        let mut still_unserved = Vec::new();
        for half in unserved {
            let begin = known.begin_as(From::Rangecache, identity);
            let reads = world.cluster.reads.load(Ordering::Relaxed);
            let of_front = tiers.front.memory_answers();
            let read = Read::new(RangeRequest::prefix(half));
            let response = client.range(&read.request).await;
            if let Ok(response) = &response {
                known.judge_read(&begin, &read, response, None);
            }
            let is_of_front = settings.has_auth || tiers.front.memory_answers() > of_front;
            let is_of_member = world.cluster.reads.load(Ordering::Relaxed) != reads;
            if response.is_err() || is_of_member || !is_of_front {
                still_unserved.push(half);
            }
        }
        unserved = still_unserved;
    }
    if !unserved.is_empty() {
        known.violation(format!(
            "memory does not serve {unserved:?} at the end; last writes: {revisions:?}"
        ));
    }
}

/// Judges each stream by the histories during which it was open.
fn judge_watches(world: &World, known: &Known, watched: &Watched) {
    let truths: Vec<_> = world.cluster.look(|state| {
        let histories = state.histories.iter();
        histories
            .map(|history| Truth::replayed(history.events().cloned().collect()))
            .collect()
    });
    let rules = Rules {
        history_is_one: truths.len() == 1,
        ..Rules::ETCD
    };
    for transcript in watched.transcripts.lock().iter() {
        let (first, last) = transcript.histories;
        // At its begin a stream may still be of the history before.
        let possible = &truths[first.saturating_sub(2)..last];
        let judged = possible
            .iter()
            .map(|truth| violations(&transcript.steps, truth, rules));
        let found = judged.min_by_key(Vec::len).expect("a history");
        if let Some(what) = found.first() {
            let last = transcript.steps.len();
            known.violation(format!("{}, a stream of {last} steps: {what}", transcript.name));
        }
    }
}
