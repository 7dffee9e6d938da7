//! Scripted etcd for faults that a real one cannot be made to show: a delayed response, a revision that goes back, a
//! version that is too old.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Frame;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use prost::Message;
use tokio::net::TcpListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::etcdserverpb::{RangeResponse, ResponseHeader, StatusResponse};
use crate::net::Url;

/// Response message, or a gRPC code with its message.
pub(crate) type Answer = Result<Vec<u8>, (u16, &'static str)>;
/// Connection, path and headers of calls.
pub(crate) type Calls = Arc<Mutex<Vec<(u64, String, HeaderMap)>>>;
type Script = dyn Fn(String, Bytes) -> Pin<Box<dyn Future<Output = Answer> + Send>> + Send + Sync;

/// Server that answers unary calls by a script until dropped.
pub(crate) struct FakeEtcd {
    pub(crate) url: Url,
    /// Connection, path and headers of each call so far.
    pub(crate) calls: Calls,
    _stop: DropGuard,
}

impl FakeEtcd {
    /// Starts a server; `script` gets the path and the request message of each call.
    pub(crate) async fn start<F, Fut>(script: F) -> FakeEtcd
    where
        F: Fn(String, Bytes) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Answer> + Send + 'static,
    {
        let script: Arc<Script> = Arc::new(move |path, message| Box::pin(script(path, message)));
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let calls = Calls::default();
        let seen = Arc::clone(&calls);
        let mut connections = 0;
        tokio::spawn(stop.clone().run_until_cancelled_owned(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let (script, seen) = (Arc::clone(&script), Arc::clone(&seen));
                connections += 1;
                let connection = connections;
                let service = service_fn(move |request: Request<Incoming>| {
                    let (path, headers) = (request.uri().path().to_owned(), request.headers().clone());
                    seen.lock().push((connection, path, headers));
                    answer(Arc::clone(&script), request)
                });
                let connection = hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service);
                tokio::spawn(stopped.clone().run_until_cancelled_owned(connection));
            }
        }));
        FakeEtcd {
            url: format!("http://127.0.0.1:{port}").parse().unwrap(),
            calls,
            _stop: stop.drop_guard(),
        }
    }
}

type Frames =
    StreamBody<tonic::codegen::tokio_stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

async fn answer(script: Arc<Script>, request: Request<Incoming>) -> Result<Response<Frames>, Infallible> {
    let path = request.uri().path().to_owned();
    let framed = request.into_body().collect().await.unwrap().to_bytes();
    let answer = if path.starts_with("/grpc.health.v1.Health/") {
        // Like etcd before 3.5 or a proxy; the script is not called.
        Err((12, "unknown service"))
    } else {
        script(path, framed.slice(5..)).await
    };
    let (code, text) = answer.as_ref().err().copied().unwrap_or((0, ""));
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from(code));
    trailers.insert("grpc-message", HeaderValue::from_static(text));
    let mut frames = Vec::new();
    if let Ok(message) = answer {
        let mut framed = BytesMut::from(&[0][..]);
        framed.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
        framed.extend_from_slice(&message);
        frames.push(Ok(Frame::data(framed.freeze())));
    }
    frames.push(Ok(Frame::trailers(trailers)));
    let mut response = Response::new(StreamBody::new(tonic::codegen::tokio_stream::iter(frames)));
    response
        .headers_mut()
        .insert("content-type", HeaderValue::from_static("application/grpc"));
    Ok(response)
}

/// Response to a Range that finds no key.
pub(crate) fn range_at(cluster_id: u64, revision: i64, raft_term: u64) -> Answer {
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
pub(crate) fn status_of(version: &str, raft_index: u64) -> Answer {
    status_of_member(1, version, raft_index)
}

/// Response of the member `member_id` to a Status call.
pub(crate) fn status_of_member(member_id: u64, version: &str, raft_index: u64) -> Answer {
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
