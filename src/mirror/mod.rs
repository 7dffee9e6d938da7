//! Mirrors: caches that follow etcd, and the proof that they are fresh.
//!
//! | file | subject |
//! |---|---|
//! | `mirrors` | all mirrors of the process and what they share |
//! | `slots`, `changes` | places of mirrors; those that a reload adds or removes |
//! | `lifecycle` | load, follow, resume, reload |
//! | `load` | a scope's keys at one pinned revision |
//! | `load_pace`, `load_pacing` | the rate of loads, by etcd's latency |
//! | `load_cause` | causes of loads, for the metric and the log |
//! | `feed`, `feed_end` | the watch that keeps a mirror up to date (I9), and how it ends |
//! | `feed_member` | cluster, history and version of the member that feeds a mirror |
//! | `continuity` | the proof that a feed continues the history that the mirror holds (I4) |
//! | `recent_events` | the newest events, which that proof compares |
//! | `compare` | the newest keys, which that proof compares where events cannot be had |
//! | `position` | where a member is in etcd's history |
//! | `assemble` | whole revisions from watch responses (I3) |
//! | `state` | the view that readers see, and the epoch that guards it |
//! | `held_views` | bytes that only readers keep in memory |
//! | `past_revisions` | rebuilt states at past revisions |
//! | `freshness` | the quorum check (I2) |
//! | `cluster_state` | replaced history (I4), revisions served (I11) |
//! | `auth_state` | whether etcd's auth is on (I8) |
//! | `history` | one history of etcd: its identity and revisions |
//! | `history_check` | whether a connection is of the known history (W10) |
//! | `proofs` | when checks were sent, and what they proved: the age of a view |
//! | `stale` | last views, while no member of etcd answers (`--serve-stale`) |
//! | `compaction` | the revision of etcd's last compaction, as etcd reports it |
//! | `pinned` | past revisions that are read from etcd, not from mirrors |
//! | `probe` | periodic checks that do not depend on client traffic |
//! | `lag` | how long a mirror has been behind etcd |
//! | `over_budget` | waiting until a mirror fits into memory again |
//! | `verify` | comparing a mirror with etcd |
//! | `version_gate` | the warning about an etcd that is too old |
//! | `watch_hub` | the events of a mirror, for watches that are served from memory |
//!
//! This room imports `upstream`, `cache`, `keyspace`, `config` and `telemetry`; `proxy`, `admin` and `main` import it.

mod assemble;
mod auth_state;
mod changes;
pub mod cluster_state;
mod compaction;
mod compare;
mod continuity;
mod feed;
mod feed_end;
mod feed_member;
pub mod freshness;
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzing;
mod held_views;
mod history;
mod history_check;
mod lag;
mod lifecycle;
mod load;
mod load_cause;
mod load_pace;
mod load_pacing;
mod mirrors;
mod over_budget;
mod past_revisions;
pub mod pinned;
mod position;
mod prefixes;
mod probe;
mod proofs;
mod recent_events;
mod slots;
mod stale;
pub mod state;
mod verify;
mod version_gate;
pub mod watch_hub;

pub use held_views::{HeldView, HeldViews};
pub use mirrors::Mirrors;
pub use prefixes::{PrefixSize, prefix_sizes};
pub use stale::StaleView;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::config::LiveConfig;
use crate::panics::restarting;
use crate::telemetry::Telemetry;
use crate::upstream::Upstream;

/// Starts to load and follow every scope that `--cache-prefix` and `--no-cache-prefix` name, until `stop` is cancelled. The tasks are spawned on
/// `tasks`, which the caller joins.
#[must_use]
pub fn start(
    live: &LiveConfig,
    upstream: &Arc<Upstream>,
    telemetry: &Arc<Telemetry>,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Arc<Mirrors> {
    let mirrors = Arc::new_cyclic(|this| Mirrors::new(this, live, upstream, telemetry, tasks, stop));
    let config = live.load();
    for (position, _) in mirrors.positions() {
        lifecycle::start(&mirrors, position);
    }
    let (probed, interval) = (Arc::clone(&mirrors), config.etcd.probe_interval);
    spawn(&mirrors, async move {
        restarting("probe", || probe::run(&probed, interval)).await;
    });
    if !config.mirror.verify_interval.is_zero() {
        let (verified, interval) = (Arc::clone(&mirrors), config.mirror.verify_interval);
        spawn(&mirrors, async move {
            restarting("verification", || verify::run(&verified, interval)).await;
        });
    }
    let contradicted = Arc::clone(&mirrors);
    spawn(&mirrors, async move {
        restarting("history", || contradicted.drop_contradicted()).await;
    });
    let (gated, old_etcd) = (Arc::clone(&mirrors), config.etcd.old_etcd);
    spawn(&mirrors, async move {
        restarting("version gate", || version_gate::run(&gated, old_etcd)).await;
    });
    mirrors
}

/// Spawns `task` on the tracker of `mirrors`; it is dropped when the process stops.
fn spawn(mirrors: &Mirrors, task: impl Future<Output = ()> + Send + 'static) {
    mirrors
        .tasks
        .spawn(mirrors.stop.clone().run_until_cancelled_owned(task));
}
