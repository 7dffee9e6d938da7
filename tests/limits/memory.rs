//! Memory that clients make rangecache hold before a call has counted it, or after its call has begun: heads of watches,
//! and receive windows of connections.

use bytes::Bytes;
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::Method;
use prost::Message;
use testkit::grpc::frame;
use testkit::kv::{PUT, WATCH};
use testkit::pb::{WatchCreateRequest, WatchProgressRequest, WatchRequest};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;

use super::budgets::{call, rude};
use super::connections::{PREFACE, address, etcd_and_rangecache, h2_frame, header_block};

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const ACKNOWLEDGEMENT: u8 = 1;
const END_HEADERS: u8 = 4;
const INITIAL_WINDOW_SIZE: [u8; 2] = [0, 4];
/// Largest frame, in bytes.
const FRAME_BYTES: usize = 16 << 10;

/// Create request of a watch.
fn create() -> Bytes {
    let create_request = WatchCreateRequest {
        key: b"k".to_vec(),
        ..WatchCreateRequest::default()
    };
    let request = WatchRequest {
        create_request: Some(create_request),
        ..WatchRequest::default()
    };
    frame(&request.encode_to_vec())
}

/// An open watch of which nothing but `created` was read.
type Watch = (SendStream<Bytes>, RecvStream);

/// Opens a watch whose head has `fields` fields more than it needs.
async fn watch(sender: &SendRequest<Bytes>, rangecache: &Rangecache, fields: usize) -> Watch {
    let mut request = call(rangecache, WATCH);
    for n in 0..fields {
        let name: http::HeaderName = format!("x-{n}").parse().unwrap();
        request.headers_mut().insert(name, "v".parse().unwrap());
    }
    let mut ready = sender.clone().ready().await.unwrap();
    let (response, mut requests): (ResponseFuture, _) = ready.send_request(request, false).unwrap();
    requests.send_data(create(), false).unwrap();
    let mut body = timeout(SOON, response)
        .await
        .expect("a head")
        .unwrap()
        .into_body();
    let created = timeout(SOON, body.data()).await.expect("created");
    created.expect("an open stream").expect("data");
    (requests, body)
}

async fn held(rangecache: &Rangecache) -> f64 {
    rangecache.metrics().await.buffered("request")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn heads_of_watches_count_until_they_end() {
    const WATCHES: usize = 50;
    const FIELDS: usize = 200;
    /// Of each open call.
    const CALL_BYTES: f64 = 8192.0;
    let (_etcd, rangecache) = etcd_and_rangecache(&[("--watch-cache", "auto")]).await;
    rangecache.client().await.put("k", "v").await.expect("a write");
    rangecache.warm().await;
    let (sender, connection) = rude(&rangecache).await;
    for source in ["memory", "etcd"] {
        if source == "etcd" {
            rangecache.forward_all(Method::POST).await;
        }
        let mut watches = Vec::new();
        for _ in 0..WATCHES {
            watches.push(watch(&sender, &rangecache, FIELDS).await);
        }
        let streams = rangecache.metrics().await.watch_streams(source);
        assert_eq!(streams, WATCHES as f64, "{source}");
        let bytes = held(&rangecache).await / WATCHES as f64;
        assert!(
            bytes > CALL_BYTES + FIELDS as f64 * 96.0,
            "{source}: {bytes} each"
        );
        drop(watches);
        until(SOON, "their heads are given back", async || {
            (held(&rangecache).await == 0.0).then_some(())
        })
        .await;
    }
    connection.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_with_more_than_256_header_fields_is_refused() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    let client = rangecache.client().await;
    // A few more are those of the request itself.
    for (fields, is_refused) in [(240, false), (260, true)] {
        let mut request = client.request(PUT);
        for n in 0..fields {
            request = request.header(format!("x-{n}"), "v");
        }
        let put = testkit::pb::PutRequest {
            key: b"k".to_vec(),
            ..testkit::pb::PutRequest::default()
        };
        let reply = client.send(request, frame(&put.encode_to_vec())).await;
        let status = reply.expect("a response").status();
        let code = if is_refused { 8 } else { 0 };
        assert_eq!(status.code, code, "{fields}: {status:?}");
        assert_eq!(
            status.message.contains("256 header fields"),
            is_refused,
            "{status:?}"
        );
    }
}

/// Reads frames up to the acknowledgement of a ping, and sums up what they say about the windows of the connection, and
/// of each stream.
async fn windows_until_pong(stream: &mut TcpStream, windows: &mut [usize; 2]) {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.expect("a frame");
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload).await.expect("a payload");
        let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().unwrap()) as usize;
        match head[3] {
            PING if head[4] == ACKNOWLEDGEMENT => return,
            WINDOW_UPDATE if head[5..] == [0; 4] => windows[0] += number(&payload),
            SETTINGS => {
                for setting in payload.chunks(6) {
                    if setting[..2] == INITIAL_WINDOW_SIZE {
                        windows[1] = number(&setting[2..]);
                    }
                }
            }
            _ => {}
        }
    }
}

