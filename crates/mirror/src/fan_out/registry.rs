//! Topics by interval, and the watchers of each. Owned by the fan-out's task.

use std::sync::{Arc, Weak};
use std::{sync::atomic::Ordering, time::Duration};

use bytes::Bytes;
use etcd_store::cache::{Batch, MissedEvent};
use etcd_store::keyspace::Interval;
use tokio::time::Instant;

use super::handle::{FanOutBounds, Held};
use super::topic::{Pick, Topic};
use super::{collector::EventCollector, reader::HubWatcher};

/// Time for which a topic without watchers is kept: a client that connects again finds its events collected.
const UNUSED_TOPIC_KEPT: Duration = Duration::from_secs(60);
/// Longest keys of a topic that is kept without watchers, in bytes.
const MAX_UNUSED_KEY_BYTES: usize = 1 << 10;
/// Bytes of new topics and watchers from which a sweep may be due before its time. A sweep looks at every topic.
const MIN_GROWN_BYTES: u64 = 64 << 10;
/// Events, or watchers, after which other tasks run.
const YIELD_AFTER_EVENTS: usize = 1000;
/// Watchers of one connection after which other tasks run.
const WAKE_BATCH: usize = 64;
/// Watchers after which other tasks run before the next connection's watchers are woken.
const WAKE_BATCH_OF_CONNECTIONS: usize = 32;
/// Watchers for which the fan-out lets others run once. In that time a busy worker runs some sixty tasks: those of the
/// streams and of their connections. Were more woken than run, a worker's own queue, which has 256 places, would
/// overflow into the queue of all workers, of which it takes one task in sixty: calls that are moved there wait for
/// hundreds of milliseconds.
const WOKEN_PER_YIELD: usize = 32;

/// A topic and its watchers.
#[derive(Debug)]
struct TopicSlot {
    key: Bytes,
    range_end: Bytes,
    topic: Arc<Topic>,
    /// By connection.
    watchers: Vec<Arc<HubWatcher>>,
    unused_since: Option<Instant>,
}

/// All topics of a fan-out.
#[derive(Debug)]
pub(super) struct Registry {
    collector: EventCollector,
    slots: Vec<Option<TopicSlot>>,
    free: Vec<u32>,
    /// Topics with new events, whose watchers are to be woken.
    to_wake: Vec<u32>,
    /// Memory of the topics and watchers that were added since the last sweep, in bytes.
    grown_bytes: u64,
}

