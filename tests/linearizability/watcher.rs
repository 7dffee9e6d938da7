//! A client that keeps watches open through the faults, continues them after each lost stream as etcd's own client does,
//! and records every stream for [`testkit::watch_rules`].

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use prost::Message;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use tokio::time::{Instant, sleep, timeout};

use crate::client::{KEYS, PREFIX, Shared, name};
use testkit::grpc::Client;
use testkit::pb::{WatchCreateRequest, WatchResponse, prefix_end};
use testkit::wait::SOON;
use testkit::watch_client::{Watch, WatchStream};
use testkit::watch_rules::Step;

/// Watches of one client, at most.
const WATCHES: usize = 4;
/// Watches of the past go back so many revisions; Compacts of the clients meet some of them.
const BACK: i64 = 200;

/// Requests and responses of one stream.
pub struct Transcript {
    /// Client and server.
    pub name: String,
    pub steps: Vec<Step>,
    /// Number of the history in which the stream was opened, and of the one in which it ended.
    pub segments: (usize, usize),
}

impl Transcript {
    /// Number of events received.
    pub fn events(&self) -> usize {
        let events = |step: &Step| match step {
            Step::Received(response) => response.events.len(),
            _ => 0,
        };
        self.steps.iter().map(events).sum()
    }
}

/// State shared by all watch clients.
#[derive(Default)]
pub struct Watched {
    pub transcripts: Mutex<Vec<Transcript>>,
    /// Watches that did not get the last writes.
    pub silent: Mutex<Vec<String>>,
    /// Revisions of the first and the last of the last writes, which put and delete every key.
    pub last_writes: Mutex<Option<[i64; 2]>>,
}

/// A watch client; see the module.
pub struct Watcher {
    shared: Arc<Shared>,
    watched: Arc<Watched>,
    name: String,
    /// Servers: the first, and the next one after each failure.
    urls: Vec<String>,
    at: usize,
    random: StdRng,
    watches: Vec<Watch>,
}

impl Watcher {
    pub fn new(
        shared: &Arc<Shared>,
        watched: &Arc<Watched>,
        number: usize,
        via: &str,
        urls: Vec<String>,
        seed: u64,
    ) -> Self {
        Self {
            shared: shared.clone(),
            watched: watched.clone(),
            name: format!("watch client {number} of {via}"),
            at: number % urls.len(),
            urls,
            random: StdRng::seed_from_u64(seed.wrapping_mul(1000).wrapping_add(500 + number as u64)),
            watches: Vec::new(),
        }
    }

    /// Watches until the clients are stopped, and then until each watch has got one of the last writes.
    pub async fn run(mut self) {
        while !self.shared.stop.load(Ordering::SeqCst) {
            let length = Duration::from_millis(self.random.random_range(200..8_000));
            self.stream(Instant::now() + length).await;
        }
        let end = Instant::now() + SOON;
        while Instant::now() < end && !self.has_last_writes() {
            self.stream(end).await;
        }
        for watch in self.watches.iter().filter(|watch| !self.is_complete(watch)) {
            let what = format!("{}: {:?} ends at {}", self.name, watch.create, watch.last);
            self.watched.silent.lock().push(what);
        }
    }

    /// Whether a watch got one of the last writes. One that continues where a replaced history had been gets none.
    fn is_complete(&self, watch: &Watch) -> bool {
        let last_writes = *self.watched.last_writes.lock();
        last_writes.is_some_and(|writes| watch.has(writes))
    }

    fn has_last_writes(&self) -> bool {
        self.watches.iter().all(|watch| self.is_complete(watch))
    }

    /// Opens a stream for all watches, and uses it until `end`, or until it ends.
    async fn stream(&mut self, end: Instant) {
        let url = &self.urls[self.at % self.urls.len()];
        let Ok(Ok(mut client)) = timeout(Duration::from_secs(1), Client::try_connect(url)).await else {
            self.at += 1;
            return sleep(Duration::from_millis(20)).await;
        };
        if self.random.random_ratio(1, 3) {
            client = client.with_metadata("hasleader", "true");
        }
        let opened = self.shared.segment.load(Ordering::SeqCst);
        let mut open = WatchStream::open(&client);
        for watch in std::mem::take(&mut self.watches) {
            open.create(watch);
        }
        if !open.is_creating() {
            let watch = self.new_watch();
            open.create(watch);
        }
        self.use_stream(&mut open, end).await;
        if open.stream.end().is_some() {
            self.at += 1;
            sleep(Duration::from_millis(50)).await;
        }
        let name = format!("{}, which ended with {:?}", self.name, open.stream.end());
        let (steps, watches) = open.close();
        self.watches = watches;
        let transcript = Transcript {
            name,
            steps,
            segments: (opened, self.shared.segment.load(Ordering::SeqCst)),
        };
        self.watched.transcripts.lock().push(transcript);
    }

    async fn use_stream(&mut self, open: &mut WatchStream, end: Instant) {
        let mut closing = end;
        while open.stream.end().is_none() {
            let is_last = self.shared.stop.load(Ordering::SeqCst);
            if is_last && open.watches().all(|watch| self.is_complete(watch)) {
                return;
            }
            if Instant::now() >= end || (open.has_cancelled() && Instant::now() >= closing) {
                return;
            }
            let pause = Duration::from_millis(self.random.random_range(5..400));
            match timeout(pause, open.stream.next()).await {
                Ok(Some(message)) => {
                    let response = WatchResponse::decode(message).expect("decodes");
                    let is_compacted = response.compact_revision != 0;
                    open.received(response);
                    if is_compacted && open.is_creating() {
                        // What the server creates now may be of another history, which is another stream's.
                        return;
                    }
                    if is_compacted {
                        closing = closing.min(Instant::now() + Duration::from_millis(300));
                    }
                    if self.random.random_ratio(1, 300) {
                        // A slow client.
                        sleep(pause).await;
                    }
                }
                Ok(None) => return,
                Err(_) => {}
            }
            if !is_last && self.random.random_ratio(1, 50) {
                self.act(open);
            }
        }
    }

    fn act(&mut self, open: &mut WatchStream) {
        match self.random.random_range(0..10) {
            0..6 => open.ask_for_progress(),
            // After a cancel the server may be at another history, which is another stream's.
            6..8 if open.watches().count() < WATCHES && !open.has_cancelled() => {
                let watch = self.new_watch();
                open.create(watch);
            }
            8 => open.cancel_one(),
            _ => {}
        }
    }

    fn new_watch(&mut self) -> Watch {
        let key = name(self.random.random_range(0..KEYS));
        let (key, range_end) = match self.random.random_range(0..5) {
            0 => (key.into(), Vec::new()),
            1 => (vec![0], vec![0]),
            2 => (key.into(), vec![0]),
            _ => (PREFIX.into(), prefix_end(PREFIX.as_bytes())),
        };
        let newest = self.shared.newest.load(Ordering::SeqCst);
        let start_revision = match self.random.random_range(0..3) {
            0 => 0,
            1 => (newest - self.random.random_range(0..BACK)).max(1),
            _ => newest + 1,
        };
        let filters = match self.random.random_range(0..6) {
            0 => vec![0],
            1 => vec![1],
            _ => Vec::new(),
        };
        Watch::new(WatchCreateRequest {
            key,
            range_end,
            start_revision,
            progress_notify: self.random.random(),
            filters,
            prev_kv: self.random.random(),
            watch_id: i64::from(self.random.random_ratio(1, 3)),
            fragment: self.random.random(),
        })
    }
}
