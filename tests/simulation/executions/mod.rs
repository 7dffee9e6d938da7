//! Scripted executions: what rarely meets by chance is brought about on purpose, with the parts of a simulation.
//!
//! | file | contents |
//! |---|---|
//! | `checks` | comparisons of connections with the mirrors |
//! | `rollbacks` | all members are put back to an older state while a mirror loads, or after it has |
//! | `watches` | memory of watches |

mod checks;
mod rollbacks;
mod watches;

use std::sync::atomic::Ordering;
use std::time::Duration;

use testkit::grpc::Client;
use tokio::time::{Instant, sleep};

use crate::caller::connect;
use crate::cluster::MEMBERS;
use crate::members::From;
use crate::proxy::{self, Rangecache, Settings};
use crate::store::Change;
use crate::trace::Trace;
use crate::world::World;

/// Seed of the delays.
const SEED: u64 = 7;
/// Bytes that each direction of a connection buffers.
const BUFFER_BYTES: usize = 1 << 14;
/// Bound on the time until memory serves.
const SERVED_TIMEOUT: Duration = Duration::from_secs(120);
/// Time in which a mirror resumes or is loaded, as long as nothing fails.
const SETTLED: Duration = Duration::from_secs(3);

/// Runs an execution on one thread with paused time.
fn run(execution: impl Future<Output = ()>) {
    if let Ok(filter) = std::env::var("SIMULATION_LOG") {
        // Another execution of this process may have begun the log.
        let _ = tracing_subscriber::fmt()
            .with_env_filter(filter)
            .without_time()
            .with_ansi(false)
            .try_init();
    }
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .start_paused(true)
        .build()
        .expect("a runtime")
        .block_on(execution);
}

/// A cluster whose members have applied `commits`, one revision for each.
async fn world(commits: impl IntoIterator<Item = Change>) -> World {
    let world = World::new(SEED, "3.7.3", BUFFER_BYTES, &Trace::new(false));
    commit(&world, commits);
    sleep(SETTLED).await;
    world
}

fn put(key: &str, value: &str) -> Change {
    Change::Put(key.into(), value.into(), 0)
}

fn commit(world: &World, changes: impl IntoIterator<Item = Change>) {
    world.cluster.change(|state| {
        for change in changes {
            state.history_mut().commit(&[change]);
        }
    });
}

/// A client of rangecache.
async fn client() -> Client {
    connect(proxy::AUTHORITY).await.expect("rangecache listens")
}

/// Value of `key` in a linearizable read that memory has answered: repeated until it does.
async fn read_from_memory(world: &World, key: &str) -> Option<String> {
    let client = client().await;
    let reads = || world.cluster.reads.load(Ordering::Relaxed);
    let deadline = Instant::now() + SERVED_TIMEOUT;
    while Instant::now() < deadline {
        let before = reads();
        let value = client.get(key).await;
        if let Ok(value) = value
            && reads() == before
        {
            return value.map(|value| String::from_utf8(value).expect("text"));
        }
        sleep(Duration::from_millis(100)).await;
    }
    panic!("memory does not serve {key}");
}

/// Value of `key` in the store.
fn stored(world: &World, key: &str) -> Option<String> {
    world.cluster.look(|state| {
        let history = state.history();
        let kv = history.get(key.as_bytes(), history.newest().revision)?;
        Some(String::from_utf8(kv.value.clone()).expect("text"))
    })
}

/// Puts every member back to its state at `revision`, and commits `again` before rangecache reaches one.
async fn roll_back(world: &World, revision: i64, again: impl IntoIterator<Item = Change>) {
    put_back(world, revision, again).await;
    (0..MEMBERS).for_each(|member| world.members.reconnect(member, From::Rangecache));
}

/// Puts every member back to its state at `revision`, and commits `again`. Rangecache reaches none.
async fn put_back(world: &World, revision: i64, again: impl IntoIterator<Item = Change>) {
    let members = 0..MEMBERS;
    members.clone().for_each(|member| world.members.kill(member));
    world.cluster.change(|state| {
        let history = state.history();
        let history = history.truncated(history.entries_at(revision));
        state.replace_history(history);
    });
    commit(world, again);
    for member in members {
        world.members.restart(member);
        world.members.cut_off(member, From::Rangecache);
    }
    sleep(Duration::from_secs(1)).await;
}

/// Starts rangecache with watches from memory and `flags`.
async fn start(flags: &[&'static str]) -> Rangecache {
    Rangecache::start(Settings::with_flags(&[&["--watch-cache=auto"], flags].concat())).await
}
