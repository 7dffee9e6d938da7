//! Bounds in time on a connection, on a paused clock: both ends are in this process, so that time passes only when
//! neither has anything to do.

use std::convert::Infallible;

use bytes::Bytes;
use http_body_util::Full;
use rangecache_base::net;
use rangecache_base::telemetry::{Metrics, exposition::Format, metrics::Gauge};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::{net::UnixStream, task::JoinHandle, time::Instant};

use super::{super::connections::ConnectionLimits, *};
use crate::limits::{ByteKind, BytesLedger, ClientAccount};

const AGE: Duration = Duration::from_secs(60);
const GET: &[u8] = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n";
/// HTTP/2's preface, and empty settings.
const HTTP2: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
const GOAWAY: u8 = 7;

fn config(max_age: Option<Duration>) -> ServeConfig {
    let limits = ConnectionLimits {
        all: 1,
        per_address: 1,
        on_loopback: false,
        replace_oldest: false,
    };
    ServeConfig {
        name: "metrics",
        connections: Connections::new(limits, Gauge::default()),
        max_concurrent_streams: 16,
        max_age,
        metrics: Arc::default(),
        tasks: TaskTracker::new(),
        closing: CancellationToken::new(),
        drain: CancellationToken::new(),
    }
}

/// A client of a connection whose requests are answered by `body_bytes` each, and the time at which the connection
/// has been closed.
fn connect(config: ServeConfig, body_bytes: usize) -> (UnixStream, JoinHandle<Duration>) {
    connect_counted(config, body_bytes, None)
}

/// Client as of [`connect`], of a connection whose unsent bytes count in `account`.
fn connect_counted(
    config: ServeConfig,
    body_bytes: usize,
    account: Option<Arc<ClientAccount>>,
) -> (UnixStream, JoinHandle<Duration>) {
    let (client, stream) = UnixStream::pair().unwrap();
    let handler = move |_: &Arc<Intake>, _: &ClientName, _: Option<std::net::IpAddr>| {
        let respond = move |_: Request<Incoming>, _: Transport| async move {
            Ok::<_, Infallible>(Response::new(Full::new(Bytes::from(vec![b'v'; body_bytes]))))
        };
        let unsent = account.as_ref().map(|account| account.hold(ByteKind::Sending));
        (respond, unsent)
    };
    let begun = Instant::now();
    let place = config.connections.place_now().unwrap();
    let open = admit(&config, None, place).unwrap();
    let unused = open.unused();
    let serving = tokio::spawn(async move {
        serve_connection(
            (net::from_unix(stream), None, open),
            None,
            server(&config),
            handler,
            (config, unused),
        )
        .await;
        begun.elapsed()
    });
    (client, serving)
}

/// When the connection was closed.
async fn ended(closed: JoinHandle<Duration>) -> Duration {
    let ended = tokio::time::timeout(Duration::from_secs(3600), closed).await;
    ended.expect("the connection stays open").unwrap()
}

