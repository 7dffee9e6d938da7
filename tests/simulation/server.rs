//! A member's side of gRPC: connections of the simulated network, and the frames of calls.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::{Buf, Bytes, BytesMut};
use futures_util::{StreamExt, stream};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use rangecache_base::simulated;
use testkit::grpc::{Status, frame};
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::auth::Identity;
use crate::cluster::{Cluster, unavailable};
use crate::kv;
use crate::link::Link;
use crate::members::From;
use crate::read::{MAX_STALENESS, MIN_REVISION};
use crate::watch;

type Body = UnsyncBoxBody<Bytes, Infallible>;
/// Messages of a response, and its status.
pub type Messages = mpsc::UnboundedSender<Result<Vec<u8>, Status>>;

/// Accepts connections of `from` to `member` until `stop`.
pub async fn serve(cluster: Arc<Cluster>, member: usize, from: From, stop: CancellationToken) {
    let mut connections = simulated::listen(&from.authority(member)).expect("a simulated network");
    let accepting = async {
        while let Some(stream) = connections.recv().await {
            let cluster = Arc::clone(&cluster);
            let link = cluster.connected(member, from);
            tokio::spawn(async move {
                let serving = serve_connection(Arc::clone(&cluster), member, stream, Arc::clone(&link));
                link.serve(serving).await;
                cluster.disconnected(&link);
            });
        }
    };
    stop.run_until_cancelled(accepting).await;
}

async fn serve_connection(cluster: Arc<Cluster>, member: usize, stream: DuplexStream, link: Arc<Link>) {
    let service = service_fn(move |request: Request<Incoming>| {
        let (cluster, link) = (Arc::clone(&cluster), Arc::clone(&link));
        async move {
            let call = call(cluster, member, request, Arc::clone(&link));
            Ok::<_, Infallible>(tokio::select! {
                biased;
                // A process that was killed carries out nothing more.
                () = link.cut.cancelled() => failed(&unavailable("the connection was cut")),
                response = call => response,
            })
        }
    });
    let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
    server.timer(TokioTimer::new()).auto_date_header(false);
    // An error is a connection that was closed by its client.
    let _ = server.serve_connection(TokioIo::new(stream), service).await;
}

async fn call(
    cluster: Arc<Cluster>,
    member: usize,
    request: Request<Incoming>,
    link: Arc<Link>,
) -> Response<Body> {
    let from = link.from;
    let path = request.uri().path().to_owned();
    for bound in [MIN_REVISION, MAX_STALENESS] {
        if from == From::Rangecache && request.headers().contains_key(bound) {
            cluster.violation(format!("etcd gets {bound} with {path}"));
        }
    }
    let needs_leader = request.headers().contains_key("hasleader");
    let token = request.headers().get("token");
    let identity =
        token.map(|token| Identity::of(token.to_str().expect("text")).unwrap_or(Identity::UNKNOWN));
    let caller = kv::Caller {
        member,
        from,
        identity,
    };
    let (messages, queue) = mpsc::unbounded_channel();
    if path == testkit::kv::WATCH {
        if let Err(status) = cluster.look(|state| kv::refuse_at_learner(state, member, &path, &[])) {
            return failed(&status);
        }
        link.record_watch();
        let stream = watch::Stream::new(cluster, caller, needs_leader, messages);
        tokio::spawn(async move {
            let cut = &link.cut;
            cut.run_until_cancelled(stream.run(Requests::new(request.into_body())))
                .await
        });
        return streamed(queue);
    }
    let Some(message) = Requests::new(request.into_body()).next().await else {
        return failed(&Status {
            code: 13,
            message: "no request".to_owned(),
        });
    };
    if from == From::Rangecache && kv::reads_keys(&path, &message) {
        cluster.reads.fetch_add(1, Ordering::Relaxed);
    }
    cluster.travel(member).await;
    if let Err(status) = cluster.look(|state| kv::refuse_at_learner(state, member, &path, &message)) {
        return failed(&status);
    }
    if path == testkit::kv::RANGE_STREAM {
        tokio::spawn(async move {
            let stream = kv::range_stream(&cluster, caller, &message, &messages);
            link.cut.run_until_cancelled(stream).await
        });
        return streamed(queue);
    }
    let result = kv::unary(&cluster, caller, &path, &message).await;
    cluster.travel(member).await;
    match result {
        Ok(message) => {
            link.record_answered();
            let _ = messages.send(Ok(message));
            drop(messages);
            streamed(queue)
        }
        Err(status) => failed(&status),
    }
}

fn trailers(status: &Status) -> HeaderMap {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from(status.code));
    trailers.insert("grpc-message", HeaderValue::from_str(&status.message).unwrap());
    trailers
}

fn head(body: Body) -> Response<Body> {
    let mut response = Response::new(body);
    let content_type = HeaderValue::from_static("application/grpc");
    response.headers_mut().insert("content-type", content_type);
    response
}

/// A response without messages.
fn failed(status: &Status) -> Response<Body> {
    let mut response = head(http_body_util::Empty::new().boxed_unsync());
    response.headers_mut().extend(trailers(status));
    response
}

/// A response with the messages of `queue`; its status is the error in it, otherwise OK.
fn streamed(queue: mpsc::UnboundedReceiver<Result<Vec<u8>, Status>>) -> Response<Body> {
    let ok = Status {
        code: 0,
        message: String::new(),
    };
    let frames = stream::unfold(Some(queue), move |queue| {
        let ok = ok.clone();
        async move {
            let mut queue = queue?;
            let (next, rest) = match queue.recv().await {
                Some(Ok(message)) => (Frame::data(frame(&message)), Some(queue)),
                Some(Err(status)) => (Frame::trailers(trailers(&status)), None),
                None => (Frame::trailers(trailers(&ok)), None),
            };
            Some((Ok(next), rest))
        }
    });
    head(StreamBody::new(frames.boxed()).boxed_unsync())
}

/// The messages of a request.
pub struct Requests {
    body: Incoming,
    buffer: BytesMut,
}

impl Requests {
    fn new(body: Incoming) -> Self {
        Self {
            body,
            buffer: BytesMut::new(),
        }
    }

    /// The next message; `None` once the client has sent all or is gone. Cancel safe.
    pub async fn next(&mut self) -> Option<Bytes> {
        loop {
            if let Some(prefix) = self.buffer.get(1..5) {
                let length = u32::from_be_bytes(prefix.try_into().unwrap()) as usize;
                if self.buffer.len() >= 5 + length {
                    self.buffer.advance(5);
                    return Some(self.buffer.split_to(length).freeze());
                }
            }
            let frame = self.body.frame().await?.ok()?;
            if let Ok(data) = frame.into_data() {
                self.buffer.extend_from_slice(&data);
            }
        }
    }
}
