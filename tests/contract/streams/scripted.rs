//! A scripted etcd, for responses that a real one does not give on demand.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::Message;
use tokio::net::TcpListener;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use super::{key, list};
use testkit::grpc::frame;
use testkit::kv::{RANGE, RANGE_STREAM};
use testkit::pb::{KeyValue, RangeResponse, ResponseHeader};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

/// A scripted response: a message or none, a status, and whether headers precede the status.
#[derive(Clone)]
pub struct Scripted {
    message: Option<Vec<u8>>,
    code: &'static str,
    text: &'static str,
    head_first: bool,
    /// The response waits for a permit of this, if it has one.
    after: Option<&'static Semaphore>,
}

impl Scripted {
    pub fn refusal(code: &'static str, text: &'static str) -> Self {
        Self {
            message: None,
            code,
            text,
            head_first: false,
            after: None,
        }
    }
}

/// Starts a server that responds by `script` to a path and a framed message, and reports the calls and their headers.
pub async fn scripted(
    script: fn(&str, &[u8]) -> Scripted,
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
                let path = request.uri().path().to_owned();
                async move {
                    // Of a watch, which does not end, the first message is enough.
                    let message = request.into_body().frame().await;
                    let message = message.and_then(|frame| frame.ok()?.into_data().ok());
                    let answer = script(&path, &message.unwrap_or_default());
                    if let Some(after) = answer.after {
                        after.acquire().await.expect("it stays open").forget();
                    }
                    Ok::<_, Infallible>(response(answer))
                }
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
    let scripts: [fn(&str, &[u8]) -> Scripted; 2] =
        [|path, _| answer(path, false), |path, _| answer(path, true)];
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

/// Reads whose shared call has failed do not all reach etcd at once (F5).
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_whose_shared_call_has_failed_are_sent_a_few_at_a_time() {
    static FIRST: Semaphore = Semaphore::const_new(0);
    static REST: Semaphore = Semaphore::const_new(0);
    static LISTS: AtomicUsize = AtomicUsize::new(0);
    const READS: usize = 40;
    let (url, _calls, _server) = scripted(|path, message| {
        if path != RANGE || !message.ends_with(&list().encode_to_vec()) {
            return Scripted::refusal("12", "unknown method");
        }
        let is_first = LISTS.fetch_add(1, Ordering::Relaxed) < 2;
        Scripted {
            after: Some(if is_first { &FIRST } else { &REST }),
            ..Scripted::refusal("13", "not now")
        }
    })
    .await;
    let rangecache = Rangecache::at(&url)
        .with("--forward-max-large", "32")
        .start_cold()
        .await;
    let client = Arc::new(rangecache.client().await);
    let mut reads = JoinSet::new();
    for _ in 0..READS {
        let client = Arc::clone(&client);
        reads.spawn(async move { client.range(&list()).await });
    }
    let until_metrics = async |in_flight: usize, waiting: usize| {
        until(SOON, "the reads are in flight, or wait", async || {
            let metrics = rangecache.metrics().await;
            let now = ["rangecache_forward_large", "rangecache_forward_waiting"];
            let now = now.map(|name| metrics.sum(name) as usize);
            (now == [in_flight, waiting]).then_some(())
        })
        .await;
    };
    // One leads, and the others wait for the call that follows it.
    until_metrics(1, READS - 1).await;
    FIRST.add_permits(2);
    until(
        SOON,
        "the first two were sent, and four of the others",
        async || (LISTS.load(Ordering::Relaxed) == 6).then_some(()),
    )
    .await;
    until_metrics(4, READS - 5).await;
    REST.add_permits(READS);
    while let Some(read) = reads.join_next().await {
        let refused = read.expect("the read ends").expect_err("each call is refused");
        assert_eq!((refused.code, refused.message.as_str()), (13, "not now"));
    }
    assert_eq!(
        LISTS.load(Ordering::Relaxed),
        READS + 1,
        "one shared call, and one of each read"
    );
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
