//! Events of one interval: a list of picks, each of which names events of one batch of the log.

use std::sync::atomic::{AtomicI64, Ordering};
use std::{collections::VecDeque, sync::Arc};

use etcd_store::cache::{Batch, Change};
use parking_lot::Mutex;

/// Events of one batch that belong to a topic: at least one. Cloning counts references.
#[derive(Clone, Debug)]
pub(super) struct Pick {
    batch: Batch,
    /// Positions in the batch, ascending.
    events: Arc<[u32]>,
    first_revision: i64,
    last_revision: i64,
    /// Sum over the events ([`event_bytes`]).
    bytes: u64,
}

impl Pick {
    /// The events of `batch` at the positions `events`; `None` without any.
    pub(super) fn new(batch: &Batch, events: &[u32]) -> Option<Pick> {
        let changes = batch.changes();
        let of = |position: &u32| changes.get(*position as usize);
        Some(Pick {
            batch: batch.clone(),
            events: events.into(),
            first_revision: events.first().and_then(of)?.revision(),
            last_revision: events.last().and_then(of)?.revision(),
            bytes: events.iter().filter_map(of).map(event_bytes).sum(),
        })
    }

    pub(super) fn events(&self) -> impl DoubleEndedIterator<Item = &Change> {
        let changes = self.batch.changes();
        self.events.iter().filter_map(|at| changes.get(*at as usize))
    }

    /// The events after the first `skipped` ones, which are not looked at.
    pub(super) fn events_from(&self, skipped: usize) -> impl Iterator<Item = &Change> {
        let changes = self.batch.changes();
        let events = self.events.get(skipped..).unwrap_or_default();
        events.iter().filter_map(|at| changes.get(*at as usize))
    }

    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    pub(super) fn last_revision(&self) -> i64 {
        self.last_revision
    }

    /// The events above `revision`; `None` without any.
    pub(super) fn after(&self, revision: i64) -> Option<Pick> {
        if self.first_revision > revision {
            return Some(self.clone());
        }
        let known = self
            .events()
            .take_while(|event| event.revision() <= revision)
            .count();
        Pick::new(&self.batch, self.events.get(known..)?)
    }

    /// The events of the first whole revisions until one of the bounds is reached.
    pub(super) fn until(&self, max_events: usize, max_bytes: u64) -> Pick {
        let (mut bytes, mut end, mut revision) = (0, 0, self.first_revision);
        for event in self.events() {
            if event.revision() != revision {
                if end >= max_events || bytes >= max_bytes {
                    break;
                }
                revision = event.revision();
            }
            bytes += event_bytes(event);
            end += 1;
        }
        if end == self.len() {
            return self.clone();
        }
        Pick {
            batch: self.batch.clone(),
            events: self.events.get(..end).unwrap_or_default().into(),
            last_revision: revision,
            bytes,
            first_revision: self.first_revision,
        }
    }

    /// Bytes of the events, encoded, with what they replaced.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Memory of the pick itself: the batch belongs to the log.
    pub(super) fn memory_bytes(&self) -> u64 {
        (size_of::<Pick>() + size_of_val(&*self.events) + 2 * size_of::<usize>()) as u64
    }
}

/// Bytes of an event, encoded, with what it replaced.
fn event_bytes(event: &Change) -> u64 {
    let replaced = event.replaced.as_ref().map_or(0, |entry| entry.encoded_len());
    (event.entry.encoded_len() + replaced) as u64
}

/// A position is older than the oldest event of its topic.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BehindTopic;

/// The events of one interval. The fan-out adds to it, readers take from it.
#[derive(Debug)]
pub(super) struct Topic {
    /// Revision of the newest event; 0 without any.
    last_revision: AtomicI64,
    picks: Mutex<Picks>,
}

#[derive(Debug)]
struct Picks {
    /// Oldest first; complete above `complete_after`.
    list: VecDeque<Pick>,
    complete_after: i64,
    /// Revision of the newest event that was trimmed, or missed.
    trimmed: i64,
}

impl Topic {
    /// A topic without events that is complete after `revision`.
    pub(super) fn new(revision: i64) -> Topic {
        Topic {
            last_revision: AtomicI64::new(0),
            picks: Mutex::new(Picks {
                list: VecDeque::new(),
                complete_after: revision,
                trimmed: 0,
            }),
        }
    }

    /// Revision after which every event is here.
    pub(super) fn complete_after(&self) -> i64 {
        self.picks.lock().complete_after
    }

    /// Appends events above all others. Readers see them once the generation has reached their revisions.
    pub(super) fn push(&self, pick: Pick) {
        let last = pick.last_revision;
        self.picks.lock().list.push_back(pick);
        self.last_revision.store(last, Ordering::Release);
    }

