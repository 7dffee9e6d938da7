//! All mirrors of this process, and what they share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::flags::MirrorConfig;
use super::freshness::{Findings, Freshness};
use super::history::{Before, ClusterState, Compaction, HistoryId, Verdict};
use super::load::LoadPacing;
use super::slots::{Slot, Slots};
use super::view::{Mirror, Pinned};
use super::watch_hub::WatchHub;
use crate::cache::HistoryLimits;
use crate::flags::Live;
use crate::keyspace::Interval;
use crate::keyspace::scope::scopes;
use crate::telemetry::trace::{Span, SpanExt as _};
use crate::telemetry::{Reason, Telemetry};
use crate::upstream::Upstream;

/// All mirrors of this process, and what they share.
#[derive(Debug)]
pub struct Mirrors {
    /// Every mirror with its watch hub.
    pub(super) slots: Arc<Slots>,
    /// The quorum check.
    pub freshness: Arc<Freshness>,
    /// The state of etcd's history and auth, and the revisions that clients have seen.
    pub cluster_state: Arc<ClusterState>,
    /// Past revisions that are read from etcd, not from the mirrors.
    pub pinned: Arc<Pinned>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) telemetry: Arc<Telemetry>,
    pub(super) history_limits: HistoryLimits,
    /// An operator has switched memory off.
    forwards_all: AtomicBool,
    /// Held while `forwards_all` and the hubs are switched.
    pub(super) switching: Mutex<()>,
    /// `--cache-max-bytes`, `--serve-stale` and `--freshness-timeout`.
    live: Live<MirrorConfig>,
    pub(super) probe_interval: Duration,
    /// What etcd has reported about its compactions.
    pub(super) compaction: Compaction,
    /// Wakes the probe: a check has found a compaction, and the probe asks how far it reaches.
    pub(super) compaction_found: Arc<Notify>,
    /// The rate of loads.
    pub(super) load_pacing: Arc<LoadPacing>,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

