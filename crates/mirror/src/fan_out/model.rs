//! Random programs against a model: every watcher gets exactly the events of its interval, once, in order, whole, with
//! what they replaced (W1 to W4, W12); progress is never ahead of events (W5); nothing waits for a further input (W17).

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::{collections::BTreeMap, future::poll_fn, sync::Arc, task::Poll, time::Duration};

use bytes::Bytes;
use etcd_store::cache::{Change, ChangeKind, Entry, HistoryLimits, Tree, testing::KeyValue};
use parking_lot::Mutex;
use proptest::prelude::*;
use rangecache_base::telemetry::Reason;

use super::tests::{Bench, join};
use super::{Join, JoinRefused, Reader, Signal, Taken};
use crate::view::ReaderEnd;

const KEYS: usize = 12;

fn key(index: usize) -> String {
    format!("/{}/{}", ["a", "b", "c"][index % 3], index / 3)
}

/// Intervals of all kinds: nested, equal, with and without keys.
const INTERVALS: [(&str, &str); 12] = [
    ("/a/0", ""),
    ("/a/1", ""),
    ("/b/0", ""),
    ("/none", ""),
    ("/a/", "/a0"),
    ("/b/", "/b0"),
    ("/a/1", "/b/2"),
    ("/a/", "/c/1"),
    ("/b/", "\0"),
    ("/c/3", "\0"),
    ("\0", "\0"),
    ("/x", "/y"),
];

fn contains(join: &Join, key: &[u8]) -> bool {
    match &*join.range_end {
        [] => join.key == key,
        [0] => join.key <= key,
        end => join.key <= key && key < end,
    }
}

/// An event as a watcher has to get it.
#[derive(Clone, Debug, PartialEq)]
struct Event {
    revision: i64,
    kind: ChangeKind,
    key_value: KeyValue,
    replaced: Option<KeyValue>,
}

impl From<&Change> for Event {
    fn from(change: &Change) -> Event {
        Event {
            revision: change.revision(),
            kind: change.kind,
            key_value: KeyValue::from(&change.entry),
            replaced: change.replaced.as_ref().map(KeyValue::from),
        }
    }
}

/// Model of an etcd with one history, and of the mirror's loads.
#[derive(Debug, Default)]
struct Model {
    keys: BTreeMap<Vec<u8>, KeyValue>,
    events: Vec<Event>,
    /// Revision up to which the mirror has every event.
    visible: i64,
    /// The current load of the mirror, and the cause and the last revision of those that ended.
    load: usize,
    ended: Vec<(ReaderEnd, i64)>,
}

impl Model {
    fn expected(&self, join: &Join, after: i64, up_to: i64) -> Vec<Event> {
        self.events
            .iter()
            .filter(|event| event.revision > after && event.revision <= up_to)
            .filter(|event| contains(join, &event.key_value.key))
            .cloned()
            .collect()
    }

    /// Last revision that a watcher of this load can get.
    fn last_of(&self, load: usize) -> i64 {
        self.ended.get(load).map_or(self.visible, |(_, last)| *last)
    }
}

struct HubWatcher {
    join: Join,
    reader: Reader,
    load: usize,
    through: i64,
    progress: i64,
    end: Option<ReaderEnd>,
}

impl HubWatcher {
    /// Takes until there is nothing more, and compares with the model.
    fn drain(&mut self, model: &Model, max_events: usize, max_bytes: u64) {
        while self.end.is_none() {
            let last = model.last_of(self.load);
            let covered = self.reader.covered();
            assert!(
                covered >= self.through.min(self.join.first_revision - 1),
                "{covered}"
            );
            assert!(
                model.expected(&self.join, self.through, covered).is_empty(),
                "covered"
            );
            match self.reader.take(max_events, max_bytes) {
                Taken::Events(picked) => {
                    let up_to = picked.last_revision();
                    let got: Vec<_> = picked.iter().map(Event::from).collect();
                    assert_eq!(got, model.expected(&self.join, self.through, up_to));
                    assert_eq!(got.len(), picked.events());
                    let whole = got.partition_point(|event| event.revision < up_to);
                    assert!(whole <= max_events, "more revisions than asked for");
                    assert!(!got.is_empty() && up_to <= last && up_to > self.progress);
                    assert!(up_to <= self.reader.reached(), "events ahead of the fan-out");
                    self.through = up_to;
                }
                Taken::Refused => panic!("nothing was refused"),
                Taken::Nothing { reached } => {
                    assert!(reached >= self.progress && reached <= model.visible, "{reached}");
                    let missing = model.expected(&self.join, self.through, reached);
                    assert_eq!(missing, [], "progress {reached} is ahead of events");
                    self.progress = reached;
                    return;
                }
                Taken::Ended(ended) => {
                    assert!(self.is_due(model, ended), "{ended:?} {:?}", model.ended);
                    self.end = Some(ended);
                }
            }
        }
    }

