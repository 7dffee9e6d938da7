//! Three members of etcd, two rangecaches and a crowd of clients, some of which call etcd itself, while members, links and
//! rangecaches fail: is there one order of all that was asked and told, in keeping with real time, in which every answer is
//! right? The judge is porcupine, by `tests/tools/linearizer`.
//!
//! `make test` runs a seeded mix of all faults for a minute; `make linearize` runs chosen ones for as long as it is told.

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

mod client;
mod faults;
mod history;
mod judge;
mod recorder;
mod world;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use faults::Fault;
use history::History;
use rand::Rng;
use rand::seq::IndexedRandom;
use tokio::task::JoinSet;
use world::{World, newest};

/// How long nothing is wrong between two faults, in milliseconds.
const CALM: std::ops::Range<u64> = 700..2_500;

/// How long it took until memory answered again, each time, by what had been wrong.
type Recoveries = BTreeMap<String, Vec<Duration>>;

/// Lets faults happen in turn, each drawn from `faults`, for as long as `duration`; then judges what clients were told.
async fn run(name: &str, faults: &[(&'static str, Fault)], duration: Duration, seed: u64) -> Recoveries {
    println!("{name}: seed {seed}, {} s", duration.as_secs());
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("linear-{name}-{seed}"));
    let mut world = World::start(History::new(&folder), seed).await;
    let mut clients = JoinSet::new();
    for caller in world.callers(seed) {
        clients.spawn(caller.run());
    }
    world.recover("the start").await;
    let began = Instant::now();
    let mut struck = 0;
    while began.elapsed() < duration {
        let calm = world.random.random_range(CALM);
        world.calm(Duration::from_millis(calm)).await;
        let Some((name, fault)) = faults.choose(&mut world.random).copied() else {
            continue;
        };
        println!("{:.1} s: {name}", began.elapsed().as_secs_f64());
        fault.strike(&mut world).await;
        struck += 1;
        world.recover(name).await;
    }
    world.crowd.stop.store(true, Ordering::SeqCst);
    while let Some(ended) = clients.join_next().await {
        ended.expect("no client panics");
    }
    world.members_serve().await;
    let last = newest(&world.cluster.members[0].client().await).await;
    world.recorder.reaches(last).await;
    world.recorder.stop().await;

    let verdict = judge::judge(world.history.finish());
    let (memory, all) = world.calm;
    println!("{}", verdict.text);
    println!("{struck} faults");
    println!("without faults {memory} of {all} linearizable reads came from memory; seed {seed}");
    let file = world.history.finish().display();
    assert!(verdict.right, "{}\nthe history is {file}", verdict.text);
    assert!(
        memory * 2 > all,
        "only {memory} of {all} linearizable reads came from memory"
    );
    std::fs::remove_dir_all(&folder).expect("is ours");
    std::mem::take(&mut world.recoveries)
}

/// How long the way back to memory was, fault by fault.
fn print(recoveries: &Recoveries) {
    println!(
        "{:20} {:>5} {:>10} {:>10}",
        "to memory after", "times", "median", "longest"
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

/// All faults but the one that ends a history.
fn mix() -> Vec<(&'static str, Fault)> {
    Fault::ALL
        .into_iter()
        .filter(|(_, fault)| *fault != Fault::Restore)
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn random_faults_keep_every_response_linearizable() {
    let seed = number("LINEAR_SEED", rand::random_range(0..1_000_000));
    print(&run("mix", &mix(), Duration::from_secs(60), seed).await);
}

/// `LINEAR_SCENARIO` names faults, or `mix` or `calm`; else it runs all of them in turn, each for `LINEAR_SECONDS`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes as long as it is told: make linearize"]
async fn scenarios() {
    let duration = Duration::from_secs(number("LINEAR_SECONDS", 300));
    let seed = number("LINEAR_SEED", rand::random_range(0..1_000_000));
    let chosen = std::env::var("LINEAR_SCENARIO").unwrap_or_default();
    let mut known = vec![("mix", mix()), ("calm", Vec::new())];
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
        for (fault, times) in run(name, faults, duration, seed).await {
            recoveries.entry(fault).or_default().extend(times);
        }
    }
    print(&recoveries);
}
