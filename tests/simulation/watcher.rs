//! A client that keeps watches open through the faults, continues them after each lost stream as etcd's own client does,
//! and records every stream for [`testkit::watch_rules`].

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use prost::Message as _;
use testkit::pb::{WatchCreateRequest, WatchResponse, prefix_end};
use testkit::watch_client::{Watch, WatchStream};
use testkit::watch_rules::Step;
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::auth::{Identity, Needs, Refusal, User};
use crate::caller::{HALVES, KEYS, PREFIX, authenticated, connect, key};
use crate::chance::Chance;
use crate::known::{Begin, Known};
use crate::members::From;
use crate::trace::Trace;

/// Watches of one client, at most.
const WATCHES: usize = 3;
/// Length of a long key without its prefix.
const LONG_KEY_BYTES: usize = 2_000;

/// Requests and responses of one stream.
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

/// A watch client; see the module.
pub struct Watcher {
    pub name: String,
    pub server: String,
    pub known: Arc<Known>,
    pub watched: Arc<Watched>,
    pub trace: Trace,
    pub chance: Chance,
    /// Whether some of its watches begin at long keys, which differ.
    pub has_long_keys: bool,
    /// User whose token its streams have.
    pub user: Option<User>,
    /// Bound on the time until the last writes have arrived.
    pub last_writes_timeout: Duration,
}

/// An open stream.
struct Open<'a> {
    of: &'a Watcher,
    stream: WatchStream,
    /// Identity whose token the stream has.
    identity: Option<Identity>,
    /// Creates without a `created`: when each was sent, and what it needs.
    creating: VecDeque<(Begin, Needs)>,
}

impl Watcher {
    /// Watches until `stop`, and then until each watch has got one of the last writes.
    pub async fn run(self, stop: CancellationToken) {
        let mut watches = Vec::new();
        while !stop.is_cancelled() {
            let end = Instant::now() + self.chance.millis(200..8_000);
            watches = self.stream(watches, end, &stop).await;
        }
        let end = Instant::now() + self.last_writes_timeout;
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
        // One that wants no deletes, and continues behind the puts, is owed nothing.
        let wants_deletes = !watch.create.filters.contains(&1);
        last_writes
            .is_some_and(|[puts, deletes]| watch.has([puts, if wants_deletes { deletes } else { puts }]))
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
        let (client, identity) = authenticated(client, self.user).await;
        let opened = self.known.history();
        let mut open = Open {
            of: self,
            stream: WatchStream::open(&client),
            identity,
            creating: VecDeque::new(),
        };
        for watch in watches {
            open.create(watch);
        }
        if !open.stream.is_creating() {
            open.create(self.new_watch());
        }
        open.run(end, stop).await;
        self.trace.line(format!(
            "{}: the stream ends: {:?}",
            self.name,
            open.stream.stream.end()
        ));
        let refused = open.stream.take_refused();
        if open.stream.stream.end().is_some() || !refused.is_empty() {
            sleep(Duration::from_millis(50)).await;
        }
        let (steps, mut watches) = open.stream.close();
        // Those that need a new token alone are created again.
        let needs_token = |reason: &str| Refusal::with_reason(reason).is_some_and(Refusal::needs_token);
        let again = refused
            .into_iter()
            .filter(|(_, reason)| self.user.is_some() && needs_token(reason));
        watches.extend(again.map(|(watch, _)| watch));
        self.watched.transcripts.lock().push(Transcript {
            name: self.name.clone(),
            steps,
            histories: (opened, self.known.history()),
        });
        watches
    }

    fn new_watch(&self) -> Watch {
        let chance = &self.chance;
        let first = key(chance.below(KEYS));
        let half = HALVES[chance.below(2)];
        let (key, range_end) = match chance.below(7) {
            0 if self.has_long_keys => {
                // Before all keys, so that it gets the last writes.
                let number = chance.below(1_000);
                (format!("{PREFIX}{number:0LONG_KEY_BYTES$}").into(), vec![0])
            }
            0 => (first.into(), Vec::new()),
            1 => (vec![0], vec![0]),
            2 => (first.into(), vec![0]),
            3 | 4 => (half.into(), prefix_end(half.as_bytes())),
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
        Watch::new(WatchCreateRequest {
            key,
            range_end,
            start_revision,
            progress_notify: chance.one_in(2),
            filters,
            prev_kv: chance.one_in(2),
            watch_id: i64::from(chance.one_in(3)),
            fragment: chance.one_in(2),
        })
    }
}

impl Open<'_> {
    async fn run(&mut self, end: Instant, stop: &CancellationToken) {
        let chance = &self.of.chance;
        let mut closing = end;
        while self.stream.stream.end().is_none() {
            let is_last = stop.is_cancelled();
            if is_last && self.stream.watches().all(|watch| self.of.is_complete(watch)) {
                return;
            }
            if Instant::now() >= end || (self.stream.has_cancelled() && Instant::now() >= closing) {
                return;
            }
            let pause = chance.millis(5..400);
            match timeout(pause, self.stream.stream.next()).await {
                Ok(Some(message)) => {
                    let response = WatchResponse::decode(message).expect("decodes");
                    let is_compacted = response.compact_revision != 0;
                    let refusal = Refusal::with_reason(&response.cancel_reason);
                    self.received(response);
                    if refusal.is_some_and(Refusal::needs_token) {
                        return;
                    }
                    if is_compacted && self.stream.is_creating() {
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
            0..5 => self.do_and_trace(WatchStream::ask_for_progress),
            // After a cancel the server may be at another history, which is another stream's.
            5..8 if self.stream.watches().count() < WATCHES && !self.stream.has_cancelled() => {
                self.create(self.of.new_watch());
            }
            8 => self.do_and_trace(WatchStream::cancel_one),
            _ => {}
        }
    }

    fn create(&mut self, watch: Watch) {
        let begin = self.of.known.begin_as(From::Rangecache, self.identity);
        let needs = Needs::to_watch(&watch.create);
        self.creating.push_back((begin, needs));
        self.do_and_trace(|stream| stream.create(watch));
    }

    fn received(&mut self, response: WatchResponse) {
        let header = response.header.as_ref().map_or(0, |header| header.revision);
        if response.created
            && let Some((begin, needs)) = self.creating.pop_front()
        {
            let known = &self.of.known;
            match Refusal::with_reason(&response.cancel_reason) {
                Some(refusal) => known.judge_refusal(&begin, &[needs], true, refusal),
                None if !response.canceled => known.judge_watch(&begin, needs),
                None => {}
            }
        }
        // After a restore a stream may show the history before, of which no call may be judged.
        let begin = self.of.known.begin(From::Rangecache);
        if begin.is_of_first_history() {
            self.of.known.show(&begin, header, 0);
        }
        self.do_and_trace(|stream| stream.received(response));
    }

    /// Adds what this sends or receives to the trace.
    fn do_and_trace(&mut self, what: impl FnOnce(&mut WatchStream)) {
        let before = self.stream.steps().len();
        what(&mut self.stream);
        for step in &self.stream.steps()[before..] {
            self.of.trace.line(format!("{}: {step:?}", self.of.name));
        }
    }
}
