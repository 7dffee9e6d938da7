//! Mirrors: caches that follow etcd, and the proof that they are fresh.
//!
//! The folders are the phases of a mirror's life:
//!
//! | folder or file | subject |
//! |---|---|
//! | `lifecycle` | load, follow, resume, reload: runs the phases |
//! | `load` | a scope's keys at one pinned revision |
//! | `feed` | the watch that keeps a mirror up to date (I9), and its proof |
//! | `view` | what readers see, and what they keep of it |
//! | `freshness` | the quorum check (I2) |
//! | `lineage` | etcd's history: identity, proofs, replacement (I4), revisions served (I11) |
//! | `fan_out` | the events of a mirror, for watches that are served from memory |
//! | `image` | images of mirrors on the disk |
//! | `mirrors` | all mirrors of the process and what they share |
//! | `set` | places of mirrors, their memory together, and what drops them all |
//! | `changes` | mirrors that a reload adds or removes |
//! | `packing` | values compressed as memory becomes scarce |
//! | `residency` | values left out once that is not enough, and read again |
//! | `pace` | pace of reads in the background |
//! | `neighbours` | neighbours that would be of no use to the next start |
//! | `flags` | the flags |
//! | `probe` | periodic checks that do not depend on client traffic |
//! | `stale` | last views, while no member of etcd answers (`--serve-stale`) |
//! | `verify` | comparing a mirror with etcd |
//! | `version_gate` | the warning about an etcd that is too old |
//!
//! This room imports `upstream`, `cache`, `keyspace` and `telemetry`; `proxy`, `admin` and `main` import it.

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

mod changes;
pub mod fan_out;
mod feed;
mod flags;
pub mod freshness;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzzing;
mod image;
mod lifecycle;
pub mod lineage;
mod load;
pub mod metrics;
mod mirrors;
mod neighbours;
mod pace;
mod packing;
mod probe;
mod residency;
mod set;
mod stale;
#[cfg(test)]
mod testing;
mod verify;
mod version_gate;
pub mod view;
mod watched;

pub use feed::RESPONSE_TIMEOUT as FEED_RESPONSE_TIMEOUT;
pub use flags::{CachePack, MirrorConfig, default_cache_bytes};
pub use image::{ImageError, check_images};
pub use metrics::{
    FreshnessMetrics, PrefixMetrics, QuorumChecks, STREAM_FALLBACKS, StreamFallbacks, Unreadable,
};
pub use mirrors::Mirrors;
pub use neighbours::UselessNeighbour;
pub use stale::StaleView;
pub use view::{HeldView, HeldViews, prefix_sizes};
pub use watched::WatchedLoads;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use rangecache_base::flags::Live;
use rangecache_base::panics::restarting;
use rangecache_base::telemetry::Telemetry;
use rangecache_upstream::{EtcdConfig, Upstream};

/// Starts to load and follow every scope that `--cache-prefix` and `--no-cache-prefix` name, until `stop` is cancelled. The tasks are spawned on
/// `tasks`, which the caller joins.
#[must_use]
pub fn start(
    live: &Live<MirrorConfig>,
    etcd: &EtcdConfig,
    upstream: &Arc<Upstream>,
    telemetry: &Arc<Telemetry>,
    tasks: &TaskTracker,
    stop: &CancellationToken,
) -> Arc<Mirrors> {
    let (interval, old_etcd) = (etcd.probe_interval, etcd.old_etcd);
    let mirrors = Arc::new(Mirrors::new(live, interval, upstream, telemetry, tasks, stop));
    for (position, _) in mirrors.positions() {
        lifecycle::start(&mirrors, position);
    }
    let probed = Arc::clone(&mirrors);
    spawn(&mirrors, async move {
        let probe = probe::Probe {
            set: &probed.set,
            upstream: &probed.upstream,
            freshness: &probed.freshness,
            pinned: &probed.pinned,
            compaction: &probed.compaction,
        };
        restarting("probe", || probe::run(&probe, interval)).await;
    });
    let interval = live.load().verify_interval;
    if !interval.is_zero() {
        let verified = Arc::clone(&mirrors);
        spawn(&mirrors, async move {
            let (set, upstream) = (&verified.set, &verified.upstream);
            let counted = (&*verified.telemetry, &*verified.metrics);
            restarting("verification", || verify::run(set, upstream, counted, interval)).await;
        });
    }
    let packed = Arc::clone(&mirrors);
    spawn(&mirrors, async move {
        restarting("packing", || packing::run(&packed.set)).await;
    });
    let refilled = Arc::clone(&mirrors);
    spawn(&mirrors, async move {
        let (set, upstream) = (&refilled.set, &refilled.upstream);
        restarting("residency", || residency::run(set, upstream)).await;
    });
    let warmed = Arc::clone(&mirrors);
    spawn(&mirrors, async move {
        let (set, upstream) = (&warmed.set, &warmed.upstream);
        restarting("neighbours", || load::check_neighbours(set, upstream)).await;
    });
    let contradicted = Arc::clone(&mirrors);
    spawn(&mirrors, async move {
        restarting("history", || contradicted.drop_contradicted()).await;
    });
    let gated = Arc::clone(&mirrors);
    spawn(&mirrors, async move {
        let (upstream, stop) = (&gated.upstream, &gated.stop);
        restarting("version gate", || version_gate::run(upstream, stop, old_etcd)).await;
    });
    mirrors
}

/// Spawns `task` on the tracker of `mirrors`; it is dropped when the process stops.
fn spawn(mirrors: &Mirrors, task: impl Future<Output = ()> + Send + 'static) {
    mirrors
        .tasks
        .spawn(mirrors.stop.clone().run_until_cancelled_owned(task));
}
