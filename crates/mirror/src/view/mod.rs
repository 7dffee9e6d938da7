//! A mirror as readers see it, and what they keep of it.
//!
//! | file | subject |
//! |---|---|
//! | `mod` | past revisions that are read from etcd, not from mirrors |
//! | `state` | the view that readers see, the epoch that guards it, the lineages in which its contents were found; why its watches end |
//! | `held_views` | bytes that only readers keep in memory |
//! | `past_revisions` | rebuilt states at past revisions |
//! | `prefixes` | sizes of a view by prefix |

mod held_views;
mod past_revisions;
mod prefixes;
mod state;

use std::{collections::BTreeMap, sync::Arc};

use parking_lot::Mutex;

pub use held_views::{HeldView, HeldViews};
pub use prefixes::prefix_sizes;
pub use state::{Epoch, Mirror, ReaderEnd, StaleEpoch, State, View, ViewAtError};

pub(crate) use prefixes::sizes;

pub(super) use state::LoadedStore;
pub(super) use state::log_read::{LogRead, Observed};

/// Number of readers at each revision.
#[derive(Debug, Default)]
pub struct Pinned(Mutex<BTreeMap<i64, usize>>);

/// A read in progress at a revision; ends when dropped.
#[derive(Debug)]
pub struct Reading {
    pinned: Arc<Pinned>,
    revision: i64,
}

impl Pinned {
    /// Registers a read at `revision`.
    #[must_use]
    pub fn read_at(self: &Arc<Self>, revision: i64) -> Reading {
        *self.0.lock().entry(revision).or_default() += 1;
        Reading {
            pinned: Arc::clone(self),
            revision,
        }
    }

    /// Oldest revision that is being read and is not below `compacted`.
    #[must_use]
    pub fn oldest(&self, compacted: i64) -> Option<i64> {
        self.0
            .lock()
            .range(compacted..)
            .next()
            .map(|(revision, _)| *revision)
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut readers = self.pinned.0.lock();
        if let Some(count) = readers.get_mut(&self.revision) {
            *count -= 1;
            if *count == 0 {
                readers.remove(&self.revision);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn oldest_is_the_lowest_revision_read_above_the_compaction() {
        let pinned = Arc::new(Pinned::default());
        assert_eq!(pinned.oldest(0), None);
        let readers = [7, 5, 5, 9].map(|revision| pinned.read_at(revision));
        assert_eq!(pinned.oldest(0), Some(5));
        assert_eq!(pinned.oldest(6), Some(7));
        let [_seven, five, again, _nine] = readers;
        drop(five);
        assert_eq!(pinned.oldest(0), Some(5));
        drop(again);
        assert_eq!(pinned.oldest(0), Some(7));
    }
}