/// A connection whose watches cannot send `created`, and therefore read none of the requests that fill its window.
async fn filled_connection(rangecache: &Rangecache) -> (TcpStream, usize) {
    const WATCHES: u32 = 4;
    let ping = h2_frame(PING, 0, 0, b"12345678");
    let mut stream = TcpStream::connect(address(rangecache.url())).await.unwrap();
    let no_window = [&INITIAL_WINDOW_SIZE[..], &[0; 4]].concat();
    let settings = h2_frame(SETTINGS, 0, 0, &no_window);
    stream
        .write_all(&[PREFACE, &settings, &ping].concat())
        .await
        .unwrap();
    let mut windows = [65_535, 65_535];
    // A pong may come before an update of the window that was due earlier.
    windows_until_pong(&mut stream, &mut windows).await;
    stream.write_all(&ping).await.unwrap();
    windows_until_pong(&mut stream, &mut windows).await;
    let [mut of_connection, of_stream] = windows;
    let create = create();
    for n in 0..WATCHES {
        let head = h2_frame(HEADERS, END_HEADERS, 2 * n + 1, &header_block(WATCH));
        let data = h2_frame(DATA, 0, 2 * n + 1, &create);
        stream.write_all(&[head, data].concat()).await.unwrap();
        of_connection -= create.len();
    }
    let progress = WatchRequest {
        progress_request: Some(WatchProgressRequest {}),
        ..WatchRequest::default()
    };
    let progress = frame(&progress.encode_to_vec());
    let requests = progress.repeat(FRAME_BYTES / progress.len());
    let mut sent = 0;
    for n in 0..WATCHES {
        let mut left = (of_stream - create.len()).min(of_connection);
        while left >= requests.len() {
            stream
                .write_all(&h2_frame(DATA, 0, 2 * n + 1, &requests))
                .await
                .unwrap();
            left -= requests.len();
            of_connection -= requests.len();
            sent += requests.len();
        }
    }
    stream.write_all(&ping).await.unwrap();
    windows_until_pong(&mut stream, &mut windows).await;
    (stream, sent)
}

/// 300 connections once held 400 MiB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn receive_windows_of_all_connections_are_bounded() {
    const CONNECTIONS: usize = 300;
    const MIB: u64 = 1 << 20;
    let (_etcd, rangecache) = etcd_and_rangecache(&[("--watch-cache", "auto")]).await;
    rangecache.warm().await;
    let before = rangecache.resident_bytes();
    let mut held = Vec::new();
    let mut sent = Vec::new();
    for _ in 0..CONNECTIONS {
        let (connection, bytes) = filled_connection(&rangecache).await;
        held.push(connection);
        sent.push(bytes);
    }
    assert!(
        sent[0] > 900 << 10,
        "the first one has a large window: {}",
        sent[0]
    );
    assert!(sent.iter().all(|bytes| *bytes > 40 << 10), "{sent:?}");
    let received = sent.iter().sum::<usize>() as u64;
    println!("{received} bytes were received");
    // 64 MiB in the budget of windows, and 128 KiB of each connection.
    let more = rangecache.resident_bytes() - before;
    assert!(
        more < (64 + 300 / 8 + 20) * MIB,
        "{} MiB for {} MiB",
        more / MIB,
        received / MIB
    );
    drop(held);
    let freed = async || filled_connection(&rangecache).await.1 > 900 << 10;
    until(SOON, "windows are given back", async || {
        freed().await.then_some(())
    })
    .await;
}
