//! Differential tests of Watch: generated programs run on two streams at once, one to etcd and one through rangecache in
//! front of the same etcd. Each watcher must get the same events, each request the same response.
//!
//! `WATCH_SEED` repeats a run and `WATCH_PROGRAMS` sets its length.

mod compare;
mod program;
mod run;

use compare::Defect;
use run::{Source, World};
use testkit::etcd::Version;

/// Programs per version of etcd.
const PROGRAMS: u64 = 25;
/// Seeds of programs that have found a defect, each with a stream that leaves memory; they run first.
const DEFECTS: [u64; 1] = [4_422_231_953_488_927_190];
/// Programs while watches are forwarded.
const FORWARDED: u64 = 10;

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().expect("a number"))
}

async fn programs_equal_etcds(version: Version, source: Source, programs: u64) {
    let seed = variable("WATCH_SEED").unwrap_or_else(rand::random::<u64>);
    let programs = variable("WATCH_PROGRAMS").unwrap_or(programs);
    println!("to replay: WATCH_SEED={seed} WATCH_PROGRAMS={programs}");
    let mut world = World::start(version, source).await;
    let defects = DEFECTS.into_iter().filter(|_| source == Source::Both);
    for seed in defects.chain((0..programs).map(|number| seed.wrapping_add(number))) {
        if let Err(Defect(what)) = world.run(seed).await {
            panic!("to replay: WATCH_SEED={seed} WATCH_PROGRAMS=1 (etcd {version:?})\n{what}");
        }
    }
    world.judge().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_programs_equal_etcds_3_7() {
    programs_equal_etcds(Version::V3_7, Source::Memory, PROGRAMS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_programs_without_values_in_memory_equal_etcds() {
    programs_equal_etcds(Version::V3_7, Source::MemoryWithoutValues, PROGRAMS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn watch_programs_equal_etcds_3_6() {
    programs_equal_etcds(Version::V3_6, Source::Memory, PROGRAMS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn watch_programs_equal_etcds_3_5() {
    programs_equal_etcds(Version::V3_5, Source::Memory, PROGRAMS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forwarded_watch_programs_equal_etcds() {
    programs_equal_etcds(Version::V3_7, Source::Etcd, FORWARDED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_programs_that_leave_memory_equal_etcds() {
    programs_equal_etcds(Version::V3_7, Source::Both, PROGRAMS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_programs_through_two_rangecaches_equal_etcds() {
    programs_equal_etcds(Version::V3_7, Source::MemoryOfSecond, PROGRAMS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forwarded_watch_programs_through_two_rangecaches_equal_etcds() {
    programs_equal_etcds(Version::V3_7, Source::MemoryOfFirst, PROGRAMS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "make test-other-etcds"]
async fn watch_programs_equal_etcds_3_8() {
    programs_equal_etcds(Version::V3_8, Source::Memory, PROGRAMS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "make test-other-etcds"]
async fn watch_programs_that_leave_memory_equal_etcds_3_8() {
    programs_equal_etcds(Version::V3_8, Source::Both, PROGRAMS).await;
}
