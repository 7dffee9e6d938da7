//! The watchers: each resumes as etcd's clients do, and checks what it gets.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use testkit::pb::WatchCreateRequest;
use tokio::runtime::Handle;
use tokio::task::JoinSet;

use super::carrier::Carrier;
use super::run::Run;
use super::shared::Shared;
use super::truth::{EVERYTHING, Mark, RANGES, interval};
use crate::client::Windows;
use crate::load::nanoseconds;
use crate::watch_message::{Event, Response};
use crate::watchers::Stream;

/// Watchers of a stream that has several.
const PER_STREAM: usize = 10;
/// Streams of one connection.
const PER_CONNECTION: usize = 500;
/// Pause of a slow client after each response.
const SLOW_PAUSE: Duration = Duration::from_millis(50);
/// Time for which a client reads that stalls afterwards.
const READS_FOR: Duration = Duration::from_secs(5);
/// Clients of each other pace. They watch everything.
const OF_EACH_PACE: usize = 4;
/// Paces other than prompt. What the longest stall misses is compacted sometimes.
const PACES: [Pace; 3] = [
    Pace::Slow,
    Pace::Stalls(Duration::from_secs(12)),
    Pace::Stalls(Duration::from_secs(35)),
];
/// Receive windows of clients that read slowly.
const SMALL: Windows = Windows {
    stream_bytes: 65_535,
    connection_bytes: 65_535,
};
/// Pause before a stream that has ended is opened again.
const REOPEN: Duration = Duration::from_millis(100);
/// Timeout of the first `created` of all streams.
const CREATED: Duration = Duration::from_secs(60);
/// Number of events of which one has its latency kept.
const SAMPLED: u64 = 16;

/// Pace at which a client reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    Prompt,
    Slow,
    /// The client repeatedly reads nothing for this long.
    Stalls(Duration),
}

/// Watcher with the events that it has received.
#[derive(Debug)]
struct Watcher {
    range: usize,
    /// Revision from which it resumes.
    next: i64,
    run: Run,
    /// Runs before a compaction that a client has slept through.
    ended: Vec<Run>,
}

/// Counts and latencies of the events that the watchers of one stream have received since they were last taken.
#[derive(Debug, Default)]
pub(super) struct Received {
    pub(super) events: u64,
    pub(super) resumed: u64,
    pub(super) compacted: u64,
    pub(super) latencies_ns: Vec<u64>,
}

/// State of one stream, over all calls that carry it.
#[derive(Debug)]
struct State {
    pace: Pace,
    watchers: Vec<Watcher>,
    created: usize,
    received: Received,
    violations: Vec<String>,
}

/// All watchers.
pub(super) struct Group {
    streams: Vec<Arc<Mutex<State>>>,
    delivered: Mutex<u64>,
}

