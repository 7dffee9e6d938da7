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
//! | `mirrors` | all mirrors of the process and what they share; last views, while no member of etcd answers (`--serve-stale`) |
//! | `set` | places of mirrors, their memory together, and what drops them all |
//! | `changes` | mirrors that a reload adds or removes |
//! | `memory` | values packed as memory becomes scarce, or left out, and read again |
//! | `neighbours` | neighbours that would be of no use to the next start |
//! | `flags` | the flags |
//! | `probe` | periodic checks that do not depend on client traffic |
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
mod memory;
pub mod metrics;
mod mirrors;
mod neighbours;
mod probe;
mod set;
#[cfg(test)]
mod testing;
mod verify;
mod version_gate;
pub mod view;

use std::sync::Arc;

use rangecache_base::{flags::Live, panics::restarting, telemetry::Telemetry};
use rangecache_upstream::{EtcdConfig, Upstream};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

pub use feed::RESPONSE_TIMEOUT as FEED_RESPONSE_TIMEOUT;
pub use flags::{CachePack, MirrorConfig, default_cache_bytes};
pub use image::{ImageError, check_images};
pub use metrics::{
    FreshnessMetrics, PrefixMetrics, QuorumChecks, STREAM_FALLBACKS, StreamFallbacks, Unreadable,
};
pub use mirrors::{Mirrors, StaleView};
pub use neighbours::UselessNeighbour;
pub use set::WatchedLoads;
pub use view::{HeldView, HeldViews, prefix_sizes};

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
    spawn(&mirrors, "probe", move |of| async move {
        probe::run(&of, interval).await
    });
    let interval = live.load().verify_interval;
    if !interval.is_zero() {
        spawn(&mirrors, "verification", move |of| async move {
            verify::run(&of, interval).await
        });
    }
    spawn(&mirrors, "memory", |of| async move {
        memory::run(&of.set, &of.upstream).await
    });
    spawn(&mirrors, "neighbours", |of| async move {
        load::check_neighbours(&of.set, &of.upstream).await;
    });
    spawn(
        &mirrors,
        "history",
        |of| async move { of.drop_contradicted().await },
    );
    spawn(&mirrors, "version gate", move |of| async move {
        version_gate::run(&of.upstream, &of.stop, old_etcd).await;
    });
    mirrors
}

/// Spawns a task of `mirrors`, which is restarted after a panic, and dropped when the process stops.
fn spawn<F: Future<Output = ()> + Send + 'static>(
    mirrors: &Arc<Mirrors>,
    name: &'static str,
    task: impl Fn(Arc<Mirrors>) -> F + Send + 'static,
) {
    let (of, stop) = (Arc::clone(mirrors), mirrors.stop.clone());
    let running = restarting(name, move || task(Arc::clone(&of)));
    mirrors.tasks.spawn(stop.run_until_cancelled_owned(running));
}
