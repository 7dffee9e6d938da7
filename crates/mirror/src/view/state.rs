//! Mirror as readers see it: in service with a view, or out of service for a reason.
//!
//! Readers load the [`State`] without a lock. A task that changes it holds the lock on `contents` and the [`Epoch`]
//! in which it started: when history is replaced the epoch advances, and later changes of an old feed or load are
//! rejected.
//!
//! | file | what it does |
//! |---|---|
//! | `waiting` | readers that wait for a revision, and what they make the feed request |
//! | `past` | past revisions |
//! | `service` | changes by the task that loads and follows the mirror |
//! | `log_read` | what the fan-out reads |

pub(crate) mod log_read;
mod past;
pub(super) mod service;
mod waiting;

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::{collections::VecDeque, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use bytes::Bytes;
use etcd_store::cache::{Applied, AtError, Change, HistoryLimits, MemoryError, Store, Tree};
use etcd_store::keyspace::scope::Scope;
use parking_lot::Mutex;
use rangecache_base::telemetry::{Reason, Telemetry, metrics::unsigned};
use rangecache_base::telemetry::{prefixes::PrefixCounters, state_changes::StateChanges};
use rangecache_upstream::Lineage;
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::held_views::{HeldView, HeldViews};
use super::past_revisions::PastRevisions;
use crate::lineage::{Anchor, ClusterState, History, HistoryId, RecentEvents};
use crate::metrics::{MirrorMetrics, MirrorsMetrics, PrefixMetrics};

/// Keys at one revision; immutable.
#[derive(Clone, Debug)]
pub struct View {
    /// The keys.
    pub tree: Tree,
    /// Every event up to this revision has been applied (I3).
    pub revision: i64,
    /// The history of etcd that the keys belong to.
    pub history: HistoryId,
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
    loaded: Option<LoadedStore>,
    /// Number of loads so far.
    generation: u64,
    /// The last load whose contents were dropped.
    ended: Option<EndedLoad>,
    /// Since when the mirror has had no feed because etcd has no leader.
    no_leader_since: Option<Instant>,
    /// Lowest revision at which a feed has resumed since the fan-out looked last.
    resumed_at: Option<i64>,
}

/// A load whose contents were dropped.
struct EndedLoad {
    generation: u64,
    /// Why they were dropped.
    end: ReaderEnd,
    found_under: Lineages,
}

/// The result of one load, as the feed has changed it since.
pub(crate) struct LoadedStore {
    store: Store,
    /// A key that the last event changed; `None` since the load.
    newest_key: Option<Bytes>,
    /// Revision of the last event that changed anything; `None` since the load.
    last_event: Option<i64>,
    /// The newest events since the load.
    recent: RecentEvents,
    /// Lineages in which these contents were loaded, or compared and found the same.
    found_under: Lineages,
    /// Rebuilt states of `store`. Outside the store, so that readers fill it without the lock on [`Contents`].
    past: Arc<PastRevisions>,
}

/// The result of a load, without events since.
impl From<Store> for LoadedStore {
    fn from(store: Store) -> Self {
        let past = Arc::new(PastRevisions::new(store.limits().fraction_bytes()));
        LoadedStore {
            store,
            newest_key: None,
            last_event: None,
            recent: RecentEvents::default(),
            found_under: Lineages::default(),
            past,
        }
    }
}

impl LoadedStore {
    /// The mirror that `anchor` is of.
    pub(crate) fn of(anchor: Anchor, limits: HistoryLimits, now: Duration) -> LoadedStore {
        LoadedStore {
            newest_key: anchor.key,
            last_event: anchor.last_event,
            recent: RecentEvents::restored(&anchor.recent, anchor.recent_is_full),
            ..Store::new(anchor.tree, anchor.revision, limits, now).into()
        }
    }

    /// Applies the events of whole revisions up to `revision`.
    ///
    /// # Errors
    /// Memory is damaged; the store is of no use afterwards.
    pub(crate) fn apply(
        &mut self,
        changes: Vec<Change>,
        revision: i64,
        now: Duration,
    ) -> Result<Applied, MemoryError> {
        let last = changes.last();
        let last = last.map(|last| (Bytes::copy_from_slice(last.key()), last.revision()));
        let reached = self.store.revision();
        self.recent
            .push(&changes[changes.partition_point(|change| change.revision() <= reached)..]);
        let applied = self.store.apply(changes, revision, now)?;
        if applied.applied > 0
            && let Some((key, revision)) = last
        {
            self.newest_key = Some(key);
            self.last_event = Some(revision);
        }
        Ok(applied)
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
    /// Events by prefix, of all mirrors.
    prefixes: PrefixCounters,
    cluster_state: Arc<ClusterState>,
    state: ArcSwap<State>,
    /// Locked by the feed for each batch of events, and by readers of past revisions. Held only briefly and never while
    /// another lock is taken, but for those of `watch` channels, which no task holds while it takes this one.
    contents: Mutex<Contents>,
    was_in_service: AtomicBool,
    /// Signals a change of `state`; carries no data, so receivers re-read the state.
    changed: watch::Sender<()>,
    /// Highest revision that a reader waits for. While the mirror is behind it, the feed requests progress
    /// notifications.
    wanted: watch::Sender<i64>,
    /// Asks the feed for one progress request.
    nudged: Notify,
    /// Highest revision that a reader has waited for in vain: until the mirror has reached it, readers do not wait.
    overdue: AtomicI64,
    /// The history that `wanted` belongs to. Changed and compared only under the lock of `wanted`.
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
    /// The newest changes of all mirrors.
    changes_of_service: Arc<StateChanges>,
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
    pub(crate) fn new(scope: Scope, cluster_state: Arc<ClusterState>, telemetry: &Telemetry) -> Mirror {
        let name = scope.name();
        let metrics = &telemetry.metrics;
        Mirror {
            metrics: metrics.group::<MirrorsMetrics>().of(&name),
            prefixes: metrics.group::<PrefixMetrics>().counters.clone(),
            name,
            scope,
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
                resumed_at: None,
            }),
            wanted_history: AtomicU64::new(cluster_state.history().number()),
            cluster_state,
            was_in_service: AtomicBool::new(false),
            changed: watch::Sender::new(()),
            wanted: watch::Sender::new(0),
            nudged: Notify::new(),
            overdue: AtomicI64::new(0),
            replaced: watch::Sender::new(0),
            born: Instant::now(),
            held_views: Arc::default(),
            loading_bytes: AtomicU64::new(0),
            progress_requested_nanos: AtomicU64::new(0),
            changes_of_service: Arc::clone(&telemetry.state_changes),
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

    /// Whether the mirror was ever in service.
    #[must_use]
    pub(crate) fn was_in_service(&self) -> bool {
        self.was_in_service.load(Ordering::Relaxed)
    }

    /// Memory of keys and history, in bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        unsigned(self.metrics.memory_bytes.get())
    }

    /// When the mirror was made.
    pub(crate) fn born(&self) -> Instant {
        self.born
    }

    /// Time since this mirror was made: the clock of its history.
    pub(crate) fn now(&self) -> Duration {
        self.born.elapsed()
    }

    /// Keeps a view, taken a moment ago, counted as held by a reader; `is_past` for one at a past revision.
    #[must_use]
    pub fn hold_view(&self, is_past: bool) -> HeldView {
        self.held_views.hold(is_past)
    }

    /// Reports that memory is damaged: nothing of the mirror can be trusted, and it is loaded again.
    pub fn report_damage(&self) {
        self.held_views.report_damage();
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
}

/// Why a reader gets no more events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReaderEnd {
    /// The mirror was dropped because etcd has compacted `compact_revision`, and is loaded again. Events up to the end
    /// were taken before.
    Compacted {
        /// etcd's compaction revision.
        compact_revision: i64,
    },
    /// The mirror was dropped for this reason, and its events are right. Events up to the end were taken before.
    Dropped(Reason),
    /// etcd's history was replaced, or the mirror differed from etcd. What was not taken must not be sent (W10).
    Replaced {
        /// Revision of etcd after that, at least 1.
        revision: i64,
    },
    /// The log no longer reaches back to the reader's position.
    Trimmed,
    /// The mirror has had no feed for ten seconds, or has lost it before it reached the revision at which the watcher
    /// joined, or nothing shows that etcd has its last event.
    FeedLost,
}

/// Lineages that are kept: hubs are few, and each has another one after its restart.
const MAX_LINEAGES: usize = 16;

/// Lineages of one load's contents, the oldest first; of too many the newest. Where raft logs do not show a history, only contents
/// show that it is the same under another number. Watchers continue in a lineage of their load's contents alone.
#[derive(Debug, Default)]
pub(crate) struct Lineages(VecDeque<Lineage>);

impl Lineages {
    /// Adds one.
    pub(crate) fn note(&mut self, lineage: Lineage) {
        if self.contains(lineage) {
            return;
        }
        if self.0.len() == MAX_LINEAGES {
            self.0.pop_front();
        }
        self.0.push_back(lineage);
    }

    /// Whether `lineage` is one of them.
    pub(crate) fn contains(&self, lineage: Lineage) -> bool {
        self.0.contains(&lineage)
    }
}

#[cfg(test)]
mod tests;