    /// Records that the event of `revision`, above all others, is missing.
    pub(super) fn miss(&self, revision: i64) {
        let mut picks = self.picks.lock();
        picks.trimmed = revision;
        picks.complete_after = revision;
        // No reader gets further than to where it is complete.
        picks.list.clear();
        self.last_revision.store(revision, Ordering::Release);
    }

    /// Puts the events above `revision` that are older than the topic's before them, in order.
    pub(super) fn extend_back(&self, older: Vec<Pick>, revision: i64) {
        let mut picks = self.picks.lock();
        if let (true, Some(last)) = (picks.list.is_empty(), older.last()) {
            self.last_revision.store(last.last_revision, Ordering::Release);
        }
        for pick in older.into_iter().rev() {
            picks.list.push_front(pick);
        }
        picks.complete_after = revision;
        // What was trimmed to save memory is back.
        picks.trimmed = picks.trimmed.min(revision);
    }

    /// Drops the events at or below `revision`; returns the memory of what remains, in bytes.
    pub(super) fn trim_through(&self, revision: i64) -> u64 {
        let mut picks = self.picks.lock();
        let trimmed = picks.list.partition_point(|pick| pick.last_revision <= revision);
        let last = picks.list.drain(..trimmed).next_back();
        if let Some(last) = last {
            picks.trimmed = last.last_revision;
        }
        // A pick that reaches over `revision` stays whole: a watcher that joins must not get its events from the log once more.
        let whole = picks
            .list
            .front()
            .map_or(revision, |first| revision.min(first.first_revision - 1));
        picks.complete_after = picks.complete_after.max(whole);
        if picks.list.len() < picks.list.capacity() / 4 {
            let length = picks.list.len();
            picks.list.shrink_to(length * 2);
        }
        picks.list.iter().map(Pick::memory_bytes).sum()
    }

    /// Revision of the first event above `through`, and at or below `reached`.
    pub(super) fn first_after(&self, through: i64, reached: i64) -> Result<Option<i64>, BehindTopic> {
        if self.last_revision.load(Ordering::Acquire) <= through {
            return Ok(None);
        }
        let picks = self.picks.lock();
        let first = picks.after(through)?.next().cloned();
        drop(picks);
        let first = first.and_then(|pick| pick.after(through));
        Ok(first
            .map(|pick| pick.first_revision)
            .filter(|first| *first <= reached))
    }

    /// Whole revisions above `through`, and at or below `reached`, until one of the bounds is reached: at least one
    /// revision if there is any.
    pub(super) fn take(
        &self,
        through: i64,
        reached: i64,
        max_events: usize,
        max_bytes: u64,
    ) -> Result<Vec<Pick>, BehindTopic> {
        if self.last_revision.load(Ordering::Acquire) <= through {
            return Ok(Vec::new());
        }
        let (mut events, mut bytes) = (0, 0);
        let mut taken: Vec<Pick> = Vec::new();
        {
            let picks = self.picks.lock();
            // The fan-out reaches whole batches only.
            for pick in picks
                .after(through)?
                .take_while(|pick| pick.last_revision <= reached)
            {
                if events >= max_events || bytes >= max_bytes {
                    break;
                }
                events += pick.len();
                bytes += pick.bytes;
                taken.push(pick.clone());
            }
        }
        // The events are looked at without the lock: the fan-out needs it for every batch.
        if let Some(first) = taken.first_mut()
            && let Some(after) = first.after(through)
        {
            *first = after;
        }
        let before_last = taken.split_last().map_or(&[][..], |(_, before)| before);
        let events: usize = before_last.iter().map(Pick::len).sum();
        let bytes: u64 = before_last.iter().map(Pick::bytes).sum();
        if let Some(last) = taken.last_mut() {
            *last = last.until(max_events.saturating_sub(events), max_bytes.saturating_sub(bytes));
        }
        Ok(taken)
    }
}

