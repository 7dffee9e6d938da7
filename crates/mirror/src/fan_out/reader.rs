//! The position of one watcher, and the state that all readers of one load of a mirror share.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};

use etcd_store::cache::Change;

use super::join::{Join, Signal};
use super::topic::{Pick, Topic};
use crate::{lineage::HistoryId, view::ReaderEnd};

/// Watcher as the fan-out sees it.
#[derive(Debug)]
pub(super) struct HubWatcher {
    pub(super) signal: Arc<Signal>,
    /// Set when its reader is dropped; the fan-out removes it later, so that a mass disconnect costs nothing at once.
    pub(super) is_gone: AtomicBool,
    /// Revision up to which its events were taken.
    pub(super) through: AtomicI64,
    /// Revision up to which its events were delivered elsewhere before it joined.
    pub(super) delivered_through: i64,
    /// The mirror has lost its feed before it reached that revision.
    is_cut: AtomicBool,
}

impl HubWatcher {
    pub(super) fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// Ends the watcher: it gets no more events.
    pub(super) fn cut(&self) {
        self.is_cut.store(true, Ordering::Release);
        self.signal.set();
    }

    fn is_cut(&self) -> bool {
        self.is_cut.load(Ordering::Acquire)
    }
}

/// The position of one watcher in the events of its interval. A watcher sees every event of its interval from its first
/// revision on, each once, in order (W1, W2, W3); filters are the stream's.
#[derive(Debug)]
pub struct Reader {
    generation: Arc<Generation>,
    topic: Arc<Topic>,
    watcher: Arc<HubWatcher>,
    /// Every event up to this revision was taken.
    through: i64,
}

/// Result of [`Reader::take`].
#[derive(Debug)]
pub enum Taken {
    /// Events.
    Events(Picked),
    /// No event at the moment: every event of the watcher up to `reached` was taken, or there was none (W5). Lower than
    /// the watcher's first revision if that is in the future.
    Nothing {
        /// Revision that the fan-out has reached.
        reached: i64,
    },
    /// The caller has refused the events; they are taken later.
    Refused,
    /// There will be no more events.
    Ended(ReaderEnd),
}

/// Events of whole revisions, at least one. Keeps their batches in memory.
#[derive(Debug)]
pub struct Picked(Vec<Pick>);

impl Picked {
    /// The events, in order of revision, and within a revision in etcd's order.
    pub fn iter(&self) -> impl Iterator<Item = &Change> {
        self.0.iter().flat_map(Pick::events)
    }

    /// The events after the first `skipped` ones.
    pub fn iter_from(&self, mut skipped: usize) -> impl Iterator<Item = &Change> {
        self.0.iter().flat_map(move |pick| {
            let here = skipped.min(pick.len());
            skipped -= here;
            pick.events_from(here)
        })
    }

    /// Number of events.
    #[must_use]
    pub fn events(&self) -> usize {
        self.0.iter().map(Pick::len).sum()
    }

    /// Revision of the last event.
    #[must_use]
    pub fn last_revision(&self) -> i64 {
        self.0.last().map_or(0, Pick::last_revision)
    }

    /// Bytes of the events, encoded, with what they replaced.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.iter().map(Pick::bytes).sum()
    }
}

impl Reader {
    /// A reader of the events from the first revision of `join` on, and the watcher to wake for it.
    pub(super) fn new(
        generation: &Arc<Generation>,
        topic: &Arc<Topic>,
        signal: &Arc<Signal>,
        join: &Join,
    ) -> (Reader, Arc<HubWatcher>) {
        let through = join.first_revision - 1;
        let watcher = Arc::new(HubWatcher {
            signal: Arc::clone(signal),
            is_gone: AtomicBool::new(false),
            through: AtomicI64::new(through),
            delivered_through: join.delivered_through(),
            is_cut: AtomicBool::new(false),
        });
        let reader = Reader {
            generation: Arc::clone(generation),
            topic: Arc::clone(topic),
            watcher: Arc::clone(&watcher),
            through,
        };
        (reader, watcher)
    }

    /// Takes the next whole revisions until `max_events` or `max_bytes` is reached; a revision is never divided (W4).
    pub fn take(&mut self, max_events: usize, max_bytes: u64) -> Taken {
        self.take_if(max_events, max_bytes, |_| true)
    }

