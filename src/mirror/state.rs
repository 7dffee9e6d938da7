//! One mirror as readers see it: in service with a view, or out of service for a reason.
//!
//! Readers load the [`State`] without a lock. A task that changes it holds the lock on `contents` and the [`Epoch`]
//! in which it started: when history is replaced the epoch advances, and later changes of an old feed or load are
//! rejected.

pub(super) mod log_read;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::cluster_state::{ClusterState, History};
use super::held_views::{HeldView, HeldViews};
use super::past_revisions::PastRevisions;
use super::watch_hub::Ended;
use crate::cache::{Applied, AtError, Change, Rebuild, Rebuilt, Snapshot, Store, Tree};
use crate::keyspace::figure_prefix;
use crate::keyspace::scope::Scope;
use crate::telemetry::Reason;
use crate::telemetry::metrics::MirrorMetrics;

/// A reader that has waited this long in vain shows that the mirror lags. One with a shorter deadline shows nothing.
const OVERDUE_AFTER: Duration = Duration::from_millis(500);

/// Keys at one revision; immutable.
#[derive(Clone, Debug)]
pub struct View {
    /// The keys.
    pub tree: Tree,
    /// Every event up to this revision has been applied (I3).
    pub revision: i64,
    /// Number of the history of etcd that the keys belong to.
    pub history: u64,
}

/// Whether reads may be answered from the mirror.
#[derive(Debug)]
pub enum State {
    /// Out of service: reads are forwarded.
    Out {
        /// Reason of forwarded reads.
        reason: Reason,
        /// View when the feed was lost, as long as the mirror keeps its contents for the next feed.
        last: Option<View>,
    },
    /// In service.
    In(View),
}

/// Token required to modify a mirror; invalid once history is replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch(u64);

/// The caller's epoch has ended: its data belong to a replaced history or to contents that were dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleEpoch;

/// Reason why a mirror cannot give a past revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ViewAtError {
    /// The mirror is out of service.
    OutOfService(Reason),
    /// The mirror is in service but does not have the revision.
    Unavailable(AtError),
}

impl From<Reason> for ViewAtError {
    fn from(reason: Reason) -> Self {
        ViewAtError::OutOfService(reason)
    }
}

impl From<AtError> for ViewAtError {
    fn from(error: AtError) -> Self {
        ViewAtError::Unavailable(error)
    }
}

struct Contents {
    epoch: u64,
    /// History of etcd in which the load of this epoch began.
    history: Arc<History>,
    /// `None` before the first load, and after the contents were dropped.
    loaded: Option<Loaded>,
    /// Number of loads so far.
    generation: u64,
    /// The last load whose contents were dropped, and why.
    ended: Option<(u64, Ended)>,
    /// Since when the mirror has had no feed because etcd has no leader.
    no_leader_since: Option<Instant>,
}

/// The result of one load, as the feed has changed it since.
struct Loaded {
    store: Store,
    /// A key changed at the newest revision, by which a resumed feed is compared with the mirror.
    newest_key: Option<Bytes>,
    /// Revision of the last event that changed anything; `None` since the load.
    last_event: Option<i64>,
    /// Rebuilt states of `store`. Outside the store, so that readers fill it without the lock on [`Contents`].
    past: Arc<PastRevisions>,
}

impl Loaded {
    fn new(store: Store, newest_key: Option<Bytes>) -> Loaded {
        let past = Arc::new(PastRevisions::new(store.limits().fraction_bytes()));
        Loaded {
            store,
            newest_key,
            last_event: None,
            past,
        }
    }
}

