//! A scripted etcd, for responses that a real one does not give on demand.

use std::convert::Infallible;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::{key, list};
use testkit::grpc::frame;
use testkit::kv::{RANGE, RANGE_STREAM};
use testkit::pb::{KeyValue, RangeResponse, ResponseHeader};
use testkit::proxy::Rangecache;

/// A scripted response: a message or none, a status, and whether headers precede the status.
#[derive(Clone)]
pub struct Scripted {
    message: Option<Vec<u8>>,
    code: &'static str,
    text: &'static str,
    head_first: bool,
}

impl Scripted {
    pub fn refusal(code: &'static str, text: &'static str) -> Self {
        Self {
            message: None,
            code,
            text,
            head_first: false,
        }
    }
}

/// Starts a server that responds by `script`, and reports the calls and their headers.
pub async fn scripted(
    script: fn(&str) -> Scripted,
) -> (String, mpsc::UnboundedReceiver<(String, HeaderMap)>, AbortOnDrop) {
    let (seen, calls) = mpsc::unbounded_channel();
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("an address"));
    let server = tokio::spawn(async move {
        let mut connections = JoinSet::new();
        loop {
            let (stream, _) = listener.accept().await.expect("accepts");
            let seen = seen.clone();
            let service = service_fn(move |request: Request<Incoming>| {
                let _ = seen.send((request.uri().path().to_owned(), request.headers().clone()));
                let answer = script(request.uri().path());
                async move { Ok::<_, Infallible>(response(answer)) }
            });
            connections.spawn(
                hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service),
            );
        }
    });
    (url, calls, AbortOnDrop(server))
}

pub struct AbortOnDrop(tokio::task::JoinHandle<()>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        self.0.abort();
    }
}

fn response(answer: Scripted) -> Response<UnsyncBoxBody<Bytes, Infallible>> {
    let status = [("grpc-status", answer.code), ("grpc-message", answer.text)];
    let status = status.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
    let mut response = Response::builder().header("content-type", "application/grpc");
    let mut frames = Vec::new();
    if answer.message.is_some() || answer.head_first {
        frames.extend(answer.message.map(|message| Ok(Frame::data(frame(&message)))));
        frames.push(Ok(Frame::trailers(status.into_iter().collect())));
    } else {
        response.headers_mut().expect("no error so far").extend(status);
    }
    let body = StreamBody::new(futures_util::stream::iter(frames));
    response.body(body.boxed_unsync()).expect("a response")
}

/// `Unimplemented` can be the response to the very call that discovers it, as trailers only or after a head.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_that_meets_unimplemented_is_answered_by_pages() {
    fn answer(path: &str, head_first: bool) -> Scripted {
        match path {
            RANGE => Scripted {
                message: Some(found().encode_to_vec()),
                ..Scripted::refusal("0", "")
            },
            RANGE_STREAM => Scripted {
                head_first,
                ..Scripted::refusal("12", "unknown method RangeStream for service etcdserverpb.KV")
            },
            // Without a status there is no version, and no load that would discover it first.
            _ => Scripted::refusal("2", "not now"),
        }
    }
    let scripts: [fn(&str) -> Scripted; 2] = [|path| answer(path, false), |path| answer(path, true)];
    for script in scripts {
        let (url, mut calls, _server) = scripted(script).await;
        let rangecache = Rangecache::at(&url).start_cold().await;
        let through = rangecache.client().await;
        for _ in 0..20 {
            assert_eq!(through.streamed(&list()).await, Ok(found()));
        }
        let mut tried = 0;
        while let Ok((path, _)) = calls.try_recv() {
            tried += usize::from(path == RANGE_STREAM);
        }
        // The result is remembered until one of the endpoint's five connections is re-established.
        assert!((1..=6).contains(&tried), "{tried}");
        let metrics = rangecache.metrics().await.0;
        let fallbacks = metrics.get("rangecache_range_stream_fallback_total{reason=\"unimplemented\"}");
        assert_eq!(fallbacks, Some(&20.0));
    }
}

fn found() -> RangeResponse {
    RangeResponse {
        header: Some(ResponseHeader {
            cluster_id: 1,
            member_id: 2,
            revision: 3,
            raft_term: 4,
            leader_id: 0,
        }),
        kvs: vec![KeyValue {
            key: key(1).into_bytes(),
            create_revision: 2,
            mod_revision: 3,
            version: 2,
            value: b"found".to_vec(),
            lease: 0,
        }],
        more: false,
        count: 1,
    }
}
