//! The newest events of a mirror, by which a resumed feed is compared with it.

use std::collections::VecDeque;

use etcd_store::cache::Change;

/// Events that are kept. One alone may be the same in two histories: the delete of the same key at the same revision.
pub(super) const MAX_EVENTS: usize = 64;
/// Bound on the memory of the events that are kept.
pub(super) const MAX_BYTES: u64 = 1 << 20;

/// The newest events of a mirror since its load: whole revisions, oldest first. What they replaced is not kept.
#[derive(Debug, Default)]
pub(crate) struct RecentEvents {
    events: VecDeque<Change>,
    bytes: u64,
    /// Whether there were more events since the load than are kept.
    is_full: bool,
}

impl RecentEvents {
    /// The events of [`RecentEvents::to_vec`], and whether there were more.
    pub(crate) fn restored(events: &[Change], is_full: bool) -> RecentEvents {
        let mut recent = RecentEvents::default();
        recent.push(events);
        recent.is_full |= is_full;
        recent
    }

    /// Adds the events of whole revisions, all of them above those that were added before.
    pub(crate) fn push(&mut self, changes: &[Change]) {
        let skipped = changes.len().saturating_sub(MAX_EVENTS);
        let (skipped, added) = changes.split_at(skipped);
        let divided = skipped.last().map(Change::revision);
        if divided.is_some() {
            *self = RecentEvents {
                is_full: true,
                ..RecentEvents::default()
            };
        }
        for change in added.iter().filter(|change| Some(change.revision()) != divided) {
            self.bytes += change.entry.memory_bytes();
            self.events.push_back(Change {
                kind: change.kind,
                entry: change.entry.clone(),
                replaced: None,
            });
        }
        while self.events.len() > MAX_EVENTS || self.bytes > MAX_BYTES {
            self.drop_oldest_revision();
            self.is_full = true;
        }
    }

    /// Whether there were more events since the load than are kept, so that those prove as much as events can.
    pub(crate) fn is_full(&self) -> bool {
        self.is_full
    }

    /// The events, oldest first.
    pub(crate) fn to_vec(&self) -> Vec<Change> {
        self.events.iter().cloned().collect()
    }

    fn drop_oldest_revision(&mut self) {
        let oldest = self.events.front().map(Change::revision);
        while self.events.front().map(Change::revision) == oldest
            && let Some(change) = self.events.pop_front()
        {
            self.bytes -= change.entry.memory_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use etcd_store::cache::testing::KeyValue;

    fn put(revision: i64, value: &str) -> Change {
        Change::put(KeyValue::new("k", revision, value).entry())
    }

    fn revisions(recent: &RecentEvents) -> Vec<i64> {
        recent.to_vec().iter().map(Change::revision).collect()
    }

    #[test]
    fn newest_whole_revisions_are_kept() {
        let mut recent = RecentEvents::default();
        recent.push(&[put(1, "a"), put(2, "a"), put(2, "b")]);
        assert_eq!(revisions(&recent), [1, 2, 2]);
        assert!(!recent.is_full());
        let next: Vec<_> = (3..3 + MAX_EVENTS as i64 - 2).map(|n| put(n, "c")).collect();
        recent.push(&next);
        assert_eq!(revisions(&recent)[..2], [2, 2]);
        recent.push(&[put(100, "d")]);
        assert_eq!(revisions(&recent)[0], 3, "no revision is divided");
        assert!(recent.is_full());
        let many: Vec<_> = (0..MAX_EVENTS as i64 + 4)
            .map(|n| put(200 + n / 3, "e"))
            .collect();
        recent.push(&many);
        assert_eq!(
            revisions(&recent)[0],
            202,
            "the first two revisions are not whole"
        );
    }

    #[test]
    fn bytes_are_bounded() {
        let mut recent = RecentEvents::default();
        let value = "v".repeat(400 << 10);
        recent.push(&[put(1, &value), put(2, &value), put(3, &value)]);
        assert_eq!(revisions(&recent), [2, 3]);
        recent.push(&[put(4, &"v".repeat(2 << 20))]);
        assert_eq!((revisions(&recent), recent.bytes), (Vec::new(), 0));
    }
}
