//! Bounds on what a connection, an address, or all connections together can use before a request is handled.

use bytes::Bytes;
use prost::Message;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::frame;
use testkit::kv::PUT;
use testkit::pb::PutRequest;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// HTTP/2's error code of a GOAWAY for a header list that is too long.
const ENHANCE_YOUR_CALM: u32 = 0xb;

pub async fn etcd_and_rangecache(flags: &[(&str, &str)]) -> (Etcd, Rangecache) {
    let etcd = Etcd::start(Version::V3_7).await;
    let builder = Rangecache::before(&etcd);
    let builder = flags
        .iter()
        .fold(builder, |builder, (flag, value)| builder.with(flag, value));
    let rangecache = builder.start().await;
    (etcd, rangecache)
}

pub fn address(url: &str) -> &str {
    url.split_once("://").unwrap().1
}

/// HTTP/2 frame.
pub fn h2_frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let mut frame = u32::try_from(payload.len()).unwrap().to_be_bytes()[1..].to_vec();
    frame.extend([kind, flags]);
    frame.extend(stream.to_be_bytes());
    frame.extend(payload);
    frame
}

/// The error code of the first GOAWAY that arrives; `None` if the connection ends without one.
async fn goaway(mut stream: impl AsyncReadExt + Unpin) -> Option<u32> {
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await.ok()?;
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize;
        let mut payload = vec![0; length];
        stream.read_exact(&mut payload).await.ok()?;
        if head[3] == 7 {
            return Some(u32::from_be_bytes(payload[4..8].try_into().unwrap()));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_control_frames_closes_its_connection() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    let polite = rangecache.client().await;
    for (name, flood) in [
        ("ping", h2_frame(6, 0, 0, b"12345678")),
        ("pong", h2_frame(6, 1, 0, b"12345678")),
        ("settings", h2_frame(4, 0, 0, &[])),
        ("window update", h2_frame(8, 0, 0, &[0, 0, 0, 1])),
        ("priority", h2_frame(2, 0, 3, &[0, 0, 0, 0, 1])),
        ("unknown", h2_frame(0xee, 0, 0, &[])),
    ] {
        let stream = TcpStream::connect(address(rangecache.url())).await.unwrap();
        let (mut reader, mut writer) = stream.into_split();
        let flooding = tokio::spawn(async move {
            writer.write_all(PREFACE).await.unwrap();
            writer.write_all(&h2_frame(4, 0, 0, &[])).await.unwrap();
            let thousand = flood.repeat(1_000);
            for _ in 0..200 {
                // rangecache closes the connection at some point.
                if writer.write_all(&thousand).await.is_err() {
                    return;
                }
            }
            // Keeps the connection open, so that only rangecache can end it.
            let () = std::future::pending().await;
        });
        // With an error, if rangecache leaves bytes unread.
        let closed = timeout(SOON, reader.read_to_end(&mut Vec::new())).await;
        flooding.abort();
        assert!(closed.is_ok(), "the connection stays open: {name}");
        polite.put("k", "v").await.expect("other clients are served");
    }
    let closed = "rangecache_client_connections_closed_total{listener=\"clients\",reason=\"flood\"}";
    let (metrics, _) = until(SOON, "each flood is counted", async || {
        let metrics = rangecache.metrics().await;
        (metrics.0.get(closed) == Some(&6.0)).then_some(metrics)
    })
    .await;
    assert_eq!(metrics.sum("rangecache_panics_total"), 0.0);
    let lines = rangecache.log().lines().count();
    assert!(lines < 200, "a flood wrote {lines} lines to the log");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flood_of_resets_closes_its_connection() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    let polite = rangecache.client().await;
    let tcp = TcpStream::connect(address(rangecache.url())).await.unwrap();
    // Held to the end: a client closes a connection that has no sender.
    let (sender, connection) = h2::client::handshake(tcp).await.unwrap();
    let connection = tokio::spawn(connection);
    let request = http::Request::post(format!("{}{PUT}", rangecache.url()))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())
        .unwrap();
    // Ten times what is allowed.
    let flooding = async {
        for _ in 0..20_000 {
            let mut ready = sender.clone().ready().await?;
            let (_answer, mut body) = ready.send_request(request.clone(), false)?;
            body.send_data(Bytes::from_static(b"\0\0"), false)?;
            body.send_reset(h2::Reason::CANCEL);
            tokio::task::yield_now().await;
        }
        Ok::<(), h2::Error>(())
    };
    let both = async { [flooding.await.err(), connection.await.unwrap().err()] };
    let errors = timeout(SOON * 2, both).await.expect("rangecache ends it");
    assert!(errors.iter().any(Option::is_some), "{errors:?}");
    polite.put("k", "v").await.expect("other clients are served");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn header_list_over_16_kib_is_refused() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    let client = rangecache.client().await;
    let put = PutRequest {
        key: b"k".to_vec(),
        value: b"v".to_vec(),
        lease: 0,
    };
    let with_metadata = async |entries: usize| {
        let mut request = client.request(PUT);
        for n in 0..entries {
            request = request.header(format!("x-{n:03}"), "v".repeat(1_000));
        }
        client.send(request, frame(&put.encode_to_vec())).await
    };
    let accepted = with_metadata(14).await.expect("a response");
    assert_eq!(accepted.status().code, 0, "{accepted:?}");
    let refused = with_metadata(17).await;
    let status = refused.as_ref().map(|reply| reply.http_status);
    assert!(refused.is_err() || status == Ok(431), "{refused:?}");
    rangecache
        .client()
        .await
        .put("k", "v")
        .await
        .expect("others are served");
}