/// The cache of one scope, with its state of service.
pub struct Mirror {
    /// Keys of the mirror.
    pub scope: Scope,
    /// Name in metrics and logs, made of the operator's prefixes.
    pub name: String,
    /// Metrics of this mirror.
    pub metrics: MirrorMetrics,
    cluster_state: Arc<ClusterState>,
    state: ArcSwap<State>,
    /// Locked by the feed for each batch of events, and by readers of past revisions. Held only briefly and never while
    /// another lock is taken, but for those of `watch` channels, which no task holds while it takes this one.
    contents: Mutex<Contents>,
    /// Signals a change of `state`; carries no data, so receivers re-read the state.
    changed: watch::Sender<()>,
    /// Highest revision that a reader waits for. While the mirror is behind it, the feed requests progress
    /// notifications.
    wanted: watch::Sender<i64>,
    /// Asks the feed for one progress request.
    nudged: Notify,
    /// Highest revision that a reader has waited for in vain: until the mirror has reached it, readers do not wait.
    overdue: AtomicI64,
    /// Number of the history that `wanted` belongs to. Changed and compared only under the lock of `wanted`.
    wanted_history: AtomicU64,
    /// The current epoch; its advance ends the feed and the load of the old one.
    replaced: watch::Sender<u64>,
    /// Origin of `now`.
    born: Instant,
    /// Views that readers hold.
    held_views: Arc<HeldViews>,
    /// Bytes of a load that is not in service yet.
    loading_bytes: AtomicU64,
    /// Time of the feed's last progress request, in nanoseconds since `born`; 0 before the first.
    progress_requested_nanos: AtomicU64,
}

impl std::fmt::Debug for Mirror {
    // Omits the contents: keys and values must not be logged (I10).
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mirror")
            .field("name", &self.name)
            .finish_non_exhaustive()
    }
}

impl Mirror {
    pub(super) fn new(scope: Scope, cluster_state: Arc<ClusterState>, metrics: MirrorMetrics) -> Mirror {
        Mirror {
            name: scope.name(),
            scope,
            metrics,
            state: ArcSwap::from_pointee(State::Out {
                reason: Reason::Loading,
                last: None,
            }),
            contents: Mutex::new(Contents {
                epoch: 0,
                history: cluster_state.current(),
                loaded: None,
                generation: 0,
                ended: None,
                no_leader_since: None,
            }),
            wanted_history: AtomicU64::new(cluster_state.history()),
            cluster_state,
            changed: watch::Sender::new(()),
            wanted: watch::Sender::new(0),
            nudged: Notify::new(),
            overdue: AtomicI64::new(0),
            replaced: watch::Sender::new(0),
            born: Instant::now(),
            held_views: Arc::default(),
            loading_bytes: AtomicU64::new(0),
            progress_requested_nanos: AtomicU64::new(0),
        }
    }

    /// The current view.
    ///
    /// # Errors
    /// The reason why the mirror is out of service.
    pub fn view(&self) -> Result<View, Reason> {
        match &**self.state.load() {
            State::In(view) => Ok(view.clone()),
            State::Out { reason, .. } => Err(*reason),
        }
    }

    /// Revision of the current view.
    ///
    /// # Errors
    /// The reason why the mirror is out of service.
    pub fn revision(&self) -> Result<i64, Reason> {
        match &**self.state.load() {
            State::In(view) => Ok(view.revision),
            State::Out { reason, .. } => Err(*reason),
        }
    }

    /// The current view, or the one with which the mirror lost its feed, until another feed is established or the
    /// contents are dropped. It proves nothing about etcd's present state.
    #[must_use]
    pub fn last_view(&self) -> Option<View> {
        match &**self.state.load() {
            State::In(view) => Some(view.clone()),
            State::Out { last, .. } => last.clone(),
        }
    }

    /// Waits until the view is at `revision` of the history of the number `history`, or later; also returns whether it
    /// had to wait. While the mirror is known to lag, because another reader has waited in vain, no reader waits.
    ///
    /// # Errors
    /// The reason why the mirror is out of service, [`Reason::HistoryReplaced`] if it is of another history, or
    /// [`Reason::NotFresh`] at `deadline` or while the mirror lags.
    pub async fn reach(
        &self,
        history: u64,
        revision: i64,
        deadline: Instant,
    ) -> Result<(View, bool), Reason> {
        let view = self.view_in(history)?;
        if view.revision >= revision {
            return Ok((view, false));
        }
        self.want(history, revision);
        if view.revision < self.overdue.load(Ordering::Acquire) {
            return Err(Reason::NotFresh);
        }
        let (began, epoch) = (Instant::now(), Epoch(*self.replaced.borrow()));
        // Subscribed before the state is read again, so that no change in between is missed.
        let mut changed = self.changed.subscribe();
        loop {
            let view = self.view_in(history)?;
            if view.revision >= revision {
                return Ok((view, true));
            }
            if !matches!(
                tokio::time::timeout_at(deadline, changed.changed()).await,
                Ok(Ok(()))
            ) {
                // Under the lock: a revision of a replaced history must not be waited for.
                if began.elapsed() >= OVERDUE_AFTER
                    && let Ok(_contents) = self.contents_of(epoch)
                {
                    self.overdue.fetch_max(revision, Ordering::AcqRel);
                }
                return Err(Reason::NotFresh);
            }
        }
    }