    fn is_due(&self, model: &Model, ended: ReaderEnd) -> bool {
        match ended {
            // Its own events were trimmed, or those that the fan-out had no time for.
            ReaderEnd::Trimmed => {
                let missing = model.expected(&self.join, self.through, i64::MAX);
                !missing.is_empty() || self.reader.reached() < model.visible
            }
            ReaderEnd::FeedLost => true,
            _ => model
                .ended
                .get(self.load)
                .is_some_and(|(cause, _)| *cause == ended),
        }
    }
}

/// A client's stream: a task that takes what its readers have, as long as it has room.
struct Stream {
    signal: Arc<Signal>,
    has_room: Arc<AtomicBool>,
    polls: Arc<AtomicUsize>,
    watchers: Arc<Mutex<Vec<HubWatcher>>>,
}

impl Stream {
    fn start(model: &Arc<Mutex<Model>>, max_events: usize, max_bytes: u64) -> Stream {
        let stream = Stream {
            signal: Arc::default(),
            has_room: Arc::new(AtomicBool::new(true)),
            polls: Arc::default(),
            watchers: Arc::default(),
        };
        let (signal, has_room) = (Arc::clone(&stream.signal), Arc::clone(&stream.has_room));
        let (polls, watchers, model) = (
            Arc::clone(&stream.polls),
            Arc::clone(&stream.watchers),
            Arc::clone(model),
        );
        tokio::spawn(poll_fn(move |context| {
            polls.fetch_add(1, Ordering::Relaxed);
            signal.look(context, |_| {
                if has_room.load(Ordering::Relaxed) {
                    for watcher in watchers.lock().iter_mut() {
                        watcher.drain(&model.lock(), max_events, max_bytes);
                    }
                }
            });
            Poll::<()>::Pending
        }));
        stream
    }
}

#[derive(Clone, Debug)]
enum Op {
    /// Keys put (`true`) or deleted in one revision each, some several times, applied at once; revisions to skip before.
    Apply(Vec<(Vec<(usize, bool)>, i64)>),
    Advance(i64),
    /// Time passes, and the history is trimmed by age.
    Wait(u64),
    Compact(i64),
    /// The feed is lost for some milliseconds.
    Resume(u64),
    /// The mirror is dropped and loaded again; etcd's revision has increased meanwhile.
    Reload(usize, i64),
    /// A stream, intervals, and the distance of the first revision to the mirror's.
    Join(usize, Vec<usize>, i64),
    /// A client closes a watcher.
    Leave(usize),
    /// A client stops or continues to read.
    Room(usize, bool),
    /// Other tasks run.
    Yield(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let revision = (
        prop::collection::vec((0..KEYS, prop::bool::weighted(0.7)), 1..4),
        0..3_i64,
    );
    prop_oneof![
        12 => prop::collection::vec(revision, 1..4).prop_map(Op::Apply),
        2 => (1..5_i64).prop_map(Op::Advance),
        1 => (1..20_000_u64).prop_map(Op::Wait),
        1 => (0..20_i64).prop_map(Op::Compact),
        1 => (0..14_000_u64).prop_map(Op::Resume),
        1 => (0..4_usize, 0..6_i64).prop_map(|(cause, by)| Op::Reload(cause, by)),
        5 => (0..3_usize, prop::collection::vec(0..INTERVALS.len(), 1..5), -30..6_i64)
            .prop_map(|(stream, intervals, from)| Op::Join(stream, intervals, from)),
        1 => (0..30_usize).prop_map(Op::Leave),
        2 => (0..3_usize, any::<bool>()).prop_map(|(stream, room)| Op::Room(stream, room)),
        4 => (0..6_usize).prop_map(Op::Yield),
    ]
}

struct Run {
    bench: Bench,
    model: Arc<Mutex<Model>>,
    streams: Vec<Stream>,
    limits: HistoryLimits,
}

impl Run {
    fn start(limits: HistoryLimits, bounds: &[(usize, u64)]) -> Run {
        let model = Arc::new(Mutex::new(Model {
            visible: 10,
            ..Model::default()
        }));
        let streams = bounds
            .iter()
            .map(|(events, bytes)| Stream::start(&model, *events, *bytes));
        Run {
            streams: streams.collect(),
            bench: Bench::new(limits),
            model,
            limits,
        }
    }

