//! Scripted etcd for faults that a real one cannot be made to show: a delayed response, a revision that goes back, a
//! version that is too old.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::disallowed_methods,
    reason = "compiled for tests only"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::{convert::Infallible, pin::Pin, sync::Arc};

use bytes::{Bytes, BytesMut};
use etcd_wire::etcdserverpb::{RangeResponse, ResponseHeader, StatusResponse};
use etcd_wire::grpc::{hub::HISTORY, metadata::OUTCOME};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::{body::Incoming, service::service_fn};
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use prost::Message;
use rangecache_base::net::Url;
use tokio::net::TcpListener;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::codegen::tokio_stream::wrappers::UnboundedReceiverStream;

/// Response message, or a gRPC code with its message.
pub type Answer = Result<Vec<u8>, (u16, &'static str)>;
/// Connection, path and headers of calls.
pub type Calls = Arc<Mutex<Vec<(u64, String, HeaderMap)>>>;
type Script = dyn Fn(String, Bytes) -> Pin<Box<dyn Future<Output = Answer> + Send>> + Send + Sync;
type StreamScript = dyn Fn(Stream) -> Pin<Box<dyn Future<Output = StreamEnd> + Send>> + Send + Sync;
type Frames = mpsc::UnboundedSender<Result<Frame<Bytes>, Infallible>>;
type Body = StreamBody<UnboundedReceiverStream<Result<Frame<Bytes>, Infallible>>>;

/// End of a stream: a gRPC code with its message, unless it ends well.
pub type StreamEnd = Result<(), (u16, &'static str)>;

/// A call of Watch or RangeStream.
pub struct Stream {
    pub path: String,
    /// The client's messages.
    pub requests: mpsc::UnboundedReceiver<Bytes>,
    frames: Frames,
}

impl Stream {
    /// Sends a message to the client.
    pub fn send(&self, message: &impl Message) {
        let _ = self.frames.send(Ok(data(&message.encode_to_vec())));
    }

    /// Begins a message of [`LONG_MESSAGE_BYTES`], and counts in `taken` what the client takes of it.
    pub async fn send_long(&self, taken: &AtomicU64) {
        let length = u32::try_from(LONG_MESSAGE_BYTES).unwrap();
        let mut piece = vec![0];
        piece.extend_from_slice(&length.to_be_bytes());
        while taken.load(Ordering::Relaxed) < LONG_MESSAGE_BYTES {
            let bytes = piece.len() as u64;
            // Dropped once it was written.
            let (held, written) = oneshot::channel::<()>();
            let sent = Bytes::from_owner(Piece(piece, held));
            let _ = self.frames.send(Ok(Frame::data(sent)));
            let _ = written.await;
            taken.fetch_add(bytes, Ordering::Relaxed);
            piece = vec![0; 64 << 10];
        }
    }
}

/// Bytes of a message that is sent for as long as the client takes it.
pub const LONG_MESSAGE_BYTES: u64 = 256 << 20;

struct Piece(
    Vec<u8>,
    #[allow(dead_code, reason = "dropped with the bytes")] oneshot::Sender<()>,
);

impl AsRef<[u8]> for Piece {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

#[derive(Clone)]
struct Scripts {
    unary: Arc<Script>,
    streams: Option<Arc<StreamScript>>,
}

/// Server that answers calls by a script until dropped.
pub struct FakeEtcd {
    pub url: Url,
    /// Connection, path and headers of each call so far.
    pub calls: Calls,
    /// Metadata by which responses from now on say that they come from another rangecache.
    pub history: Arc<Mutex<Option<&'static str>>>,
    /// Outcome that responses from now on have.
    pub outcome: Arc<Mutex<Option<&'static str>>>,
    _stop: DropGuard,
}

impl FakeEtcd {
    /// Starts a server; `script` gets the path and the request message of each call.
    pub async fn start<F, Fut>(script: F) -> FakeEtcd
    where
        F: Fn(String, Bytes) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Answer> + Send + 'static,
    {
        let unary: Arc<Script> = Arc::new(move |path, message| Box::pin(script(path, message)));
        let streams = None;
        FakeEtcd::serve(Scripts { unary, streams }).await
    }

    /// Starts a server; `script` is that of unary calls, and `stream` runs each call of Watch or RangeStream.
    pub async fn start_with_streams<F, Fut, S, StreamFut>(script: F, stream: S) -> FakeEtcd
    where
        F: Fn(String, Bytes) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Answer> + Send + 'static,
        S: Fn(Stream) -> StreamFut + Send + Sync + 'static,
        StreamFut: Future<Output = StreamEnd> + Send + 'static,
    {
        let unary: Arc<Script> = Arc::new(move |path, message| Box::pin(script(path, message)));
        let streams: Arc<StreamScript> = Arc::new(move |call| Box::pin(stream(call)));
        FakeEtcd::serve(Scripts {
            unary,
            streams: Some(streams),
        })
        .await
    }

    async fn serve(scripts: Scripts) -> FakeEtcd {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let calls = Calls::default();
        let seen = Arc::clone(&calls);
        let history = Arc::<Mutex<_>>::default();
        let outcome = Arc::<Mutex<_>>::default();
        let added = [(HISTORY, Arc::clone(&history)), (OUTCOME, Arc::clone(&outcome))];
        let mut connections = 0;
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                // As etcd does.
                stream.set_nodelay(true).unwrap();
                let (scripts, seen, added) = (scripts.clone(), Arc::clone(&seen), added.clone());
                connections += 1;
                let connection = connections;
                let service = service_fn(move |request: Request<Incoming>| {
                    let (path, headers) = (request.uri().path().to_owned(), request.headers().clone());
                    seen.lock().push((connection, path, headers));
                    let (scripts, added) = (scripts.clone(), added.clone());
                    async move {
                        let mut response = answer(scripts, request).await?;
                        for (name, value) in added {
                            if let Some(value) = *value.lock() {
                                let value = HeaderValue::from_static(value);
                                response.headers_mut().insert(name, value);
                            }
                        }
                        Ok::<_, Infallible>(response)
                    }
                });
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(stopped.clone().run_until_cancelled_owned(connection));
            }
        }));
        FakeEtcd {
            url: format!("http://127.0.0.1:{port}").parse().unwrap(),
            calls,
            history,
            outcome,
            _stop: stop.drop_guard(),
        }
    }
}