    /// Waits until the mirror is in service, if it only waits for its feed to resume; returns its revision.
    ///
    /// # Errors
    /// The reason why the mirror is out of service, at `deadline` or before.
    pub async fn resumed(&self, deadline: Instant) -> Result<i64, Reason> {
        // Subscribed before the state is read, so that no change in between is missed.
        let mut changed = self.changed.subscribe();
        loop {
            let revision = self.revision();
            if revision != Err(Reason::FeedLost) {
                return revision;
            }
            if !matches!(
                tokio::time::timeout_at(deadline, changed.changed()).await,
                Ok(Ok(()))
            ) {
                return revision;
            }
        }
    }

    /// The current view, if it is of the history of the number `history`.
    fn view_in(&self, history: u64) -> Result<View, Reason> {
        let view = self.view()?;
        if view.history == history {
            Ok(view)
        } else {
            Err(Reason::HistoryReplaced)
        }
    }

    /// Makes the feed request progress notifications until the mirror is at `revision`, which was proven in the history
    /// of the number `history`.
    pub fn want(&self, history: u64, revision: i64) {
        self.wanted.send_if_modified(|wanted| {
            // A late reader of an old history must not make the feed wait for a revision that the new one lacks.
            let higher = *wanted < revision && self.wanted_history.load(Ordering::Relaxed) == history;
            if higher {
                *wanted = revision;
            }
            higher
        });
    }

    /// Makes the feed send one progress request, so that the mirror reaches etcd's revision although it is not known here. The
    /// feed sends at most one per 50 ms for all callers, and none if it receives an event for every revision.
    pub fn nudge(&self) {
        if !self.scope.is_everything() {
            self.nudged.notify_one();
        }
    }

    /// Resolves after [`Mirror::nudge`]. For the feed alone.
    pub(super) async fn nudged(&self) {
        self.nudged.notified().await;
    }

    /// Forgets what readers wait for: only those of `history` count from now on.
    fn reset_wanted(&self, history: u64) {
        self.wanted.send_modify(|wanted| {
            *wanted = 0;
            self.overdue.store(0, Ordering::Release);
            self.wanted_history.store(history, Ordering::Relaxed);
        });
    }

    /// Keys at a past `revision`. Rebuilds them if necessary, without delaying the feed.
    ///
    /// # Errors
    /// The mirror is out of service, or does not have the revision.
    pub fn view_at(&self, revision: i64) -> Result<Tree, ViewAtError> {
        self.view_at_built_by(self.view()?, revision, Rebuild::run)
    }

    /// Like [`Mirror::view_at`], also while [`Mirror::last_view`] is all that there is.
    ///
    /// # Errors
    /// The mirror has no contents, or does not have the revision.
    pub fn last_view_at(&self, revision: i64) -> Result<Tree, ViewAtError> {
        let view = self.last_view().ok_or(Reason::Loading)?;
        self.view_at_built_by(view, revision, Rebuild::run)
    }

