//! The mirrors of this process: their places, their memory together, and what concerns them all, which is etcd's history.
//! A reload adds mirrors and removes others while reads and watches refer to them.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::flags::MirrorConfig;
use super::history::{Before, ClusterState, HistoryId, Verdict};
use super::view::Mirror;
use super::watch_hub::WatchHub;
use rangecache_base::flags::Live;

/// Mirrors that reloads may add until the next start. The place of a removed one is not used again.
const MAX_ADDED: usize = 1_024;

/// A mirror with its watch hub.
#[derive(Debug)]
pub(super) struct MirrorSlot {
    pub(super) mirror: Mirror,
    pub(super) hub: Arc<WatchHub>,
    /// Set once a reload has removed the mirror: what a connection sends that was opened by then, and is still open, is of
    /// the history that the mirror was of.
    removed: OnceLock<Instant>,
    /// A reload has added the mirror.
    pub(super) was_added: bool,
    /// Stops the mirror's task.
    pub(super) stop: CancellationToken,
    /// Cancelled once the task of a removed mirror has ended.
    pub(super) ended: CancellationToken,
}

impl MirrorSlot {
    pub(super) fn new(
        mirror: Mirror,
        hub: Arc<WatchHub>,
        was_added: bool,
        stop: CancellationToken,
    ) -> MirrorSlot {
        MirrorSlot {
            mirror,
            hub,
            removed: OnceLock::new(),
            was_added,
            stop,
            ended: CancellationToken::new(),
        }
    }

    /// Takes the mirror out of the answer to every later read and watch, and stops its task.
    pub(super) fn remove(&self) {
        let is_proven = self.mirror.revision().is_ok();
        // The feed of a mirror that is out of service may have ended because etcd was restored.
        let opened_by = if is_proven {
            Instant::now()
        } else {
            self.mirror.born()
        };
        let _ = self.removed.set(opened_by);
        self.stop.cancel();
    }

    pub(super) fn is_removed(&self) -> bool {
        self.removed.get().is_some()
    }

    /// Of a removed mirror, the time by which a connection must have been opened that continues the mirror's watchers.
    pub(super) fn opened_by(&self) -> Option<Instant> {
        self.removed.get().copied()
    }
}

/// All mirrors, those that were removed included. A mirror keeps its position.
#[derive(Debug)]
pub(super) struct MirrorSet {
    places: Box<[OnceLock<MirrorSlot>]>,
    pub(super) cluster_state: Arc<ClusterState>,
    /// `--cache-max-bytes`.
    live: Live<MirrorConfig>,
}

impl MirrorSet {
    /// Places for `slots`, and for those that reloads add.
    pub(super) fn new(
        slots: Vec<MirrorSlot>,
        cluster_state: Arc<ClusterState>,
        live: Live<MirrorConfig>,
    ) -> MirrorSet {
        let empty = std::iter::repeat_with(OnceLock::new).take(MAX_ADDED);
        MirrorSet {
            places: slots.into_iter().map(OnceLock::from).chain(empty).collect(),
            cluster_state,
            live,
        }
    }

    /// Number of mirrors that can be added.
    pub(super) fn free(&self) -> usize {
        self.places.len() - self.every().count()
    }

    /// Adds a mirror, and returns its position; `None` without a place.
    pub(super) fn add(&self, slot: MirrorSlot) -> Option<usize> {
        let position = self.every().count();
        self.places.get(position)?.set(slot).ok()?;
        Some(position)
    }

    /// The mirror at `position`, removed or not.
    pub(super) fn get(&self, position: usize) -> Option<&MirrorSlot> {
        self.places.get(position)?.get()
    }

    /// Every slot in use, those of removed mirrors included.
    pub(super) fn every(&self) -> impl Iterator<Item = &MirrorSlot> {
        self.places.iter().map_while(OnceLock::get)
    }

    /// Mirrors that were not removed, with their positions.
    pub(super) fn present(&self) -> impl Iterator<Item = (usize, &MirrorSlot)> {
        self.every().enumerate().filter(|(_, slot)| !slot.is_removed())
    }

    /// Mirrors that were not removed.
    pub(super) fn all(&self) -> impl Iterator<Item = &Mirror> {
        self.present().map(|(_, slot)| &slot.mirror)
    }

    /// Bound on the memory of all mirrors together (`--cache-max-bytes`).
    fn max_bytes(&self) -> u64 {
        self.live.load().max_bytes()
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

    /// Bytes by which the mirrors, what readers keep of their old views, and loads in progress exceed
    /// `--cache-max-bytes`, as far as giving up readers can help.
    pub(super) fn excess_held_bytes(&self) -> u64 {
        // Readers may keep views of removed mirrors.
        let every = self.every().map(|slot| &slot.mirror);
        let held: u64 = every.map(Mirror::held_bytes).sum();
        let own = self
            .all()
            .map(|mirror| mirror.memory_bytes() + mirror.loading_bytes().load(Ordering::Relaxed));
        (held + own.sum::<u64>())
            .saturating_sub(self.max_bytes())
            .min(held)
    }

    /// Records that etcd has compacted up to `revision`, unless `history`, the one in which that was found, has been
    /// replaced.
    pub(super) fn compacted(&self, history: HistoryId, revision: i64) {
        if self.cluster_state.note_compacted(history, revision) {
            self.all().for_each(|mirror| mirror.compacted(revision));
        }
    }

    /// Records that etcd's contents or raft log are not those of the history in which a feed or a load began, and drops
    /// every mirror, unless that has been done. `revision` is one of the new history, 0 if none is known; `explanation`
    /// goes to the log.
    pub(super) fn replace_history(&self, before: &Before, revision: i64, explanation: &str) {
        if self.cluster_state.contradict(before) == Verdict::Replaced {
            self.drop_all(revision, explanation);
        }
    }

    /// Drops every mirror, because etcd's history was replaced; the parameters are those of
    /// [`MirrorSet::replace_history`].
    pub(super) fn drop_all(&self, revision: i64, explanation: &str) {
        tracing::warn!(
            explanation,
            "etcd's history was replaced (restored from a backup?); dropping and reloading every mirror"
        );
        self.all().for_each(|mirror| mirror.replace_history(revision));
    }
}
