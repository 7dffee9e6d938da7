//! Watches every member directly and records etcd's changes by revision, which shows the outcome of writes whose
//! responses were lost.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::history::History;
use testkit::grpc::Client;
use testkit::kv::WATCH;
use testkit::pb::{Event, WatchCreateRequest, WatchRequest, WatchResponse};
use testkit::wait::{SOON, until};

/// etcd's event type DELETE.
const DELETE: i32 = 1;

/// A running recorder; see the module. Dropping it stops it.
pub struct Recorder {
    log: Arc<Log>,
    watches: JoinSet<()>,
}

struct Log {
    history: Arc<History>,
    segment: usize,
    seen: Mutex<Seen>,
}

struct Seen {
    /// Every revision up to this one is recorded.
    whole: i64,
    /// Later revisions, received out of order.
    ahead: BTreeSet<i64>,
    /// Events by revision.
    events: BTreeMap<i64, Vec<Event>>,
}

impl Recorder {
    /// Starts after a revision. `segment` is the number of the history.
    pub fn start(history: &Arc<History>, members: &[String], segment: usize, revision: i64) -> Self {
        history.set_recorded(revision);
        let log = Arc::new(Log {
            history: history.clone(),
            segment,
            seen: Mutex::new(Seen {
                whole: revision,
                ahead: BTreeSet::new(),
                events: BTreeMap::new(),
            }),
        });
        let mut watches = JoinSet::new();
        for member in members {
            watches.spawn(watch(member.clone(), log.clone()));
        }
        Self { log, watches }
    }

    /// Watches another member, too.
    pub fn also_watch(&mut self, member: &str) {
        self.watches.spawn(watch(member.to_owned(), self.log.clone()));
    }

    /// The revision up to which all are recorded.
    pub fn revision(&self) -> i64 {
        self.log.seen.lock().whole
    }

    /// Stops watching, and returns all events since the start, in order.
    pub async fn stop(&mut self) -> Vec<Event> {
        self.watches.shutdown().await;
        let events = std::mem::take(&mut self.log.seen.lock().events);
        events.into_values().flatten().collect()
    }

    /// Waits until every revision up to this one is recorded.
    pub async fn reaches(&self, revision: i64) {
        until(SOON, "the recorder has seen every revision", async || {
            (self.revision() >= revision).then_some(())
        })
        .await;
    }
}

/// Watches one member, reconnecting after failures.
async fn watch(member: String, log: Arc<Log>) {
    loop {
        if let Ok(Ok(client)) = timeout(Duration::from_secs(1), Client::try_connect(&member)).await {
            let mut stream = client.open(WATCH);
            // All keys, so that every revision is seen.
            stream.send(&WatchRequest {
                create_request: Some(WatchCreateRequest {
                    key: vec![0],
                    range_end: vec![0],
                    start_revision: log.seen.lock().whole + 1,
                    ..WatchCreateRequest::default()
                }),
                ..WatchRequest::default()
            });
            while let Some(message) = stream.next().await {
                let response = <WatchResponse as prost::Message>::decode(message).expect("decodes");
                if response.canceled {
                    break;
                }
                log.take(&response.events);
            }
        }
        sleep(Duration::from_millis(50)).await;
    }
}

impl Log {
    /// Accepts events of whole revisions, which another member may have delivered before.
    fn take(&self, events: &[Event]) {
        let revision = |event: &Event| event.kv.as_ref().expect("an event has a key").mod_revision;
        let mut seen = self.seen.lock();
        for events in events.chunk_by(|a, b| revision(a) == revision(b)) {
            let at = revision(&events[0]);
            if at <= seen.whole || !seen.ahead.insert(at) {
                continue;
            }
            let changes: Vec<_> = events
                .iter()
                .map(|event| {
                    let kv = event.kv.clone().expect("an event has a key");
                    (kv.key, (event.r#type != DELETE).then_some(kv.value))
                })
                .collect();
            self.history.event(self.segment, at, &changes);
            seen.events.insert(at, events.to_vec());
            while let Some(next) = seen.ahead.first().copied().filter(|next| *next == seen.whole + 1) {
                seen.ahead.remove(&next);
                seen.whole = next;
                self.history.set_recorded(next);
            }
        }
    }
}