impl Mirrors {
    /// Empty mirrors of every scope that `live` names, which will be those of `this`. No task runs yet:
    /// [`start`](super::start) starts them.
    pub(super) fn new(
        this: &Weak<Mirrors>,
        live: &Live<MirrorConfig>,
        probe_interval: Duration,
        upstream: &Arc<Upstream>,
        telemetry: &Arc<Telemetry>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Mirrors {
        let flags = live.load();
        let cluster_state = Arc::new(ClusterState::new(telemetry.metrics.unreadable.clone()));
        let slots = scopes(&flags.cache_prefix, &flags.no_cache_prefix)
            .into_iter()
            .map(|scope| {
                let mirror_metrics = telemetry.metrics.mirrors.mirror(&scope.name());
                let mirror = Mirror::new(scope, Arc::clone(&cluster_state), mirror_metrics);
                Slot::new(mirror, Arc::default(), false, stop.child_token())
            });
        let slots = Arc::new(Slots::new(slots.collect()));
        let compaction_found = Arc::new(Notify::new());
        let findings = Findings {
            replaced: {
                let slots = Arc::clone(&slots);
                Box::new(move |header| {
                    drop_all(&slots, header.revision, "a quorum check shows another history");
                })
            },
            compacted: {
                let (slots, cluster_state) = (Arc::clone(&slots), Arc::clone(&cluster_state));
                let found = Arc::clone(&compaction_found);
                Box::new(move |history, revision| {
                    compacted(&slots, &cluster_state, history, revision);
                    found.notify_one();
                })
            },
            continues: {
                let this = Weak::clone(this);
                Box::new(move |connection, history| {
                    let mirrors = this.upgrade();
                    Box::pin(async move {
                        match mirrors {
                            Some(mirrors) => mirrors.is_of_history(&connection, history, false).await,
                            None => false,
                        }
                    })
                })
            },
        };
        let freshness = Arc::new(Freshness::new(
            Arc::clone(upstream),
            Arc::clone(&cluster_state),
            Arc::clone(telemetry),
            live.clone(),
            tasks.clone(),
            stop.clone(),
            findings,
        ));
        Mirrors {
            slots,
            freshness,
            cluster_state,
            pinned: Arc::default(),
            upstream: Arc::clone(upstream),
            telemetry: Arc::clone(telemetry),
            history_limits: HistoryLimits {
                max_age: flags.history_max_age,
                max_bytes: flags.history_max_bytes,
                ..HistoryLimits::default()
            },
            forwards_all: AtomicBool::new(false),
            switching: Mutex::default(),
            live: live.clone(),
            probe_interval,
            compaction: Compaction::default(),
            compaction_found,
            load_pacing: Arc::new(LoadPacing::new()),
            tasks: tasks.clone(),
            stop: stop.clone(),
        }
    }

    /// Whether an operator has switched memory off: etcd answers everything.
    #[must_use]
    pub fn forwards_all(&self) -> bool {
        self.forwards_all.load(Ordering::SeqCst)
    }

    /// Switches memory off or on: lets etcd answer every read that arrives from now on, and continue every watch. The
    /// mirrors follow etcd nevertheless. Returns whether that is a change.
    pub fn forward_all(&self, is_on: bool) -> bool {
        let _switching = self.switching.lock();
        let was_on = self.forwards_all.swap(is_on, Ordering::SeqCst);
        for slot in self.slots.every() {
            slot.hub.set_closed(is_on);
        }
        self.telemetry.metrics.reads.set_forward_all(is_on);
        was_on != is_on
    }

    /// The mirror that holds every key that `interval` can name.
    #[must_use]
    pub fn holding(&self, interval: &Interval<'_>) -> Option<&Mirror> {
        self.all().find(|mirror| mirror.scope.contains(interval))
    }

    /// Position of the mirror that holds every key that `interval` can name.
    #[must_use]
    pub fn position_holding(&self, interval: &Interval<'_>) -> Option<usize> {
        let mut present = self.slots.present();
        present
            .find(|(_, slot)| slot.mirror.scope.contains(interval))
            .map(|(position, _)| position)
    }

    /// The mirror at `position`, which it keeps, also once it was removed.
    #[must_use]
    pub fn at(&self, position: usize) -> Option<&Mirror> {
        self.slots.get(position).map(|slot| &slot.mirror)
    }

    /// The hub of a mirror of this process.
    #[must_use]
    pub fn watch_hub(&self, mirror: &Mirror) -> Option<&Arc<WatchHub>> {
        let mut slots = self.slots.every();
        slots
            .find(|slot| std::ptr::eq(&slot.mirror, mirror))
            .map(|slot| &slot.hub)
    }

    /// Every mirror.
    pub fn all(&self) -> impl Iterator<Item = &Mirror> {
        self.slots.mirrors()
    }

    /// Every mirror with its position.
    pub fn positions(&self) -> impl Iterator<Item = (usize, &Mirror)> {
        self.slots
            .present()
            .map(|(position, slot)| (position, &slot.mirror))
    }

    /// Why each mirror is out of service, by position; removed ones included.
    pub fn reasons_out(&self) -> impl Iterator<Item = Option<Reason>> {
        self.slots.every().map(|slot| slot.mirror.revision().err())
    }

    /// Mirrors without which the process is not ready: all but those that a reload has added and that were never in service.
    pub fn awaited(&self) -> impl Iterator<Item = &Mirror> {
        let present = self.slots.present().map(|(_, slot)| slot);
        present
            .filter(|slot| !slot.was_added || slot.mirror.was_in_service())
            .map(|slot| &slot.mirror)
    }

    /// Records that etcd has compacted up to `revision`, as it has reported, unless `history`, the one in
    /// which that was found, has been replaced.
    pub fn compacted(&self, history: HistoryId, revision: i64) {
        self.compaction.record(history, revision);
        compacted(&self.slots, &self.cluster_state, history, revision);
    }

    /// Revision of etcd's last compaction, as etcd has reported it, if that is above `revision`, which etcd refuses then.
    #[must_use]
    pub fn reported_compaction(&self, revision: i64) -> Option<i64> {
        self.compaction
            .reported_above(self.cluster_state.history(), revision)
    }

    /// Like [`Mirrors::reported_compaction`], given that etcd refuses `revision`: asks etcd if necessary, once for all that
    /// ask at a time. `mirror` has a key that rangecache may read. `None` without a response.
    pub async fn compaction_above(&self, mirror: &Mirror, revision: i64) -> Option<i64> {
        // A call that was in flight may have begun before the compaction.
        for _ in 0..2 {
            if let Some(reported) = self.reported_compaction(revision) {
                return Some(reported);
            }
            let history = self.cluster_state.history();
            let asking = self.compaction.ask(&self.upstream, mirror.scope.key(), revision);
            self.compacted(history, asking.await?);
        }
        self.reported_compaction(revision)
    }

    /// Records that etcd's contents or raft log are not those of the history in which a feed or a load began, and drops
    /// every mirror, unless that has been done. `revision` is one of the new history, 0 if none is known; `explanation`
    /// goes to the log.
    pub(super) fn replace_history(&self, before: &Before, revision: i64, explanation: &str) {
        if self.cluster_state.contradict(before) == Verdict::Replaced {
            drop_all(&self.slots, revision, explanation);
        }
    }

    /// Drops every mirror each time that the response to a client's write has shown another history.
    pub(super) async fn drop_contradicted(&self) {
        loop {
            self.cluster_state.until_contradicted().await;
            let revision = self.cluster_state.known();
            drop_all(
                &self.slots,
                revision,
                "a write got a revision that was known before",
            );
        }
    }

    /// Removes one key from each mirror, for tests of verification.
    #[cfg(debug_assertions)]
    pub fn corrupt(&self) {
        self.all().for_each(Mirror::corrupt);
    }

    /// A span of background work on `mirror`; `None` unless it is sampled.
    pub(super) fn background(&self, name: &'static str, mirror: &Mirror) -> Option<Box<Span>> {
        let mut span = self.telemetry.tracer.background(name)?;
        span.set("rangecache.mirror", mirror.name.clone());
        Some(span)
    }

    /// Bytes by which the mirrors, what readers keep of their old views, and loads in progress exceed
    /// `--cache-max-bytes`, as far as giving up readers can help.
    #[must_use]
    pub fn excess_held_bytes(&self) -> u64 {
        // Readers may keep views of removed mirrors.
        let every = self.slots.every().map(|slot| &slot.mirror);
        let held: u64 = every.map(Mirror::held_bytes).sum();
        let own = self
            .all()
            .map(|mirror| mirror.memory_bytes() + mirror.loading_bytes().load(Ordering::Relaxed));
        (held + own.sum::<u64>())
            .saturating_sub(self.max_bytes())
            .min(held)
    }

    /// Bound on the memory of all mirrors together (`--cache-max-bytes`).
    fn max_bytes(&self) -> u64 {
        self.live.load().max_bytes()
    }

    /// Age up to which last views are served while no member answers (`--serve-stale`); zero disables it.
    pub(super) fn longest_stale(&self) -> Duration {
        self.live.load().serve_stale
    }

    /// Longest wait of a read for a proof that its mirror is fresh (`--freshness-timeout`).
    pub fn freshness_timeout(&self) -> Duration {
        self.live.load().freshness_timeout
    }

    /// Bytes that `mirror` may take: `--cache-max-bytes` less the memory of the other mirrors.
    pub(super) fn budget_of(&self, mirror: &Mirror) -> u64 {
        let others = self.all().filter(|other| !std::ptr::eq(*other, mirror));
        self.max_bytes()
            .saturating_sub(others.map(Mirror::memory_bytes).sum())
    }

    pub(super) fn within_budget(&self, mirror: &Mirror) -> bool {
        mirror.memory_bytes() <= self.budget_of(mirror)
    }
}

fn compacted(slots: &Slots, cluster_state: &ClusterState, history: HistoryId, revision: i64) {
    if cluster_state.note_compacted(history, revision) {
        slots.mirrors().for_each(|mirror| mirror.compacted(revision));
    }
}

fn drop_all(slots: &Slots, revision: i64, explanation: &str) {
    tracing::warn!(
        explanation,
        "etcd's history was replaced (restored from a backup?); dropping and reloading every mirror"
    );
    slots
        .mirrors()
        .for_each(|mirror| mirror.replace_history(revision));
}