#[tokio::test(start_paused = true)]
async fn connection_is_closed_at_its_age_however_busy_it_is() {
    let (mut client, closed) = connect(config(Some(AGE)), 10);
    let mut response = [0; 4096];
    let mut responses = 0;
    loop {
        tokio::time::advance(Duration::from_secs(1)).await;
        // The connection may be closed already.
        let _ = client.write_all(GET).await;
        match client.read(&mut response).await {
            Ok(0) | Err(_) => break,
            Ok(_) => responses += 1,
        }
        assert!(responses < 100, "it is never closed");
    }
    assert!(responses > 50, "{responses}");
    assert!(ended(closed).await < AGE + FAREWELL_TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn http2_client_gets_goaway_at_the_end_of_its_connection() {
    let (mut client, closed) = connect(config(Some(AGE)), 10);
    client.write_all(HTTP2).await.unwrap();
    let mut frames = Vec::new();
    loop {
        assert!(frames.len() < 1_000, "the connection stays open");
        let mut head = [0; 9];
        if client.read_exact(&mut head).await.is_err() {
            break;
        }
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        client.read_exact(&mut payload).await.unwrap();
        frames.push(head[3]);
        // A ping is acknowledged, so that only the age can end the connection.
        if head[3] == 6 && head[4] == 0 {
            head[4] = 1;
            client.write_all(&[&head[..], &payload].concat()).await.unwrap();
        }
    }
    assert!(frames.contains(&GOAWAY), "{frames:?}");
    let closed = ended(closed).await;
    assert!((AGE..AGE + FAREWELL_TIMEOUT * 2).contains(&closed), "{closed:?}");
}

#[tokio::test(start_paused = true)]
async fn unread_response_keeps_no_connection_beyond_its_age() {
    let (mut client, closed) = connect(config(Some(AGE)), 64 << 20);
    client.write_all(GET).await.unwrap();
    assert_eq!(ended(closed).await, AGE + FAREWELL_TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn connection_without_an_age_stays_open() {
    let (mut client, closed) = connect(config(None), 10);
    for _ in 0..10 {
        client.write_all(GET).await.unwrap();
        assert!(client.read(&mut [0; 4096]).await.unwrap() > 0);
        tokio::time::advance(HEAD_TIMEOUT / 2).await;
    }
    assert!(!closed.is_finished());
}

#[tokio::test(start_paused = true)]
async fn request_head_that_never_ends_ends_its_connection() {
    let (mut client, closed) = connect(config(None), 10);
    client
        .write_all(b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ")
        .await
        .unwrap();
    // Each second brings another byte: a head has a deadline, not only a pause.
    let trickling = async {
        while client.write_all(b"v").await.is_ok() {
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    tokio::time::timeout(HEAD_TIMEOUT * 2, trickling)
        .await
        .expect("the connection is closed");
    assert!(ended(closed).await <= HEAD_TIMEOUT + FAREWELL_TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn client_without_a_next_request_is_closed() {
    let (mut client, closed) = connect(config(None), 10);
    client.write_all(GET).await.unwrap();
    let closed = ended(closed).await;
    assert_eq!(closed, HEAD_TIMEOUT);
}

#[tokio::test(start_paused = true)]
async fn mute_http2_client_is_closed_after_an_unanswered_ping() {
    let (mut client, closed) = connect(config(None), 10);
    client.write_all(HTTP2).await.unwrap();
    let closed = ended(closed).await;
    let unanswered = PING_INTERVAL + PING_TIMEOUT;
    assert!(
        (unanswered..unanswered + FAREWELL_TIMEOUT).contains(&closed),
        "{closed:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn silent_connection_is_closed_and_counted() {
    let metrics = Metrics::new();
    let config = ServeConfig {
        metrics: metrics.group(),
        ..config(None)
    };
    let (_client, closed) = connect(config, 10);
    ended(closed).await;
    let text = metrics.encode(Format::Text);
    let line = "rangecache_client_connections_closed_total{listener=\"metrics\",reason=\"silent\"} 1";
    assert!(text.contains(line), "{text}");
}

/// Sends an HTTP/2 request, with a window in which the whole response fits.
async fn request_http2(client: &mut UnixStream) {
    const WINDOW_BYTES: [u8; 4] = (16_u32 << 20).to_be_bytes();
    let settings = [&[0, 0, 6, 4, 0, 0, 0, 0, 0, 0, 4][..], &WINDOW_BYTES].concat();
    let update = [&[0, 0, 4, 8, 0, 0, 0, 0, 0][..], &WINDOW_BYTES].concat();
    // GET, http, / and the authority "a", in a stream that ends.
    let headers = b"\0\0\x06\x01\x05\0\0\0\x01\x82\x86\x84\x41\x01a";
    let bytes = [&HTTP2[..24], &settings, &update, headers].concat();
    client.write_all(&bytes).await.unwrap();
}

#[tokio::test]
async fn unread_response_counts_what_its_connection_has_collected() {
    const BODY_BYTES: usize = 8 << 20;
    let buffers = BytesLedger::of_bytes(2 << 20);
    let account = buffers.account(0, Arc::default());
    let (mut client, _closed) = connect_counted(config(None), BODY_BYTES, Some(account));
    let mut other = buffers.account(0, Arc::default()).hold(ByteKind::Request);
    // Half of three quarters of the buffers is free only as long as no other connection holds something.
    let mut is_free = async || {
        tokio::time::sleep(Duration::from_millis(1)).await;
        let is_free = other.grow_if_free(384 << 10);
        other.shrink_to(0);
        is_free
    };
    assert!(is_free().await);
    request_http2(&mut client).await;
    let waiting = async { while is_free().await {} };
    tokio::time::timeout(Duration::from_secs(30), waiting)
        .await
        .expect("what was collected does not count");
    let mut read = 0;
    let mut part = vec![0; 1 << 16];
    while read < BODY_BYTES {
        read += client.read(&mut part).await.unwrap();
    }
    let waiting = async { while !is_free().await {} };
    tokio::time::timeout(Duration::from_secs(30), waiting)
        .await
        .expect("what was sent counts");
}

#[test]
fn loopback_addresses_and_unix_sockets_alone_are_local() {
    assert!(is_local(None));
    for (address, expected) in [
        ("127.0.0.1", true),
        ("127.9.9.9", true),
        ("::1", true),
        ("::ffff:127.0.0.1", true),
        ("10.0.0.1", false),
        ("0.0.0.0", false),
        ("192.168.1.1", false),
        ("::ffff:10.0.0.1", false),
        ("fe80::1", false),
        ("2001:db8::1", false),
    ] {
        assert_eq!(is_local(Some(address.parse().unwrap())), expected, "{address}");
    }
}
