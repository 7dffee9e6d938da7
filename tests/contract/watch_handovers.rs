//! Watch streams that are handed over between memory and etcd, in both directions, under writes: no event is lost or
//! repeated.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use prost::Message;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Stream};
use testkit::pb::{RequestOp, WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse};
use testkit::proxy::Rangecache;
use testkit::wait::SOON;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::watch_streams::{before, create, created, header_revision, next, open, prefix};

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
}

impl Watched {
    fn new(stream: Stream) -> Watched {
        let events = Vec::new();
        Watched { stream, events }
    }

    fn record(&mut self, response: &WatchResponse) {
        if response.watch_id == 0 {
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
async fn stream_returns_to_memory_without_loss_or_repetition_3_6() {
    stream_leaves_and_returns(Version::V3_6).await;
}

#[tokio::test]
async fn stream_returns_to_memory_without_loss_or_repetition_3_5() {
    stream_leaves_and_returns(Version::V3_5).await;
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
