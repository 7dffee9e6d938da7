//! All mirrors of this process, and what they share; the age of a mirror's view, and last views, for reads that may be stale while no
//! member of etcd answers (`--serve-stale`).

use std::sync::atomic::{AtomicBool, Ordering};
use std::{sync::Arc, time::Duration};

use etcd_store::cache::HistoryLimits;
use etcd_store::keyspace::{Interval, scope::scopes};
use parking_lot::Mutex;
use rangecache_base::flags::Live;
use rangecache_base::telemetry::trace::{Span, SpanExt as _};
use rangecache_base::telemetry::{Reason, Telemetry};
use rangecache_upstream::{Connection, Lineage, Upstream};
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::fan_out::{FanOut, Reader};
use super::freshness::{Findings, Freshness};
use super::lineage::{Auth, ClusterState, Compaction, HistoryId};
use super::set::{MirrorSet, MirrorSlot, WatchedLoads};
use super::view::{Mirror, Pinned, View};
use super::{
    feed::is_of_history, flags::MirrorConfig, image::Images, metrics::RoomMetrics,
    neighbours::UselessNeighbour,
};

#[cfg(debug_assertions)]
use super::memory;

/// All mirrors of this process, and what they share.
#[derive(Debug)]
pub struct Mirrors {
    /// Every mirror with its fan-out.
    pub(super) set: Arc<MirrorSet>,
    /// The quorum check.
    pub freshness: Arc<Freshness>,
    /// The state of etcd's history and auth, and the revisions that clients have seen.
    pub cluster_state: Arc<ClusterState>,
    /// Past revisions that are read from etcd, not from the mirrors.
    pub pinned: Arc<Pinned>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) telemetry: Arc<Telemetry>,
    pub(super) metrics: Arc<RoomMetrics>,
    pub(super) history_limits: HistoryLimits,
    /// An operator has switched memory off.
    forwards_all: AtomicBool,
    /// Held while `forwards_all` and the fan-outs are switched.
    pub(super) switching: Mutex<()>,
    /// `--serve-stale` and `--freshness-timeout`.
    live: Live<MirrorConfig>,
    pub(super) probe_interval: Duration,
    /// Compactions that etcd has reported.
    pub(super) compaction: Arc<Compaction>,
    /// Images on the disk.
    pub(super) images: Option<Arc<Images>>,
    pub(super) tasks: TaskTracker,
    pub(super) stop: CancellationToken,
}