async fn answer(scripts: Scripts, request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let (frames, body) = mpsc::unbounded_channel();
    let is_stream = path.ends_with("/Watch") || path.ends_with("/RangeStream");
    match scripts.streams.filter(|_| is_stream) {
        Some(script) => {
            let (sender, requests) = mpsc::unbounded_channel();
            tokio::spawn(read_messages(request.into_body(), sender));
            let end = script(Stream {
                path,
                requests,
                frames: frames.clone(),
            });
            tokio::spawn(async move {
                let closed = frames.clone();
                tokio::select! {
                    end = end => drop(frames.send(Ok(trailers(end)))),
                    () = closed.closed() => {}
                }
            });
        }
        None => {
            let framed = request.into_body().collect().await.unwrap().to_bytes();
            let answer = if path.starts_with("/grpc.health.v1.Health/") {
                // Like etcd before 3.5 or a proxy; the script is not called.
                Err((12, "unknown service"))
            } else {
                (scripts.unary)(path, framed.slice(5..)).await
            };
            if let Ok(message) = &answer {
                let _ = frames.send(Ok(data(message)));
            }
            let _ = frames.send(Ok(trailers(answer.map(drop))));
        }
    }
    let mut response = Response::new(StreamBody::new(UnboundedReceiverStream::new(body)));
    response
        .headers_mut()
        .insert("content-type", HeaderValue::from_static("application/grpc"));
    Ok(response)
}

/// Passes each message of a request on.
async fn read_messages(mut body: Incoming, messages: mpsc::UnboundedSender<Bytes>) {
    let mut read = BytesMut::new();
    while let Some(Ok(frame)) = body.frame().await {
        read.extend_from_slice(&frame.into_data().unwrap_or_default());
        while let Some(length) = read.get(1..5) {
            let length = u32::from_be_bytes(length.try_into().unwrap()) as usize;
            if read.len() < 5 + length {
                break;
            }
            let _ = messages.send(read.split_to(5 + length).freeze().slice(5..));
        }
    }
}

fn data(message: &[u8]) -> Frame<Bytes> {
    let mut framed = BytesMut::from(&[0][..]);
    framed.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
    framed.extend_from_slice(message);
    Frame::data(framed.freeze())
}

fn trailers(end: StreamEnd) -> Frame<Bytes> {
    let (code, text) = end.err().unwrap_or((0, ""));
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from(code));
    trailers.insert("grpc-message", HeaderValue::from_static(text));
    Frame::trailers(trailers)
}

/// Response to a Range that finds no key.
pub fn range_at(cluster_id: u64, revision: i64, raft_term: u64) -> Answer {
    let header = Some(ResponseHeader {
        cluster_id,
        member_id: 1,
        revision,
        raft_term,
        leader_id: 0,
    });
    Ok(RangeResponse {
        header,
        ..RangeResponse::default()
    }
    .encode_to_vec())
}

/// Response of the member that answers reads to a Status call.
pub fn status_of(version: &str, raft_index: u64) -> Answer {
    status_of_member(1, version, raft_index)
}

/// Response of the member `member_id` to a Status call.
pub fn status_of_member(member_id: u64, version: &str, raft_index: u64) -> Answer {
    Ok(StatusResponse {
        header: Some(ResponseHeader {
            member_id,
            ..ResponseHeader::default()
        }),
        version: version.to_owned(),
        raft_index,
        ..StatusResponse::default()
    }
    .encode_to_vec())
}
