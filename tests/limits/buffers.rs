//! The budget of bytes that are held for calls (`--buffer-max-bytes`), and the deadlines of requests (I7). Every client
//! here behaves as badly as HTTP/2 permits; another one must be served meanwhile, and everything must be given back.

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::Response;
use prost::Message;
use testkit::etcd::Etcd;
use testkit::grpc::{Client, frame};
use testkit::kv::{PUT, RANGE, RANGE_STREAM, TXN, WATCH};
use testkit::pb::{
    PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest, WatchRequest, WatchResponse,
    prefix_end,
};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::net::TcpSocket;

use super::budgets::{PREFIX, call, etcd_with, rude, watch};

const DEADLINE_EXCEEDED: &str = "4";
const RESOURCE_EXHAUSTED: &str = "8";
const UNAVAILABLE: &str = "14";
/// Time without data after which a watch counts as open and without events.
const QUIET: std::time::Duration = std::time::Duration::from_secs(2);
/// The share of the calls in a budget of 4 MiB.
const CALLS_BYTES: f64 = (2 << 20) as f64;

async fn before(etcd: &Etcd, flags: &[(&str, &str)]) -> Rangecache {
    let mut builder = Rangecache::before(etcd).with("--buffer-max-bytes", "4MiB");
    for (flag, value) in flags {
        builder = builder.with(flag, value);
    }
    builder.start().await
}

fn calls_bytes(metrics: &testkit::metrics::Metrics) -> f64 {
    let kinds = ["request", "forwarded", "sending"];
    kinds.iter().map(|kind| metrics.buffered(kind)).sum()
}

/// Open call of a client that does not read.
struct Open {
    _body: Option<SendStream<Bytes>>,
    response: ResponseFuture,
}

/// Opens a call and sends `data`, which is the end of the request only if `ends`.
async fn open(
    sender: SendRequest<Bytes>,
    request: http::Request<()>,
    data: Bytes,
    ends: bool,
) -> (SendRequest<Bytes>, Open) {
    let mut sender = sender.ready().await.expect("the connection is open");
    let (response, mut body) = sender.send_request(request, false).expect("a stream");
    if !data.is_empty() || ends {
        body.send_data(data, ends).expect("data");
    }
    let open = Open {
        _body: (!ends).then_some(body),
        response,
    };
    (sender, open)
}

fn status(response: &Response<RecvStream>) -> Option<&str> {
    response
        .headers()
        .get("grpc-status")
        .and_then(|code| code.to_str().ok())
}

/// Statuses of the calls that were refused before a response; the others stay open.
async fn refused(calls: &mut Vec<Open>) -> Vec<String> {
    let (mut statuses, mut open) = (Vec::new(), Vec::new());
    for mut call in std::mem::take(calls) {
        let head = tokio::time::timeout(std::time::Duration::from_millis(1), &mut call.response).await;
        match head {
            Ok(Ok(response)) => statuses.extend(status(&response).map(str::to_owned)),
            Ok(Err(error)) => statuses.push(error.to_string()),
            Err(_) => open.push(call),
        }
    }
    *calls = open;
    statuses
}

/// Checks that a polite client is served while `held` calls hold bytes, then that everything is given back.
async fn is_bounded_and_given_back(rangecache: &Rangecache, held: impl Sized, at_least: f64) {
    let polite = rangecache.client().await;
    for _ in 0..20 {
        let answer = polite.get(format!("{PREFIX}0000")).await;
        assert!(answer.expect("a polite client is served").is_some());
    }
    let metrics = rangecache.metrics().await;
    let used = calls_bytes(&metrics);
    println!("{used} B held");
    assert!(used <= CALLS_BYTES, "{used}");
    assert!(used >= at_least, "{used}");
    assert!(metrics.sum("rangecache_buffer_refused_total") > 0.0);
    assert!(
        metrics
            .0
            .contains_key("rangecache_limit{limit=\"buffer_max_bytes\"}")
    );
    drop((held, polite));
    until(SOON, "everything is given back", async || {
        (calls_bytes(&rangecache.metrics().await) == 0.0).then_some(())
    })
    .await;
}

