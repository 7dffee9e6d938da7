//! Bytes that only readers keep in memory: entries and nodes of views that a mirror has replaced since, which slow
//! readers' responses still need.
//!
//! Nothing is counted per view. The mirror has running totals of what it has dropped from its history, and of nodes
//! that were copied because readers held them; a reader remembers both as they were when it got its view. What the
//! oldest reader keeps is the difference, and it includes what all later readers keep.

use std::{collections::BTreeSet, sync::Arc};

use etcd_store::cache::Store;
use parking_lot::Mutex;
use tokio::sync::Notify;

/// Readers' views of one mirror.
#[derive(Debug, Default)]
pub struct HeldViews {
    state: Mutex<HeldTotals>,
    /// A reader has found a packed value damaged.
    damage: Notify,
}

#[derive(Debug, Default)]
struct HeldTotals {
    /// Totals of stores that were dropped as a whole.
    before: Totals,
    now: Totals,
    /// Bytes that history holds now.
    history_bytes: u64,
    /// Totals at which each view was taken, and its number.
    held: BTreeSet<(Totals, u64)>,
    next_number: u64,
}

/// Running totals, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
struct Totals {
    /// Dropped from history: what history holds is counted there.
    dropped: u64,
    /// Nodes that were copied because readers held them.
    copied: u64,
}

/// Keeps a view counted until dropped.
#[derive(Debug)]
pub struct HeldView {
    views: Arc<HeldViews>,
    key: (Totals, u64),
}

impl HeldViews {
    /// Records the totals of `store`, after it has changed.
    pub(crate) fn record(&self, store: &Store) {
        let mut state = self.state.lock();
        state.now = state.before.after(store.dropped_bytes(), store);
        state.history_bytes = store.history_bytes();
    }

    /// Records that the mirror drops `store`: readers keep all of it from now on.
    pub(crate) fn record_dropped(&self, store: &Store) {
        let mut state = self.state.lock();
        let dropped = store.dropped_bytes() + store.memory_bytes();
        state.before = state.before.after(dropped, store);
        state.now = state.before;
        state.history_bytes = 0;
    }

    /// Counts a view that was taken now, or one at a past revision with `is_past`.
    #[must_use]
    pub fn hold(self: &Arc<Self>, is_past: bool) -> HeldView {
        let mut state = self.state.lock();
        let mut taken_at = state.now;
        if !is_past {
            // What history holds was replaced before this view.
            taken_at.dropped += state.history_bytes;
        }
        let key = (taken_at, state.next_number);
        state.next_number += 1;
        state.held.insert(key);
        drop(state);
        HeldView {
            views: Arc::clone(self),
            key,
        }
    }

    pub(super) fn report_damage(&self) {
        self.damage.notify_one();
    }

    pub(super) async fn damage_reported(&self) {
        self.damage.notified().await;
    }

    /// Bytes that only readers keep.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let state = self.state.lock();
        state.held.first().map_or(0, |(oldest, _)| {
            state.now.dropped.saturating_sub(oldest.dropped) + state.now.copied.saturating_sub(oldest.copied)
        })
    }
}

impl Totals {
    /// The totals after a store has dropped `dropped` bytes in addition.
    fn after(self, dropped: u64, store: &Store) -> Totals {
        Totals {
            dropped: self.dropped + dropped,
            copied: self.copied + store.tree().node_bytes_copied_for_readers(),
        }
    }
}

impl HeldView {
    /// Order in which the views were taken.
    #[must_use]
    pub fn number(&self) -> u64 {
        self.key.1
    }
}

impl HeldView {
    /// Reports that a packed value of the view is damaged; see [`Mirror::report_damage`](super::Mirror::report_damage).
    pub fn report_damage(&self) {
        self.views.report_damage();
    }
}

impl Drop for HeldView {
    fn drop(&mut self) {
        self.views.state.lock().held.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use etcd_store::cache::{Change, Entry, HistoryLimits, Tree};

    use super::*;

    const KEYS: u8 = 100;
    const VALUE_BYTES: usize = 1000;

    fn entry(key: u8, revision: i64) -> Entry {
        let mut key_value = vec![0x0a, 1, key];
        for (field, value) in [(0x10, 1), (0x18, revision)] {
            key_value.push(field);
            prost::encoding::encode_varint(value.cast_unsigned(), &mut key_value);
        }
        key_value.push(0x2a);
        prost::encoding::encode_varint(VALUE_BYTES as u64, &mut key_value);
        key_value.extend([b'v'; VALUE_BYTES]);
        Entry::from_key_value(&key_value).unwrap()
    }

    /// Store of `KEYS` keys that keeps almost no history.
    fn store() -> Store {
        let tree = Tree::from_sorted((0..KEYS).map(|key| entry(key, 1)));
        let limits = HistoryLimits {
            max_bytes: 10_000,
            ..HistoryLimits::default()
        };
        Store::new(tree, 1, limits, Duration::ZERO)
    }

    /// Replaces every entry once.
    fn replace_all(store: &mut Store, views: &HeldViews) {
        for key in 0..KEYS {
            let revision = store.revision() + 1;
            let applied = store.apply(vec![Change::put(entry(key, revision))], revision, Duration::ZERO);
            assert!(applied.is_ok());
            views.record(store);
        }
    }

    #[test]
    fn readers_keep_what_was_replaced_since_the_oldest_view() {
        let (views, mut store) = (Arc::new(HeldViews::default()), store());
        views.record(&store);
        replace_all(&mut store, &views);
        assert_eq!(views.bytes(), 0, "no reader");
        let oldest = views.hold(false);
        assert_eq!(views.bytes(), 0);
        replace_all(&mut store, &views);
        let later = views.hold(false);
        let once = views.bytes();
        let all = u64::from(KEYS) * VALUE_BYTES as u64;
        assert!(once > all / 10 * 8, "{once}");
        replace_all(&mut store, &views);
        let twice = views.bytes();
        assert!(twice > all / 10 * 18, "{twice}");
        drop(oldest);
        assert!(views.bytes() < twice - all / 2, "{}", views.bytes());
        drop(later);
        assert_eq!(views.bytes(), 0);
    }

    #[test]
    fn readers_keep_the_whole_store_that_a_reload_drops() {
        let (views, old) = (Arc::new(HeldViews::default()), store());
        views.record(&old);
        let (held, past) = (views.hold(false), views.hold(true));
        views.record_dropped(&old);
        assert_eq!(views.bytes(), old.memory_bytes());
        let new = store();
        views.record(&new);
        let fresh = views.hold(false);
        assert!(fresh.number() > held.number());
        drop((held, past));
        assert_eq!(views.bytes(), 0, "the reader of the new store keeps nothing");
    }
}
