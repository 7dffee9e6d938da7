//! Three members of etcd, two rangecaches and clients of both run while members, links and rangecaches fail. The test
//! then checks that there is one order of all requests and responses, consistent with real time, in which every
//! response is right. The checker is porcupine, in `tests/tools/linearizer`. Watch clients keep watches open meanwhile;
//! each of their streams is judged by [`testkit::watch_rules`].
//!
//! `make test` runs a random mix of all faults for a minute, and, under load, an upgrade of the cluster and the replacement
//! of all its members; `make linearize` runs chosen faults for a given time.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test fails by a panic and reports by printing"
)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::large_futures,
    unreachable_pub,
    reason = "small numbers, no load, and one crate"
)]

mod checker;
mod client;
mod faults;
mod history;
mod judge;
mod recorder;
mod replacement;
mod upgrade;
mod watcher;
mod world;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use client::{Caller, Failure};
use faults::Fault;
use history::History;
use judge::judge_watches;
use rand::Rng;
use rand::rngs::StdRng;
use rand::seq::IndexedRandom;
use testkit::etcd::Version;
use tokio::task::JoinSet;
use world::{Endpoints, World, newest};

/// Time without faults between two faults, in milliseconds.
const CALM: std::ops::Range<u64> = 700..2_500;

/// Both rangecaches are in front of etcd.
const SIDE_BY_SIDE: [Endpoints; 2] = [Endpoints::Links, Endpoints::Links];
/// The second rangecache is behind the first one, and falls back to etcd.
const BEHIND_THE_FIRST: [Endpoints; 2] = [Endpoints::Links, Endpoints::First];

/// Times until responses came from memory again, by fault.
type Recoveries = BTreeMap<String, Vec<Duration>>;

/// The running system and its clients, until their history is judged.
struct Trial {
    world: World,
    folder: PathBuf,
    clients: JoinSet<()>,
    watchers: JoinSet<()>,
    seed: u64,
}

impl Trial {
    async fn start(
        name: &str,
        version: Version,
        etcd_flags: &[&str],
        endpoints: [Endpoints; 2],
        seed: u64,
    ) -> Self {
        let folder = folder(name, seed);
        let world = World::start(History::new(&folder), version, etcd_flags, endpoints, seed).await;
        Self::in_world(world, folder, seed).await
    }

    /// Starts the clients of `world`.
    async fn in_world(mut world: World, folder: PathBuf, seed: u64) -> Self {
        let mut clients = JoinSet::new();
        for caller in world.callers(seed) {
            clients.spawn(caller.run());
        }
        let mut watchers = JoinSet::new();
        for watcher in world.watchers(seed) {
            watchers.spawn(watcher.run());
        }
        world.recover("the start").await;
        Self {
            world,
            folder,
            clients,
            watchers,
            seed,
        }
    }

    /// Stops the clients, checks their history, and returns what was seen of the times of recovery and of failed calls.
    async fn judge(self) -> (Recoveries, Vec<Failure>) {
        let Self {
            mut world,
            folder,
            mut clients,
            mut watchers,
            seed,
        } = self;
        world.shared.stop.store(true, Ordering::SeqCst);
        while let Some(ended) = clients.join_next().await {
            ended.expect("no client panics");
        }
        world.members_serve().await;
        let writer = Caller::new(&world.shared, 999, "etcd", world.members(), seed);
        *world.watched.last_writes.lock() = Some(writer.write_last().await);
        while let Some(ended) = watchers.join_next().await {
            ended.expect("no watch client panics");
        }
        let last = newest(&world.cluster.members[0].client().await).await;
        world.recorder.reaches(last).await;
        world.stop_recording().await;

        judge_watches(&world, &folder);
        let verdict = checker::check(world.history.finish());
        let (memory, all) = world.calm;
        println!("{}", verdict.text);
        println!("between faults {memory} of {all} linearizable reads came from memory; seed {seed}");
        let file = world.history.finish().display();
        assert!(verdict.right, "{}\nthe history is {file}", verdict.text);
        assert!(
            memory * 2 > all,
            "only {memory} of {all} linearizable reads came from memory"
        );
        std::fs::remove_dir_all(&folder).expect("is ours");
        let failures = std::mem::take(&mut *world.shared.failures.lock());
        (std::mem::take(&mut world.recoveries), failures)
    }
}

