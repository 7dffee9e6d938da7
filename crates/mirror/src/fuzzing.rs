//! Fuzz targets of images, and of the feed: whole revisions from watch responses, however they are divided, delayed and repeated.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_wrap,
    reason = "compiled for tests and fuzz targets only"
)]

use std::{collections::BTreeMap, ops::ControlFlow, time::Duration};

use arbitrary::{Arbitrary, Unstructured};
use etcd_store::cache::{Entry, HistoryLimits, Store, Tree, testing::KeyValue};
use etcd_wire::etcdserverpb::{Event, ResponseHeader, WatchResponse};
use prost::Message as _;

use super::feed::{Assembler, Step};

pub use super::image::fuzzing::image;

/// Number of the event type DELETE.
const DELETE: i32 = 1;
/// Revision of the load.
const LOADED: i64 = 10;

#[derive(Arbitrary, Debug)]
enum Op {
    /// Commits a revision with puts (`true`) and deletes of these keys; revisions without events before it.
    Commit { keys: Vec<(u8, bool)>, skipped: u8 },
    /// Sends the revisions of up to so many events, from some revisions back on, in fragments of so many events; progress
    /// comes between the fragments.
    Send {
        revisions: u8,
        back: u8,
        fragment_events: u8,
        progress_between: bool,
        header_ahead: u8,
    },
    /// Sends progress at what was sent.
    Progress,
    /// Sends a key-value of these bytes.
    Raw(Vec<u8>),
}

/// etcd's history, and the part of it that was sent.
#[derive(Default)]
struct Etcd {
    revision: i64,
    /// Events in order of revision, with the keys behind each revision.
    events: Vec<(i64, Event)>,
    keys: BTreeMap<Vec<u8>, KeyValue>,
    states: BTreeMap<i64, BTreeMap<Vec<u8>, KeyValue>>,
    /// Revision up to which everything was sent.
    sent: i64,
}

struct Feed {
    assembler: Assembler,
    store: Store,
}

/// A mirror that follows an etcd: at each of its revisions it has exactly the keys of that revision.
pub fn feed(data: &[u8]) {
    let mut data = Unstructured::new(data);
    let mut etcd = Etcd {
        revision: LOADED,
        sent: LOADED,
        states: BTreeMap::from([(LOADED, BTreeMap::new())]),
        ..Etcd::default()
    };
    let mut feed = Feed {
        assembler: Assembler::new(LOADED, 1 << 20),
        store: Store::new(Tree::new(), LOADED, HistoryLimits::default(), Duration::ZERO),
    };
    for _ in 0..100 {
        let Ok(op) = Op::arbitrary(&mut data) else {
            break;
        };
        match op {
            Op::Commit { keys, skipped } => etcd.commit(&keys, skipped % 3),
            Op::Send {
                revisions,
                back,
                fragment_events,
                progress_between,
                header_ahead,
            } => {
                let (events, last) = etcd.next(usize::from(revisions % 8) + 1, usize::from(back % 8));
                let header = etcd.revision + i64::from(header_ahead % 4);
                let size = usize::from(fragment_events % 8) + 1;
                let fragments = events.chunks(size).count();
                for (index, fragment) in events.chunks(size).enumerate() {
                    let is_open = index + 1 < fragments;
                    feed.take(&response(header, fragment, is_open), &etcd);
                    if is_open && progress_between {
                        feed.take(&response(header, &[], false), &etcd);
                    }
                }
                etcd.sent = etcd.sent.max(last);
                feed.check(&etcd);
            }
            Op::Progress => {
                if etcd.sent == etcd.events.last().map_or(LOADED, |(revision, _)| *revision) {
                    etcd.sent = etcd.revision;
                }
                feed.take(&response(etcd.sent, &[], false), &etcd);
                feed.check(&etcd);
            }
            Op::Raw(bytes) => check_key_value(&bytes),
        }
    }
}