impl Group {
    /// Opens the streams, in the runtime `on`: half of the watchers have one each, the others share one with nine more.
    pub(super) async fn open(
        address: SocketAddr,
        shared: &Arc<Shared>,
        watchers: usize,
        tasks: &mut JoinSet<Result<()>>,
        on: &Handle,
    ) -> Result<Group> {
        let mut streams = Vec::new();
        let alone = watchers / 2;
        let ranges = (0..watchers).map(|number| number % RANGES).collect::<Vec<_>>();
        let (own, others) = ranges.split_at(alone);
        let of_one = own.iter().map(std::slice::from_ref);
        for ranges in of_one.chain(others.chunks(PER_STREAM)) {
            streams.push(State::new(Pace::Prompt, ranges, shared));
        }
        let prompt = streams.len();
        for pace in PACES {
            streams.extend((0..OF_EACH_PACE).map(|_| State::new(pace, &[EVERYTHING], shared)));
        }
        let mut carriers = Vec::new();
        for _ in 0..prompt.div_ceil(PER_CONNECTION) {
            let carrier = on.spawn(Carrier::open(address, Windows::LARGE));
            carriers.push(Arc::new(carrier.await??));
        }
        let streams: Vec<_> = streams
            .into_iter()
            .map(|state| Arc::new(Mutex::new(state)))
            .collect();
        for (number, state) in streams.iter().enumerate() {
            let carrier = if number < prompt {
                carriers[number / PER_CONNECTION].clone()
            } else {
                // Its connection has no room while it does not read.
                Arc::new(on.spawn(Carrier::open(address, SMALL)).await??)
            };
            tasks.spawn_on(follow(carrier, state.clone(), shared.clone()), on);
        }
        let group = Group {
            streams,
            delivered: Mutex::new(0),
        };
        let all = async {
            while group.streams.iter().any(|state| state.lock().created == 0) {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(CREATED, all)
            .await
            .context("not every watcher was created")?;
        Ok(group)
    }

    pub(super) fn streams(&self) -> usize {
        self.streams.len()
    }

    pub(super) fn watchers(&self) -> usize {
        self.streams.iter().map(|state| state.lock().watchers.len()).sum()
    }

    /// Takes the counts and latencies since the last call, summed over all streams.
    pub(super) fn take(&self) -> Received {
        let mut sum = Received::default();
        for state in &self.streams {
            let received = std::mem::take(&mut state.lock().received);
            sum.events += received.events;
            sum.resumed += received.resumed;
            sum.compacted += received.compacted;
            sum.latencies_ns.extend(received.latencies_ns);
        }
        *self.delivered.lock() += sum.events;
        sum
    }

    /// Events that all watchers have received.
    pub(super) fn delivered(&self) -> u64 {
        self.take();
        *self.delivered.lock()
    }

    /// Events that the watcher which is furthest behind still has to get; until the end, of those that read promptly.
    pub(super) fn behind(&self, shared: &Shared) -> usize {
        let of = |state: &Arc<Mutex<State>>| {
            let state = state.lock();
            let watchers = state.watchers.iter();
            let behind =
                watchers.map(|watcher| shared.truth.after(watcher.range, watcher.run.last, <[Mark]>::len));
            let is_counted = state.pace == Pace::Prompt || shared.is_over.load(Ordering::Relaxed);
            behind.max().filter(|_| is_counted)
        };
        self.streams.iter().filter_map(of).max().unwrap_or(0)
    }

    /// Compares what was received with etcd's history as far as that is known; returns what is wrong.
    pub(super) fn verify(&self, shared: &Shared) -> Vec<String> {
        let known = shared.truth.known();
        let mut violations = Vec::new();
        for (number, state) in self.streams.iter().enumerate() {
            let mut state = state.lock();
            violations.append(&mut state.violations);
            for watcher in &mut state.watchers {
                let range = watcher.range;
                for run in std::mem::take(&mut watcher.ended) {
                    let differs = shared.truth.after(range, run.after, |marks| run.differs(marks));
                    violations.extend(differs.map(|what| format!("stream {number}, range {range}: {what}")));
                }
                let run = watcher.run;
                if run.last > known {
                    continue;
                }
                let differs = shared.truth.after(range, run.after, |marks| run.differs(marks));
                violations.extend(differs.map(|what| format!("stream {number}, range {range}: {what}")));
                watcher.run = Run::new(run.last);
            }
        }
        violations
    }

    /// Watchers that have not got the last events of their range.
    pub(super) fn missing(&self, shared: &Shared) -> Vec<String> {
        let mut missing = Vec::new();
        for (number, state) in self.streams.iter().enumerate() {
            for watcher in &state.lock().watchers {
                let last = watcher.run.last;
                let behind = shared.truth.after(watcher.range, last, <[Mark]>::len);
                if behind > 0 {
                    let range = watcher.range;
                    missing.push(format!(
                        "stream {number}, range {range}: {behind} events after {last} are missing"
                    ));
                }
            }
        }
        missing
    }
}

impl State {
    fn new(pace: Pace, ranges: &[usize], shared: &Shared) -> State {
        let base = shared.truth.base;
        let watchers = ranges.iter().map(|range| Watcher {
            range: *range,
            next: base + 1,
            run: Run::new(base),
            ended: Vec::new(),
        });
        State {
            pace,
            watchers: watchers.collect(),
            created: 0,
            received: Received::default(),
            violations: Vec::new(),
        }
    }

    /// The create requests with which the watchers begin, or resume. Ids are positions, from 1.
    fn creates(&self) -> Vec<WatchCreateRequest> {
        let creates = (1..).zip(&self.watchers).map(|(watch_id, watcher)| {
            let (key, range_end) = interval(watcher.range);
            WatchCreateRequest {
                key,
                range_end,
                start_revision: watcher.next,
                watch_id,
                progress_notify: true,
                ..WatchCreateRequest::default()
            }
        });
        creates.collect()
    }

    /// Handles one response; returns whether the stream continues.
    fn handle(&mut self, message: &[u8], shared: &Shared) -> bool {
        let response = Response::of(message);
        if response.canceled {
            return self.canceled(&response, shared);
        }
        if response.created {
            self.created += 1;
            return true;
        }
        let position = usize::try_from(response.watch_id - 1).ok();
        let Some(watcher) = position.and_then(|position| self.watchers.get_mut(position)) else {
            self.violations
                .push(format!("a response for watcher {}", response.watch_id));
            return false;
        };
        let now = nanoseconds(shared.epoch.elapsed());
        let mut events = 0;
        for event in response.events() {
            events += 1;
            let Some(Event {
                revision,
                number,
                made_ns,
                ..
            }) = event
            else {
                self.violations.push("an event that no put has made".to_owned());
                return false;
            };
            if revision < watcher.next {
                let range = watcher.range;
                self.violations.push(format!(
                    "range {range}: revision {revision} repeats, or is late: the next was to be {} or above",
                    watcher.next
                ));
                return false;
            }
            watcher.run.add((revision, number));
            watcher.next = revision + 1;
            if number.is_multiple_of(SAMPLED) && self.pace == Pace::Prompt {
                self.received.latencies_ns.extend(now.checked_sub(made_ns));
            }
        }
        self.received.events += events;
        if events == 0 {
            // As etcd's client: a progress notification covers all that is not above it.
            watcher.next = watcher.next.max(response.revision + 1);
        }
        true
    }

    /// A cancel is right only for a client that has slept until what it needs was compacted.
    fn canceled(&mut self, response: &Response<'_>, shared: &Shared) -> bool {
        let position = usize::try_from(response.watch_id - 1).unwrap_or(0);
        let (compacted, pace) = (response.compact_revision, self.pace);
        let Some(watcher) = self.watchers.get_mut(position) else {
            self.violations.push("a cancel of no watcher".to_owned());
            return false;
        };
        let is_right = compacted > watcher.next && compacted <= shared.compacted.load(Ordering::Relaxed);
        if pace == Pace::Prompt || !is_right {
            self.violations.push(format!(
                "{pace:?}, range {}: cancelled at {} with compact_revision {compacted}",
                watcher.range, watcher.next
            ));
            return false;
        }
        self.received.compacted += 1;
        watcher.ended.push(watcher.run);
        watcher.next = compacted;
        watcher.run = Run::new(compacted - 1);
        false
    }
}

/// Keeps one stream open.
async fn follow(carrier: Arc<Carrier>, state: Arc<Mutex<State>>, shared: Arc<Shared>) -> Result<()> {
    loop {
        let creates = state.lock().creates();
        if let Ok((mut stream, _connection)) = carrier.stream(creates).await {
            read(&mut stream, &state, &shared).await;
        }
        if !state.lock().violations.is_empty() {
            // The violation is reported; nothing that follows would be news.
            return std::future::pending().await;
        }
        state.lock().received.resumed += 1;
        tokio::time::sleep(REOPEN).await;
    }
}

/// Reads a stream at its pace until it ends.
async fn read(stream: &mut Stream, state: &Mutex<State>, shared: &Shared) {
    let pace = state.lock().pace;
    let is_over = || shared.is_over.load(Ordering::Relaxed);
    let mut reads_since = tokio::time::Instant::now();
    while let Ok(Some(message)) = stream.next().await {
        if !state.lock().handle(&message, shared) {
            return;
        }
        match pace {
            _ if is_over() => {}
            Pace::Prompt => {}
            Pace::Slow => tokio::time::sleep(SLOW_PAUSE).await,
            Pace::Stalls(duration) if reads_since.elapsed() > READS_FOR => {
                tokio::time::sleep(duration).await;
                reads_since = tokio::time::Instant::now();
            }
            Pace::Stalls(_) => {}
        }
    }
}
