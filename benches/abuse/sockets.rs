//! Connections that send little or nothing, WebSockets, and requests of HTTP/1.

use std::sync::atomic::Ordering;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::counts::{Counts, RECONNECT_PAUSE};

/// The beginning of an HTTP/1 request to the JSON gateway whose body never ends.
const UNFINISHED_HTTP1: &[u8] =
    b"POST /v3/kv/range HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 65536\r\n\r\n{";
/// A WebSocket, and the text `{"create_request":{"key":"aw=="}}` with a mask that changes nothing.
const WEB_SOCKET: &[u8] =
    b"GET /v3/watch HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
    sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n\
    \x81\xa1\0\0\0\0{\"create_request\":{\"key\":\"aw==\"}}";
/// A request that etcd answers.
const HEALTH: &[u8] = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
/// The beginning of a request to the admin port.
const UNFINISHED_ADMIN: &[u8] = b"GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ";

/// The beginning of an HTTP/1 request with a head of 60 KB.
static HALF_HEAD: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let line = b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ";
    [&line[..], &[b'v'; 60_000]].concat()
});
/// The first message of a TLS handshake, of 48 KB without its last byte, in records of 16,000 bytes.
static HALF_HELLO: LazyLock<Vec<u8>> = LazyLock::new(|| {
    const LENGTH: [u8; 3] = [0, 0xbb, 0x80];
    let mut message = [&[1], &LENGTH[..], &[3, 3]].concat();
    message.resize(4 + 48_000 - 1, 0);
    let records = message.chunks(16_000).map(|piece| {
        let length = u16::try_from(piece.len()).unwrap_or(0).to_be_bytes();
        [&[22, 3, 1], &length[..], piece].concat()
    });
    records.flatten().collect()
});

/// Holds one connection after another on which only `first_bytes` are sent.
async fn hold(address: String, first_bytes: &'static [u8], counts: Arc<Counts>) {
    loop {
        if let Ok(mut tcp) = TcpStream::connect(&address).await {
            counts.connections.fetch_add(1, Ordering::Relaxed);
            let _ = tcp.write_all(first_bytes).await;
            // Returns when the server closes the connection.
            let mut byte = [0];
            while tcp.read(&mut byte).await.is_ok_and(|n| n > 0) {}
            counts.closed.fetch_add(1, Ordering::Relaxed);
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

/// A connection that sends nothing.
pub(crate) async fn silent(address: String, counts: Arc<Counts>) {
    hold(address, b"", counts).await;
}

/// An HTTP/1 request whose body never ends.
pub(crate) async fn unfinished_http1(address: String, counts: Arc<Counts>) {
    hold(address, UNFINISHED_HTTP1, counts).await;
}

/// An HTTP/1 request whose head never ends.
pub(crate) async fn half_head(address: String, counts: Arc<Counts>) {
    hold(address, &HALF_HEAD, counts).await;
}

/// A TLS handshake whose first message never ends.
pub(crate) async fn half_hello(address: String, counts: Arc<Counts>) {
    hold(address, &HALF_HELLO, counts).await;
}

/// A WebSocket with a watch.
pub(crate) async fn web_socket(address: String, counts: Arc<Counts>) {
    hold(address, WEB_SOCKET, counts).await;
}

/// Requests over a kept connection, at the begin of each second, as all other connections' are.
pub(crate) async fn http1_bursts(address: String, counts: Arc<Counts>) {
    loop {
        if let Ok(mut tcp) = TcpStream::connect(&address).await {
            counts.connections.fetch_add(1, Ordering::Relaxed);
            let mut response = [0; 4096];
            loop {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                let begun = Duration::from_nanos(now.subsec_nanos().into());
                tokio::time::sleep(Duration::from_secs(1).saturating_sub(begun)).await;
                counts.calls.fetch_add(1, Ordering::Relaxed);
                if tcp.write_all(HEALTH).await.is_err() {
                    break;
                }
                match tcp.read(&mut response).await {
                    Ok(1..) if response.starts_with(b"HTTP/1.1 200") => {}
                    Ok(1..) => {
                        counts.refused.fetch_add(1, Ordering::Relaxed);
                    }
                    _ => break,
                }
            }
            counts.closed.fetch_add(1, Ordering::Relaxed);
        }
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

/// A request to the admin port whose head never ends.
pub(crate) async fn unfinished_admin(address: String, counts: Arc<Counts>) {
    hold(address, UNFINISHED_ADMIN, counts).await;
}

/// Requests the metrics of the admin port without pause, over new connections.
pub(crate) async fn scrape(address: String, counts: Arc<Counts>) {
    loop {
        counts.calls.fetch_add(1, Ordering::Relaxed);
        match testkit::http::get(&format!("http://{address}/metrics")).await {
            Ok(response) if response.status == 200 => {}
            _ => {
                counts.refused.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
    }
}