impl Registry {
    pub(super) fn new() -> Registry {
        Registry {
            collector: EventCollector::new(),
            slots: Vec::new(),
            free: Vec::new(),
            to_wake: Vec::new(),
            grown_bytes: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.slots.len() == self.free.len()
    }

    /// The topic of an interval; a new one is complete after `reached`.
    pub(super) fn topic(&mut self, key: &Bytes, range_end: &Bytes, reached: i64) -> (u32, Arc<Topic>) {
        let interval = Interval::from_request(key, range_end);
        if let Some(number) = self.collector.get(&interval)
            && let Some(slot) = self.slot_mut(number)
        {
            slot.unused_since = None;
            return (number, Arc::clone(&slot.topic));
        }
        let topic = Arc::new(Topic::new(reached));
        let number = self.free.pop().unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let slot = TopicSlot {
            key: key.clone(),
            range_end: range_end.clone(),
            topic: Arc::clone(&topic),
            watchers: Vec::new(),
            unused_since: None,
        };
        self.grown_bytes += slot.memory_bytes();
        if let Some(free) = self.slots.get_mut(number as usize) {
            *free = Some(slot);
        }
        self.collector.insert(&interval, number);
        (number, topic)
    }

    /// Adds a watcher to a topic.
    pub(super) fn add(&mut self, number: u32, watcher: Arc<HubWatcher>) {
        self.grown_bytes += size_of_val(&*watcher) as u64;
        if let Some(slot) = self.slot_mut(number) {
            let connection = watcher.signal.connection();
            let at = slot
                .watchers
                .partition_point(|other| other.signal.connection() <= connection);
            slot.watchers.insert(at, watcher);
        }
    }

    fn slot_mut(&mut self, number: u32) -> Option<&mut TopicSlot> {
        self.slots.get_mut(number as usize)?.as_mut()
    }

    /// Counts what topics have got from the log.
    pub(super) fn note_grown(&mut self, bytes: u64) {
        self.grown_bytes += bytes;
    }

    /// Adds the events of `batch` to their topics.
    pub(super) async fn add_batch(&mut self, batch: &Batch) {
        for (piece, changes) in batch.changes().chunks(YIELD_AFTER_EVENTS).enumerate() {
            if piece > 0 {
                tokio::task::yield_now().await;
            }
            self.collector.look_up(changes, piece * YIELD_AFTER_EVENTS);
        }
        let (slots, to_wake, grown_bytes) = (&self.slots, &mut self.to_wake, &mut self.grown_bytes);
        self.collector.end_batch(|number, positions| {
            let slot = slots.get(number as usize).and_then(Option::as_ref);
            if let (Some(slot), Some(pick)) = (slot, Pick::new(batch, positions)) {
                *grown_bytes += pick.memory_bytes();
                slot.topic.push(pick);
                to_wake.push(number);
            }
        });
    }

    /// Ends the watchers that need events which were `missed`; the others continue. They are woken with those of the next
    /// events.
    pub(super) async fn miss(&mut self, missed: &[MissedEvent]) {
        for some in missed.chunks(YIELD_AFTER_EVENTS) {
            for event in some {
                let (slots, to_wake) = (&self.slots, &mut self.to_wake);
                self.collector.look_up_key(&event.key, |number| {
                    if let Some(slot) = slots.get(number as usize).and_then(Option::as_ref) {
                        slot.topic.miss(event.revision);
                        to_wake.push(number);
                    }
                });
            }
            tokio::task::yield_now().await;
        }
    }

    /// Ends the watchers that have got events above `revision` elsewhere, at which another feed continues: its proof does not
    /// concern these (W10). To be called before the events of that feed are added.
    pub(super) fn cut_ahead_of(&mut self, revision: i64) {
        let watchers = self.slots.iter().flatten().flat_map(|slot| &slot.watchers);
        let ahead = watchers.filter(|watcher| watcher.delivered_through > revision);
        ahead.for_each(|watcher| watcher.cut());
    }

    /// Wakes the watchers of the topics with new events. To be called once they have been reached (W5, W17).
    pub(super) async fn wake_touched(&mut self) {
        let mut touched = std::mem::take(&mut self.to_wake);
        touched.sort_unstable();
        touched.dedup();
        let mut woken = 0;
        for number in touched.drain(..) {
            if let Some(slot) = self.slot_mut(number) {
                slot.wake(&mut woken).await;
            }
        }
        self.to_wake = touched;
    }

    /// Wakes every watcher.
    pub(super) async fn wake_all(&mut self) {
        let mut woken = 0;
        for slot in self.slots.iter_mut().flatten() {
            slot.wake(&mut woken).await;
        }
    }

    /// Ends every topic: it keeps the events that a reader has not taken. Returns those with readers.
    pub(super) fn end(&mut self) -> Vec<Weak<Topic>> {
        let slots = std::mem::replace(self, Registry::new()).slots;
        let with_readers = slots.into_iter().flatten().filter_map(|slot| {
            slot.topic.trim_through(slot.taken_by_all()?);
            Some(Arc::downgrade(&slot.topic))
        });
        with_readers.collect()
    }

    /// Whether so much was added since the last sweep that one is due: watchers that are gone, and their topics, are found by
    /// sweeps alone.
    pub(super) fn has_grown(&self, bounds: FanOutBounds) -> bool {
        self.grown_bytes > bounds.max_unused_bytes.max(MIN_GROWN_BYTES)
    }

    /// Drops events at or below `revision` as the log does, watchers whose readers were dropped, and topics without watchers:
    /// those that have been unused for a minute, or have long keys, and what exceeds `bounds`.
    pub(super) async fn sweep(
        &mut self,
        revision: i64,
        reached: i64,
        now: Instant,
        bounds: FanOutBounds,
    ) -> Held {
        let mut held = Held::default();
        let mut lists_bytes = 0;
        let mut unused = Vec::new();
        let mut seen = 0;
        for number in 0..u32::try_from(self.slots.len()).unwrap_or(u32::MAX) {
            let Some(slot) = self.slot_mut(number) else {
                continue;
            };
            slot.watchers.retain(|watcher| !watcher.is_gone());
            let events_bytes = slot.topic.trim_through(revision);
            match slot.unused_since(now) {
                None => {
                    lists_bytes += events_bytes;
                    held.bytes += slot.watchers_bytes();
                }
                Some(since) => unused.push((since, number, events_bytes + slot.memory_bytes())),
            }
            held.watchers += slot.watchers.len() as u64;
            held.topics += 1;
            held.behind_revisions = held.behind_revisions.max(slot.behind(reached));
            seen += slot.watchers.len() + 1;
            if seen >= YIELD_AFTER_EVENTS {
                seen = 0;
                tokio::task::yield_now().await;
            }
        }
        unused.sort_unstable_by_key(|(since, ..)| std::cmp::Reverse(*since));
        let mut unused_bytes = 0;
        for (since, number, bytes) in unused {
            let is_kept = now.duration_since(since) < UNUSED_TOPIC_KEPT && self.may_be_unused(number);
            if is_kept && unused_bytes + bytes <= bounds.max_unused_bytes {
                unused_bytes += bytes;
            } else {
                self.remove(number);
                held.topics -= 1;
            }
        }
        if lists_bytes > bounds.max_list_bytes {
            lists_bytes = self.shorten_lists(reached, bounds.max_list_bytes).await;
        }
        held.bytes += unused_bytes + lists_bytes;
        self.grown_bytes = 0;
        if self.is_empty() {
            // A burst of watchers must not leave its lists behind.
            *self = Registry::new();
        }
        held
    }

    /// Drops the events that every watcher of their topic has taken, which the log still has for those that join. If that is
    /// not enough, drops those of the longest lists up to `reached`, so that their slow readers continue at etcd. Returns the
    /// bytes of the lists.
    async fn shorten_lists(&mut self, reached: i64, max_bytes: u64) -> u64 {
        let mut lists = Vec::new();
        for (at, slot) in self.slots.iter().enumerate() {
            if let Some(slot) = slot
                && let Some(taken) = slot.taken_by_all()
            {
                lists.push((slot.topic.trim_through(taken.min(reached)), at));
            }
            if at % YIELD_AFTER_EVENTS == 0 {
                tokio::task::yield_now().await;
            }
        }
        lists.sort_unstable();
        let mut bytes = lists.iter().map(|(bytes, _)| bytes).sum();
        while bytes > max_bytes
            && let Some((of_list, at)) = lists.pop()
        {
            let slot = self.slots.get(at).and_then(Option::as_ref);
            bytes = bytes - of_list + slot.map_or(0, |slot| slot.topic.trim_through(reached));
        }
        bytes
    }

    /// Whether the topic may be kept without watchers.
    fn may_be_unused(&self, number: u32) -> bool {
        let slot = self.slots.get(number as usize).and_then(Option::as_ref);
        slot.is_some_and(|slot| slot.key.len() + slot.range_end.len() <= MAX_UNUSED_KEY_BYTES)
    }

    fn remove(&mut self, number: u32) {
        if let Some(slot) = self.slots.get_mut(number as usize).and_then(Option::take) {
            let interval = Interval::from_request(&slot.key, &slot.range_end);
            self.collector.remove(&interval);
            self.free.push(number);
        }
    }
}

impl TopicSlot {
    /// Wakes the watchers, one connection after another: responses of one connection that are ready together are sent
    /// in one write. `woken` counts those since other tasks ran.
    async fn wake(&mut self, woken: &mut usize) {
        let mut last = None;
        for watcher in self.watchers.iter().filter(|watcher| !watcher.is_gone()) {
            let connection = Some(watcher.signal.connection());
            let is_next = last.replace(watcher.signal.connection()) != connection;
            if *woken >= WAKE_BATCH || (is_next && *woken >= WAKE_BATCH_OF_CONNECTIONS) {
                for _ in 0..*woken / WOKEN_PER_YIELD {
                    tokio::task::yield_now().await;
                }
                *woken = 0;
            }
            watcher.signal.set();
            *woken += 1;
        }
    }