    fn view_at_built_by(
        &self,
        view: View,
        revision: i64,
        build: impl FnOnce(&Rebuild) -> Rebuilt,
    ) -> Result<Tree, ViewAtError> {
        if view.revision == revision {
            return Ok(view.tree);
        }
        let (past, rebuild) = {
            let contents = self.contents.lock();
            let loaded = contents.loaded.as_ref().ok_or(Reason::Loading)?;
            match loaded.store.snapshot_at(revision)? {
                Snapshot::Ready(tree) => return Ok(tree),
                Snapshot::Rebuild(rebuild) => (Arc::clone(&loaded.past), rebuild),
            }
        };
        // The lock is free while the state is rebuilt: the feed needs it for every batch of events.
        let tree = past.get_or_build(&rebuild, build);
        // Contents that were dropped meanwhile may be of a replaced history: their state is not served any more.
        let contents = self.contents.lock();
        match &contents.loaded {
            Some(loaded) if Arc::ptr_eq(&loaded.past, &past) => Ok(tree),
            _ => Err(self.view().err().unwrap_or(Reason::Loading).into()),
        }
    }

    /// Records that etcd has compacted below `revision`: reads below it get etcd's error from now on.
    pub fn compacted(&self, revision: i64) {
        let kept = {
            let mut contents = self.contents.lock();
            contents.loaded.as_mut().map(|loaded| {
                loaded.store.compact(revision);
                (Arc::clone(&loaded.past), loaded.store.oldest_checkpoint())
            })
        };
        if let Some((past, oldest)) = kept {
            past.drop_below(oldest);
        }
    }

    /// Drops history that has become too old while nothing changed, and rebuilt states that can no longer be requested.
    pub(super) fn age(&self) {
        let now = self.now();
        let kept = {
            let mut contents = self.contents.lock();
            contents.loaded.as_mut().map(|loaded| {
                loaded.store.advance(loaded.store.revision(), now);
                (Arc::clone(&loaded.past), loaded.store.oldest_checkpoint())
            })
        };
        if let Some((past, oldest)) = kept {
            past.drop_below(oldest);
        }
    }

    /// Oldest revision that can be read; `None` while nothing is loaded.
    #[must_use]
    pub fn oldest_revision(&self) -> Option<i64> {
        let contents = self.contents.lock();
        let loaded = contents.loaded.as_ref()?;
        Some(loaded.store.oldest_revision())
    }

