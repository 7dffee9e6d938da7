//! Watch streams that are handed over between memory and etcd, in both directions, under writes: no event is lost or
//! repeated.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::Method;
use prost::Message;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Stream};
use testkit::pb::{RequestOp, WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse};
use testkit::proxy::Rangecache;
use testkit::relay::{HOLD, Relay};
use testkit::wait::{SOON, until};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::watch_streams::{before, create, created, header_revision, next, open, prefix, progress};

/// Watch streams that may be handed over at once, in each direction.
const TURNS: usize = 64;

/// A client that writes without a pause to `/a/key`.
struct Writer {
    stop: Arc<AtomicBool>,
    /// Returns the revisions of all its writes.
    writing: JoinHandle<Vec<i64>>,
}

impl Writer {
    fn start(client: &Client) -> Writer {
        let (stop, client) = (Arc::new(AtomicBool::new(false)), client.clone());
        let is_stopped = Arc::clone(&stop);
        let writing = tokio::spawn(async move {
            let mut revisions = Vec::new();
            while !is_stopped.load(Ordering::Relaxed) {
                let value = revisions.len().to_string();
                revisions.push(client.put("/a/key", value).await.expect("put"));
            }
            revisions
        });
        Writer { stop, writing }
    }

    async fn stop(self) -> Vec<i64> {
        self.stop.store(true, Ordering::Relaxed);
        self.writing.await.expect("the writer")
    }
}

/// A stream, and the revisions of the events that its watcher 0 has received.
struct Watched {
    stream: Stream,
    events: Vec<i64>,
    /// A progress notification is requested after each event.
    asks_progress: bool,
    /// Revision of the last progress notification.
    reported: i64,
}

impl Watched {
    fn new(stream: Stream) -> Watched {
        Watched {
            stream,
            events: Vec::new(),
            asks_progress: false,
            reported: 0,
        }
    }

    fn record(&mut self, response: &WatchResponse) {
        let revision = header_revision(response);
        if is_progress(response) {
            let least = self.reported.max(self.events.last().copied().unwrap_or(0));
            assert!(revision >= least, "progress at {revision} after {least}");
            self.reported = revision;
        }
        if response.watch_id == 0 {
            if let Some(first) = response.events.first() {
                let first = first.kv.as_ref().expect("a kv").mod_revision;
                let reported = self.reported;
                assert!(first > reported, "event of {first} after progress at {reported}");
                if self.asks_progress {
                    self.stream.send(&progress());
                }
            }
            let events = response.events.iter();
            let revisions = events.map(|event| event.kv.as_ref().expect("a kv").mod_revision);
            self.events.extend(revisions);
        }
    }

    /// Receives responses until `is_awaited`.
    async fn until(&mut self, is_awaited: impl Fn(&WatchResponse) -> bool) {
        let deadline = Instant::now() + SOON;
        loop {
            let response = next(&mut self.stream).await;
            self.record(&response);
            if is_awaited(&response) {
                return;
            }
            assert!(Instant::now() < deadline, "not received: {response:?}");
        }
    }

    /// Receives responses until memory serves `watchers` watchers.
    async fn until_memory_serves(&mut self, rangecache: &Rangecache, watchers: f64) {
        let deadline = Instant::now() + SOON;
        while rangecache.metrics().await.sum("rangecache_watch_watchers") != watchers {
            // A stream without events is open, too.
            if let Ok(message) = tokio::time::timeout(Duration::from_millis(20), self.stream.next()).await {
                let message = message.unwrap_or_else(|| panic!("ended: {:?}", self.stream.end()));
                self.record(&WatchResponse::decode(message).expect("decodes"));
            }
            assert!(Instant::now() < deadline, "the stream does not return");
        }
    }

    /// Receives the rest of the events at `written`, and compares all of them from `first` on.
    async fn has_exactly(mut self, written: &[i64], first: i64) {
        let expected: Vec<_> = written
            .iter()
            .copied()
            .filter(|revision| *revision >= first)
            .collect();
        let last = *expected.last().expect("writes");
        if self.events.last() != Some(&last) {
            self.until(|response| response.watch_id == 0 && header_revision(response) >= last)
                .await;
        }
        let differing = self
            .events
            .iter()
            .zip(&expected)
            .find(|(event, written)| event != written);
        assert_eq!(
            differing, None,
            "an event was lost or repeated (received, written)"
        );
        assert_eq!(self.events.len(), expected.len());
    }
}