    /// Time of the first sweep that has found no watcher; `None` with watchers.
    fn unused_since(&mut self, now: Instant) -> Option<Instant> {
        if !self.watchers.is_empty() {
            self.unused_since = None;
            return None;
        }
        Some(*self.unused_since.get_or_insert(now))
    }

    /// Revision up to which every watcher has taken its events; `None` without watchers.
    fn taken_by_all(&self) -> Option<i64> {
        let watchers = self.watchers.iter().filter(|watcher| !watcher.is_gone());
        watchers
            .map(|watcher| watcher.through.load(Ordering::Relaxed))
            .min()
    }

    /// Revisions that the slowest watcher with pending events is behind.
    fn behind(&self, reached: i64) -> i64 {
        let first = self
            .taken_by_all()
            .map(|through| self.topic.first_after(through, reached));
        match first {
            Some(Ok(Some(first))) => reached - first + 1,
            _ => 0,
        }
    }

    /// Memory of the topic without its events and watchers, in bytes.
    fn memory_bytes(&self) -> u64 {
        let keys = 2 * (self.key.len() + self.range_end.len());
        (size_of::<TopicSlot>() + size_of::<Topic>() + keys) as u64
    }

    /// Memory of the list of watchers, in bytes.
    fn watchers_bytes(&self) -> u64 {
        (size_of::<usize>() * self.watchers.capacity()) as u64
    }
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, sync::atomic::AtomicUsize, task::Poll};