    /// Memory of keys and history, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        u64::try_from(self.metrics.memory_bytes.get()).unwrap_or(0)
    }

    pub(super) fn epoch(&self) -> Epoch {
        Epoch(self.contents.lock().epoch)
    }

    /// Resolves once `epoch` has ended.
    pub(super) async fn epoch_ended(&self, epoch: Epoch) {
        let mut replaced = self.replaced.subscribe();
        // The sender lives as long as self, so there is no error.
        let _ = replaced.wait_for(|now| *now != epoch.0).await;
    }

    /// Records that the feed requests a progress notification now.
    pub(super) fn record_progress_request(&self) {
        let nanos = u64::try_from(self.now().as_nanos()).unwrap_or(u64::MAX);
        self.progress_requested_nanos
            .store(nanos.max(1), Ordering::Relaxed);
        self.metrics.progress_requests.inc();
    }

    /// Time of the feed's last progress request.
    #[must_use]
    pub fn last_progress_request(&self) -> Option<Instant> {
        match self.progress_requested_nanos.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(self.born + Duration::from_nanos(nanos)),
        }
    }

    pub(super) fn wanted(&self) -> watch::Receiver<i64> {
        self.wanted.subscribe()
    }

    /// Time since this mirror was made: the clock of its history.
    pub(super) fn now(&self) -> Duration {
        self.born.elapsed()
    }

    /// Drops everything because history was replaced, and ends the epoch. `revision` is one of the new history, 0 if none is
    /// known.
    pub(super) fn replace_history(&self, revision: i64) {
        let ended = self.ended_by_replacement(revision);
        self.drop_epoch(self.contents.lock(), Reason::HistoryReplaced, ended);
    }

    /// How watchers end whose events were of a replaced history, or wrong.
    fn ended_by_replacement(&self, revision: i64) -> Ended {
        Ended::Replaced {
            revision: self.cluster_state.known().max(revision).max(1),
        }
    }

    /// Ends `epoch` and drops its contents, because they cannot be trusted.
    pub(super) fn end_epoch(&self, epoch: Epoch, reason: Reason) -> Result<(), StaleEpoch> {
        let ended = match reason {
            Reason::Mismatch | Reason::HistoryReplaced => self.ended_by_replacement(0),
            _ => Ended::Dropped(reason),
        };
        self.drop_epoch(self.contents_of(epoch)?, reason, ended);
        Ok(())
    }

    /// Drops the contents. Readers may keep their views of them; watchers end by `ended`.
    fn drop_loaded(&self, contents: &mut Contents, ended: Ended) {
        if let Some(loaded) = contents.loaded.take() {
            contents.ended = Some((contents.generation, ended));
            self.held_views.record_dropped(&loaded.store);
        }
        self.loading_bytes.store(0, Ordering::Relaxed);
    }

    /// Keeps a view, taken a moment ago, counted as held by a reader; `is_past` for one at a past revision.
    #[must_use]
    pub fn hold_view(&self, is_past: bool) -> HeldView {
        self.held_views.hold(is_past)
    }

    /// Bytes that only readers' views keep in memory.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        let bytes = self.held_views.bytes();
        self.metrics
            .held_bytes
            .set(i64::try_from(bytes).unwrap_or(i64::MAX));
        bytes
    }

    /// Bytes of a load that is not in service yet.
    pub(super) fn loading_bytes(&self) -> &AtomicU64 {
        &self.loading_bytes
    }

    fn drop_epoch(&self, mut contents: MutexGuard<'_, Contents>, reason: Reason, ended: Ended) {
        contents.epoch += 1;
        self.drop_loaded(&mut contents, ended);
        self.reset_wanted(self.cluster_state.history());
        self.replaced.send_replace(contents.epoch);
        self.set_out(reason, None);
    }

    /// Removes one key, for tests of verification.
    #[cfg(debug_assertions)]
    pub(super) fn corrupt(&self) {
        let mut contents = self.contents.lock();
        if let Some(loaded) = &contents.loaded {
            let (mut tree, revision) = (loaded.store.tree().clone(), loaded.store.revision());
            if let Some(key) = tree.at(tree.len() / 2).map(|entry| entry.key().to_vec()) {
                tree.remove(&key);
                let limits = *loaded.store.limits();
                let (newest_key, last_event) = (loaded.newest_key.clone(), loaded.last_event);
                let store = Store::new(tree, revision, limits, self.now());
                contents.loaded = Some(Loaded {
                    last_event,
                    ..Loaded::new(store, newest_key)
                });
                let _ = self.publish(&contents);
            }
        }
    }

    /// Takes the mirror out of service but keeps its contents, because its feed was lost; `has_no_leader` if etcd has
    /// ended the feed because it has no leader.
    pub(super) fn lose_feed(&self, epoch: Epoch, has_no_leader: bool) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        if has_no_leader && contents.no_leader_since.is_none() {
            contents.no_leader_since = Some(Instant::now());
        }
        let last = self.last_view();
        self.set_out(Reason::FeedLost, last);
        Ok(())
    }

    /// Takes the mirror out of service and drops its contents; watchers end by `ended`.
    pub(super) fn drop_contents(&self, epoch: Epoch, reason: Reason, ended: Ended) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        self.drop_loaded(&mut contents, ended);
        contents.history = self.cluster_state.current();
        self.reset_wanted(contents.history.number);
        self.set_out(reason, None);
        self.metrics.keys.set(0);
        self.metrics.memory_bytes.set(0);
        self.metrics.history_bytes.set(0);
        Ok(())
    }

    /// Takes in the result of a load. The mirror stays out of service until its feed is established.
    pub(super) fn fill(
        &self,
        epoch: Epoch,
        store: Store,
        newest_key: Option<Bytes>,
    ) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        contents.history.note_known(store.revision());
        self.held_views.record(&store);
        contents.loaded = Some(Loaded::new(store, newest_key));
        contents.generation += 1;
        Ok(())
    }

    /// State of the mirror that a resumed feed is compared with; `None` while nothing is loaded.
    pub(super) fn anchor(&self, epoch: Epoch) -> Result<Option<Anchor>, StaleEpoch> {
        let contents = self.contents_of(epoch)?;
        Ok(contents.loaded.as_ref().map(|loaded| Anchor {
            revision: loaded.store.revision(),
            key: loaded.newest_key.clone(),
            last_event: loaded.last_event,
            tree: loaded.store.tree().clone(),
        }))
    }

    /// Puts the mirror in service with its contents.
    pub(super) fn put_in_service(&self, epoch: Epoch) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        contents.no_leader_since = None;
        self.publish(&contents)
    }

    /// Applies the events of whole revisions up to `revision`, and shows the result to readers (I3).
    pub(super) fn apply(
        &self,
        epoch: Epoch,
        changes: Vec<Change>,
        revision: i64,
    ) -> Result<Applied, StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        let Some(last) = changes.last() else {
            return Err(StaleEpoch);
        };
        if !self.metrics.prefixes.is_empty() {
            for prefix in changes.iter().filter_map(|change| figure_prefix(change.key())) {
                self.metrics.prefixes.record_write(prefix);
            }
        }
        let (newest_key, last_event) = (Bytes::copy_from_slice(last.key()), last.revision());
        let now = self.now();
        let loaded = contents.loaded.as_mut().ok_or(StaleEpoch)?;
        let applied = loaded.store.apply(changes, revision, now);
        if applied.applied > 0 {
            loaded.newest_key = Some(newest_key);
            loaded.last_event = Some(last_event);
        }
        self.metrics.events.inc_by(applied.applied as u64);
        self.metrics.events_fenced.inc_by(applied.fenced as u64);
        self.publish(&contents)?;
        Ok(applied)
    }

    /// Records that there are no more events up to `revision`, as a progress notification reports.
    pub(super) fn advance(&self, epoch: Epoch, revision: i64) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        let now = self.now();
        let loaded = contents.loaded.as_mut().ok_or(StaleEpoch)?;
        if revision <= loaded.store.revision() {
            return Ok(());
        }
        loaded.store.advance(revision, now);
        self.publish(&contents)
    }

    /// Locks the contents, if `epoch` is the current one.
    fn contents_of(&self, epoch: Epoch) -> Result<MutexGuard<'_, Contents>, StaleEpoch> {
        let contents = self.contents.lock();
        if contents.epoch == epoch.0 {
            Ok(contents)
        } else {
            Err(StaleEpoch)
        }
    }

    fn publish(&self, contents: &Contents) -> Result<(), StaleEpoch> {
        let loaded = contents.loaded.as_ref().ok_or(StaleEpoch)?;
        let store = &loaded.store;
        let view = View {
            tree: store.tree().clone(),
            revision: store.revision(),
            history: contents.history.number,
        };
        self.held_views.record(store);
        self.loading_bytes.store(0, Ordering::Relaxed);
        let rebuilt_bytes = loaded.past.bytes();
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.metrics.revision.set(view.revision);
        self.metrics.keys.set(gauge(view.tree.len()));
        self.metrics
            .memory_bytes
            .set(gauge(store.memory_bytes() + rebuilt_bytes));
        self.metrics
            .history_bytes
            .set(gauge(store.history_bytes() + rebuilt_bytes));
        self.metrics.oldest_revision.set(store.oldest_revision());
        self.metrics.in_service.set(1);
        contents.history.note_known(view.revision);
        self.state.store(Arc::new(State::In(view)));
        self.changed.send_replace(());
        Ok(())
    }

    fn set_out(&self, reason: Reason, last: Option<View>) {
        self.metrics.in_service.set(0);
        self.state.store(Arc::new(State::Out { reason, last }));
        self.changed.send_replace(());
    }
}

/// State of a mirror that a resumed feed is compared with.
#[derive(Debug)]
pub(super) struct Anchor {
    /// Revision of the mirror.
    pub(super) revision: i64,
    /// A key changed at the newest revision; `None` if the mirror has never held a key.
    pub(super) key: Option<Bytes>,
    /// Revision of the last event that changed anything; `None` if there was none since the load.
    pub(super) last_event: Option<i64>,
    /// Keys at `revision`.
    pub(super) tree: Tree,
}

#[cfg(test)]
mod tests;