fn is_progress(response: &WatchResponse) -> bool {
    response.events.is_empty() && !response.created && !response.canceled
}

fn cancel(watch_id: i64) -> WatchRequest {
    WatchRequest {
        cancel_request: Some(WatchCancelRequest { watch_id }),
        ..WatchRequest::default()
    }
}

async fn stream_leaves_and_returns(version: Version) {
    let etcd = Etcd::start(version).await;
    let rangecache = before(&etcd).with("--cache-prefix", "/a/").start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let start = direct.put("/a/key", "first").await.expect("put") + 1;
    let mut watched = Watched::new(open(&through, &[create(prefix("/a/", start))]));
    watched.until(|response| response.created).await;
    let writer = Writer::start(&direct);
    for id in 7..10 {
        let elsewhere = WatchCreateRequest {
            watch_id: id,
            ..prefix("/b/", 0)
        };
        watched.stream.send(&create(elsewhere));
        watched
            .until(|response| response.created && response.watch_id == id)
            .await;
        assert_eq!(rangecache.metrics().await.sum("rangecache_watch_watchers"), 0.0);
        watched.stream.send(&cancel(id));
        watched
            .until(|response| response.canceled && response.watch_id == id)
            .await;
        watched.until_memory_serves(&rangecache, 1.0).await;
    }
    watched.has_exactly(&writer.stop().await, start).await;
    assert_eq!(created(&rangecache, "interrupted", "not_mirrored").await, 0.0);
}