    /// Commits a revision to the model: puts (`true`) and deletes of keys by number. Returns its events.
    fn commit(model: &mut Model, revision: i64, keys: &[(usize, bool)]) -> Vec<Change> {
        let mut changes = Vec::new();
        let before = model.keys.clone();
        for (index, is_put) in keys {
            let name = key(*index).into_bytes();
            let old = model.keys.remove(&name);
            let mut replaced = before.get(&name).cloned();
            let change = if *is_put {
                let mut put = KeyValue::new(name.clone(), revision, format!("value {revision}"));
                if let Some(old) = old {
                    (put.create_revision, put.version) = (old.create_revision, old.version + 1);
                }
                if put.create_revision == revision {
                    replaced = None;
                }
                model.keys.insert(name, put.clone());
                Change::put(put.entry())
            } else if old.is_some() {
                Change::delete(KeyValue::deleted(name, revision).entry())
            } else {
                continue;
            };
            let event = Event {
                replaced,
                ..Event::from(&change)
            };
            model.events.push(event);
            changes.push(change);
        }
        changes
    }

    fn apply(&self, revisions: &[(Vec<(usize, bool)>, i64)]) {
        let mut model = self.model.lock();
        let mut changes = Vec::new();
        let mut revision = model.visible;
        for (keys, skipped) in revisions {
            revision += 1 + skipped;
            changes.extend(Run::commit(&mut model, revision, keys));
        }
        let epoch = self.bench.mirror.epoch();
        // The model first: a stream may get the events as soon as the mirror has them.
        match changes.last().map(Change::revision) {
            Some(last) => {
                model.visible = last;
                drop(model);
                self.bench.mirror.apply(epoch, changes, last).unwrap();
            }
            None => {
                model.visible = revision;
                drop(model);
                self.bench.mirror.advance(epoch, revision).unwrap();
            }
        }
    }

    fn reload(&self, cause: usize, by: i64) {
        let mirror = &self.bench.mirror;
        let epoch = mirror.epoch();
        let mut model = self.model.lock();
        let visible = model.visible;
        let compacted = ReaderEnd::Compacted {
            compact_revision: visible + by,
        };
        let ended = [
            compacted,
            ReaderEnd::Dropped(Reason::Loading),
            ReaderEnd::Dropped(Reason::Panicked),
            ReaderEnd::Replaced {
                revision: 1.max(visible),
            },
        ][cause];
        model.ended.push((ended, visible));
        model.load += 1;
        match ended {
            ReaderEnd::Dropped(Reason::Panicked) => mirror.end_epoch(epoch, Reason::Panicked).unwrap(),
            ReaderEnd::Replaced { .. } => mirror.end_epoch(epoch, Reason::Mismatch).unwrap(),
            _ => mirror.drop_contents(epoch, Reason::Loading, ended).unwrap(),
        }
        for revision in visible + 1..=visible + by {
            Run::commit(&mut model, revision, &[(0, true), (5, true)]);
        }
        model.visible += by;
        let (revision, keys) = (model.visible, model.keys.clone());
        drop(model);
        let tree = Tree::from_sorted(keys.values().map(KeyValue::entry).collect::<Vec<Entry>>());
        self.bench.load(tree, revision, self.limits);
    }

    async fn join(&self, stream: usize, intervals: &[usize], from: i64) {
        let stream = &self.streams[stream];
        let (first, load) = {
            let model = self.model.lock();
            ((model.visible + from).max(1), model.load)
        };
        let joins: Vec<_> = intervals
            .iter()
            .map(|at| join(INTERVALS[*at].0, INTERVALS[*at].1, first))
            .collect();
        let oldest = self.bench.mirror.oldest_revision().unwrap();
        match self.bench.fan_out.join(&stream.signal, None, joins.clone()).await {
            Ok(readers) => {
                let watchers = joins.into_iter().zip(readers).map(|(join, reader)| HubWatcher {
                    through: join.first_revision - 1,
                    progress: 0,
                    end: None,
                    load,
                    join,
                    reader,
                });
                stream.watchers.lock().extend(watchers);
                // As a stream does that has added watchers.
                stream.signal.set();
            }
            Err(refused) => {
                assert_eq!(refused, JoinRefused::Trimmed);
                assert!(first <= oldest, "{first} {oldest}");
            }
        }
    }

