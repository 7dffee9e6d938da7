//! Responses of which their clients read nothing are given up after a minute, whatever their way; a client that reads
//! slowly but steadily gets its own whole.

use std::time::Duration;

use bytes::Bytes;
use h2::RecvStream;
use h2::client::SendRequest;
use prost::Message;
use testkit::etcd::Etcd;
use testkit::grpc::frame;
use testkit::kv::{RANGE, RANGE_STREAM, WATCH};
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchRequest};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::budgets::{PREFIX, call, etcd_with, rude};

/// Prefix of keys that no mirror has; 2 MB.
const OTHER: &str = "/other/";
/// Prefix of keys that are listed in pages of [`PAGE_KEYS`]; 3 MB.
const PAGES: &str = "/pages/";
const PAGE_KEYS: i64 = 1_000;
/// Bytes that the slow reader takes at a time.
const SIP_BYTES: usize = 8 << 10;

/// A response on a connection of its own, of which only the head was read.
struct Unread {
    way: &'static str,
    body: RecvStream,
    /// Bytes that were read and whose part of the window was not given back.
    unreleased: usize,
    _sender: SendRequest<Bytes>,
    _connection: JoinHandle<Result<(), h2::Error>>,
}

async fn unread(way: &'static str, rangecache: &Rangecache, path: &str, list: impl Message) -> Unread {
    let (sender, connection) = rude(rangecache).await;
    let mut sender = sender.ready().await.unwrap();
    let (response, mut body) = sender.send_request(call(rangecache, path), false).unwrap();
    body.send_data(frame(&list.encode_to_vec()), true).unwrap();
    let head = timeout(SOON, response).await.expect(way).expect("a head");
    assert!(
        head.headers().get("grpc-status").is_none(),
        "{way} is refused: {head:?}"
    );
    Unread {
        way,
        body: head.into_body(),
        unreleased: 0,
        _sender: sender,
        _connection: connection,
    }
}

impl Unread {
    fn release(&mut self, bytes: usize) {
        self.unreleased -= bytes;
        // The stream may have been reset.
        let _ = self.body.flow_control().release_capacity(bytes);
    }

    /// Reads a little.
    async fn sip(&mut self) {
        if let Ok(Some(Ok(data))) = timeout(Duration::from_millis(1), self.body.data()).await {
            self.unreleased += data.len();
        }
        self.release(SIP_BYTES.min(self.unreleased));
    }

    /// Reads at least `bytes`; returns whether there were as many.
    async fn read(&mut self, bytes: usize) -> bool {
        let mut read = 0;
        while read < bytes {
            self.release(self.unreleased);
            match timeout(SOON, self.body.data()).await.expect("data or an end") {
                Some(Ok(data)) => {
                    read += data.len();
                    self.unreleased += data.len();
                }
                _ => return false,
            }
        }
        true
    }

    /// Reads to the end; returns the bytes and whether the stream was reset.
    async fn rest(&mut self) -> (usize, bool) {
        self.release(self.unreleased);
        let mut bytes = 0;
        while let Some(data) = timeout(SOON, self.body.data()).await.expect("data or an end") {
            let Ok(data) = data else {
                return (bytes, true);
            };
            bytes += data.len();
            self.unreleased += data.len();
            self.release(data.len());
        }
        (bytes, false)
    }
}

async fn given_up(rangecache: &Rangecache) -> f64 {
    let given_up = "rangecache_responses_given_up_total{reason=\"idle\"}";
    rangecache.metrics().await.0.get(given_up).copied().unwrap_or(0.0)
}

async fn filled_etcd() -> Etcd {
    let etcd = etcd_with(20, 100_000).await;
    let direct = etcd.client().await;
    for n in 0..20 {
        let put = direct.put(format!("{OTHER}{n:04}"), vec![b'v'; 100_000]).await;
        put.expect("etcd writes");
    }
    for n in 0..3 * PAGE_KEYS {
        let put = direct.put(format!("{PAGES}{n:05}"), vec![b'v'; 1_000]).await;
        put.expect("etcd writes");
    }
    etcd
}

/// Two reads that share one call to etcd, the one after the call of a reader that reads.
async fn shared(etcd: &Etcd, rangecache: &Rangecache) -> Vec<Unread> {
    let forwarding = async |metric: &str| rangecache.metrics().await.sum(metric);
    etcd.pause();
    let list = RangeRequest::prefix(OTHER);
    let first = {
        let (client, list) = (rangecache.client().await, list.clone());
        tokio::spawn(async move { client.range(&list).await })
    };
    until(SOON, "the first read is in flight", async || {
        (forwarding("rangecache_forward_large").await == 1.0).then_some(())
    })
    .await;
    let reads = futures_util::future::join(
        unread("shared", rangecache, RANGE, list.clone()),
        unread("shared", rangecache, RANGE, list),
    );
    let joined = until(SOON, "the others wait for it", async || {
        (forwarding("rangecache_forward_waiting").await == 2.0).then(|| etcd.resume())
    });
    let ((one, two), _) = futures_util::future::join(reads, joined).await;
    first.await.unwrap().expect("is served");
    assert_eq!(forwarding("rangecache_forward_joined_total").await, 2.0);
    vec![one, two]
}