impl Mirrors {
    /// Empty mirrors of every scope that `live` names. No task runs yet: [`start`](super::start) starts them.
    pub(super) fn new(
        live: &Live<MirrorConfig>,
        probe_interval: Duration,
        upstream: &Arc<Upstream>,
        telemetry: &Arc<Telemetry>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Mirrors {
        let flags = live.load();
        let cluster_state = Arc::new(ClusterState::new(telemetry.metrics.group()));
        let slots = scopes(&flags.cache_prefix, &flags.no_cache_prefix)
            .into_iter()
            .map(|scope| {
                let mirror = Mirror::new(scope, Arc::clone(&cluster_state), telemetry);
                MirrorSlot::new(mirror, Arc::default(), false, stop.child_token())
            });
        let set = MirrorSet::new(slots.collect(), Arc::clone(&cluster_state), live.clone());
        let (set, compaction) = (Arc::new(set), Arc::<Compaction>::default());
        let findings = Findings {
            replaced: {
                let set = Arc::clone(&set);
                Box::new(move |header| {
                    set.drop_all(header.revision, "a quorum check shows another history");
                })
            },
            compacted: {
                let (set, compaction) = (Arc::clone(&set), Arc::clone(&compaction));
                Box::new(move |history, revision| {
                    set.compacted(history, revision);
                    compaction.wake();
                })
            },
            continues: {
                let (set, upstream) = (Arc::clone(&set), Arc::clone(upstream));
                Box::new(move |connection, history, lineage| {
                    let (set, upstream) = (Arc::clone(&set), Arc::clone(&upstream));
                    Box::pin(async move {
                        is_of_history(&set, &upstream, &connection, history, lineage, None).await
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
            set,
            freshness,
            cluster_state,
            pinned: Arc::default(),
            upstream: Arc::clone(upstream),
            telemetry: Arc::clone(telemetry),
            metrics: telemetry.metrics.group(),
            history_limits: HistoryLimits {
                max_age: flags.history_max_age,
                max_bytes: flags.history_max_bytes,
                ..HistoryLimits::default()
            },
            forwards_all: AtomicBool::new(false),
            switching: Mutex::default(),
            live: live.clone(),
            probe_interval,
            compaction,
            images: open_images(&flags),
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
        for slot in self.set.every() {
            slot.fan_out.set_closed(is_on);
        }
        self.metrics.forward_all.set(i64::from(is_on));
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
        let mut present = self.set.present();
        present
            .find(|(_, slot)| slot.mirror.scope.contains(interval))
            .map(|(position, _)| position)
    }

    /// The mirror at `position`, which it keeps, also once it was removed.
    #[must_use]
    pub fn at(&self, position: usize) -> Option<&Mirror> {
        self.set.get(position).map(|slot| &slot.mirror)
    }

    /// The fan-out of a mirror of this process.
    #[must_use]
    pub fn fan_out(&self, mirror: &Mirror) -> Option<&Arc<FanOut>> {
        let mut slots = self.set.every();
        slots
            .find(|slot| std::ptr::eq(&slot.mirror, mirror))
            .map(|slot| &slot.fan_out)
    }

    /// Every mirror.
    pub fn all(&self) -> impl Iterator<Item = &Mirror> {
        self.set.all()
    }

    /// Every mirror with its position.
    pub fn positions(&self) -> impl Iterator<Item = (usize, &Mirror)> {
        self.set
            .present()
            .map(|(position, slot)| (position, &slot.mirror))
    }

    /// Why each mirror is out of service, by position; removed ones included.
    pub fn reasons_out(&self) -> impl Iterator<Item = Option<Reason>> {
        self.set.every().map(|slot| slot.mirror.revision().err())
    }

    /// Mirrors without which the process is not ready: all but those that a reload has added and that were never in service.
    pub fn awaited(&self) -> impl Iterator<Item = &Mirror> {
        let present = self.set.present().map(|(_, slot)| slot);
        present
            .filter(|slot| !slot.was_added || slot.mirror.was_in_service())
            .map(|slot| &slot.mirror)
    }

    /// Records that etcd has compacted up to `revision`, as it has reported, unless `history`, the one in
    /// which that was found, has been replaced.
    pub fn compacted(&self, history: HistoryId, revision: i64) {
        self.compaction.record(history, revision);
        self.set.compacted(history, revision);
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

    /// Drops every mirror each time that the response to a client's write has shown another history.
    pub(super) async fn drop_contradicted(&self) {
        loop {
            self.cluster_state.until_contradicted().await;
            let revision = self.cluster_state.known();
            self.set
                .drop_all(revision, "a write got a revision that was known before");
        }
    }

    /// Carries out a fault that concerns mirrors, by its name, for tests.
    #[cfg(debug_assertions)]
    pub fn inject(&self, fault: &[u8]) {
        match fault {
            b"corrupt" => self.all().for_each(Mirror::corrupt),
            b"leave-out" => memory::leave_out_all(&self.set),
            _ => {}
        }
    }

    /// Bytes by which the mirrors, what readers keep of their old views, and loads in progress exceed
    /// `--cache-max-bytes`, as far as giving up readers can help.
    #[must_use]
    pub fn excess_held_bytes(&self) -> u64 {
        self.set.excess_held_bytes()
    }

    /// Whether images of the mirrors are kept (`--image-dir`).
    #[must_use]
    pub fn keep_images(&self) -> bool {
        self.images.is_some()
    }

    /// Neighbours (`--warm-from`) that were of no use when they were asked last.
    #[must_use]
    pub fn useless_neighbours(&self) -> Vec<UselessNeighbour> {
        self.set.useless_neighbours()
    }

    /// Age up to which last views are served while no member answers (`--serve-stale`); zero disables it.
    pub(super) fn longest_stale(&self) -> Duration {
        self.live.load().serve_stale
    }

    /// Longest wait of a read for a proof that its mirror is fresh (`--freshness-timeout`).
    pub fn freshness_timeout(&self) -> Duration {
        self.live.load().freshness_timeout
    }

    /// Loads that the readers of watchers are of, each of the mirror at the position before it.
    pub fn watched<'a>(&self, readers: impl Iterator<Item = (usize, &'a Reader)>) -> WatchedLoads {
        let loads = readers.map(|(position, reader)| (position, reader.generation()));
        WatchedLoads::new(&self.set, loads)
    }

    /// Whether etcd may continue the watchers of `watched` on `connection`: the member behind it is of `history`, so that its events
    /// continue those of each mirror ([`is_of_history`]), and those that were watched are among them.
    pub async fn may_continue(
        &self,
        connection: &Arc<Connection>,
        history: HistoryId,
        watched: &WatchedLoads,
    ) -> bool {
        is_of_history(
            &self.set,
            &self.upstream,
            connection,
            history,
            Lineage::Member,
            Some(watched),
        )
        .await
            && connection
                .standing()
                .is_some_and(|standing| watched.began_after(standing.since))
    }
}

/// The images that `flags` name; their faults were reported before the start, and what has happened since costs no more
/// than the images.
fn open_images(flags: &MirrorConfig) -> Option<Arc<Images>> {
    match Images::open(flags) {
        Ok(images) => images.map(Arc::new),
        Err(error) => {
            tracing::warn!(%error, "there are no images; a start reads every key from etcd");
            None
        }
    }
}

/// A span of background work on `mirror`; `None` unless it is sampled.
pub(super) fn background(telemetry: &Telemetry, name: &'static str, mirror: &Mirror) -> Option<Box<Span>> {
    let mut span = telemetry.tracer.background(name)?;
    span.set("rangecache.mirror", mirror.name.clone());
    Some(span)
}

/// View of a mirror, and how long ago it was proven to lack nothing.
#[derive(Debug)]
pub struct StaleView {
    /// The view.
    pub view: View,
    /// Time since the last check was sent that proves the view.
    pub age: Duration,
}

/// Whether no client has been answered later than a view of this revision, which a check proved that was sent at this time:
/// neither from a later revision, nor on a connection that was opened after the check, `answered_by`. `shown` is the highest
/// revision that clients are known to have seen.
fn has_not_been_passed(view: (i64, Instant), shown: Option<i64>, answered_by: Instant) -> bool {
    let (revision, proven_at) = view;
    shown.is_some_and(|shown| shown <= revision) && answered_by <= proven_at
}

impl Mirrors {
    /// Whether last views are served at all.
    #[must_use]
    pub fn serve_stale(&self) -> bool {
        !self.longest_stale().is_zero()
    }

    /// Time since the last check was sent which proves that `view` lacked no acknowledged write then; `None` if there is
    /// none, or the view is of a replaced history.
    #[must_use]
    pub fn age(&self, view: &View) -> Option<Duration> {
        let history = self.cluster_state.current();
        let proven_at = history.proven_at(view.revision)?;
        (view.history == history.id).then(|| proven_at.elapsed())
    }

    /// Last view of `mirror`, for a caller without credentials, while no member answers and the view's age is within
    /// `--serve-stale`.
    ///
    /// `None` also if a client is known to have seen a later revision (I11), and if etcd has answered a client's call on a connection
    /// that was opened after the view's proof: that may have been another history, after which the old one must not
    /// appear again (I4). A response whose revision could not be read is no reason: no check can come that would tell what
    /// it has shown, and the view's age says what the answer is worth.
    #[must_use]
    pub fn stale_view(&self, mirror: &Mirror) -> Option<StaleView> {
        if !self.serve_stale() || !self.upstream.is_silent() {
            return None;
        }
        let cluster_state = &self.cluster_state;
        let (history, view) = (cluster_state.current(), mirror.last_view()?);
        let proven_at = history.proven_at(view.revision)?;
        let age = proven_at.elapsed();
        let is_usable = view.history == history.id
            && cluster_state.auth() == Auth::Off
            && age <= self.longest_stale()
            && has_not_been_passed(
                (view.revision, proven_at.instant),
                cluster_state.known_shown_revision(),
                cluster_state.last_answered_by(),
            );
        is_usable.then_some(StaleView { view, age })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Bench;

    const SCOPES: [&str; 4] = ["--cache-prefix", "/a/", "--cache-prefix", "/b/"];

    #[tokio::test]
    async fn interval_is_held_by_the_mirror_that_has_all_of_it() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&SCOPES);
        let position = |key: &str, end: &str| {
            let interval = Interval::from_request(key.as_bytes(), end.as_bytes());
            let holding = mirrors.holding(&interval).map(|mirror| &mirror.scope);
            let position = mirrors.position_holding(&interval);
            assert_eq!(
                holding,
                position.map(|position| &mirrors.at(position).unwrap().scope)
            );
            position
        };
        assert_eq!(position("/a/1", ""), Some(0));
        assert_eq!(position("/b/", "/b0"), Some(1));
        assert_eq!(position("/a/", "/b0"), None);
        assert_eq!(position("/c/1", ""), None);
        mirrors.set.get(0).unwrap().remove();
        assert_eq!(position("/a/1", ""), None);
        assert_eq!(position("/b/1", ""), Some(1));
        assert!(mirrors.at(0).is_some(), "watches refer to its position");
    }

    #[tokio::test]
    async fn memory_that_is_switched_off_closes_every_hub() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&SCOPES);
        // Watches of a removed mirror may still be open.
        mirrors.set.get(0).unwrap().remove();
        for (is_on, is_change) in [(false, false), (true, true), (true, false), (false, true)] {
            assert_eq!(mirrors.forward_all(is_on), is_change);
            assert_eq!(mirrors.forwards_all(), is_on);
            let mut fan_outs = mirrors.set.every().map(|slot| &slot.fan_out);
            assert!(fan_outs.all(|fan_out| fan_out.is_closed() == is_on));
        }
    }

    #[tokio::test]
    async fn process_is_ready_without_mirrors_that_a_reload_adds() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&SCOPES);
        let awaited = || {
            mirrors
                .awaited()
                .map(|mirror| mirror.name.clone())
                .collect::<Vec<_>>()
        };
        let first = awaited();
        assert_eq!(first.len(), 2);
        let scopes = scopes(&["/c/".to_owned()], &[]);
        let added = Mirror::new(
            scopes.into_iter().next().unwrap(),
            Arc::clone(&mirrors.cluster_state),
            &mirrors.telemetry,
        );
        let slot = MirrorSlot::new(added, Arc::default(), true, CancellationToken::new());
        let added = mirrors.set.add(slot).unwrap();
        assert_eq!(awaited(), first);
        let added = mirrors.at(added).unwrap();
        crate::testing::serve(added, 10);
        assert_eq!(awaited().len(), 3);
        added.lose_feed(added.epoch(), false).unwrap();
        assert_eq!(awaited().len(), 3, "it was in service");
        mirrors.set.get(0).unwrap().remove();
        assert_eq!(awaited()[0], first[1]);
    }

    #[tokio::test]
    async fn compaction_above_a_revision_refuses_it_only_in_its_history() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&SCOPES);
        mirrors.compacted(HistoryId::FIRST, 9);
        mirrors.compacted(HistoryId::FIRST, 7);
        assert_eq!(mirrors.reported_compaction(8), Some(9));
        assert_eq!(mirrors.reported_compaction(9), None);
        let before = mirrors.cluster_state.before_check();
        mirrors.set.replace_history(&before, 3, "restored");
        assert_eq!(mirrors.reported_compaction(8), None);
    }

    #[test]
    fn view_is_passed_by_a_later_revision_and_by_an_answer_on_a_newer_connection() {
        let proven_at = Instant::now();
        let (before, after) = (
            proven_at - Duration::from_secs(1),
            proven_at + Duration::from_secs(1),
        );
        for (shown, answered_by, expected) in [
            (Some(7), before, true),
            (Some(7), proven_at, true),
            (Some(8), before, false),
            (None, before, false),
            (Some(7), after, false),
        ] {
            let passed = has_not_been_passed((7, proven_at), shown, answered_by);
            assert_eq!(
                passed,
                expected,
                "shown {shown:?}, answered on a newer connection: {}",
                answered_by > proven_at
            );
        }
    }
}