#[tokio::test]
async fn stream_returns_to_memory_without_loss_or_repetition_3_7() {
    stream_leaves_and_returns(Version::V3_7).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn stream_returns_to_memory_without_loss_or_repetition_3_6() {
    stream_leaves_and_returns(Version::V3_6).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn stream_returns_to_memory_without_loss_or_repetition_3_5() {
    stream_leaves_and_returns(Version::V3_5).await;
}

async fn progress_of_a_stream_that_leaves_and_returns(version: Version) {
    let etcd = Etcd::start(version).await;
    let rangecache = before(&etcd).with("--cache-prefix", "/a/").start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let start = direct.put("/a/key", "first").await.expect("put") + 1;
    let mut watched = Watched::new(open(&through, &[create(prefix("/a/", start))]));
    watched.asks_progress = true;
    watched.until(|response| response.created).await;
    let writer = Writer::start(&direct);
    for _ in 0..3 {
        watched.until(is_progress).await;
        let elsewhere = WatchCreateRequest {
            watch_id: 7,
            ..prefix("/b/", 0)
        };
        watched.stream.send(&create(elsewhere));
        watched.until(|response| response.created).await;
        watched.until(is_progress).await;
        watched.stream.send(&cancel(7));
        watched.until(|response| response.canceled).await;
        watched.until_memory_serves(&rangecache, 1.0).await;
    }
    watched.has_exactly(&writer.stop().await, start).await;
}

#[tokio::test]
async fn progress_is_not_ahead_of_events_while_a_stream_changes_its_source_3_7() {
    progress_of_a_stream_that_leaves_and_returns(Version::V3_7).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn progress_is_not_ahead_of_events_while_a_stream_changes_its_source_3_6() {
    progress_of_a_stream_that_leaves_and_returns(Version::V3_6).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn progress_is_not_ahead_of_events_while_a_stream_changes_its_source_3_5() {
    progress_of_a_stream_that_leaves_and_returns(Version::V3_5).await;
}

/// etcd continues a watcher behind the last revision that the client has, as it does for a client that resumes: until
/// the next write it reports no progress.
async fn progress_after_leaving_begins_with_the_next_write(version: Version) {
    let etcd = Etcd::start(version).await;
    let rangecache = before(&etcd).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let last = direct.put("/a/key", "last").await.expect("put");
    let resumed = open(&direct, &[create(prefix("/a/", last + 1))]);
    let handed_over = open(&through, &[create(prefix("/a/", 0))]);
    let mut both = [resumed, handed_over].map(Watched::new);
    for watched in &mut both {
        watched.until(|response| response.created).await;
    }
    rangecache.forward_all(Method::POST).await;
    until(SOON, "etcd continues the stream", async || {
        (rangecache.metrics().await.watch_streams("etcd") == 1.0).then_some(())
    })
    .await;
    for watched in &mut both {
        watched.stream.send(&progress());
        watched.asks_progress = true;
    }
    let written = direct.put("/a/key", "next").await.expect("put");
    for watched in &mut both {
        watched.until(is_progress).await;
        assert_eq!((&watched.events[..], watched.reported), (&[written][..], written));
    }
}

#[tokio::test]
async fn progress_after_leaving_begins_with_the_next_write_3_7() {
    progress_after_leaving_begins_with_the_next_write(Version::V3_7).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn progress_after_leaving_begins_with_the_next_write_3_6() {
    progress_after_leaving_begins_with_the_next_write(Version::V3_6).await;
}

#[tokio::test]
#[ignore = "nightly"]
async fn progress_after_leaving_begins_with_the_next_write_3_5() {
    progress_after_leaving_begins_with_the_next_write(Version::V3_5).await;
}

#[tokio::test]
async fn handovers_take_turns_and_one_that_waits_can_be_given_up() {
    let etcd = Etcd::start(Version::V3_7).await;
    let relay = Relay::to(&etcd.url()).await;
    let rangecache = Rangecache::at(relay.url())
        .with("--cache-prefix", "/a/")
        .start()
        .await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let mut streams = BTreeMap::new();
    for name in 0..TURNS + 6 {
        let held = through.with_metadata(HOLD, &name.to_string());
        let mut stream = open(&held, &[create(prefix("/a/", 0))]);
        assert!(next(&mut stream).await.created);
        streams.insert(name.to_string(), Watched::new(stream));
    }
    let mut written = vec![direct.put("/a/key", "in memory").await.expect("put")];
    for watched in streams.values_mut() {
        watched.until(|response| !response.events.is_empty()).await;
        watched.stream.send(&create(prefix("/b/", 0)));
    }
    until(SOON, "every stream leaves", async || {
        let has_left = rangecache.metrics().await.watch_streams("etcd") == (TURNS + 6) as f64;
        (has_left && relay.held().in_flight >= TURNS).then_some(())
    })
    .await;
    let arrived = relay.held().arrived;
    assert_eq!(arrived.len(), TURNS, "turns");
    let waiting: Vec<_> = streams
        .keys()
        .filter(|name| !arrived.contains(name))
        .cloned()
        .collect();
    drop(streams.remove(&waiting[0]));
    let cancelled = streams.get_mut(&waiting[1]).expect("waits");
    cancelled.stream.send(&cancel(0));
    for value in 0..3 {
        written.push(direct.put("/a/key", value.to_string()).await.expect("put"));
    }
    relay.let_go(usize::from(u16::MAX));
    for (name, watched) in &mut streams {
        watched
            .until(|response| response.created && response.watch_id == 1)
            .await;
        if *name == waiting[1] {
            watched
                .until(|response| response.canceled && response.watch_id == 0)
                .await;
        }
        watched.stream.send(&cancel(1));
        watched
            .until(|response| response.canceled && response.watch_id == 1)
            .await;
    }
    let held = relay.held();
    assert_eq!((held.most, held.arrived.len()), (TURNS, TURNS + 5));
    streams.remove(&waiting[1]);
    let left = streams.len() as f64;
    until(SOON, "every stream returns", async || {
        (rangecache.metrics().await.watch_streams("memory") == left).then_some(())
    })
    .await;
    written.push(direct.put("/a/key", "in memory again").await.expect("put"));
    let first = written[0];
    for watched in streams.into_values() {
        watched.has_exactly(&written, first).await;
    }
}

#[tokio::test]
async fn stream_of_revisions_that_memory_has_not_kept_begins_at_etcd_and_returns() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let mut written = Vec::new();
    for value in 0..200 {
        written.push(direct.put("/a/key", value.to_string()).await.expect("put"));
    }
    let first = written[0];
    let rangecache = before(&etcd).start().await;
    let through = rangecache.client().await;
    let writer = Writer::start(&direct);
    let mut watched = Watched::new(open(&through, &[create(prefix("/a/", first))]));
    watched.until(|response| response.created).await;
    assert_eq!(created(&rangecache, "etcd", "history_gone").await, 1.0);
    watched.until_memory_serves(&rangecache, 1.0).await;
    // From memory, and with an id of its own.
    watched.stream.send(&create(prefix("/a/", 0)));
    watched
        .until(|response| response.created && response.watch_id == 1)
        .await;
    assert_eq!(created(&rangecache, "memory", "now").await, 1.0);
    written.extend(writer.stop().await);
    watched.has_exactly(&written, first).await;
}

#[tokio::test]
async fn stream_of_a_mirror_that_is_loaded_again_returns() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd)
        .with("--cache-prefix", "/a/")
        .with("--cache-max-bytes", "2MiB")
        .with("--cache-pack", "never")
        .with("--history-max-bytes", "256KiB")
        .with("--probe-interval", "50ms")
        .start()
        .await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let keys: Vec<String> = (0..40).map(|key| format!("/a/large/{key}")).collect();
    let mut stream = open(&through, &[create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created);
    let mut watched = Watched::new(stream);
    let value = "v".repeat(100_000);
    let mut written = Vec::new();
    for key in &keys {
        written.push(direct.put(key, &value).await.expect("put"));
    }
    watched.until_memory_serves(&rangecache, 0.0).await;
    for key in &keys {
        written.push(
            direct
                .transact(vec![RequestOp::delete(key)])
                .await
                .expect("delete"),
        );
    }
    watched.until_memory_serves(&rangecache, 1.0).await;
    written.push(direct.put("/a/key", "last").await.expect("put"));
    let first = written[0];
    watched.has_exactly(&written, first).await;
}

#[tokio::test]
async fn request_that_is_not_understood_continues_its_stream_at_etcd() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let mut stream = open(&through, &[create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created);
    // etcd ignores a filter that it does not know.
    let unknown = WatchCreateRequest {
        filters: vec![9],
        watch_id: 5,
        ..prefix("/b/", 0)
    };
    stream.send(&create(unknown));
    stream.send(&create(prefix("/c/", 0)));
    let response = next(&mut stream).await;
    assert!(response.created && response.watch_id == 5, "{response:?}");
    assert!(next(&mut stream).await.created);
    assert_eq!(created(&rangecache, "etcd", "undecodable").await, 1.0);
    for (key, id) in [("/a/key", 0), ("/b/key", 5), ("/c/key", 1), ("/a/key", 0)] {
        let revision = direct.put(key, "1").await.expect("put");
        let event = next(&mut stream).await;
        assert_eq!((event.watch_id, header_revision(&event)), (id, revision), "{key}");
    }
    // Further streams of the connection are served from memory.
    let mut stream = open(&through, &[create(prefix("/a/", 0))]);
    assert!(next(&mut stream).await.created);
    assert_eq!(created(&rangecache, "memory", "now").await, 2.0);
}

/// etcd permits keys up to the length of a request. Their revision follows them.
#[tokio::test]
async fn stream_with_a_long_key_continues_at_etcd() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let long = format!("/a/{}", "k".repeat(200_000));
    let first = direct.put(&long, "1").await.expect("put");
    let rangecache = before(&etcd).start().await;
    let through = rangecache.client().await;
    let mut stream = open(&through, &[create(prefix("/a/", first))]);
    assert!(next(&mut stream).await.created);
    assert_eq!(created(&rangecache, "etcd", "history_gone").await, 1.0);
    let mut revision = first;
    for key in [&long, "/a/short", &long] {
        let event = next(&mut stream).await;
        let kv = event.events[0].kv.as_ref().expect("a kv");
        assert_eq!((event.watch_id, kv.mod_revision), (0, revision));
        stream.send(&create(prefix(key, 0)));
        let response = next(&mut stream).await;
        assert!(response.created, "{response:?}");
        stream.send(&cancel(response.watch_id));
        assert!(next(&mut stream).await.canceled);
        revision = direct.put(key, "2").await.expect("put");
    }
}
