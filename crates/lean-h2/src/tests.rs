//! Calls to hyper's server, and to a peer that a test scripts frame by frame.

use std::{convert::Infallible, sync::Arc, time::Duration};

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use http_body::Frame;
use http_body_util::{BodyExt as _, StreamBody};
use rangecache_edge::write_batching::PING_ACK_DELAY;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::either::Either;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;

use super::client::{Lean, PING_INTERVAL};
use super::{frame::LeanError, head, parts::Parts, response::Whole, testing::*};

const PING_TIMEOUT: Duration = Duration::from_secs(5);

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

/// Why the connection of a client ended.
type End = JoinHandle<LeanError>;

impl Peer {
    /// A client, and the peer that has read the beginning of its connection.
    async fn new() -> (Peer, Lean, End) {
        Peer::with_buffer(1 << 20).await
    }

    /// A client, and its peer, with a socket that takes no more than `bytes` that the other side has not read.
    async fn with_buffer(bytes: usize) -> (Peer, Lean, End) {
        let (ours, theirs) = tokio::io::duplex(bytes);
        let (lean, driver) = Lean::new(Either::Left(Either::Right(Either::Right(ours))), PING_TIMEOUT);
        let end = tokio::spawn(driver);
        let mut peer = Peer::on(theirs).await;
        let (kind, flags, stream, settings) = peer.frame().await;
        assert_eq!((kind, flags, stream), (SETTINGS, 0, 0));
        // No dynamic table, no pushes, and a window of 64 KiB.
        assert_eq!(settings, [0, 1, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 4, 0, 1, 0, 0]);
        assert_eq!(peer.frame().await.0, WINDOW_UPDATE);
        (peer, lean, end)
    }
}

/// Waits for `called` while the peer plays `script`.
async fn beside<T>(
    called: impl Future<Output = Result<Whole, LeanError>>,
    script: impl Future<Output = T>,
) -> Result<Whole, LeanError> {
    tokio::join!(called, script).0
}

/// Returns why the connection ended on which a peer has played `script` for a call.
async fn end_after(script: impl AsyncFnOnce(&mut Peer, u32)) -> LeanError {
    let (mut peer, lean, end) = Peer::new().await;
    let playing = async {
        let stream = peer.request().await;
        script(&mut peer, stream).await;
    };
    beside(call(&lean, b""), playing).await.unwrap_err();
    let end = tokio::time::timeout(SOON, end).await.unwrap().unwrap();
    assert!(lean.is_closed());
    assert!(matches!(call(&lean, b"").await, Err(LeanError::Closed)));
    end
}

#[tokio::test]
async fn request_is_headers_without_indexes_and_data() {
    let (mut peer, lean, _end) = Peer::new().await;
    let playing = async {
        let (kind, flags, stream, block) = peer.frame().await;
        assert_eq!((kind, flags, stream), (HEADERS, END_HEADERS, 1));
        let path = uri().path().as_bytes().to_vec();
        // No dynamic table, POST, http, and the path.
        assert!(block.starts_with(&[0x20, 0x83, 0x86, 4, u8::try_from(path.len()).unwrap()]));
        assert!(block.windows(path.len()).any(|part| part == path));
        assert_eq!(peer.frame().await, (DATA, END_STREAM, 1, b"body".to_vec()));
        peer.answer(1, b"answer").await;
    };
    let response = beside(call(&lean, b"body"), playing).await.unwrap();
    assert_eq!(response.into_body(), (Bytes::from_static(b"answer"), None));
}