/// Causes random faults of `faults` one after the other for `duration`, then checks the recorded history.
async fn run(
    name: &str,
    faults: &[(&'static str, Fault)],
    endpoints: [Endpoints; 2],
    duration: Duration,
    seed: u64,
) -> Recoveries {
    println!("{name}: seed {seed}, {} s", duration.as_secs());
    let mut trial = Trial::start(name, Version::V3_7, &[], endpoints, seed).await;
    let world = &mut trial.world;
    let began = Instant::now();
    let mut applied = 0;
    while began.elapsed() < duration {
        let calm = random_calm(&mut world.random);
        world.calm(calm).await;
        let Some((name, fault)) = faults.choose(&mut world.random).copied() else {
            continue;
        };
        println!("{:.1} s: {name}", began.elapsed().as_secs_f64());
        fault.apply(world).await;
        applied += 1;
        world.recover(name).await;
    }
    println!("{applied} faults");
    trial.judge().await.0
}

/// Folder of a trial.
fn folder(name: &str, seed: u64) -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("linear-{name}-{seed}"))
}

/// A time without faults.
fn random_calm(random: &mut StdRng) -> Duration {
    Duration::from_millis(random.random_range(CALM))
}

/// Prints the times until responses came from memory again, by fault.
fn print(recoveries: &Recoveries) {
    println!(
        "{:20} {:>5} {:>10} {:>10}",
        "from memory again after", "times", "median", "longest"
    );
    for (fault, times) in recoveries {
        let mut times = times.clone();
        times.sort();
        let (median, longest) = (times[times.len() / 2], times[times.len() - 1]);
        println!(
            "{fault:20} {:>5} {:>7} ms {:>7} ms",
            times.len(),
            median.as_millis(),
            longest.as_millis()
        );
    }
}

fn number(variable: &str, default: u64) -> u64 {
    match std::env::var(variable) {
        Ok(text) if !text.is_empty() => text
            .parse()
            .unwrap_or_else(|_| panic!("{variable} is not a number: {text}")),
        _ => default,
    }
}

/// All faults except the one that ends a history.
fn mix() -> Vec<(&'static str, Fault)> {
    Fault::ALL
        .into_iter()
        .filter(|(_, fault)| *fault != Fault::Restore)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_faults_keep_every_response_linearizable() {
    let seed = number("LINEAR_SEED", rand::random_range(0..1_000_000));
    print(&run("mix", &mix(), SIDE_BY_SIDE, Duration::from_secs(60), seed).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn faults_around_a_hub_keep_every_response_linearizable() {
    let seed = number("LINEAR_SEED", rand::random_range(0..1_000_000));
    print(&run("hub", &mix(), BEHIND_THE_FIRST, Duration::from_secs(45), seed).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rolling_upgrade_keeps_every_response_linearizable() {
    let seed = number("LINEAR_SEED", rand::random_range(0..1_000_000));
    println!("upgrade: seed {seed}");
    let mut trial = Trial::start("upgrade", upgrade::FROM, &upgrade::ETCD_FLAGS, SIDE_BY_SIDE, seed).await;
    upgrade::upgrade_and_back(&mut trial.world).await;
    let (recoveries, failures) = trial.judge().await;
    print(&recoveries);
    judge::judge_failures(&failures);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_replaced_one_by_one_keep_every_response_linearizable() {
    let seed = number("LINEAR_SEED", rand::random_range(0..1_000_000));
    println!("replacement: seed {seed}");
    let folder = folder("replacement", seed);
    let world = replacement::world(&folder, seed).await;
    let mut trial = Trial::in_world(world, folder.clone(), seed).await;
    replacement::replace_all(&mut trial.world, &folder).await;
    let (recoveries, failures) = trial.judge().await;
    print(&recoveries);
    judge::judge_failures(&failures);
}

/// `LINEAR_SCENARIO` names faults, or `mix`, `hub` (one rangecache behind the other) or `calm`; by default all of them run in turn, each for `LINEAR_SECONDS`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "run time is set by make linearize"]
async fn scenarios() {
    let duration = Duration::from_secs(number("LINEAR_SECONDS", 300));
    let seed = number("LINEAR_SEED", rand::random_range(0..1_000_000));
    let chosen = std::env::var("LINEAR_SCENARIO").unwrap_or_default();
    let mut known = vec![("mix", mix()), ("hub", mix()), ("calm", Vec::new())];
    known.extend(Fault::ALL.map(|fault| (fault.0, vec![fault])));
    let names: Vec<_> = known.iter().map(|(name, _)| *name).collect();
    let chosen: Vec<_> = match chosen.as_str() {
        "" | "all" => names.clone(),
        chosen => chosen.split(',').collect(),
    };
    let mut recoveries = Recoveries::new();
    for name in chosen {
        let scenario = known.iter().find(|(known, _)| *known == name);
        let (name, faults) = scenario.unwrap_or_else(|| panic!("{name:?} is none of {names:?}"));
        let endpoints = match *name {
            "hub" => BEHIND_THE_FIRST,
            _ => SIDE_BY_SIDE,
        };
        for (fault, times) in run(name, faults, endpoints, duration, seed).await {
            recoveries.entry(fault).or_default().extend(times);
        }
    }
    print(&recoveries);
}