/// A message of 64 KiB that lacks its last bytes.
fn begun() -> Bytes {
    let list = RangeRequest {
        key: vec![b'k'; 64 << 10],
        ..RangeRequest::default()
    };
    let mut whole = frame(&list.encode_to_vec());
    whole.truncate(60 << 10);
    whole
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn messages_begun_and_never_ended_are_bounded() {
    let etcd = etcd_with(1, 10).await;
    let rangecache = before(&etcd, &[]).await;
    let mut held = Vec::new();
    let mut statuses = Vec::new();
    for _ in 0..4 {
        let (mut sender, connection) = rude(&rangecache).await;
        let mut calls = Vec::new();
        for _ in 0..30 {
            let opened;
            (sender, opened) = open(sender, call(&rangecache, RANGE), begun(), false).await;
            calls.push(opened);
        }
        until(SOON, "calls are refused", async || {
            statuses.extend(refused(&mut calls).await);
            (statuses.len() > 20).then_some(())
        })
        .await;
        held.push((sender, Aborted(connection), calls));
    }
    assert!(
        statuses.iter().all(|status| status == RESOURCE_EXHAUSTED),
        "{statuses:?}"
    );
    is_bounded_and_given_back(&rangecache, held, CALLS_BYTES / 4.0).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn header_lists_of_open_calls_are_bounded() {
    let etcd = etcd_with(1, 10).await;
    let rangecache = before(&etcd, &[]).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        let (mut sender, connection) = rude(&rangecache).await;
        let (mut calls, mut statuses) = (Vec::new(), Vec::new());
        for _ in 0..100 {
            let mut request = call(&rangecache, RANGE);
            for n in 0..100 {
                let name: http::HeaderName = format!("x-{n}").parse().unwrap();
                request
                    .headers_mut()
                    .insert(name, "v".repeat(100).parse().unwrap());
            }
            let opened;
            (sender, opened) = open(sender, request, Bytes::new(), false).await;
            calls.push(opened);
        }
        until(SOON, "calls are refused", async || {
            statuses.extend(refused(&mut calls).await);
            (statuses.len() > 20).then_some(())
        })
        .await;
        assert!(
            statuses.iter().all(|status| status == RESOURCE_EXHAUSTED),
            "{statuses:?}"
        );
        held.push((sender, Aborted(connection), calls));
    }
    is_bounded_and_given_back(&rangecache, held, CALLS_BYTES / 4.0).await;
}

/// Responses of 100 KB that are never read, by `path` with `message`.
async fn unread_responses_are_bounded(path: &str, message: Vec<u8>, flags: &[(&str, &str)]) {
    let etcd = etcd_with(2, 100_000).await;
    let rangecache = before(&etcd, flags).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        let (mut sender, connection) = rude(&rangecache).await;
        let mut calls = Vec::new();
        for _ in 0..50 {
            let opened;
            (sender, opened) = open(sender, call(&rangecache, path), frame(&message), true).await;
            calls.push(opened.response);
        }
        // Every call gets a head, whether it is refused or not.
        let heads = futures_util::future::join_all(calls).await;
        let heads: Vec<_> = heads.into_iter().map(|head| head.expect("a head")).collect();
        held.push((sender, Aborted(connection), heads));
    }
    let refusals: Vec<_> = held
        .iter()
        .flat_map(|(_, _, heads)| heads.iter().filter_map(status))
        .collect();
    assert!(refusals.len() > 50, "{refusals:?}");
    assert!(
        refusals.iter().all(|status| *status == RESOURCE_EXHAUSTED),
        "{refusals:?}"
    );
    is_bounded_and_given_back(&rangecache, held, CALLS_BYTES / 4.0).await;
}