#[tokio::test]
async fn settings_and_pings_are_acknowledged_and_settings_kept() {
    let (mut peer, lean, _end) = Peer::new().await;
    peer.send(SETTINGS, 0, 0, &[0, 4, 0, 0, 0x40, 0]).await;
    assert_eq!(peer.frame().await, (SETTINGS, ACK, 0, vec![]));
    peer.send(PING, 0, 0, b"12345678").await;
    assert_eq!(peer.frame().await, (PING, ACK, 0, b"12345678".to_vec()));
    peer.send(SETTINGS, ACK, 0, &[]).await;
    peer.send(PING, ACK, 0, &[0; 8]).await;
    // A kind that does not exist.
    peer.send(0x55, 0, 0, b"?").await;
    let playing = async {
        let stream = peer.request().await;
        peer.answer(stream, b"").await;
    };
    beside(call(&lean, &[0; 16 << 10]), playing).await.unwrap();
    // The settings allow 16 KiB.
    assert!(matches!(
        call(&lean, &[0; (16 << 10) + 1]).await,
        Err(LeanError::Full)
    ));
    assert!(!lean.is_closed());
}

#[tokio::test]
async fn window_of_the_connection_is_kept() {
    let (mut peer, lean, _end) = Peer::new().await;
    for _ in 0..3 {
        let playing = async {
            let stream = peer.request().await;
            peer.answer(stream, b"").await;
        };
        beside(call(&lean, &[0; 16_384]), playing).await.unwrap();
    }
    // 65,535 − 3 × 16,384 bytes are left.
    assert!(matches!(call(&lean, &[0; 16_384]).await, Err(LeanError::Full)));
    peer.send(WINDOW_UPDATE, 0, 0, &[0, 0, 0, 1]).await;
    peer.send(PING, 0, 0, &[0; 8]).await;
    assert_eq!(peer.frame().await.0, PING);
    let playing = async {
        let stream = peer.request().await;
        peer.answer(stream, b"").await;
    };
    beside(call(&lean, &[0; 16_384]), playing).await.unwrap();
}