/// A client that never acknowledges rangecache's settings is bounded, too: one byte per header, each of 4 KB.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn header_list_of_a_client_that_acknowledges_nothing_is_bounded() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    let mut stream = TcpStream::connect(address(rangecache.url())).await.unwrap();
    stream.write_all(PREFACE).await.unwrap();
    stream.write_all(&h2_frame(4, 0, 0, &[])).await.unwrap();
    // A literal that is added to the table: name "x", a value of 4,000 bytes, whose length takes three bytes.
    let mut block = vec![0x40, 1, b'x', 0x7f, 0xa1, 0x1e];
    block.extend([b'v'; 4_000]);
    // References to it.
    block.extend([0xbe; 3_000]);
    stream.write_all(&h2_frame(1, 0x5, 1, &block)).await.unwrap();
    let code = timeout(SOON, goaway(stream)).await.expect("an end");
    assert_eq!(code, Some(ENHANCE_YOUR_CALM));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn http1_head_over_16_kib_is_refused() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[]).await;
    for (bytes, status) in [(14 << 10, "200"), (20 << 10, "431")] {
        let mut stream = TcpStream::connect(address(rangecache.url())).await.unwrap();
        let head = format!(
            "GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: {}",
            "v".repeat(bytes)
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        if status == "200" {
            stream.write_all(b"\r\n\r\n").await.unwrap();
        }
        let mut line = [0; 12];
        let read = timeout(SOON, stream.read_exact(&mut line)).await;
        read.expect("a response").expect("a status line");
        assert_eq!(line[9..], *status.as_bytes(), "{bytes}");
    }
}

/// A connection from a local address, after its first exchange; `None` if rangecache closes it.
async fn connection_from(local: &str, to: &str) -> Option<TcpStream> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(format!("{local}:0").parse().unwrap()).unwrap();
    let mut stream = socket.connect(to.parse().unwrap()).await.ok()?;
    stream.write_all(PREFACE).await.ok()?;
    stream.write_all(&h2_frame(4, 0, 0, &[])).await.ok()?;
    let mut head = [0; 9];
    let answered = timeout(SOON, stream.read_exact(&mut head)).await;
    answered.expect("settings or an end").ok()?;
    Some(stream)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_of_one_address_are_bounded() {
    let (_etcd, rangecache) = etcd_and_rangecache(&[("--max-connections-per-address", "3")]).await;
    let to = address(rangecache.url());
    let mut held = Vec::new();
    for _ in 0..3 {
        held.push(connection_from("127.0.0.2", to).await.expect("is served"));
    }
    assert!(connection_from("127.0.0.2", to).await.is_none(), "a fourth one");
    assert!(
        connection_from("127.0.0.3", to).await.is_some(),
        "another address"
    );
    let metrics = rangecache.metrics().await;
    let closed = "rangecache_client_connections_closed_total{listener=\"clients\",reason=\"address\"}";
    assert_eq!(metrics.0.get(closed), Some(&1.0));
    held.pop();
    until(SOON, "its place is free again", async || {
        connection_from("127.0.0.2", to).await
    })
    .await;
}

/// Header block of a call without a message, in literals.
pub fn header_block(path: &str) -> Vec<u8> {
    let literal = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    // `POST` and `http` of the static table; names of the table for path, authority and content type.
    [
        vec![0x83, 0x86, 0x04],
        literal(path),
        vec![0x01],
        literal("127.0.0.1"),
        vec![0x0f, 0x10],
        literal("application/grpc"),
    ]
    .concat()
}

/// A refused call is answered before its message arrives. A client that was refused often, because buffers or calls were
/// full, has done nothing wrong.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_of_refused_calls_keeps_its_connection() {
    const CALLS: u32 = 3_000;
    const RST_STREAM: u8 = 3;
    const PING: u8 = 6;
    let (_etcd, rangecache) = etcd_and_rangecache(&[("--max-calls", "1")]).await;
    let _watch = super::budgets::watch(&rangecache.client().await).await;
    let mut stream = TcpStream::connect(address(rangecache.url())).await.unwrap();
    stream.write_all(PREFACE).await.unwrap();
    stream.write_all(&h2_frame(4, 0, 0, &[])).await.unwrap();
    let message = frame(b"message");
    let mut calls: u32 = 0;
    let open = |calls: u32| h2_frame(1, 0x4, 2 * calls + 1, &header_block(PUT));
    stream.write_all(&open(0)).await.unwrap();
    loop {
        let mut head = [0; 9];
        let read = timeout(SOON, stream.read_exact(&mut head)).await;
        read.expect("a frame")
            .unwrap_or_else(|error| panic!("closed after {calls} refused calls: {error}"));
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        stream.read_exact(&mut payload).await.unwrap();
        match head[3] {
            7 => panic!("GOAWAY after {calls} refused calls: {payload:?}"),
            PING if head[4] == 1 => break,
            // The late message is answered by another one.
            RST_STREAM if head[5..] == (2 * calls + 1).to_be_bytes()[..] => {
                let late = h2_frame(0, 1, 2 * calls + 1, &message);
                calls += 1;
                let next = if calls == CALLS {
                    h2_frame(PING, 0, 0, b"the last")
                } else {
                    open(calls)
                };
                stream.write_all(&[late, next].concat()).await.unwrap();
            }
            _ => {}
        }
    }
    assert_eq!(calls, CALLS);
}