/// The address of the noisy client is another than that of the polite one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_reads_nothing_on_many_connections_leaves_half_of_the_buffers_to_others() {
    const CALLS: f64 = (32 << 20) as f64;
    let etcd = etcd_with(2, 100_000).await;
    let mut builder = Rangecache::before(&etcd).with("--buffer-max-bytes", "64MiB");
    for (flag, value) in FORWARDED {
        builder = builder.with(flag, value);
    }
    let rangecache = builder.start().await;
    let polite = rangecache.client().await;
    let (mut connections, mut calls) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
        let address = rangecache.url().strip_prefix("http://").unwrap();
        let tcp = socket.connect(address.parse().unwrap()).await.unwrap();
        let (mut sender, connection) = h2::client::handshake(tcp).await.unwrap();
        let connection = Aborted(tokio::spawn(connection));
        for _ in 0..50 {
            let opened;
            let message = frame(&get().encode_to_vec());
            (sender, opened) = open(sender, call(&rangecache, RANGE), message, true).await;
            calls.push(opened.response);
        }
        connections.push((sender, connection));
    }
    let heads = futures_util::future::join_all(calls).await;
    let heads: Vec<_> = heads.into_iter().map(|head| head.expect("a head")).collect();
    let refused = heads.iter().filter(|head| status(head).is_some()).count();
    let used = calls_bytes(&rangecache.metrics().await);
    println!("{used} B held, {refused} calls refused");
    // Half of three quarters, and on each connection a frame that is always sent.
    assert!((CALLS / 8.0..=CALLS * 0.6).contains(&used), "{used}");
    for _ in 0..20 {
        let answer = polite.get(format!("{PREFIX}0000")).await;
        assert!(answer.expect("a polite client is served").is_some());
    }
    drop((connections, heads));
}

const FORWARDED: [(&str, &str); 2] = [("--cache-prefix", "/elsewhere/"), ("--stream-max-wait", "1s")];

