//! The whole of rangecache in one process with clients and a model of an etcd cluster: connections are simulated, time is
//! paused, and every random choice comes from a seed. See its README.md.

#![cfg(all(target_os = "linux", debug_assertions))]
#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "a test fails by a panic and reports by printing"
)]
#![allow(clippy::large_futures, unreachable_pub, reason = "no load, and one crate")]

mod auth;
mod caller;
mod chance;
mod closed_on_exit;
mod cluster;
mod executions;
mod faults;
mod hub;
mod images;
mod known;
mod kv;
mod link;
mod members;
mod memory;
mod proxy;
mod read;
mod restore;
mod seeds;
mod send_loop;
mod server;
mod store;
mod trace;
mod watch;
mod watcher;
mod world;

use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use seeds::Job;
use testkit::effort::part_of;

/// Seeds of each job in front of members that the tests simulate with full effort.
const SEEDS: u64 = 300;
/// Seeds behind hubs, each of which takes twice as long.
const HUB_SEEDS: u64 = 150;
/// After this time of a processor a simulation counts as hung: time is paused, and does not advance while a task is ready.
const HUNG: Duration = Duration::from_secs(60);
/// After this time of the clock it counts as hung, too: no task is ready, and none waits for time.
const ASLEEP: Duration = Duration::from_secs(1_800);

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok().filter(|text| !text.is_empty())?;
    Some(
        text.parse()
            .unwrap_or_else(|_| panic!("{variable} is not a number: {text}")),
    )
}

/// Simulates seeds of `job`, and reports those that fail.
fn simulate(job: Job, first: u64, count: u64, until_found: bool) {
    let began = std::time::Instant::now();
    let (failed, ran) = seeds::run_all(job, first, count, until_found);
    println!(
        "{}: {ran} seeds in {:.1} s, {} failed",
        job.name(),
        began.elapsed().as_secs_f64(),
        failed.len()
    );
    if !failed.is_empty() {
        seeds::report(job, &failed);
        panic!("{} of {ran} seeds failed", failed.len());
    }
}

#[test]
fn every_seed_keeps_the_rules_of_reads_and_watches() {
    simulate(Job::Mixed, 0, part_of(SEEDS), false);
}

#[test]
fn every_seed_keeps_the_rules_while_histories_are_replaced() {
    simulate(Job::Restores, 0, part_of(SEEDS), false);
}

#[test]
fn every_seed_keeps_the_rules_behind_hubs() {
    simulate(Job::Hubs, 0, part_of(HUB_SEEDS), false);
}

#[test]
fn seed_is_replayed_bit_by_bit() {
    for (job, seed) in [
        (Job::Mixed, 1),
        (Job::Mixed, 1234),
        (Job::Restores, 7),
        (Job::Hubs, 3),
    ] {
        let results = [0, 1].map(|_| seeds::run(job, seed, false).result.expect("a result"));
        assert_eq!(results[0], results[1], "seed {seed} of {}", job.name());
    }
}

/// `make simulate`: one seed with its trace, or many seeds, of one job or of all.
#[test]
#[ignore = "seeds are chosen by make simulate"]
fn chosen_seeds() {
    let job = std::env::var("JOB").ok().filter(|name| !name.is_empty());
    let job = job.map(|name| Job::named(&name));
    if let Some(seed) = number("SEED") {
        let job = job.unwrap_or(Job::Mixed);
        assert!(seeds::run(job, seed, true).is_right, "seed {seed} failed");
        return;
    }
    let count = number("SEEDS").unwrap_or(1_000);
    let first = number("FIRST_SEED").unwrap_or(0);
    let until_found = number("UNTIL_FOUND").is_some();
    let jobs = job.map_or(Job::ALL.to_vec(), |job| vec![job]);
    for job in jobs {
        simulate(job, first, count, until_found);
    }
}

/// Ends this process with a violation once its simulation counts as hung. Other processes may take the processors for as
/// long as they like.
fn end_hung_simulation() {
    let began = std::time::Instant::now();
    let what = loop {
        std::thread::sleep(Duration::from_secs(1));
        let used = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
        if used.tv_sec.unsigned_abs() >= HUNG.as_secs() {
            break "a task is always ready: time stands still";
        }
        if began.elapsed() >= ASLEEP {
            break "no task is ready, and none waits for time";
        }
    };
    let trace = trace::CURRENT.get().map(trace::Trace::lines).unwrap_or_default();
    println!("{}", trace.join("\n"));
    println!("violation: {what}");
    std::process::exit(1);
}

/// Whether the panic is an assertion of h2's about the streams of a connection that is dropped. Connections that end with their process
/// have streams (hyperium/h2 issue 907); builds without debug assertions do not have it.
fn is_wrong_assertion_of_h2(info: &panic::PanicHookInfo<'_>) -> bool {
    let says = info.to_string();
    says.contains("/proto/streams/counts.rs:") && says.ends_with("assertion failed: !self.has_streams()")
}

/// The simulation of one seed, in a process that [`seeds`] has started.
#[test]
#[ignore = "is run by the other tests, in a process of its own"]
fn one_seed() {
    let seed = number(seeds::SEED).expect("a seed");
    let job = Job::named(&std::env::var(seeds::JOB).expect("a job"));
    let panics = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&panics);
    let report = panic::take_hook();
    panic::set_hook(Box::new(move |info| {
        if !is_wrong_assertion_of_h2(info) {
            counted.fetch_add(1, Ordering::Relaxed);
        }
        report(info);
    }));
    if let Ok(filter) = std::env::var("SIMULATION_LOG") {
        // In another thread: what it takes of this thread's randomness would change the simulation.
        let log = || {
            tracing_subscriber::fmt()
                .with_env_filter(filter)
                .without_time()
                .with_ansi(false)
                .init()
        };
        std::thread::spawn(log).join().expect("no panic");
    }
    std::thread::spawn(end_hung_simulation);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime");
    let outcome = runtime.block_on(world::simulate(
        job,
        seed,
        std::env::var_os("SIMULATION_PRINTS").is_some(),
    ));
    let trace = outcome.trace.lines();
    println!(
        "{}seed {seed}, trace {:016x}, {} lines, {} ms",
        seeds::RESULT,
        outcome.trace.hash(),
        trace.len(),
        outcome.millis
    );
    let panics = panics.load(Ordering::Relaxed);
    if outcome.violations.is_empty() && panics == 0 {
        return;
    }
    for line in trace {
        println!("{line}");
    }
    for violation in &outcome.violations {
        println!("violation: {violation}");
    }
    panic!("{} violations, {panics} panics", outcome.violations.len());
}
