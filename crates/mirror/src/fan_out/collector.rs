//! Events of a batch that belong to intervals.

use std::hash::{BuildHasher, RandomState};

use etcd_store::cache::{Change, IntervalTree};
use etcd_store::keyspace::Interval;

/// Positions that a list may keep room for.
const KEPT_POSITIONS: usize = 1024;

/// Looks up the events of one batch after another in a set of intervals.
#[derive(Debug)]
pub(super) struct EventCollector {
    intervals: IntervalTree<u32>,
    /// Positions in the current batch, by the number of the interval.
    found: Vec<Vec<u32>>,
    /// Intervals with positions.
    touched: Vec<u32>,
}

impl EventCollector {
    pub(super) fn new() -> EventCollector {
        EventCollector {
            intervals: IntervalTree::new(RandomState::new().hash_one(0)),
            found: Vec::new(),
            touched: Vec::new(),
        }
    }

    /// Number of the interval.
    pub(super) fn get(&self, interval: &Interval<'_>) -> Option<u32> {
        self.intervals.get(interval)
    }

    /// Adds an interval under a small number that is not in use.
    pub(super) fn insert(&mut self, interval: &Interval<'_>, number: u32) {
        let length = number as usize + 1;
        if self.found.len() < length {
            self.found.resize_with(length, Vec::new);
        }
        self.intervals.insert(interval, number);
    }

    pub(super) fn remove(&mut self, interval: &Interval<'_>) {
        self.intervals.remove(interval);
    }

    /// Looks up events of the current batch; the first is at the position `at`.
    pub(super) fn look_up(&mut self, changes: &[Change], at: usize) {
        let (found, touched) = (&mut self.found, &mut self.touched);
        for (position, change) in (at..).zip(changes) {
            let Ok(position) = u32::try_from(position) else {
                return;
            };
            self.intervals.stab(change.key(), |number| {
                if let Some(positions) = found.get_mut(number as usize) {
                    if positions.is_empty() {
                        touched.push(number);
                    }
                    positions.push(position);
                }
            });
        }
    }

    /// Calls `each` with every interval that holds `key`.
    pub(super) fn look_up_key(&self, key: &[u8], each: impl FnMut(u32)) {
        self.intervals.stab(key, each);
    }

    /// Ends the batch: calls `each` with every interval found, and its positions.
    pub(super) fn end_batch(&mut self, mut each: impl FnMut(u32, &[u32])) {
        for number in self.touched.drain(..) {
            if let Some(positions) = self.found.get_mut(number as usize) {
                each(number, positions);
                positions.clear();
                positions.shrink_to(KEPT_POSITIONS);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_of_a_removed_interval_may_name_another() {
        let mut collector = EventCollector::new();
        let numbers_at = |collector: &EventCollector, key: &[u8]| {
            let mut numbers = Vec::new();
            collector.look_up_key(key, |number| numbers.push(number));
            numbers
        };
        for (first, second) in [(&b"b"[..], &b"d"[..]), (b"", b"")] {
            // A range, then a single key.
            let (removed, kept) = (
                Interval::from_request(b"a", first),
                Interval::from_request(b"c", second),
            );
            collector.insert(&removed, 0);
            collector.remove(&removed);
            assert_eq!(collector.get(&removed), None);
            collector.insert(&kept, 0);
            assert_eq!(numbers_at(&collector, b"a"), [0; 0]);
            assert_eq!(numbers_at(&collector, b"c"), [0]);
            collector.remove(&kept);
        }
    }
}
