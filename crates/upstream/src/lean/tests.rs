//! Calls to hyper's server, and to a peer that a test scripts frame by frame.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, DuplexStream};
use tokio::net::TcpStream;
use tokio_util::either::Either;

use super::client::{Lean, Whole};
use super::error::LeanError;
use crate::fake::FakeEtcd;

const SOON: Duration = Duration::from_secs(20);
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const END_STREAM: u8 = 1;
const ACK: u8 = 1;
const END_HEADERS: u8 = 4;
const PADDED: u8 = 8;
/// `:status: 200` by index.
const OK: [u8; 1] = [0x88];

fn uri() -> Uri {
    Uri::from_static("http://etcd:2379/etcdserverpb.KV/Range")
}

async fn call(lean: &Lean, body: &[u8]) -> Result<Whole, LeanError> {
    let mut headers = HeaderMap::new();
    headers.insert("te", HeaderValue::from_static("trailers"));
    let uri = uri();
    let called = lean.call(&uri, &headers, body);
    tokio::time::timeout(SOON, called).await.expect("the call ends")
}

/// The server's side of a connection, as a test plays it.
struct Peer(DuplexStream);

impl Peer {
    fn new() -> (Peer, Lean) {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        (
            Peer(theirs),
            Lean::new(Either::Left(Either::Right(Either::Right(ours)))),
        )
    }

    async fn send(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        let mut frame = BytesMut::new();
        frame.put_uint(payload.len() as u64, 3);
        frame.put_slice(&[kind, flags]);
        frame.put_u32(stream);
        frame.put_slice(payload);
        self.0.write_all(&frame).await.unwrap();
    }

    /// The kind, flags, stream and payload of the next frame.
    async fn frame(&mut self) -> (u8, u8, u32, Vec<u8>) {
        let mut prefix = [0; 9];
        let reading = self.0.read_exact(&mut prefix);
        tokio::time::timeout(SOON, reading).await.unwrap().unwrap();
        let [a, b, c, kind, flags, stream @ ..] = prefix;
        let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
        self.0.read_exact(&mut payload).await.unwrap();
        (kind, flags, u32::from_be_bytes(stream), payload)
    }

    /// Reads up to the end of a request, and returns its stream.
    async fn request(&mut self) -> u32 {
        loop {
            if let (DATA, END_STREAM, stream, _) = self.frame().await {
                return stream;
            }
        }
    }

