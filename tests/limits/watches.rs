//! Watches from memory whose clients read slowly, or not at all: their memory is bounded, no other watch is delayed, and
//! no event is lost.

use bytes::{Buf, BytesMut};
use h2::client::SendRequest;
use h2::{RecvStream, SendStream};
use prost::Message;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Stream, frame};
use testkit::kv::WATCH;
use testkit::pb::request_op::Request;
use testkit::pb::{
    PutRequest, RequestOp, WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest,
    WatchResponse,
};
use testkit::proxy::{Builder, Rangecache};
use testkit::wait::{SOON, until};
use testkit::watch_rules::NO_ID;
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::budgets::call;

const KEYS: &str = "/watched/";
/// Budget of watches in these tests.
const WATCH_BYTES: u64 = 1 << 20;

fn before(etcd: &Etcd) -> Builder {
    Rangecache::before(etcd)
        .with("--watch-cache", "auto")
        .with("--watch-max-bytes", &WATCH_BYTES.to_string())
}

/// A connection on bare HTTP/2 whose windows are 64 KiB per stream.
struct Connection {
    sender: SendRequest<bytes::Bytes>,
    task: JoinHandle<Result<(), h2::Error>>,
}

/// A watch of all keys of which only `created` was read.
struct Watch {
    _requests: SendStream<bytes::Bytes>,
    body: RecvStream,
    buffer: BytesMut,
    /// Bytes that were read and whose part of the window was not given back.
    unreleased: usize,
}

impl Connection {
    async fn open(rangecache: &Rangecache) -> Connection {
        let address = rangecache.url().strip_prefix("http://").unwrap();
        let tcp = TcpStream::connect(address).await.unwrap();
        let windows = h2::client::Builder::new()
            .initial_connection_window_size(1 << 28)
            .max_concurrent_reset_streams(1 << 12)
            .handshake(tcp);
        let (sender, connection) = windows.await.unwrap();
        Connection {
            sender,
            task: tokio::spawn(connection),
        }
    }