/// The second page of a list, cut from a series.
async fn second_page(rangecache: &Rangecache) -> Unread {
    let page = |list: RangeRequest| RangeRequest {
        limit: PAGE_KEYS,
        ..list
    };
    let client = rangecache.client().await;
    let first = client
        .range(&page(RangeRequest::prefix(PAGES)))
        .await
        .expect("a page");
    let mut next = first.kvs.last().unwrap().key.clone();
    next.push(0);
    let second = page(RangeRequest {
        key: next,
        revision: first.revision(),
        ..RangeRequest::prefix(PAGES)
    });
    let unread = unread("page of a series", rangecache, RANGE, second).await;
    assert_eq!(
        rangecache.metrics().await.sum("rangecache_series_pages_total"),
        1.0
    );
    unread
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_response_of_every_way_is_given_up_and_a_slow_one_is_not() {
    let etcd = filled_etcd().await;
    let streaming = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .with("--watch-cache", "auto")
        .start()
        .await;
    let paging = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .with("--range-stream", "off")
        .start()
        .await;
    let mirrored = RangeRequest::prefix(PREFIX);
    let other = RangeRequest::prefix(OTHER);
    let mut of_paging = shared(&etcd, &paging).await;
    of_paging.push(unread("stream of pages", &paging, RANGE_STREAM, other.clone()).await);
    let mut of_streaming = vec![
        unread("memory", &streaming, RANGE, mirrored.clone()).await,
        unread("stream from memory", &streaming, RANGE_STREAM, mirrored.clone()).await,
        unread("converted", &streaming, RANGE, other.clone()).await,
        unread("forwarded stream", &streaming, RANGE_STREAM, other.clone()).await,
        second_page(&streaming).await,
    ];
    let one = RangeRequest::one(format!("{OTHER}0000"));
    of_streaming.push(unread("forwarded", &streaming, RANGE, one).await);

    // Slow readers, of memory and of etcd: a sip at a time, for longer than the idle ones get.
    let mut slow = vec![
        unread("slow, memory", &streaming, RANGE, mirrored).await,
        unread("slow, forwarded stream", &streaming, RANGE_STREAM, other).await,
    ];
    // A watch from memory is only a position.
    let create = WatchCreateRequest {
        key: PREFIX.into(),
        ..WatchCreateRequest::default()
    };
    let watch = WatchRequest {
        create_request: Some(create),
        ..WatchRequest::default()
    };
    let mut of_memory = unread("watch", &streaming, WATCH, watch).await;
    let writer = etcd.client().await;
    for _ in 0..20 {
        writer.put(PREFIX, vec![b'v'; 50_000]).await.expect("etcd writes");
    }

    let expected = (of_streaming.len() as f64, of_paging.len() as f64);
    until(SOON * 6, "every unread response is given up", async || {
        for reader in &mut slow {
            reader.sip().await;
        }
        sleep(Duration::from_millis(500)).await;
        ((given_up(&streaming).await, given_up(&paging).await) == expected).then_some(())
    })
    .await;
    for unread in of_streaming.iter_mut().chain(&mut of_paging) {
        assert!(unread.rest().await.1, "{}: it is complete", unread.way);
    }
    for reader in &mut slow {
        let (bytes, is_reset) = reader.rest().await;
        assert!(
            !is_reset && bytes > 0,
            "{}: reset after {bytes} bytes",
            reader.way
        );
    }
    assert!(of_memory.read(20 * 50_000).await, "the watch continues");
    assert_eq!((given_up(&streaming).await, given_up(&paging).await), expected);
    for rangecache in [&streaming, &paging] {
        let metrics = rangecache.metrics().await;
        assert_eq!(
            metrics.sum("rangecache_forward_large"),
            0.0,
            "turns are given back"
        );
    }
}

/// etcd without RangeStream buffers a large response until its client has read it, so that identical reads wait for it:
/// not for longer than `--stream-max-wait`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_does_not_read_does_not_hold_up_identical_reads() {
    let etcd = filled_etcd().await;
    let rangecache = Rangecache::before(&etcd)
        .with("--cache-prefix", PREFIX)
        .with("--range-stream", "off")
        .with("--stream-max-wait", "1s")
        .start()
        .await;
    let list = RangeRequest::prefix(OTHER);
    let _unread = unread("forwarded", &rangecache, RANGE, list.clone()).await;
    let polite = rangecache.client().await;
    for _ in 0..3 {
        let answer = polite.range(&list).await.expect("is served");
        assert_eq!(answer.kvs.len(), 20);
    }
    assert_eq!(given_up(&rangecache).await, 0.0, "the first read is still open");
}
