//! Keeps caches in step with etcd, and proves that they are fresh.
//!
//! | file | subject |
//! |---|---|
//! | `scope` | which keys a mirror holds |
//! | `lifecycle` | load, follow, resume, load anew |
//! | `load` | a scope at one pinned revision |
//! | `feed` | the watch: created, held against what is here, asked for progress (I9) |
//! | `assemble` | from watch responses to whole revisions (I3) |
//! | `state` | what readers see, and the epoch that guards it |
//! | `freshness` | the quorum check (I2) |
//! | `cluster_state` | replaced history (I4), what was shown (I11), auth (I8) |
//! | `pinned` | past revisions that are read apart from mirrors |
//! | `probe` | what has to be asked even while no client reads |
//! | `lag` | how long a mirror has been behind |
//! | `aside` | waiting for memory |
//! | `verify` | holding a mirror against etcd |
//!
//! It uses `cache` and `upstream`; `proxy` and `admin` use it.

mod assemble;
pub mod cluster_state;
mod feed;
pub mod freshness;
mod lag;
mod lifecycle;
mod load;
mod over_budget;
pub mod pinned;
mod probe;

pub mod state;
mod verify;

pub use probe::{compact_revision, is_compacted};

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::cache::{HistoryLimits, Interval};
use crate::config::{Config, OldEtcd};
use crate::keyspace::scope::scopes;
use crate::panics::restarting;
use crate::telemetry::Metrics;
use crate::telemetry::trace::Span;
use crate::upstream::Upstream;
use cluster_state::ClusterState;
use freshness::Freshness;
use pinned::Pinned;
use state::Mirror;