    use super::*;
    use crate::fan_out::reader::{Generation, Reader};
    use crate::fan_out::{join::Signal, tests::join};
    use crate::lineage::HistoryId;

    const STREAMS: usize = 5_000;
    /// Streams that may run while a call waits for its turn.
    const BETWEEN_TURNS: usize = 2 * (WAKE_BATCH + WAKE_BATCH_OF_CONNECTIONS);

    /// Waits for one turn, behind the tasks that are ready.
    async fn turn() {
        let mut waited = false;
        poll_fn(|cx| {
            if std::mem::replace(&mut waited, true) {
                return Poll::Ready(());
            }
            cx.waker().wake_by_ref();
            Poll::Pending
        })
        .await;
    }

    #[tokio::test]
    async fn call_gets_its_turns_while_thousands_of_streams_are_woken() {
        let mut registry = Registry::new();
        let generation = Arc::new(Generation::new(1, HistoryId::of(1), 1));
        let (number, topic) = registry.topic(&Bytes::from_static(b"a"), &Bytes::from_static(b"b"), 1);
        let looks = Arc::new(AtomicUsize::new(0));
        for stream in 0..STREAMS {
            // Half of them share a connection.
            let signal = Arc::new(Signal::new(stream.saturating_sub(STREAMS / 2) as u64));
            let (reader, watcher) = Reader::new(&generation, &topic, &signal, &join("a", "b", 2));
            registry.add(number, watcher);
            let looks = Arc::clone(&looks);
            tokio::spawn(poll_fn(move |cx| {
                let _open = &reader;
                signal.look(cx, |_| looks.fetch_add(1, Ordering::Relaxed));
                Poll::<()>::Pending
            }));
        }
        while looks.load(Ordering::Relaxed) < STREAMS {
            turn().await;
        }
        let looked = Arc::clone(&looks);
        let call = tokio::spawn(async move {
            let mut longest = 0;
            while looked.load(Ordering::Relaxed) < 2 * STREAMS {
                let before = looked.load(Ordering::Relaxed);
                turn().await;
                longest = longest.max(looked.load(Ordering::Relaxed) - before);
            }
            longest
        });
        registry.wake_all().await;
        let longest = call.await.unwrap();
        assert!(
            longest <= BETWEEN_TURNS,
            "{longest} streams ran between two turns"
        );
    }