    async fn step(&self, op: Op) {
        let mirror = &self.bench.mirror;
        match op {
            Op::Apply(revisions) => self.apply(&revisions),
            Op::Advance(by) => {
                let to = {
                    let mut model = self.model.lock();
                    model.visible += by;
                    model.visible
                };
                mirror.advance(mirror.epoch(), to).unwrap();
            }
            Op::Wait(millis) => {
                tokio::time::sleep(Duration::from_millis(millis)).await;
                mirror.age();
            }
            Op::Compact(by) => mirror.compacted(self.model.lock().visible - by),
            Op::Resume(millis) => {
                mirror.lose_feed(mirror.epoch(), false).unwrap();
                tokio::time::sleep(Duration::from_millis(millis)).await;
                mirror.put_in_service(mirror.epoch()).unwrap();
            }
            Op::Reload(cause, by) => {
                self.reload(cause, by);
                // A load takes longer than the fan-out.
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            Op::Join(stream, intervals, from) => self.join(stream, &intervals, from).await,
            Op::Leave(at) => {
                let mut watchers = self.streams[at % 3].watchers.lock();
                if let Some(last) = watchers.len().checked_sub(1) {
                    watchers.remove(at.min(last));
                }
            }
            Op::Room(stream, has_room) => {
                self.streams[stream].has_room.store(has_room, Ordering::Relaxed);
                if has_room {
                    // As a connection does whose window opens.
                    self.streams[stream].signal.set();
                }
            }
            Op::Yield(times) => {
                for _ in 0..times {
                    tokio::task::yield_now().await;
                }
            }
        }
    }

    /// Without further input every watcher whose stream has room has everything.
    async fn check_end(&self) {
        let polls = || {
            let counts = self.streams.iter().map(|stream| &stream.polls);
            counts.map(|polls| polls.load(Ordering::Relaxed)).sum::<usize>()
        };
        // Less than a sweep of the fan-out.
        tokio::time::sleep(Duration::from_millis(400)).await;
        let model = self.model.lock();
        for stream in &self.streams {
            let has_room = stream.has_room.load(Ordering::Relaxed);
            for watcher in stream.watchers.lock().iter_mut() {
                let is_alive = watcher.end.is_none() && watcher.load == model.load;
                if has_room && is_alive {
                    let missing = model.expected(&watcher.join, watcher.through, model.visible);
                    assert_eq!(missing, [], "a lost wake-up, after {} polls", polls());
                }
                watcher.drain(&model, 1000, 1 << 20);
                let is_current = watcher.load == model.load && watcher.end.is_none();
                assert!(!is_current || watcher.reader.covered() >= model.visible);
                assert!(
                    watcher.load == model.load || watcher.end.is_some(),
                    "its load has ended"
                );
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn watchers_get_exactly_the_events_of_their_intervals(
        ops in prop::collection::vec(op(), 1..80),
        bounds in prop::collection::vec((1..6_usize, prop_oneof![Just(1_u64), Just(200), Just(1 << 20)]), 3),
        max_age in prop_oneof![Just(3600_u64), 1..30_u64],
        checkpoint_every_events in 1..40_usize,
    ) {
        let limits = HistoryLimits {
            max_age: Duration::from_secs(max_age),
            checkpoint_every_events,
            ..HistoryLimits::default()
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_time()
            .start_paused(true)
            .build()
            .unwrap();
        runtime.block_on(async {
            let run = Run::start(limits, &bounds);
            for op in ops {
                run.step(op).await;
            }
            run.check_end().await;
        });
    }
}

#[test]
fn intervals_of_the_model_name_keys() {
    let named = |interval: &(&str, &str)| {
        let join = join(interval.0, interval.1, 1);
        (0..KEYS)
            .filter(|index| contains(&join, &Bytes::from(key(*index))))
            .count()
    };
    assert_eq!(
        INTERVALS.iter().map(named).collect::<Vec<_>>(),
        [1, 1, 1, 0, 4, 4, 5, 9, 8, 1, 12, 0]
    );
}
