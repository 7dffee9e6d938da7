//! A client that keeps watches open through the faults, continues them after each lost stream as etcd's own client does,
//! and records every stream for [`testkit::watch_rules`].

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prost::Message as _;
use testkit::grpc::Stream;
use testkit::kv::WATCH;
use testkit::pb::{
    WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse, prefix_end,
};
use testkit::watch_rules::{NO_ID, Step, is_progress, revision};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::caller::{KEYS, PREFIX, connect, key};
use crate::chance::Chance;
use crate::known::Known;
use crate::members::From;
use crate::trace::Trace;

/// Watches of one client, at most.
const WATCHES: usize = 3;
/// Bound on the time until the last writes have arrived.
const LAST_WRITES_TIMEOUT: Duration = Duration::from_secs(60);

/// What one stream sent and received.
pub struct Transcript {
    pub name: String,
    pub steps: Vec<Step>,
    /// Numbers of the histories in which the stream was opened and ended.
    pub histories: (usize, usize),
}

/// State shared by all watch clients.
#[derive(Default)]
pub struct Watched {
    pub transcripts: Mutex<Vec<Transcript>>,
    /// Revisions of the last writes, which put and delete every key.
    pub last_writes: Mutex<Option<[i64; 2]>>,
}

/// A watch, continued over streams.
struct Watch {
    /// `start_revision` is where the next stream continues.
    create: WatchCreateRequest,
    /// Revision of the last event.
    last: i64,
}

/// A watch client; see the module.
pub struct Watcher {
    pub name: String,
    pub server: String,
    pub known: Arc<Known>,
    pub watched: Arc<Watched>,
    pub trace: Trace,
    pub chance: Chance,
}

/// An open stream.
struct Open<'a> {
    of: &'a Watcher,
    stream: Stream,
    steps: Vec<Step>,
    /// Creates without a `created`.
    creating: VecDeque<Watch>,
    watches: BTreeMap<i64, Watch>,
    /// Watches that the server cancelled.
    cancelled: Vec<Watch>,
    /// Explicit ids given so far.
    ids: i64,
}

impl Watcher {
    /// Watches until `stop`, and then until each watch has got one of the last writes.
    pub async fn run(self, stop: CancellationToken) {
        let mut watches = Vec::new();
        while !stop.is_cancelled() {
            let end = Instant::now() + self.chance.millis(200..8_000);
            watches = self.stream(watches, end, &stop).await;
        }
        let end = Instant::now() + LAST_WRITES_TIMEOUT;
        while Instant::now() < end && !watches.iter().all(|watch| self.is_complete(watch)) {
            watches = self.stream(watches, end, &stop).await;
        }
        for watch in watches.iter().filter(|watch| !self.is_complete(watch)) {
            let (name, create, last) = (&self.name, &watch.create, watch.last);
            self.known.violation(format!(
                "{name}: {create:?} ends at {last}, without the last writes"
            ));
        }
    }

    /// Whether a watch got one of the last writes. One that continues where a replaced history had been gets none.
    fn is_complete(&self, watch: &Watch) -> bool {
        let last_writes = *self.watched.last_writes.lock();
        last_writes.is_some_and(|[first, last]| watch.last >= first || watch.create.start_revision > last)
    }

    /// Opens a stream for all watches, and uses it until `end`, or until it ends.
    async fn stream(&self, watches: Vec<Watch>, end: Instant, stop: &CancellationToken) -> Vec<Watch> {
        let Some(client) = connect(&self.server).await else {
            sleep(Duration::from_millis(50)).await;
            return watches;
        };
        let client = if self.chance.one_in(3) {
            client.with_metadata("hasleader", "true")
        } else {
            client
        };
        let opened = self.known.history();
        let mut open = Open {
            of: self,
            stream: client.open(WATCH),
            steps: Vec::new(),
            creating: VecDeque::new(),
            watches: BTreeMap::new(),
            cancelled: Vec::new(),
            ids: 0,
        };
        for watch in watches {
            open.create(watch);
        }
        if open.creating.is_empty() {
            open.create(self.new_watch());
        }
        open.run(end, stop).await;
        self.trace
            .line(format!("{}: the stream ends: {:?}", self.name, open.stream.end()));
        if open.stream.end().is_some() {
            sleep(Duration::from_millis(50)).await;
        }
        self.watched.transcripts.lock().push(Transcript {
            name: self.name.clone(),
            steps: open.steps,
            histories: (opened, self.known.history()),
        });
        let mut watches = Vec::from(open.creating);
        watches.extend(open.watches.into_values());
        watches.extend(open.cancelled);
        watches
    }

