//! One mirror as readers see it: in service with a view, or out of service with a reason.
//!
//! Readers load the [`State`] without a lock. Whoever changes it holds `store`'s lock and the epoch that the change
//! belongs to: when history is replaced the epoch moves on, and what a late feed still brings is void.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use bytes::Bytes;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::time::Instant;

use super::cluster_state::ClusterState;
use crate::cache::{Applied, AtError, Change, Store, Tree};
use crate::keyspace::scope::Scope;
use crate::telemetry::Reason;
use crate::telemetry::metrics::MirrorMetrics;

/// The keys at one revision; immutable.
#[derive(Clone, Debug)]
pub struct View {
    /// The keys.
    pub tree: Tree,
    /// Every event up to this revision has been applied (I3).
    pub revision: i64,
}

/// Whether reads may be answered from the mirror.
#[derive(Debug)]
pub enum State {
    /// They may not.
    Out(Reason),
    /// They may.
    In(View),
}

/// A loan of the right to change a mirror: void once history was replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Epoch(u64);

/// The epoch has passed: what the caller holds belongs to a history that is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StaleEpoch;

struct Contents {
    epoch: u64,
    store: Option<Store>,
    /// The key changed last, by which a resumed feed is held against what is here.
    newest_key: Option<Bytes>,
}

/// One mirror.
pub struct Mirror {
    /// Its keys.
    pub scope: Scope,
    /// Its name in metrics and logs.
    pub name: String,
    /// Its metrics.
    pub metrics: MirrorMetrics,
    cluster_state: Arc<ClusterState>,
    state: ArcSwap<State>,
    contents: Mutex<Contents>,
    /// Changes with every new view and every change of service; carries nothing, so that nobody trusts it.
    changed: watch::Sender<()>,
    /// The highest revision that a reader waits for: the feed asks for progress while it is behind.
    wanted: watch::Sender<i64>,
    /// Moves on when history was replaced: ends the feed and the load of the old one.
    replaced: watch::Sender<u64>,
    born: Instant,
    /// When the feed last asked for progress, in nanoseconds since `born`; 0 before it ever has.
    asked_nanos: AtomicU64,
}