    /// Takes events like [`Reader::take`], unless `admit` refuses them.
    pub fn take_if(
        &mut self,
        max_events: usize,
        max_bytes: u64,
        admit: impl FnOnce(&Picked) -> bool,
    ) -> Taken {
        // In this order (W5): no event is added after the end, and every event up to `reached` is in the topic.
        let end = self.generation.end();
        let reached = self.generation.reached();
        if let Some(end @ ReaderEnd::Replaced { .. }) = end {
            return Taken::Ended(end);
        }
        // After `reached`: a watcher is cut before the events of another feed are reached.
        if self.watcher.is_cut() {
            return Taken::Ended(ReaderEnd::FeedLost);
        }
        let Ok(picks) = self.topic.take(self.through, reached, max_events, max_bytes) else {
            return Taken::Ended(ReaderEnd::Trimmed);
        };
        let picked = Picked(picks);
        if picked.0.is_empty() {
            self.advance(reached);
            return end.map_or(Taken::Nothing { reached }, Taken::Ended);
        }
        if !admit(&picked) {
            return Taken::Refused;
        }
        self.advance(picked.last_revision());
        Taken::Events(picked)
    }

    fn advance(&mut self, revision: i64) {
        self.through = self.through.max(revision);
        self.watcher.through.store(self.through, Ordering::Relaxed);
    }

    /// Whether [`Reader::take`] would return events or the end. Cheap.
    #[must_use]
    pub fn is_pending(&self) -> bool {
        self.has_ended() || !matches!(self.first_pending(), Ok(None))
    }

    /// Whether there will be no more events.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        self.generation.end().is_some() || self.watcher.is_cut()
    }

    fn first_pending(&self) -> Result<Option<i64>, super::topic::BehindTopic> {
        let reached = self.generation.reached();
        self.topic.first_after(self.through, reached)
    }

    /// Revision up to which every event of the watcher was taken, or there was none: a watcher that continues elsewhere
    /// starts behind it. At least the revision before its first one.
    #[must_use]
    pub fn covered(&self) -> i64 {
        // In this order, as in `take`.
        let reached = self.generation.reached();
        match self.topic.first_after(self.through, reached) {
            Ok(None) => self.through.max(reached),
            Ok(Some(first)) => first - 1,
            Err(_) => self.through,
        }
    }

    /// Revision up to which the fan-out has added every event.
    #[must_use]
    pub fn reached(&self) -> i64 {
        self.generation.reached()
    }

    /// Number of the mirror's load that the events belong to.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation.number
    }

    /// Number of etcd's history that the events belong to.
    #[must_use]
    pub fn history(&self) -> HistoryId {
        self.generation.history
    }

    /// Whether events up to `revision`, which another source has sent, are not proven by the mirror: it has not reached them, or
    /// had not when it lost its feed. No comparison of etcd with the mirror concerns them.
    #[must_use]
    pub fn is_unproven(&self, revision: i64) -> bool {
        // In this order, as in `take`.
        let reached = self.generation.reached();
        revision > reached || (revision > 0 && self.watcher.is_cut())
    }

    /// Whether etcd has told the mirror's feed for three seconds that it has no leader (W15).
    #[must_use]
    pub fn has_no_leader(&self) -> bool {
        self.generation.has_no_leader()
    }

    /// Whether the mirror has lost its feed, and has none yet: etcd may be another one when it has.
    #[must_use]
    pub fn is_without_feed(&self) -> bool {
        self.generation.is_without_feed()
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        self.watcher.is_gone.store(true, Ordering::Release);
    }
}

/// Load of the mirror, as changed by the feed since.
#[derive(Debug)]
pub(super) struct Generation {
    /// Number of the load.
    pub(super) number: u64,
    /// Number of etcd's history that the events belong to.
    pub(super) history: HistoryId,
    /// Every event up to this revision is in the topics.
    reached: AtomicI64,
    has_no_leader: AtomicBool,
    is_without_feed: AtomicBool,
    end: OnceLock<ReaderEnd>,
}

impl Generation {
    pub(super) fn new(number: u64, history: HistoryId, reached: i64) -> Generation {
        Generation {
            number,
            history,
            reached: AtomicI64::new(reached),
            has_no_leader: AtomicBool::new(false),
            is_without_feed: AtomicBool::new(false),
            end: OnceLock::new(),
        }
    }

    pub(super) fn reached(&self) -> i64 {
        self.reached.load(Ordering::Acquire)
    }

    /// Records that the topics have every event up to `revision`.
    pub(super) fn reach(&self, revision: i64) {
        self.reached.store(revision, Ordering::Release);
    }

    /// End of the generation: no event is added after it.
    pub(super) fn end(&self) -> Option<ReaderEnd> {
        self.end.get().copied()
    }

    pub(super) fn set_end(&self, end: ReaderEnd) {
        let _ = self.end.set(end);
    }

    pub(super) fn has_no_leader(&self) -> bool {
        self.has_no_leader.load(Ordering::Acquire)
    }