    async fn preface(&mut self) {
        let mut preface = [0; 24];
        self.0.read_exact(&mut preface).await.unwrap();
        assert_eq!(&preface, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
    }

    /// Answers the request of `stream` with `body` and without trailers.
    async fn answer(&mut self, stream: u32, body: &[u8]) {
        self.send(HEADERS, END_HEADERS, stream, &OK).await;
        self.send(DATA, END_STREAM, stream, body).await;
    }
}

/// Waits for `called` while the peer plays `script`.
async fn beside<T>(
    called: impl Future<Output = Result<Whole, LeanError>>,
    script: impl Future<Output = T>,
) -> Result<Whole, LeanError> {
    tokio::join!(called, script).0
}

/// Fails unless a call whose peer plays `script` fails, and closes the connection.
async fn closes(script: impl AsyncFnOnce(&mut Peer, u32)) {
    let (mut peer, lean) = Peer::new();
    let playing = async {
        peer.preface().await;
        let stream = peer.request().await;
        script(&mut peer, stream).await;
    };
    beside(call(&lean, b""), playing).await.unwrap_err();
    assert!(lean.closed().is_cancelled() && !lean.is_idle());
    assert!(matches!(call(&lean, b"").await, Err(LeanError::Closed)));
}

#[tokio::test]
async fn calls_to_hypers_server_are_answered_on_one_connection() {
    // Of one and of several frames.
    let sizes = [0, 1, 300, 70_000, 1 << 20];
    let etcd = FakeEtcd::start(move |_, message| {
        let size = u32::from_be_bytes(message[..4].try_into().unwrap());
        std::future::ready(match size {
            1 => Err((11, "etcdserver: mvcc: required revision has been compacted")),
            size => Ok(vec![7; size as usize]),
        })
    })
    .await;
    let address = etcd.url.authority().to_string();
    let stream = TcpStream::connect(address).await.unwrap();
    let lean = Lean::new(Either::Left(Either::Left(stream)));
    for size in sizes.iter().cycle().take(200).copied() {
        let mut body = vec![0, 0, 0, 0, 4];
        body.put_u32(size);
        let response = call(&lean, &body).await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        assert_eq!(response.headers()["content-type"], "application/grpc");
        let (body, trailers) = response.into_body();
        let trailers = trailers.unwrap();
        if size == 1 {
            assert_eq!(trailers["grpc-status"], "11");
            assert_eq!(
                trailers["grpc-message"],
                "etcdserver: mvcc: required revision has been compacted"
            );
        } else {
            assert_eq!(trailers["grpc-status"], "0");
            assert_eq!(body.len(), 5 + size as usize);
            assert!(body[5..].iter().all(|byte| *byte == 7));
        }
    }
    let calls = etcd.calls.lock();
    assert!(calls.iter().all(|(connection, path, headers)| {
        *connection == 1 && path == uri().path() && headers["te"] == "trailers"
    }));
}

#[tokio::test]
async fn request_is_one_write_behind_the_preface_and_settings() {
    let (mut peer, lean) = Peer::new();
    let playing = async {
        peer.preface().await;
        let (kind, flags, stream, settings) = peer.frame().await;
        assert_eq!((kind, flags, stream), (SETTINGS, 0, 0));
        // No dynamic table, no pushes, and a window of 4 MiB.
        assert_eq!(
            settings,
            [0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 4, 0, 0x40, 0, 0]
        );
        assert_eq!(peer.frame().await.0, WINDOW_UPDATE);
        let (kind, flags, stream, block) = peer.frame().await;
        assert_eq!((kind, flags, stream), (HEADERS, END_HEADERS, 1));
        let path = uri().path().as_bytes().to_vec();
        assert!(block.starts_with(&[0x83, 0x86, 4, u8::try_from(path.len()).unwrap()]));
        assert!(block.windows(path.len()).any(|part| part == path));
        assert_eq!(peer.frame().await, (DATA, END_STREAM, 1, b"body".to_vec()));
        peer.answer(1, b"answer").await;
    };
    let response = beside(call(&lean, b"body"), playing).await.unwrap();
    assert_eq!(response.into_body(), (Bytes::from_static(b"answer"), None));
    assert!(lean.is_idle());
}

#[tokio::test]
async fn settings_and_pings_are_acknowledged_with_the_next_request() {
    let (mut peer, lean) = Peer::new();
    let playing = async {
        peer.preface().await;
        peer.send(SETTINGS, 0, 0, &[0, 4, 0, 0, 0, 3]).await;
        let stream = peer.request().await;
        peer.send(PING, 0, 0, b"12345678").await;
        peer.send(SETTINGS, ACK, 0, &[]).await;
        // A kind that does not exist.
        peer.send(0x55, 0, 0, b"?").await;
        peer.answer(stream, b"").await;
    };
    beside(call(&lean, b"abc"), playing).await.unwrap();
    let playing = async {
        assert_eq!(peer.frame().await, (SETTINGS, ACK, 0, vec![]));
        assert_eq!(peer.frame().await, (PING, ACK, 0, b"12345678".to_vec()));
        let stream = peer.request().await;
        assert_eq!(stream, 3);
        peer.answer(stream, b"").await;
    };
    beside(call(&lean, b"abc"), playing).await.unwrap();
    // The settings allow three bytes.
    assert!(matches!(call(&lean, b"abcd").await, Err(LeanError::TooLong)));
}

#[tokio::test]
async fn informational_heads_padding_and_empty_frames_are_skipped() {
    let (mut peer, lean) = Peer::new();
    let playing = async {
        peer.preface().await;
        let stream = peer.request().await;
        peer.send(HEADERS, END_HEADERS, stream, b"\x48\x03100").await;
        peer.send(HEADERS, END_HEADERS | PADDED, stream, b"\x02\x88\0\0")
            .await;
        peer.send(DATA, 0, stream, b"").await;
        peer.send(DATA, PADDED, stream, b"\x01a\0").await;
        peer.send(DATA, 0, stream, b"b").await;
        peer.send(HEADERS, END_HEADERS | END_STREAM, stream, b"\0\x01a\x01b")
            .await;
    };
    let response = beside(call(&lean, b""), playing).await.unwrap();
    assert_eq!(response.status(), StatusCode::OK);
    let (body, trailers) = response.into_body();
    assert_eq!(
        (&body[..], trailers.unwrap()["a"].as_bytes()),
        (&b"ab"[..], &b"b"[..])
    );
}

#[tokio::test]
async fn what_is_not_expected_closes_the_connection() {
    closes(async |peer, _| peer.send(GOAWAY, 0, 0, &[0; 8]).await).await;
    closes(async |peer, stream| peer.send(RST_STREAM, 0, stream, &[0; 4]).await).await;
    closes(async |peer, stream| peer.answer(stream + 2, b"").await).await;
    closes(async |peer, stream| peer.send(DATA, END_STREAM, stream, b"without a head").await).await;
    // Headers that another frame continues, that are damaged, or that refer to a dynamic table.
    closes(async |peer, stream| peer.send(HEADERS, 0, stream, &OK).await).await;
    closes(async |peer, stream| peer.send(HEADERS, END_HEADERS, stream, b"\0\x7f").await).await;
    closes(async |peer, stream| peer.send(HEADERS, END_HEADERS, stream, &[0xbe]).await).await;
    closes(async |peer, stream| peer.send(HEADERS, END_HEADERS, stream, &[0x3f, 0xe1, 0x1f]).await).await;
    closes(async |peer, stream| peer.send(DATA, PADDED, stream, &[9, 1]).await).await;
    closes(async |peer, stream| {
        peer.send(HEADERS, END_HEADERS, stream, &OK).await;
        peer.send(HEADERS, END_HEADERS | END_STREAM, stream, &OK).await;
    })
    .await;
    closes(async |peer, _| peer.0.shutdown().await.unwrap()).await;
}

#[tokio::test]
async fn end_of_an_idle_connection_is_found_before_a_request_is_sent() {
    let (mut peer, lean) = Peer::new();
    let playing = async {
        peer.preface().await;
        let stream = peer.request().await;
        peer.answer(stream, b"").await;
        peer.send(GOAWAY, 0, 0, &[0; 8]).await;
    };
    beside(call(&lean, b""), playing).await.unwrap();
    call(&lean, b"").await.unwrap_err();
    let mut rest = Vec::new();
    peer.0.read_to_end(&mut rest).await.unwrap();
    assert_eq!(rest, b"", "nothing was sent to a connection that has ended");
}

/// The response of a call that was given up must not be taken for that of the next one.
#[tokio::test]
async fn call_that_is_given_up_closes_the_connection() {
    let (mut peer, lean) = Peer::new();
    let playing = async {
        peer.preface().await;
        peer.request().await;
    };
    tokio::select! {
        _ = call(&lean, b"") => panic!("nothing was answered"),
        () = playing => {}
    }
    assert!(lean.closed().is_cancelled());
    call(&lean, b"").await.unwrap_err();
}

#[tokio::test]
async fn calls_wait_for_each_other() {
    let (mut peer, lean) = Peer::new();
    let playing = async {
        peer.preface().await;
        for expected in [1, 3] {
            let stream = peer.request().await;
            assert_eq!(stream, expected);
            assert!(!lean.is_idle());
            peer.answer(stream, &[u8::try_from(stream).unwrap()]).await;
        }
    };
    let (first, second, ()) = tokio::join!(call(&lean, b""), call(&lean, b""), playing);
    assert_eq!(first.unwrap().into_body().0, [1][..]);
    assert_eq!(second.unwrap().into_body().0, [3][..]);
}

/// A server may ping an idle connection, and close it if nothing is acknowledged.
#[tokio::test(start_paused = true)]
async fn ping_of_an_idle_connection_is_acknowledged() {
    let (mut peer, lean) = Peer::new();
    let (closed, lean) = (lean.closed().clone(), Arc::new(lean));
    let playing = async {
        peer.preface().await;
        let stream = peer.request().await;
        peer.answer(stream, b"").await;
    };
    beside(call(&lean, b""), playing).await.unwrap();
    let weak = Arc::downgrade(&lean);
    let playing = async {
        peer.send(PING, 0, 0, b"12345678").await;
        assert_eq!(peer.frame().await, (PING, ACK, 0, b"12345678".to_vec()));
        assert!(!closed.is_cancelled());
        peer.0.shutdown().await.unwrap();
    };
    tokio::join!(Lean::tend(&weak, &closed), playing);
    assert!(closed.is_cancelled());
}