/// All mirrors of this sidecar, and what they share.
#[derive(Debug)]
pub struct Mirrors {
    all: Arc<[Mirror]>,
    /// The quorum check.
    pub freshness: Arc<Freshness>,
    /// What is known of etcd's history and what was shown of it.
    pub cluster_state: Arc<ClusterState>,
    /// Past revisions that are read apart from the mirrors.
    pub pinned: Arc<Pinned>,
    upstream: Arc<Upstream>,
    metrics: Arc<Metrics>,
    history_limits: HistoryLimits,
    max_bytes: u64,
    probe_interval: Duration,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Mirrors {
    /// Starts to load and to follow everything that `config` wants mirrored, until `stop`.
    #[must_use]
    pub fn start(
        config: &Config,
        upstream: &Arc<Upstream>,
        metrics: &Arc<Metrics>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Arc<Mirrors> {
        let cluster_state = Arc::new(ClusterState::default());
        let all: Arc<[Mirror]> = scopes(&config.cache_prefix, &config.no_cache_prefix)
            .into_iter()
            .map(|scope| {
                let mirror_metrics = metrics.mirror(&scope.name());
                Mirror::new(scope, Arc::clone(&cluster_state), mirror_metrics)
            })
            .collect();
        let replaced = Arc::clone(&all);
        let freshness = Arc::new(Freshness::new(
            Arc::clone(upstream),
            Arc::clone(&cluster_state),
            Arc::clone(metrics),
            config.freshness_timeout,
            tasks.clone(),
            stop.clone(),
            Box::new(move |_| drop_all(&replaced, "a quorum check shows another history")),
        ));
        let mirrors = Arc::new(Mirrors {
            all,
            freshness,
            cluster_state,
            pinned: Arc::default(),
            upstream: Arc::clone(upstream),
            metrics: Arc::clone(metrics),
            history_limits: HistoryLimits {
                max_age: config.history_max_age,
                max_bytes: config.history_max_bytes,
                ..HistoryLimits::default()
            },
            max_bytes: config.cache_max_bytes(),
            probe_interval: config.probe_interval,
            tasks: tasks.clone(),
            stop: stop.clone(),
        });
        lifecycle::start(&mirrors);
        let (pulse, stop, interval) = (Arc::clone(&mirrors), stop.clone(), config.probe_interval);
        tasks.spawn(async move {
            let beating = restarting("probe", || probe::run(&pulse, interval));
            stop.run_until_cancelled(beating).await
        });
        if !config.verify_interval.is_zero() {
            let (verified, stop) = (Arc::clone(&mirrors), mirrors.stop.clone());
            let interval = config.verify_interval;
            tasks.spawn(async move {
                let verifying = restarting("verification", || verify::run(&verified, interval));
                stop.run_until_cancelled(verifying).await
            });
        }
        let (gate, stop, old_etcd) = (Arc::clone(&mirrors), mirrors.stop.clone(), config.old_etcd);
        tasks.spawn(async move {
            let watching = restarting("version gate", || gate.watch_gate(old_etcd));
            stop.run_until_cancelled(watching).await
        });
        mirrors
    }

    /// The mirror that holds every key that `interval` can name.
    #[must_use]
    pub fn holding(&self, interval: &Interval<'_>) -> Option<&Mirror> {
        self.all.iter().find(|mirror| mirror.scope.contains(interval))
    }

    /// All of them, in key order.
    #[must_use]
    pub fn all(&self) -> &[Mirror] {
        &self.all
    }

    /// etcd has compacted below `revision`.
    pub fn compacted(&self, revision: i64) {
        self.cluster_state.note_compacted(revision);
        self.all.iter().for_each(|mirror| mirror.compacted(revision));
    }

    /// History was replaced: every mirror is of the old one.
    fn replace_history(&self, explanation: &str) {
        drop_all(&self.all, explanation);
    }

    /// Loses a key of each mirror, for tests.
    #[cfg(debug_assertions)]
    pub fn corrupt(&self) {
        self.all.iter().for_each(Mirror::corrupt);
    }

    /// A span of what is done to `mirror` in the background, if it is traced.
    fn background(&self, name: &'static str, mirror: &Mirror) -> Option<Box<Span>> {
        let mut span = self.metrics.tracer.background(name)?;
        span.set("rangecache.mirror", mirror.name.clone());
        Some(span)
    }

    /// Bytes that `mirror` may take: the bound on all, less what the others have.
    fn budget_of(&self, mirror: &Mirror) -> u64 {
        let others = self.all.iter().filter(|other| !std::ptr::eq(*other, mirror));
        self.max_bytes
            .saturating_sub(others.map(Mirror::memory_bytes).sum())
    }

    fn within_budget(&self, mirror: &Mirror) -> bool {
        mirror.memory_bytes() <= self.budget_of(mirror)
    }

    /// Says in the log when the version gate closes or opens; stops everything if the operator asked for that.
    async fn watch_gate(&self, old_etcd: OldEtcd) {
        let mut changed = self.upstream.versions_changed();
        loop {
            if let Some(lowest) = self.upstream.versions().lowest
                && !lowest.progress_is_trusted()
            {
                match old_etcd {
                    OldEtcd::Forward => tracing::warn!(version = %lowest,
                        "this etcd's progress notifications cannot be trusted: linearizable reads are forwarded. \
                         Upgrade etcd to 3.4.31, 3.5.13, 3.6.0 or later"),
                    OldEtcd::Refuse => {
                        tracing::error!(version = %lowest,
                            "this etcd is too old and --old-etcd=refuse is set: stopping. \
                             Upgrade etcd to 3.4.31, 3.5.13, 3.6.0 or later, or set --old-etcd=forward");
                        self.stop.cancel();
                    }
                }
            }
            if changed.changed().await.is_err() {
                return;
            }
        }
    }
}

fn drop_all(mirrors: &[Mirror], explanation: &str) {
    tracing::warn!(
        explanation,
        "etcd's history was replaced (restored from a backup?): every mirror is dropped and loaded anew"
    );
    mirrors.iter().for_each(Mirror::replace_history);
}