    pub(super) fn is_without_feed(&self) -> bool {
        self.is_without_feed.load(Ordering::Acquire)
    }

    /// Returns the previous value.
    pub(super) fn set_without_feed(&self, is_without_feed: bool) -> bool {
        self.is_without_feed.swap(is_without_feed, Ordering::AcqRel)
    }

    /// Returns the previous value.
    pub(super) fn set_no_leader(&self, has_no_leader: bool) -> bool {
        self.has_no_leader.swap(has_no_leader, Ordering::AcqRel)
    }
}

#[cfg(test)]
mod tests {
    use rangecache_base::telemetry::Reason;

    use super::*;
    use crate::fan_out::{tests::join, topic::tests::pick};

    /// A generation that has reached revision 5, with events at 2, 2, 3 and 5, and a reader of those from
    /// `first_revision` on.
    fn reader(first_revision: i64) -> (Reader, Arc<HubWatcher>) {
        let generation = Arc::new(Generation::new(1, HistoryId::FIRST, 5));
        let topic = Arc::new(Topic::new(1));
        topic.push(pick(&[2, 2, 3]));
        topic.push(pick(&[5]));
        Reader::new(
            &generation,
            &topic,
            &Arc::default(),
            &join("a", "", first_revision),
        )
    }

    fn take(reader: &mut Reader) -> Result<Vec<i64>, ReaderEnd> {
        match reader.take(100, 1 << 20) {
            Taken::Events(picked) => Ok(picked.iter().map(Change::revision).collect()),
            Taken::Nothing { .. } | Taken::Refused => Ok(Vec::new()),
            Taken::Ended(end) => Err(end),
        }
    }

    #[test]
    fn events_of_a_dropped_mirror_are_taken_before_its_end() {
        let (mut reader, _watcher) = reader(3);
        let end = ReaderEnd::Dropped(Reason::Loading);
        reader.generation.set_end(end);
        assert!(reader.has_ended());
        assert_eq!(take(&mut reader), Ok(vec![3, 5]));
        assert_eq!(take(&mut reader), Err(end));
    }

    #[test]
    fn events_of_a_replaced_history_are_not_taken() {
        let (mut reader, _watcher) = reader(2);
        let end = ReaderEnd::Replaced { revision: 4 };
        reader.generation.set_end(end);
        assert_eq!(take(&mut reader), Err(end));
    }

    #[test]
    fn watcher_that_is_cut_gets_no_more_events_and_nothing_proves_those_it_had() {
        let (mut reader, watcher) = reader(2);
        assert!(!reader.is_unproven(5) && reader.is_unproven(6));
        watcher.cut();
        assert!(reader.is_pending());
        assert_eq!(take(&mut reader), Err(ReaderEnd::FeedLost));
        assert!(reader.is_unproven(5));
        assert!(!reader.is_unproven(0), "nothing was sent");
    }

    #[test]
    fn watcher_continues_elsewhere_behind_the_last_revision_without_a_pending_event() {
        let (mut reader, watcher) = reader(3);
        assert_eq!(reader.covered(), 2, "the event at 3 is pending");
        reader.take(1, 1 << 20);
        assert_eq!(reader.covered(), 4, "nothing happened at 4");
        assert_eq!(take(&mut reader), Ok(vec![5]));
        reader.generation.reach(8);
        assert_eq!(reader.covered(), 8);
        assert_eq!(take(&mut reader), Ok(vec![]));
        assert_eq!(watcher.through.load(Ordering::Relaxed), 8);
    }

    #[test]
    fn watcher_of_the_future_does_not_fall_back_to_the_reached_revision() {
        let (mut reader, _watcher) = reader(9);
        assert_eq!(take(&mut reader), Ok(vec![]));
        assert_eq!(reader.covered(), 8);
        reader.topic.push(pick(&[7, 9]));
        reader.generation.reach(9);
        assert_eq!(take(&mut reader), Ok(vec![9]));
    }

    #[test]
    fn skipped_events_reach_over_batches() {
        let (mut reader, _watcher) = reader(2);
        let Taken::Events(picked) = reader.take(100, 1 << 20) else {
            panic!("there are events");
        };
        let from = |skipped| {
            picked
                .iter_from(skipped)
                .map(Change::revision)
                .collect::<Vec<_>>()
        };
        assert_eq!((picked.events(), picked.last_revision()), (4, 5));
        assert_eq!(from(0), [2, 2, 3, 5]);
        assert_eq!(from(2), [3, 5]);
        assert_eq!(from(3), [5]);
        assert_eq!(from(4), [0; 0]);
    }
}