impl Picks {
    /// Picks with events above `through`, oldest first. O(log n).
    fn after(&self, through: i64) -> Result<impl Iterator<Item = &Pick>, BehindTopic> {
        if through < self.trimmed {
            return Err(BehindTopic);
        }
        let first = self.list.partition_point(|pick| pick.last_revision <= through);
        Ok(self.list.range(first..))
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use etcd_store::cache::{HistoryLimits, Store, Tree, testing::KeyValue};

    use super::*;

    const ALL: (usize, u64) = (usize::MAX, u64::MAX);

    /// A pick of every event of a batch with one event for each of `revisions`.
    pub(in crate::fan_out) fn pick(revisions: &[i64]) -> Pick {
        let puts = revisions.iter().zip(["a", "b", "c"]);
        let changes = puts.map(|(revision, key)| Change::put(KeyValue::new(key, *revision, "v").entry()));
        let mut store = Store::new(Tree::default(), 1, HistoryLimits::default(), Duration::ZERO);
        store
            .apply(changes.collect(), *revisions.last().unwrap(), Duration::ZERO)
            .unwrap();
        let batch = store.log().batches_after(0).next().unwrap().clone();
        let events: Vec<_> = (0..3).take(revisions.len()).collect();
        Pick::new(&batch, &events).unwrap()
    }

    /// Revisions of the events that are taken.
    fn take(
        topic: &Topic,
        through: i64,
        reached: i64,
        (max_events, max_bytes): (usize, u64),
    ) -> Result<Vec<i64>, BehindTopic> {
        let taken = topic.take(through, reached, max_events, max_bytes)?;
        Ok(taken
            .iter()
            .flat_map(Pick::events)
            .map(Change::revision)
            .collect())
    }

    #[test]
    fn bounds_end_behind_a_whole_revision_in_the_first_batch_and_in_a_later_one() {
        let topic = Topic::new(1);
        topic.push(pick(&[2, 2, 3]));
        topic.push(pick(&[4, 4, 5]));
        assert_eq!(take(&topic, 1, 5, (1, u64::MAX)), Ok(vec![2, 2]));
        assert_eq!(take(&topic, 1, 5, (usize::MAX, 1)), Ok(vec![2, 2]));
        assert_eq!(take(&topic, 1, 5, (3, u64::MAX)), Ok(vec![2, 2, 3]));
        assert_eq!(take(&topic, 1, 5, (4, u64::MAX)), Ok(vec![2, 2, 3, 4, 4]));
        assert_eq!(take(&topic, 2, 5, ALL), Ok(vec![3, 4, 4, 5]));
    }

    #[test]
    fn events_above_the_reached_revision_are_not_seen() {
        let topic = Topic::new(1);
        topic.push(pick(&[2]));
        topic.push(pick(&[5]));
        assert_eq!(take(&topic, 1, 4, ALL), Ok(vec![2]));
        assert_eq!(topic.first_after(2, 4), Ok(None));
        assert_eq!(topic.first_after(2, 5), Ok(Some(5)));
        assert_eq!(topic.first_after(5, 9), Ok(None));
    }

    #[test]
    fn trimmed_events_end_the_positions_before_them_and_no_others() {
        let topic = Topic::new(1);
        topic.push(pick(&[2]));
        topic.push(pick(&[7]));
        topic.trim_through(4);
        assert_eq!(topic.complete_after(), 4);
        assert_eq!(take(&topic, 1, 7, ALL), Err(BehindTopic));
        assert_eq!(topic.first_after(1, 7), Err(BehindTopic));
        // There was no event between.
        assert_eq!(take(&topic, 2, 7, ALL), Ok(vec![7]));
    }

    #[test]
    fn events_that_are_trimmed_in_part_stay_whole_and_come_once() {
        let topic = Topic::new(1);
        topic.push(pick(&[3]));
        topic.push(pick(&[5, 7]));
        topic.trim_through(5);
        assert_eq!(
            topic.complete_after(),
            4,
            "a watcher that joins needs those before"
        );
        topic.extend_back(vec![pick(&[3])], 2);
        assert_eq!(take(&topic, 2, 7, ALL), Ok(vec![3, 5, 7]));
    }

    #[test]
    fn missed_event_ends_the_positions_before_it() {
        let topic = Topic::new(1);
        topic.push(pick(&[2]));
        topic.miss(6);
        topic.push(pick(&[8]));
        assert_eq!(take(&topic, 5, 8, ALL), Err(BehindTopic));
        assert_eq!(take(&topic, 6, 8, ALL), Ok(vec![8]));
    }

    #[test]
    fn older_events_come_before_the_others_and_trimmed_ones_are_back() {
        let topic = Topic::new(1);
        topic.push(pick(&[5]));
        topic.push(pick(&[9]));
        topic.trim_through(7);
        topic.extend_back(vec![pick(&[3]), pick(&[5])], 2);
        assert_eq!(topic.complete_after(), 2);
        assert_eq!(take(&topic, 2, 9, ALL), Ok(vec![3, 5, 9]));
    }

    #[test]
    fn older_events_of_an_empty_topic_are_seen() {
        let topic = Topic::new(9);
        topic.extend_back(vec![pick(&[3]), pick(&[5])], 2);
        assert_eq!(take(&topic, 3, 9, ALL), Ok(vec![5]));
    }
}