impl std::fmt::Debug for Mirror {
    // Not the contents: keys and values do not belong in a log (I10).
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
            cluster_state,
            state: ArcSwap::from_pointee(State::Out(Reason::Loading)),
            contents: Mutex::new(Contents {
                epoch: 0,
                store: None,
                newest_key: None,
            }),
            changed: watch::Sender::new(()),
            wanted: watch::Sender::new(0),
            replaced: watch::Sender::new(0),
            born: Instant::now(),
            asked_nanos: AtomicU64::new(0),
        }
    }

    /// What readers may have now.
    ///
    /// # Errors
    /// Why they may have nothing.
    pub fn view(&self) -> Result<View, Reason> {
        match &**self.state.load() {
            State::In(view) => Ok(view.clone()),
            State::Out(reason) => Err(*reason),
        }
    }

    /// Up to which revision readers may have it now.
    ///
    /// # Errors
    /// Why they may have nothing.
    pub fn revision(&self) -> Result<i64, Reason> {
        match &**self.state.load() {
            State::In(view) => Ok(view.revision),
            State::Out(reason) => Err(*reason),
        }
    }

    /// The view once it is at `revision` or later, and whether that took waiting.
    ///
    /// # Errors
    /// Why the mirror is out of service, or [`Reason::NotFresh`] at `deadline`.
    pub async fn reach(&self, revision: i64, deadline: Instant) -> Result<(View, bool), Reason> {
        let view = self.view()?;
        if view.revision >= revision {
            return Ok((view, false));
        }
        // Subscribed before the look, so that no change in between is missed.
        let mut changed = self.changed.subscribe();
        self.want(revision);
        loop {
            let view = self.view()?;
            if view.revision >= revision {
                return Ok((view, true));
            }
            if !matches!(
                tokio::time::timeout_at(deadline, changed.changed()).await,
                Ok(Ok(()))
            ) {
                return Err(Reason::NotFresh);
            }
        }
    }

    /// Makes the feed ask for progress until the mirror is at `revision`.
    pub fn want(&self, revision: i64) {
        self.wanted.send_if_modified(|wanted| {
            let higher = *wanted < revision;
            *wanted = revision.max(*wanted);
            higher
        });
    }

    /// The keys at a past `revision`.
    ///
    /// # Errors
    /// `Ok(Err(_))`: the mirror is in service but cannot give that revision. `Err(_)`: it is out of service.
    pub fn view_at(&self, revision: i64) -> Result<Result<Tree, AtError>, Reason> {
        let view = self.view()?;
        if view.revision == revision {
            return Ok(Ok(view.tree));
        }
        let contents = self.contents.lock();
        let store = contents.store.as_ref().ok_or(Reason::Loading)?;
        Ok(store.snapshot_at(revision).map(crate::cache::Snapshot::into_tree))
    }

    /// etcd has compacted below `revision`: older revisions are etcd's error from now on.
    pub fn compacted(&self, revision: i64) {
        let mut contents = self.contents.lock();
        if let Some(store) = &mut contents.store {
            store.compact(revision);
        }
    }

    /// Lets go of history that has grown too old while nothing changed.
    pub(super) fn age(&self) {
        let now = self.now();
        if let Some(store) = &mut self.contents.lock().store {
            store.advance(store.revision(), now);
        }
    }

    /// The oldest revision that can be given; `None` while there is nothing.
    #[must_use]
    pub fn oldest_revision(&self) -> Option<i64> {
        self.contents.lock().store.as_ref().map(Store::oldest_revision)
    }

    /// Memory of keys and history, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        u64::try_from(self.metrics.memory_bytes.get()).unwrap_or(0)
    }

    pub(super) fn epoch(&self) -> Epoch {
        Epoch(self.contents.lock().epoch)
    }

    /// Resolves once `epoch` is void.
    pub(super) async fn until_void(&self, epoch: Epoch) {
        let mut replaced = self.replaced.subscribe();
        // The sender lives as long as self: an error cannot come.
        let _ = replaced.wait_for(|now| *now != epoch.0).await;
    }

    /// The feed asks etcd for its progress now.
    pub(super) fn asks_for_progress(&self) {
        let nanos = u64::try_from(self.now().as_nanos()).unwrap_or(u64::MAX);
        self.asked_nanos.store(nanos.max(1), Ordering::Relaxed);
        self.metrics.progress_requests.inc();
    }

    /// When the feed last did.
    #[must_use]
    pub fn asked_for_progress(&self) -> Option<Instant> {
        match self.asked_nanos.load(Ordering::Relaxed) {
            0 => None,
            nanos => Some(self.born + Duration::from_nanos(nanos)),
        }
    }

    pub(super) fn wanted(&self) -> watch::Receiver<i64> {
        self.wanted.subscribe()
    }

    pub(super) fn now(&self) -> Duration {
        self.born.elapsed()
    }

    /// History was replaced: drops everything, and voids what feeds and loads of the old history hold.
    pub(super) fn replace_history(&self) {
        self.drop_epoch(self.contents.lock(), Reason::HistoryReplaced);
    }

    /// The contents are not to be trusted: drops them if they are still those of `epoch`, and voids what feeds and loads hold.
    pub(super) fn void(&self, epoch: Epoch, reason: Reason) -> Result<(), StaleEpoch> {
        self.drop_epoch(self.contents_of(epoch)?, reason);
        Ok(())
    }

    fn drop_epoch(&self, mut contents: MutexGuard<'_, Contents>, reason: Reason) {
        contents.epoch += 1;
        contents.store = None;
        contents.newest_key = None;
        self.wanted.send_replace(0);
        self.replaced.send_replace(contents.epoch);
        self.set_out(reason);
    }

    /// Loses a key, for tests.
    #[cfg(debug_assertions)]
    pub(super) fn corrupt(&self) {
        let mut contents = self.contents.lock();
        if let Some(store) = &contents.store {
            let (mut tree, revision) = (store.tree().clone(), store.revision());
            if let Some(key) = tree.at(tree.len() / 2).map(|entry| entry.key().to_vec()) {
                tree.remove(&key);
                let limits = crate::cache::HistoryLimits::default();
                contents.store = Some(Store::new(tree, revision, limits, self.now()));
                let _ = self.publish(&contents);
            }
        }
    }

    /// Takes the mirror out of service but keeps its contents.
    pub(super) fn take_out_of_service(&self, epoch: Epoch, reason: Reason) -> Result<(), StaleEpoch> {
        let _contents = self.contents_of(epoch)?;
        self.set_out(reason);
        Ok(())
    }

    /// Takes the mirror out of service and drops its contents.
    pub(super) fn drop_contents(&self, epoch: Epoch, reason: Reason) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        contents.store = None;
        contents.newest_key = None;
        self.set_out(reason);
        self.metrics.keys.set(0);
        self.metrics.memory_bytes.set(0);
        self.metrics.history_bytes.set(0);
        Ok(())
    }

    /// The contents come from a load; the mirror stays out of service until its feed stands.
    pub(super) fn fill(
        &self,
        epoch: Epoch,
        store: Store,
        newest_key: Option<Bytes>,
    ) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        self.cluster_state.note_known(store.revision());
        contents.newest_key = newest_key;
        contents.store = Some(store);
        Ok(())
    }

    /// What a resumed feed is held against: the revision, the key changed last and what it holds.
    pub(super) fn anchor(&self, epoch: Epoch) -> Result<Option<Anchor>, StaleEpoch> {
        let contents = self.contents_of(epoch)?;
        Ok(contents.store.as_ref().map(|store| Anchor {
            revision: store.revision(),
            key: contents.newest_key.clone(),
            tree: store.tree().clone(),
        }))
    }

    /// Puts the mirror in service with what it has.
    pub(super) fn put_in_service(&self, epoch: Epoch) -> Result<(), StaleEpoch> {
        let contents = self.contents_of(epoch)?;
        self.publish(&contents)
    }

    /// Applies the events of whole revisions up to `revision`, and shows them to readers (I3).
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
        let newest_key = Bytes::copy_from_slice(last.key());
        let now = self.now();
        let store = contents.store.as_mut().ok_or(StaleEpoch)?;
        let applied = store.apply(changes, revision, now);
        if applied.applied > 0 {
            contents.newest_key = Some(newest_key);
        }
        self.metrics.events.inc_by(applied.applied as u64);
        self.metrics.events_fenced.inc_by(applied.fenced as u64);
        self.publish(&contents)?;
        Ok(applied)
    }

    /// Progress: there are no events up to `revision` that have not been applied.
    pub(super) fn advance(&self, epoch: Epoch, revision: i64) -> Result<(), StaleEpoch> {
        let mut contents = self.contents_of(epoch)?;
        let now = self.now();
        let store = contents.store.as_mut().ok_or(StaleEpoch)?;
        if revision <= store.revision() {
            return Ok(());
        }
        store.advance(revision, now);
        self.publish(&contents)
    }

    /// The contents, locked, for whoever holds an epoch; void if that has passed.
    fn contents_of(&self, epoch: Epoch) -> Result<MutexGuard<'_, Contents>, StaleEpoch> {
        let contents = self.contents.lock();
        if contents.epoch == epoch.0 {
            Ok(contents)
        } else {
            Err(StaleEpoch)
        }
    }

    fn publish(&self, contents: &Contents) -> Result<(), StaleEpoch> {
        let store = contents.store.as_ref().ok_or(StaleEpoch)?;
        let view = View {
            tree: store.tree().clone(),
            revision: store.revision(),
        };
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        self.metrics.revision.set(view.revision);
        self.metrics.keys.set(gauge(view.tree.len()));
        self.metrics.memory_bytes.set(gauge(store.memory_bytes()));
        self.metrics.history_bytes.set(gauge(store.history_bytes()));
        self.metrics.oldest_revision.set(store.oldest_revision());
        self.metrics.in_service.set(1);
        self.cluster_state.note_known(view.revision);
        self.state.store(Arc::new(State::In(view)));
        self.changed.send_replace(());
        Ok(())
    }

    fn set_out(&self, reason: Reason) {
        self.metrics.in_service.set(0);
        self.state.store(Arc::new(State::Out(reason)));
        self.changed.send_replace(());
    }
}

/// See [`Mirror::anchor`].
#[derive(Debug)]
pub(super) struct Anchor {
    pub(super) revision: i64,
    pub(super) key: Option<Bytes>,
    pub(super) tree: Tree,
}
