//! Places of mirrors: a reload adds mirrors and removes others while reads and watches refer to them.

use std::sync::{Arc, OnceLock};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::view::Mirror;
use super::watch_hub::WatchHub;

/// Mirrors that reloads may add until the next start. The place of a removed one is not used again.
const MAX_ADDED: usize = 1_024;

/// A mirror with its watch hub.
#[derive(Debug)]
pub(super) struct Slot {
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

impl Slot {
    pub(super) fn new(mirror: Mirror, hub: Arc<WatchHub>, was_added: bool, stop: CancellationToken) -> Slot {
        Slot {
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
pub(super) struct Slots(Box<[OnceLock<Slot>]>);

impl Slots {
    /// Places for `slots`, and for those that reloads add.
    pub(super) fn new(slots: Vec<Slot>) -> Slots {
        let empty = std::iter::repeat_with(OnceLock::new).take(MAX_ADDED);
        Slots(slots.into_iter().map(OnceLock::from).chain(empty).collect())
    }

    /// Number of mirrors that can be added.
    pub(super) fn free(&self) -> usize {
        self.0.len() - self.every().count()
    }

    /// Adds a mirror, and returns its position; `None` without a place.
    pub(super) fn add(&self, slot: Slot) -> Option<usize> {
        let position = self.every().count();
        self.0.get(position)?.set(slot).ok()?;
        Some(position)
    }

    /// The mirror at `position`, removed or not.
    pub(super) fn get(&self, position: usize) -> Option<&Slot> {
        self.0.get(position)?.get()
    }

    /// Every slot in use, those of removed mirrors included.
    pub(super) fn every(&self) -> impl Iterator<Item = &Slot> {
        self.0.iter().map_while(OnceLock::get)
    }

    /// Mirrors that were not removed, with their positions.
    pub(super) fn present(&self) -> impl Iterator<Item = (usize, &Slot)> {
        self.every().enumerate().filter(|(_, slot)| !slot.is_removed())
    }

    /// Mirrors that were not removed.
    pub(super) fn mirrors(&self) -> impl Iterator<Item = &Mirror> {
        self.present().map(|(_, slot)| &slot.mirror)
    }
}