    fn watch(registry: &mut Registry, generation: &Arc<Generation>, key: &Bytes) -> Reader {
        let (number, topic) = registry.topic(key, &Bytes::new(), 1);
        let (reader, watcher) = Reader::new(generation, &topic, &Arc::new(Signal::new(0)), &join("a", "", 2));
        registry.add(number, watcher);
        reader
    }

    fn kept(max_unused_bytes: u64) -> FanOutBounds {
        FanOutBounds {
            max_unused_bytes,
            max_list_bytes: u64::MAX,
        }
    }

    #[tokio::test]
    async fn topics_without_watchers_are_kept_up_to_a_bound_and_the_newest_of_them() {
        let mut registry = Registry::new();
        let generation = Arc::new(Generation::new(1, HistoryId::of(1), 1));
        let live = watch(&mut registry, &generation, &Bytes::from_static(b"live"));
        let now = Instant::now();
        let held = registry.sweep(1, 1, now, kept(0)).await;
        assert!(held.bytes < 100, "its stream counts the watcher: {held:?}");
        let mut of_one = 0;
        for second in 0..20 {
            let key = Bytes::from(format!("key {second:02}"));
            drop(watch(&mut registry, &generation, &key));
            let now = now + Duration::from_secs(second);
            let before = registry.sweep(1, 1, now, kept(u64::MAX)).await;
            of_one = before.bytes / (second + 1);
        }
        assert!(
            (size_of::<TopicSlot>() as u64..1024).contains(&of_one),
            "{of_one}"
        );
        let now = now + Duration::from_secs(20);
        let max_unused_bytes = 5 * of_one;
        let held = registry.sweep(1, 1, now, kept(max_unused_bytes)).await;
        assert!(
            held.bytes <= max_unused_bytes + 100 && (4..=6).contains(&held.topics),
            "{held:?}"
        );
        let is_kept = |key: &'static [u8]| registry.collector.get(&Interval::Single(key)).is_some();
        assert!(is_kept(b"live") && is_kept(b"key 19") && !is_kept(b"key 00"));
        let held = registry
            .sweep(1, 1, now + UNUSED_TOPIC_KEPT, kept(max_unused_bytes))
            .await;
        assert_eq!((held.topics, held.watchers), (1, 1), "a minute later");
        drop(live);
    }

    #[tokio::test]
    async fn topics_with_long_keys_end_with_their_watchers_and_many_are_found_early() {
        let mut registry = Registry::new();
        let generation = Arc::new(Generation::new(1, HistoryId::of(1), 1));
        let mut most = 0;
        let mut sweeps = 0;
        for number in 0..400 {
            let mut key = vec![b'k'; 30_000];
            key.extend_from_slice(format!("{number}").as_bytes());
            drop(watch(&mut registry, &generation, &key.into()));
            most = most.max(registry.grown_bytes);
            if registry.has_grown(kept(MIN_GROWN_BYTES)) {
                sweeps += 1;
                let held = registry.sweep(1, 1, Instant::now(), kept(MIN_GROWN_BYTES)).await;
                assert_eq!(held, Held::default());
            }
        }
        assert!(most <= 3 * MIN_GROWN_BYTES && sweeps >= 100, "{most}, {sweeps}");
    }
}