impl Etcd {
    fn commit(&mut self, keys: &[(u8, bool)], skipped: u8) {
        self.revision += 1 + i64::from(skipped);
        for (key, is_put) in keys.iter().take(8) {
            let key = vec![b'k', key % 16];
            let old = self.keys.remove(&key);
            let (r#type, kv) = if *is_put {
                let mut put = KeyValue::new(key.clone(), self.revision, "v");
                if let Some(old) = &old {
                    (put.create_revision, put.version) = (old.create_revision, old.version + 1);
                }
                self.keys.insert(key, put.clone());
                (0, put)
            } else if old.is_some() {
                (DELETE, KeyValue::deleted(key, self.revision))
            } else {
                continue;
            };
            let event = Event {
                r#type,
                kv: kv.encode_to_vec().into(),
                ..Event::default()
            };
            self.events.push((self.revision, event));
        }
        self.states.insert(self.revision, self.keys.clone());
    }

    /// Events of the next whole revisions, and of some that were sent already; the last of the revisions.
    fn next(&self, revisions: usize, back: usize) -> (Vec<Event>, i64) {
        let mut known: Vec<i64> = self.events.iter().map(|(revision, _)| *revision).collect();
        known.dedup();
        let first = known.partition_point(|revision| *revision <= self.sent);
        let range = first.saturating_sub(back)..(first + revisions).min(known.len());
        let Some(of) = known.get(range).filter(|of| !of.is_empty()) else {
            return (Vec::new(), self.sent);
        };
        let (low, high) = (of[0], of[of.len() - 1]);
        let events = self
            .events
            .iter()
            .filter(|(revision, _)| (low..=high).contains(revision));
        (events.map(|(_, event)| event.clone()).collect(), high)
    }
}

fn response(revision: i64, events: &[Event], fragment: bool) -> WatchResponse {
    WatchResponse {
        header: Some(ResponseHeader {
            revision,
            ..ResponseHeader::default()
        }),
        events: events.to_vec(),
        fragment,
        ..WatchResponse::default()
    }
}

impl Feed {
    /// Takes a response; whatever it is, the store is then at a whole revision of etcd.
    fn take(&mut self, response: &WatchResponse, etcd: &Etcd) {
        let before = self.assembler.revision();
        let now = Duration::ZERO;
        match self.assembler.add(response).unwrap() {
            Step::Wait => assert_eq!(self.assembler.revision(), before),
            Step::Fenced(events) => {
                assert!(events > 0);
                assert_eq!(self.assembler.revision(), before);
            }
            Step::Advance(revision) => {
                assert!(revision > before && revision <= etcd.sent);
                self.store.advance(revision, now);
            }
            Step::Apply { changes, revision } => {
                assert!(revision > before);
                assert!(changes.is_sorted_by_key(etcd_store::cache::Change::revision));
                assert!(self.store.apply(changes, revision, now).is_ok());
            }
        }
        assert_eq!(self.store.revision(), self.assembler.revision());
        self.check_keys(etcd);
    }

    /// Everything that was sent has arrived.
    fn check(&self, etcd: &Etcd) {
        assert_eq!(self.assembler.revision(), etcd.sent);
    }

    fn check_keys(&self, etcd: &Etcd) {
        let (_, expected) = etcd.states.range(..=self.store.revision()).next_back().unwrap();
        let mut keys = Vec::new();
        self.store.tree().for_each_from(0, |entry| {
            keys.push(KeyValue::from(entry));
            ControlFlow::Continue(())
        });
        assert!(
            keys.iter().eq(expected.values()),
            "at revision {}",
            self.store.revision()
        );
    }
}

/// A key-value of any bytes: kept as it is if it is encoded as etcd encodes it, otherwise refused.
fn check_key_value(bytes: &[u8]) {
    let decoded = KeyValue::decode(bytes);
    let is_etcds = |kv: &KeyValue| !kv.key.is_empty() && kv.encode_to_vec() == bytes;
    match Entry::from_key_value(bytes) {
        Ok(entry) => assert_eq!(Some(KeyValue::from(&entry)), decoded.ok()),
        Err(_) => assert!(!decoded.is_ok_and(|kv| is_etcds(&kv))),
    }
}