    fn new_watch(&self) -> Watch {
        let chance = &self.chance;
        let first = key(chance.below(KEYS));
        let (key, range_end) = match chance.below(5) {
            0 => (first.into(), Vec::new()),
            1 => (vec![0], vec![0]),
            2 => (first.into(), vec![0]),
            _ => (PREFIX.into(), prefix_end(PREFIX.as_bytes())),
        };
        let newest = self.known.begin(From::Rangecache).floor.revision;
        let start_revision = match chance.below(3) {
            0 => 0,
            1 => (newest - chance.within(0..40)).max(1),
            _ => newest + 1,
        };
        let filters = match chance.below(6) {
            0 => vec![0],
            1 => vec![1],
            _ => Vec::new(),
        };
        Watch {
            create: WatchCreateRequest {
                key,
                range_end,
                start_revision,
                progress_notify: chance.one_in(2),
                filters,
                prev_kv: chance.one_in(2),
                watch_id: i64::from(chance.one_in(3)),
                fragment: chance.one_in(2),
            },
            last: 0,
        }
    }
}

impl Open<'_> {
    async fn run(&mut self, end: Instant, stop: &CancellationToken) {
        let chance = &self.of.chance;
        let mut closing = end;
        while self.stream.end().is_none() {
            let is_last = stop.is_cancelled();
            let mut all = self.watches.values().chain(&self.creating);
            if is_last && all.all(|watch| self.of.is_complete(watch)) {
                return;
            }
            if Instant::now() >= end || (!self.cancelled.is_empty() && Instant::now() >= closing) {
                return;
            }
            let pause = chance.millis(5..400);
            match timeout(pause, self.stream.next()).await {
                Ok(Some(message)) => {
                    let response = WatchResponse::decode(message).expect("decodes");
                    let is_compacted = response.compact_revision != 0;
                    self.received(response);
                    if is_compacted && !self.creating.is_empty() {
                        // What the server creates now may be of another history, which is another stream's.
                        return;
                    }
                    if is_compacted {
                        closing = closing.min(Instant::now() + Duration::from_millis(300));
                    }
                    if chance.one_in(60) {
                        // A slow client.
                        sleep(pause).await;
                    }
                }
                Ok(None) => return,
                Err(_) => {}
            }
            if !is_last && chance.one_in(12) {
                self.act();
            }
        }
    }

    fn act(&mut self) {
        match self.of.chance.below(10) {
            0..5 => self.send(WatchRequest {
                progress_request: Some(WatchProgressRequest {}),
                ..WatchRequest::default()
            }),
            // After a cancel the server may be at another history, which is another stream's.
            5..8 if self.watches.len() + self.creating.len() < WATCHES && self.cancelled.is_empty() => {
                self.create(self.of.new_watch());
            }
            8 if self.watches.len() > 1 => {
                let id = self.watches.keys().next().copied();
                if let Some(watch_id) = id {
                    self.watches.remove(&watch_id);
                    self.send(WatchRequest {
                        cancel_request: Some(WatchCancelRequest { watch_id }),
                        ..WatchRequest::default()
                    });
                }
            }
            _ => {}
        }
    }

    fn send(&mut self, request: WatchRequest) {
        self.of.trace.line(format!("{}: {request:?}", self.of.name));
        self.stream.send(&request);
        self.steps.push(Step::Sent(request));
    }

    /// Creates a watch; those with an explicit id get one that no automatic id reaches.
    fn create(&mut self, mut watch: Watch) {
        if watch.create.watch_id != 0 {
            self.ids += 1;
            watch.create.watch_id = 1_000 + self.ids;
        }
        self.send(WatchRequest {
            create_request: Some(watch.create.clone()),
            ..WatchRequest::default()
        });
        self.creating.push_back(watch);
    }

    fn received(&mut self, response: WatchResponse) {
        self.of.trace.line(format!("{}: {response:?}", self.of.name));
        let id = response.watch_id;
        let header = response.header.as_ref().map_or(0, |header| header.revision);
        // After a restore a stream may show the history before, of which no call may be judged.
        let begin = self.of.known.begin(From::Rangecache);
        if begin.is_of_first_history() {
            self.of.known.show(&begin, header, 0);
        }
        if response.created {
            let mut watch = self.creating.pop_front().expect("a create");
            if watch.create.start_revision == 0 {
                watch.create.start_revision = header + 1;
            }
            if response.canceled {
                self.cancelled.push(watch);
            } else {
                self.watches.insert(id, watch);
            }
        } else if response.canceled {
            if let Some(mut watch) = self.watches.remove(&id) {
                // The client lists again.
                watch.create.start_revision = response.compact_revision;
                watch.last = 0;
                self.cancelled.push(watch);
            }
        } else if is_progress(&response) {
            let all = self.watches.iter_mut();
            for (_, watch) in all.filter(|(of, _)| id == NO_ID || **of == id) {
                watch.create.start_revision = watch.create.start_revision.max(header + 1);
            }
        } else if !response.fragment
            && let (Some(watch), Some(event)) = (self.watches.get_mut(&id), response.events.last())
        {
            watch.last = revision(event);
            watch.create.start_revision = watch.create.start_revision.max(watch.last + 1);
        }
        self.steps.push(Step::Received(response));
    }
}