    async fn watch(&mut self, rangecache: &Rangecache) -> Watch {
        let create = WatchCreateRequest {
            key: KEYS.into(),
            range_end: "/watched0".into(),
            ..WatchCreateRequest::default()
        };
        let request = WatchRequest {
            create_request: Some(create),
            ..WatchRequest::default()
        };
        let ready = self.sender.clone().ready();
        let mut sender = timeout(SOON, ready).await.unwrap().unwrap();
        let (response, mut requests) = sender.send_request(call(rangecache, WATCH), false).unwrap();
        requests
            .send_data(frame(&request.encode_to_vec()), false)
            .unwrap();
        let head = timeout(SOON, response).await.expect("a head").unwrap();
        let mut watch = Watch {
            _requests: requests,
            body: head.into_body(),
            buffer: BytesMut::new(),
            unreleased: 0,
        };
        assert!(watch.next(usize::MAX).await.created);
        watch
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Watch {
    /// The next response, read `sip` bytes at a time.
    async fn next(&mut self, sip: usize) -> WatchResponse {
        loop {
            if self.buffer.len() >= 5 {
                let length = (&self.buffer[1..5]).get_u32() as usize;
                if self.buffer.len() >= 5 + length {
                    let message = self.buffer.split_to(5 + length);
                    return WatchResponse::decode(&message[5..]).unwrap();
                }
            }
            if self.unreleased > 0 {
                let released = sip.min(self.unreleased);
                self.unreleased -= released;
                self.body.flow_control().release_capacity(released).unwrap();
            }
            let data = timeout(SOON, self.body.data()).await.expect("data");
            let data = data.expect("the watch continues").unwrap();
            self.unreleased += data.len();
            self.buffer.extend_from_slice(&data);
        }
    }

    /// Values of the next `count` events.
    async fn values(&mut self, count: usize, sip: usize) -> Vec<String> {
        let mut values = Vec::new();
        while values.len() < count {
            let response = self.next(sip).await;
            assert!(!response.canceled, "{response:?}");
            let of_response = response.events.into_iter().filter_map(|event| event.kv);
            values.extend(of_response.map(|kv| String::from_utf8_lossy(&kv.value[..4]).into_owned()));
        }
        values
    }
}

/// Puts `keys` values of `value_bytes` in one transaction; they begin with `number`.
async fn put(client: &Client, number: usize, keys: usize, value_bytes: usize) {
    let puts = (0..keys).map(|key| {
        let mut value = format!("{number:04}").into_bytes();
        value.resize(value_bytes, b'v');
        let put = PutRequest {
            key: format!("{KEYS}{key}").into(),
            value,
            ..PutRequest::default()
        };
        RequestOp {
            request: Some(Request::RequestPut(put)),
        }
    });
    client.transact(puts.collect()).await.expect("etcd writes");
}

fn numbers(count: usize) -> Vec<String> {
    (0..count).map(|number| format!("{number:04}")).collect()
}

async fn watch_bytes(rangecache: &Rangecache) -> u64 {
    rangecache.metrics().await.sum("rangecache_watch_bytes") as u64
}

async fn given_up(rangecache: &Rangecache, reason: &str) -> f64 {
    let metric = format!("rangecache_responses_given_up_total{{reason=\"{reason}\"}}");
    rangecache.metrics().await.0.get(&metric).copied().unwrap_or(0.0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_that_is_read_a_kilobyte_at_a_time_gets_every_event() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let mut connection = Connection::open(&rangecache).await;
    let mut slow = connection.watch(&rangecache).await;
    let writer = etcd.client().await;
    for number in 0..100 {
        put(&writer, number, 1, 10_000).await;
    }
    assert_eq!(slow.values(100, 1 << 10).await, numbers(100));
    let metrics = rangecache.metrics().await;
    assert_eq!(
        metrics.sum("rangecache_watch_handovers_total"),
        0.0,
        "from memory"
    );
}

/// The HTTP/2 library closes a connection with some 2,600 small frames that were not taken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_of_creates_at_once_on_one_connection_are_answered() {
    const STREAMS: usize = 100;
    const CREATES: i64 = 100;
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let client = rangecache.client().await;
    let mut streams: Vec<_> = (0..STREAMS).map(|_| client.open(WATCH)).collect();
    for watch in &streams {
        for _ in 0..CREATES {
            watch.send(&WatchRequest {
                create_request: Some(WatchCreateRequest {
                    key: KEYS.into(),
                    ..WatchCreateRequest::default()
                }),
                ..WatchRequest::default()
            });
        }
    }
    for watch in &mut streams {
        for id in 0..CREATES {
            let created = watch.next_as::<WatchResponse>(SOON).await;
            let created = created.unwrap_or_else(|| panic!("the stream ended: {:?}", watch.end()));
            assert_eq!((created.created, created.watch_id), (true, id));
        }
    }
}

/// W13: watches that are not read take all room, and the others get their events nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_watches_stay_within_their_memory_and_give_way_to_others() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let mut unread = Vec::new();
    let mut rude = Connection::open(&rangecache).await;
    for _ in 0..20 {
        unread.push(rude.watch(&rangecache).await);
    }
    let mut polite_connection = Connection::open(&rangecache).await;
    let mut polite = polite_connection.watch(&rangecache).await;
    let writer = etcd.client().await;
    let (keys, value_bytes) = (10, 20_000);
    let reading = tokio::spawn(async move { polite.values(12 * 10, usize::MAX).await });
    for number in 0..12 {
        put(&writer, number, keys, value_bytes).await;
        let used = watch_bytes(&rangecache).await;
        // A message that is begun while there is room may be longer than the room.
        assert!(used <= WATCH_BYTES + 2 * 200_000, "{used}");
    }
    let got = reading.await.unwrap();
    let expected: Vec<_> = numbers(12)
        .into_iter()
        .flat_map(|number| vec![number; 10])
        .collect();
    assert_eq!(got, expected);
    assert_eq!(given_up(&rangecache, "idle").await, 0.0);
    drop((unread, rude));
    until(SOON, "the memory is free again", async || {
        (watch_bytes(&rangecache).await < 32 << 10).then_some(())
    })
    .await;
}

/// Progress that all watchers of a stream have reached may be below the start of one that begins later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_is_not_below_the_start_of_a_watcher_while_another_waits_for_room() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let writer = etcd.client().await;
    let mut unread = Vec::new();
    let mut rude = Connection::open(&rangecache).await;
    for _ in 0..20 {
        unread.push(rude.watch(&rangecache).await);
    }
    put(&writer, 0, 10, 20_000).await;
    until(SOON, "no message has room any more", async || {
        (watch_bytes(&rangecache).await > WATCH_BYTES - 250_000).then_some(())
    })
    .await;
    let client = rangecache.client().await;
    let mut stream = client.open(WATCH);
    let create = |key: &str, range_end: &str, start_revision| WatchRequest {
        create_request: Some(WatchCreateRequest {
            key: key.into(),
            range_end: range_end.into(),
            start_revision,
            ..WatchCreateRequest::default()
        }),
        ..WatchRequest::default()
    };
    stream.send(&create(KEYS, "/watched0", 0));
    let created = stream.next_as::<WatchResponse>(SOON).await.expect("a response");
    assert!(created.created, "{created:?}");
    put(&writer, 1, 10, 20_000).await;
    let start = writer.put("/other", "1").await.expect("etcd writes");
    // Now rangecache knows of the revision.
    assert!(client.get("/other").await.expect("a response").is_some());
    stream.send(&create("/another", "", start));
    stream.send(&WatchRequest {
        progress_request: Some(WatchProgressRequest {}),
        ..WatchRequest::default()
    });
    // Requests are answered one after the other.
    stream.send(&create("/another", "", start));
    let mut created = 0;
    while created < 2 {
        let response = stream.next_as::<WatchResponse>(SOON).await.expect("a response");
        created += usize::from(response.created);
        let revision = response.header.map_or(0, |header| header.revision);
        assert!(
            response.watch_id != NO_ID || revision >= start,
            "progress {revision} below the start {start}: {response:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_beyond_their_memory_are_forwarded() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let mut connection = Connection::open(&rangecache).await;
    let mut watches = Vec::new();
    for _ in 0..300 {
        watches.push(connection.watch(&rangecache).await);
    }
    let metrics = rangecache.metrics().await;
    let forwarded = "rangecache_watch_created_total{outcome=\"etcd\",reason=\"over_budget\"}";
    let forwarded = metrics.0.get(forwarded).copied().unwrap_or(0.0);
    assert!((1.0..300.0).contains(&forwarded), "{forwarded}");
    put(&etcd.client().await, 7, 1, 10).await;
    for watch in &mut watches {
        assert_eq!(watch.values(1, usize::MAX).await, ["0007"]);
    }
}

/// A stream with watchers that its client creates and cancels one after the other.
struct Changing(Stream);

impl Changing {
    async fn create(&mut self, key: Vec<u8>, start_revision: i64) -> i64 {
        self.0.send(&WatchRequest {
            create_request: Some(WatchCreateRequest {
                key,
                start_revision,
                ..WatchCreateRequest::default()
            }),
            ..WatchRequest::default()
        });
        let created = self.0.next_as::<WatchResponse>(SOON).await;
        let created = created.unwrap_or_else(|| panic!("the stream ended: {:?}", self.0.end()));
        assert!(created.created && !created.canceled, "{created:?}");
        created.watch_id
    }

    async fn cancel(&mut self, watch_id: i64) {
        self.0.send(&WatchRequest {
            cancel_request: Some(WatchCancelRequest { watch_id }),
            ..WatchRequest::default()
        });
        let canceled = self.0.next_as::<WatchResponse>(SOON).await;
        assert!(canceled.expect("a response").canceled);
    }
}

/// W13: what a hub keeps for watchers that are gone takes no room from others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_of_many_keys_that_are_gone_leave_room_for_others() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = before(&etcd).start().await;
    let mut connection = Connection::open(&rangecache).await;
    let mut other = connection.watch(&rangecache).await;
    let client = rangecache.client().await;
    let mut changing = Changing(client.open(WATCH));
    for (keys, key_bytes) in [(200, 30_000), (3_000, 100)] {
        for number in 0..keys {
            let mut key = format!("{number:06}").into_bytes();
            key.resize(key_bytes, b'k');
            let id = changing.create(key, 0).await;
            changing.cancel(id).await;
        }
    }
    until(
        SOON,
        "some topics of short keys are kept, and no other",
        async || {
            let kept = 32 << 10..WATCH_BYTES / 8;
            kept.contains(&watch_bytes(&rangecache).await).then_some(())
        },
    )
    .await;
    put(&etcd.client().await, 7, 1, 3_000).await;
    assert_eq!(other.values(1, usize::MAX).await, ["0007"]);
    let metrics = rangecache.metrics().await;
    assert_eq!(metrics.sum("rangecache_watch_handovers_total"), 0.0);
    assert_eq!(
        metrics.sum("rangecache_watch_refused_total"),
        0.0,
        "none has waited"
    );
}

/// I7: a stream that etcd serves keeps what memory needs to take it over, as far as there is room.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watchers_that_etcd_serves_count_and_are_forgotten_when_there_is_no_room() {
    const KEY_BYTES: usize = 30_000;
    let etcd = Etcd::start(Version::V3_7).await;
    let writer = etcd.client().await;
    let rangecache = before(&etcd).with("--cache-prefix", KEYS).start().await;
    let client = rangecache.client().await;
    let mut changing = Changing(client.open(WATCH));
    changing.create(KEYS.into(), 0).await;
    let key = |number: usize| {
        let mut key = format!("{number:06}").into_bytes();
        key.resize(KEY_BYTES, b'k');
        key
    };
    let mut most = 0;
    for number in 0..60 {
        changing.create(key(number), 0).await;
        let used = watch_bytes(&rangecache).await;
        assert!(used <= WATCH_BYTES, "{used}");
        most = most.max(used);
    }
    assert!(most > 8 * KEY_BYTES as u64, "{most}: they count");
    let refused = rangecache.metrics().await.sum("rangecache_watch_refused_total");
    assert!(refused >= 1.0, "{refused}");
    until(SOON, "the watchers are forgotten", async || {
        (watch_bytes(&rangecache).await < KEY_BYTES as u64).then_some(())
    })
    .await;
    for number in [0, 30, 59] {
        let key = String::from_utf8(key(number)).expect("text");
        writer.put(&key, "2").await.expect("etcd writes");
        let event = changing.0.next_as::<WatchResponse>(SOON).await;
        let event = event.expect("an event");
        assert_eq!((event.watch_id, event.events.len()), (number as i64 + 1, 1));
    }
    changing.cancel(1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_held_for_watches_whose_connection_was_cut() {
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--watch-cache", "auto")
        .start()
        .await;
    let writer = etcd.client().await;
    let mut connections = Vec::new();
    let mut watches = Vec::new();
    for _ in 0..4 {
        let mut connection = Connection::open(&rangecache).await;
        for _ in 0..250 {
            watches.push(connection.watch(&rangecache).await);
        }
        connections.push(connection);
    }
    // Half of them are cut in the midst of a message.
    put(&writer, 0, 10, 20_000).await;
    let metrics = rangecache.metrics().await;
    assert_eq!(metrics.sum("rangecache_watch_watchers"), 1000.0);
    drop((watches, connections));
    until(SOON, "no watcher and no byte is left", async || {
        put(&writer, 1, 1, 10).await;
        let metrics = rangecache.metrics().await;
        let held =
            ["rangecache_watch_watchers", "rangecache_watch_streams"].map(|metric| metrics.sum(metric));
        let bytes = ["streams", "events"].map(|kind| {
            let metric = format!("rangecache_watch_bytes{{kind=\"{kind}\"}}");
            metrics.0.get(&metric).copied()
        });
        (held == [0.0; 2] && bytes == [Some(0.0); 2]).then_some(())
    })
    .await;
}