#[tokio::test]
async fn informational_heads_padding_and_empty_frames_are_skipped() {
    let (mut peer, lean, _end) = Peer::new().await;
    let playing = async {
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
async fn what_is_not_expected_ends_the_connection() {
    let unexpected = [
        // Of a stream that was not opened, or before a head.
        end_after(async |peer, stream| peer.answer(stream + 2, b"").await).await,
        end_after(async |peer, stream| peer.send(DATA, END_STREAM, stream, b"?").await).await,
        // Headers within headers, the rest of others or of none, and more than is kept of them.
        end_after(async |peer, stream| {
            peer.send(HEADERS, 0, stream, &OK).await;
            peer.send(HEADERS, END_HEADERS, stream, &OK).await;
        })
        .await,
        end_after(async |peer, stream| {
            peer.send(HEADERS, 0, stream, &OK).await;
            peer.send(CONTINUATION, END_HEADERS, stream + 2, b"").await;
        })
        .await,
        end_after(async |peer, stream| peer.send(CONTINUATION, END_HEADERS, stream, &OK).await).await,
        end_after(async |peer, stream| {
            peer.send(HEADERS, 0, stream, &OK).await;
            for _ in 0..65 {
                peer.send(CONTINUATION, 0, stream, &[0x88; 16_384]).await;
            }
        })
        .await,
        // Headers that are damaged, or that refer to a dynamic table.
        end_after(async |peer, stream| peer.send(HEADERS, END_HEADERS, stream, b"\0\x7f").await).await,
        end_after(async |peer, stream| peer.send(HEADERS, END_HEADERS, stream, &[0xbe]).await).await,
        end_after(async |peer, stream| {
            peer.send(HEADERS, END_HEADERS, stream, &[0x3f, 0xe1, 0x1f]).await;
        })
        .await,
        end_after(async |peer, stream| peer.send(DATA, PADDED, stream, &[9, 1]).await).await,
        end_after(async |peer, stream| {
            peer.send(HEADERS, END_HEADERS, stream, &OK).await;
            peer.send(HEADERS, END_HEADERS | END_STREAM, stream, &OK).await;
        })
        .await,
    ];
    for end in unexpected {
        assert!(matches!(end, LeanError::Unexpected(_)), "{end:?}");
    }
    let end = end_after(async |peer, _| peer.0.shutdown().await.unwrap()).await;
    assert!(matches!(end, LeanError::Closed), "{end:?}");
}

#[test]
fn head_of_many_fields_is_refused() {
    // More names than a map has.
    let mut block = BytesMut::new();
    for number in 0..30_000 {
        let name = format!("{number:x}");
        block.put_slice(&[0, u8::try_from(name.len()).unwrap()]);
        block.put_slice(name.as_bytes());
        block.put_u8(0);
    }
    let refused = head::decode(block.freeze());
    assert!(matches!(refused, Err(LeanError::Unexpected(_))), "{refused:?}");
    // `www-authenticate` without a value by index, which counts 16 + 32 bytes each time.
    let of = |fields| head::decode(Bytes::from(vec![0x80 | 61; fields]));
    let most = (1 << 20) / 48;
    assert_eq!(of(most).unwrap().headers.len(), most);
    assert!(matches!(of(most + 1), Err(LeanError::Unexpected(_))));
}

/// Although the rest of another request cannot be written any more.
#[tokio::test(start_paused = true)]
async fn answer_of_a_peer_that_was_closed_is_read() {
    // Chance must not decide what is looked at first.
    for _ in 0..64 {
        let (mut peer, lean, _end) = Peer::with_buffer(24 << 10).await;
        let (uri, headers, long) = (uri(), HeaderMap::new(), &[0; 16_384]);
        let first = lean.begin(&uri, &headers, long, true).await.unwrap();
        let _second = lean.begin(&uri, &headers, long, true).await.unwrap();
        // The driver finds that the socket takes nothing.
        tokio::time::sleep(Duration::from_millis(1)).await;
        peer.answer(1, b"answer").await;
        drop(peer);
        let response = Parts::response(first, None).await.unwrap();
        let body = response.into_body().collect().await.unwrap().to_bytes();
        assert_eq!(body, b"answer"[..]);
    }
}

#[tokio::test(start_paused = true)]
async fn call_does_not_wait_for_the_socket_in_the_place_of_the_driver() {
    let (mut peer, lean, _end) = Peer::with_buffer(24 << 10).await;
    let (uri, headers, long) = (uri(), HeaderMap::new(), &[0; 16_384]);
    let first = lean.begin(&uri, &headers, long, true).await.unwrap();
    let _second = lean.begin(&uri, &headers, long, true).await.unwrap();
    // The driver finds that the socket takes nothing.
    tokio::time::sleep(Duration::from_millis(1)).await;
    // With few calls in flight, each writes its own request.
    drop(first);
    let _third = lean.begin(&uri, &headers, b"third", true).await.unwrap();
    let reading = async { [peer.request().await, peer.request().await, peer.request().await] };
    // Before anything but the peer wakes the driver.
    let read = tokio::time::timeout(PING_INTERVAL / 2, reading).await;
    assert_eq!(read.expect("all requests arrive"), [1, 3, 5]);
}

#[tokio::test]
async fn server_that_leaves_answers_what_it_has_taken() {
    let (mut peer, lean, end) = Peer::new().await;
    let playing = async {
        let (first, second) = (peer.request().await, peer.request().await);
        assert_eq!((first, second), (1, 3));
        peer.send(GOAWAY, 0, 0, &[0, 0, 0, 1, 0, 0, 0, 0]).await;
        peer.answer(first, b"").await;
    };
    let (first, second, ()) = tokio::join!(call(&lean, b""), call(&lean, b""), playing);
    first.unwrap();
    assert!(matches!(second, Err(LeanError::NotProcessed)), "{second:?}");
    assert!(lean.is_closed());
    assert!(matches!(end.await.unwrap(), LeanError::Closed));
}

#[tokio::test]
async fn call_that_is_given_up_is_cancelled_and_others_continue() {
    let (mut peer, lean, _end) = Peer::new().await;
    let stream = tokio::select! {
        _ = call(&lean, b"") => panic!("nothing was answered"),
        stream = peer.request() => stream,
    };
    assert_eq!(peer.frame().await, (RST_STREAM, 0, stream, vec![0, 0, 0, 8]));
    let playing = async {
        let next = peer.request().await;
        // What was on its way.
        peer.answer(stream, b"of the other").await;
        peer.answer(next, b"of this one").await;
    };
    let response = beside(call(&lean, b""), playing).await.unwrap();
    assert_eq!(response.into_body().0, b"of this one"[..]);
}

#[tokio::test]
async fn call_that_is_reset_fails_and_others_continue() {
    let (mut peer, lean, _end) = Peer::new().await;
    let playing = async {
        let (first, second) = (peer.request().await, peer.request().await);
        peer.send(RST_STREAM, 0, first, &[0, 0, 0, 2]).await;
        peer.answer(second, b"").await;
    };
    let (first, second, ()) = tokio::join!(call(&lean, b""), call(&lean, b""), playing);
    let reset = |error: LeanError| match error {
        LeanError::Reset(reason) => reason.reason(),
        other => panic!("{other:?}"),
    };
    assert_eq!(reset(first.unwrap_err()), Some(h2::Reason::INTERNAL_ERROR));
    second.unwrap();

    // One whose response is read in parts.
    let begun = lean.begin(&uri(), &HeaderMap::new(), b"", true).await.unwrap();
    let stream = peer.request().await;
    peer.send(RST_STREAM, 0, stream, &[0, 0, 0, 7]).await;
    let error = Parts::response(begun, None).await.unwrap_err();
    let error = error.downcast::<LeanError>().unwrap();
    assert_eq!(reset(*error), Some(h2::Reason::REFUSED_STREAM));
}

#[tokio::test]
async fn connection_ends_with_its_last_stream() {
    let (mut peer, lean, end) = Peer::new().await;
    lean.skip_streams();
    let playing = async {
        assert_eq!(peer.request().await, u32::MAX >> 1);
        assert!(lean.is_closed());
        peer.answer(u32::MAX >> 1, b"answer").await;
    };
    let response = beside(call(&lean, b""), playing).await.unwrap();
    assert_eq!(response.into_body().0, b"answer"[..]);
    assert!(matches!(call(&lean, b"").await, Err(LeanError::Closed)));
    assert!(matches!(end.await.unwrap(), LeanError::Closed));
}

#[tokio::test]
async fn headers_in_several_frames_are_one_block() {
    let (mut peer, lean, _end) = Peer::new().await;
    let long = "x".repeat(16_384);
    let playing = async {
        let stream = peer.request().await;
        // The value is divided: 16,384 = 127 + 1 + (127 << 7).
        peer.send(HEADERS, END_STREAM, stream, b"\x88\0\x01a\x7f\x81\x7f")
            .await;
        peer.send(CONTINUATION, 0, stream, &long.as_bytes()[..1]).await;
        peer.send(CONTINUATION, END_HEADERS, stream, &long.as_bytes()[1..])
            .await;
    };
    let response = beside(call(&lean, b""), playing).await.unwrap();
    assert_eq!(response.headers()["a"], long);
}

#[tokio::test]
async fn server_gets_no_more_calls_at_once_than_it_takes() {
    let (mut peer, lean, _end) = Peer::new().await;
    peer.send(SETTINGS, 0, 0, &[0, 3, 0, 0, 0, 101]).await;
    assert_eq!(peer.frame().await, (SETTINGS, ACK, 0, vec![]));
    let (uri, headers, mut in_flight) = (uri(), HeaderMap::new(), Vec::new());
    for _ in 0..101 {
        in_flight.push(lean.begin(&uri, &headers, b"", true).await.unwrap());
    }
    let refused = lean.begin(&uri, &headers, b"", true).await.unwrap_err();
    assert!(matches!(refused, LeanError::Full), "{refused:?}");
    drop(in_flight.pop());
    lean.begin(&uri, &headers, b"", true).await.unwrap();
}

/// Also if it announces that while a call is in flight, which gets its response.
#[tokio::test]
async fn server_that_has_to_be_waited_for_gets_no_calls() {
    for settings in [[0, 4, 0, 0, 0, 0], [0, 4, 0, 0, 0x3f, 0xff], [0, 3, 0, 0, 0, 99]] {
        let (mut peer, lean, end) = Peer::new().await;
        let playing = async {
            let stream = peer.request().await;
            assert_eq!(lean.too_tight(), None);
            peer.send(SETTINGS, 0, 0, &settings).await;
            assert_eq!(peer.frame().await, (SETTINGS, ACK, 0, vec![]));
            assert!(lean.is_closed() && lean.too_tight().is_some());
            peer.answer(stream, b"answer").await;
        };
        let response = beside(call(&lean, b""), playing).await.unwrap();
        assert_eq!(response.into_body().0, b"answer"[..]);
        assert!(matches!(end.await.unwrap(), LeanError::Closed));
    }
}

#[tokio::test]
async fn requests_of_many_calls_are_written_by_the_driver() {
    let (mut peer, lean, _end) = Peer::new().await;
    let (lean, mut calls) = (Arc::new(lean), JoinSet::new());
    for number in 0..50 {
        let lean = Arc::clone(&lean);
        calls.spawn(async move {
            let response = call(&lean, &[number]).await.unwrap();
            (number, response.into_body().0[0])
        });
    }
    // Each answer is its request.
    let mut requests = Vec::new();
    while requests.len() < 50 {
        if let (DATA, END_STREAM, stream, body) = peer.frame().await {
            requests.push((stream, body));
        }
    }
    for (stream, body) in requests {
        peer.answer(stream, &body).await;
    }
    let answers = calls.join_all().await;
    assert_eq!(answers.len(), 50);
    assert!(
        answers.iter().all(|(sent, received)| sent == received),
        "{answers:?}"
    );
}

/// A response that is longer than the window of its stream, of one call that is read as a whole and of one in parts.
#[tokio::test]
async fn windows_of_long_responses_are_raised() {
    let (mut peer, lean, _end) = Peer::new().await;
    let playing = async {
        let stream = peer.request().await;
        peer.send(HEADERS, END_HEADERS, stream, &OK).await;
        for _ in 0..32 {
            peer.send(DATA, 0, stream, &[1; 16_384]).await;
        }
        for _ in 0..16 {
            let raised = peer.frame().await;
            assert_eq!(raised, (WINDOW_UPDATE, 0, stream, vec![0, 0, 0x80, 0]));
        }
        peer.send(DATA, END_STREAM, stream, b"").await;
    };
    let response = beside(call(&lean, b""), playing).await.unwrap();
    assert_eq!(response.into_body().0.len(), 1 << 19);
}

/// A stream in both directions, as a watch is.
#[tokio::test]
async fn response_is_read_while_the_request_is_sent() {
    let (mut peer, lean, _end) = Peer::new().await;
    let (requests, rest) = tokio::sync::mpsc::channel(1);
    let rest = StreamBody::new(ReceiverStream::new(rest));
    let begun = lean
        .begin(&uri(), &HeaderMap::new(), b"first", false)
        .await
        .unwrap();
    let opening = Parts::response(begun, Some(tonic::body::Body::new(rest)));
    let answering = async {
        let mut frames = vec![peer.frame().await, peer.frame().await];
        assert_eq!(frames.pop().unwrap(), (DATA, 0, 1, b"first".to_vec()));
        peer.send(HEADERS, END_HEADERS, 1, &OK).await;
    };
    let (response, ()) = tokio::join!(opening, answering);
    let mut response = response.unwrap().into_body();
    requests
        .send(Ok::<_, Infallible>(Frame::data(Bytes::from_static(b"second"))))
        .await
        .unwrap();
    let answering = async {
        assert_eq!(peer.frame().await, (DATA, 0, 1, b"second".to_vec()));
        peer.send(DATA, 0, 1, b"answer").await;
    };
    let (answer, ()) = tokio::join!(response.frame(), answering);
    assert_eq!(answer.unwrap().unwrap().into_data().unwrap(), b"answer"[..]);
    drop(response);
    assert_eq!(peer.frame().await, (RST_STREAM, 0, 1, vec![0, 0, 0, 8]));
}

#[tokio::test(start_paused = true)]
async fn peer_that_is_silent_while_a_call_is_in_flight_is_given_up() {
    let (mut peer, lean, end) = Peer::new().await;
    tokio::time::sleep(2 * PING_INTERVAL).await;
    let began = Instant::now();
    let playing = async {
        peer.request().await;
        // No ping without a call in flight.
        assert_eq!(peer.frame().await, (PING, 0, 0, vec![0; 8]));
    };
    let calling = async { lean.call(&uri(), &HeaderMap::new(), b"").await };
    beside(calling, playing).await.unwrap_err();
    assert!(began.elapsed() <= PING_INTERVAL + PING_TIMEOUT);
    assert!(matches!(end.await.unwrap(), LeanError::Unresponsive));
}

#[tokio::test]
async fn connection_ends_with_its_client_and_the_last_call() {
    let (peer, lean, end) = Peer::new().await;
    drop(lean);
    assert!(matches!(end.await.unwrap(), LeanError::Closed));
    drop(peer);

    let (mut peer, lean, end) = Peer::new().await;
    let mut begun = lean.begin(&uri(), &HeaderMap::new(), b"", true).await.unwrap();
    drop(lean);
    let stream = peer.request().await;
    peer.send(HEADERS, END_HEADERS, stream, &OK).await;
    assert!(
        begun.parts.recv().await.is_some(),
        "a call in flight gets its response"
    );
    assert!(!end.is_finished());
    drop(begun);
    assert!(matches!(end.await.unwrap(), LeanError::Closed));
}

#[tokio::test]
async fn calls_end_when_the_connection_is_not_driven_any_more() {
    let (_peer, lean, end) = Peer::new().await;
    let calling = async {
        tokio::task::yield_now().await;
        end.abort();
    };
    let (called, ()) = tokio::join!(call(&lean, b""), calling);
    assert!(matches!(called, Err(LeanError::Closed)), "{called:?}");
    assert!(lean.is_closed());
}

#[tokio::test(start_paused = true)]
async fn acknowledgement_of_a_ping_leaves_with_the_next_request() {
    let (mut peer, lean, _end) = Peer::new().await;
    let begun = Instant::now();
    peer.send(PING, 0, 0, b"a ping!!").await;
    // Everything that can run has run when the clock, which is paused, is moved.
    let early = tokio::time::timeout(PING_ACK_DELAY / 2, peer.0.read_u8()).await;
    assert!(early.is_err(), "{early:?}");
    let playing = async {
        let stream = peer.request().await;
        let acknowledgement = peer.frame().await;
        peer.answer(stream, b"").await;
        acknowledgement
    };
    let (called, acknowledgement) = tokio::join!(call(&lean, b""), playing);
    called.unwrap();
    assert_eq!(acknowledgement, (PING, ACK, 0, b"a ping!!".to_vec()));
    assert_eq!(begun.elapsed(), PING_ACK_DELAY / 2);
}

#[tokio::test(start_paused = true)]
async fn acknowledgements_of_pings_leave_without_a_request_in_time() {
    let (mut peer, _lean, _end) = Peer::new().await;
    for _ in 0..2 {
        let begun = Instant::now();
        peer.send(PING, 0, 0, b"a ping!!").await;
        assert_eq!(peer.frame().await, (PING, ACK, 0, b"a ping!!".to_vec()));
        assert!(begun.elapsed() <= PING_ACK_DELAY + Duration::from_millis(1));
    }
}