fn get() -> RangeRequest {
    RangeRequest {
        key: format!("{PREFIX}0000").into(),
        ..RangeRequest::default()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forwarded_responses_that_are_never_read_are_bounded() {
    unread_responses_are_bounded(RANGE, get().encode_to_vec(), &FORWARDED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn forwarded_range_streams_that_are_never_read_are_bounded() {
    let list = RangeRequest::prefix(PREFIX);
    unread_responses_are_bounded(RANGE_STREAM, list.encode_to_vec(), &FORWARDED).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_to_writes_that_are_never_read_are_bounded() {
    let read = testkit::pb::request_op::Request::RequestRange(get());
    let transaction = TxnRequest {
        success: vec![RequestOp { request: Some(read) }],
        ..TxnRequest::default()
    };
    unread_responses_are_bounded(TXN, transaction.encode_to_vec(), &[]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn small_responses_from_memory_that_are_never_read_are_bounded() {
    let etcd = etcd_with(1, 10_000).await;
    let rangecache = before(&etcd, &[]).await;
    let mut held = Vec::new();
    for _ in 0..4 {
        let address = rangecache.url().strip_prefix("http://").unwrap();
        let tcp = tokio::net::TcpStream::connect(address).await.unwrap();
        let mut builder = h2::client::Builder::new();
        // Nothing can be sent to this client.
        let handshake = builder.initial_window_size(0).handshake(tcp);
        let (mut sender, connection) = handshake.await.unwrap();
        let connection = Aborted(tokio::spawn(connection));
        let mut calls = Vec::new();
        for _ in 0..100 {
            let opened;
            let message = frame(&get().encode_to_vec());
            (sender, opened) = open(sender, call(&rangecache, RANGE), message, true).await;
            calls.push(opened.response);
        }
        let heads = futures_util::future::join_all(calls).await;
        let heads: Vec<_> = heads.into_iter().map(|head| head.expect("a head")).collect();
        let refusals = heads.iter().filter_map(status);
        assert!(refusals.filter(|status| *status == RESOURCE_EXHAUSTED).count() > 20);
        held.push((sender, connection, heads));
    }
    is_bounded_and_given_back(&rangecache, held, CALLS_BYTES / 4.0).await;
}

/// Request message of a watch over the keys of the test.
fn watch_request() -> Bytes {
    let create = WatchCreateRequest {
        key: PREFIX.into(),
        range_end: prefix_end(PREFIX.as_bytes()),
        ..WatchCreateRequest::default()
    };
    let request = WatchRequest {
        create_request: Some(create),
        ..WatchRequest::default()
    };
    frame(&request.encode_to_vec())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watches_that_are_never_read_are_ended_and_resumable() {
    let etcd = etcd_with(1, 10).await;
    let rangecache = before(&etcd, &[("--watch-cache", "off")]).await;
    let (mut sender, connection) = rude(&rangecache).await;
    let mut watches = Vec::new();
    for _ in 0..30 {
        let opened;
        (sender, opened) = open(sender, call(&rangecache, WATCH), watch_request(), false).await;
        let response = opened.response.await.expect("a head");
        assert_eq!(status(&response), None, "idle watches take nothing");
        watches.push((opened._body, response.into_body()));
    }
    let mut polite = watch(&rangecache.client().await).await;
    let writer = rangecache.client().await;
    // More than the windows of the client and of rangecache have room for.
    for _ in 0..60 {
        writer
            .put(format!("{PREFIX}0000"), vec![b'v'; 10_000])
            .await
            .unwrap();
        writer.put(PREFIX, "for the polite client").await.unwrap();
        let event = polite.next_as::<WatchResponse>(SOON).await;
        assert_eq!(event.map(|response| response.events.len()), Some(1));
    }
    until(SOON, "watches find no room", async || {
        let refused = rangecache.metrics().await.0;
        let refused = refused.get("rangecache_buffer_refused_total{kind=\"forwarded\"}");
        refused.is_some_and(|count| *count > 0.0).then_some(())
    })
    .await;
    let used = calls_bytes(&rangecache.metrics().await);
    assert!(used <= CALLS_BYTES, "{used}");
    // The client reads after all: a watch that was ended has a status behind its last whole message.
    let ended = watches.into_iter().map(|(body, mut received)| async move {
        let _body = body;
        while let Ok(Some(piece)) = tokio::time::timeout(QUIET, received.data()).await {
            let length = piece.expect("no watch is reset").len();
            received
                .flow_control()
                .release_capacity(length)
                .expect("capacity");
        }
        let trailers = tokio::time::timeout(QUIET, received.trailers())
            .await
            .ok()?
            .ok()??;
        Some(trailers.get("grpc-status")?.to_str().ok()?.to_owned())
    });
    let ended: Vec<String> = futures_util::future::join_all(ended)
        .await
        .into_iter()
        .flatten()
        .collect();
    assert!(!ended.is_empty());
    assert!(ended.iter().all(|status| status == UNAVAILABLE), "{ended:?}");
    drop((sender, connection));
}

/// Task of a connection, which ends with the test's client.
struct Aborted(tokio::task::JoinHandle<Result<(), h2::Error>>);

impl Drop for Aborted {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn request_message_that_is_not_complete_in_time_is_refused() {
    let etcd = etcd_with(1, 10).await;
    let rangecache = before(&etcd, &[("--request-timeout", "1s")]).await;
    let through: Client = rangecache.client().await;
    let mut idle = watch(&through).await;
    let (mut sender, _connection) = rude(&rangecache).await;
    let put = PutRequest {
        key: b"late".to_vec(),
        ..PutRequest::default()
    };
    let mut late = frame(&put.encode_to_vec());
    late.truncate(7);
    for (path, data) in [
        (RANGE, begun()),
        (RANGE, Bytes::new()),
        // Too long to be decoded.
        (RANGE, Bytes::from_static(&[0, 0, 8, 0, 0, 1])),
        (RANGE_STREAM, begun()),
        (PUT, late),
        (PUT, Bytes::new()),
        ("/etcdserverpb.KV/Compact", Bytes::new()),
    ] {
        let opened;
        (sender, opened) = open(sender, call(&rangecache, path), data, false).await;
        let head = tokio::time::timeout(SOON, opened.response).await;
        let head = head.expect("in time").expect("a head");
        assert_eq!(status(&head), Some(DEADLINE_EXCEEDED), "{path}");
    }
    // By now the watch has sent nothing for several times the limit.
    through.put(PREFIX, "v").await.expect("a write");
    let event: Option<testkit::pb::WatchResponse> = idle.next_as(SOON).await;
    assert!(event.is_some(), "the watch is open");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_writes_pass_through_small_windows() {
    let etcd = etcd_with(1, 10).await;
    let rangecache = before(&etcd, &[]).await;
    let through = rangecache.client().await;
    for n in 0..20 {
        let value = vec![b'v'; 1_400_000];
        through.put(format!("/large/{n}"), &value).await.expect("a write");
        let read = etcd.client().await.get(format!("/large/{n}")).await;
        assert_eq!(read.expect("etcd answers").as_ref(), Some(&value));
    }
}
