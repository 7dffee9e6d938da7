//! Calls that are begun properly and then neither ended nor read, through an ordinary HTTP/2 library.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context, Result};
use bytes::Bytes;
use h2::client::SendRequest;
use prost::Message;
use testkit::grpc::{Client, frame};
use testkit::kv::{PUT, RANGE, RANGE_STREAM, WATCH};
use testkit::pb::{
    PutRequest, RangeRequest, RangeResponse, WatchCreateRequest, WatchProgressRequest, WatchRequest,
    prefix_end,
};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::counts::{Counts, RECONNECT_PAUSE};
use crate::dataset;

/// Bytes of a message that is never complete.
const UNFINISHED_BYTES: usize = 64 << 10;
/// Requests of a watch that reads none of them, in bytes: the largest receive window of a stream.
const STUCK_BYTES: usize = 256 << 10;
/// Bytes that a slow reader reads per second and call.
const SLOW_BYTES_PER_SECOND: u32 = 1_000;
/// Pause after a call that the server has refused, before the next one.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Course of each call of a connection.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Held {
    /// Stays open.
    Open(OpenCall),
    /// Lists of which two pages are read, and the third is never requested.
    AbandonedPages,
}

/// A call that stays open.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OpenCall {
    /// A Range or a Put whose message never ends.
    Unfinished { path: &'static str },
    /// A request whose response is never read.
    Unread(Unread),
    /// A watch that may send nothing, and requests for progress that nothing reads.
    StuckWatch,
    /// Lists from memory, read slowly.
    SlowList,
}

/// A response that is never read.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Unread {
    /// A forwarded value of 1 MB.
    Value,
    /// A forwarded list of 20 MB.
    List,
    /// A forwarded RangeStream of 20 MB.
    Stream,
    /// A filtered or sorted list from memory.
    Scan,
    /// A watch over the overwritten keys.
    Watch,
}

impl Held {
    pub(crate) const RANGES: Held = Held::Open(OpenCall::Unfinished { path: RANGE });
    pub(crate) const PUTS: Held = Held::Open(OpenCall::Unfinished { path: PUT });
    pub(crate) const STUCK_WATCHES: Held = Held::Open(OpenCall::StuckWatch);
    pub(crate) const SLOW_LISTS: Held = Held::Open(OpenCall::SlowList);

    /// Calls whose responses are never read.
    pub(crate) const fn unread(unread: Unread) -> Held {
        Held::Open(OpenCall::Unread(unread))
    }

    /// Calls that one connection keeps in flight.
    fn calls_per_connection(self) -> usize {
        match self {
            Held::Open(OpenCall::Unfinished { .. } | OpenCall::Unread(Unread::Watch)) => 1_000,
            Held::Open(OpenCall::Unread(Unread::Value)) => 100,
            Held::Open(OpenCall::Unread(_)) | Held::AbandonedPages => 20,
            Held::Open(OpenCall::SlowList) => 8,
            Held::Open(OpenCall::StuckWatch) => 4,
        }
    }

    /// Receive window that the connection announces for each stream, in bytes.
    fn stream_window(self) -> u32 {
        match self {
            Held::Open(OpenCall::Unread(_) | OpenCall::StuckWatch) => 0,
            Held::Open(OpenCall::Unfinished { .. }) | Held::AbandonedPages => 65_535,
            Held::Open(OpenCall::SlowList) => 1_024,
        }
    }
}

/// Misbehaves on one connection after another, forever.
pub(crate) async fn run(address: String, held: Held, counts: Arc<Counts>) {
    loop {
        // An error is the end of a connection: the server's defence, counted below.
        let _ = connection(&address, held, &counts).await;
        counts.closed.fetch_add(1, Ordering::Relaxed);
        tokio::time::sleep(RECONNECT_PAUSE).await;
    }
}

async fn connection(address: &str, held: Held, counts: &Arc<Counts>) -> Result<()> {
    let tcp = TcpStream::connect(address).await?;
    counts.connections.fetch_add(1, Ordering::Relaxed);
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(held.stream_window())
        .initial_connection_window_size(16 << 20);
    let (sender, connection) = builder.handshake::<_, Bytes>(tcp).await?;
    let mut calls = JoinSet::new();
    for number in 0..held.calls_per_connection() {
        calls.spawn(call_repeatedly(
            sender.clone(),
            format!("http://{address}"),
            held,
            number,
            Arc::clone(counts),
        ));
    }
    // Ends with the connection; the calls are then dropped.
    connection.await?;
    Ok(())
}

async fn call_repeatedly(
    sender: SendRequest<Bytes>,
    url: String,
    held: Held,
    number: usize,
    counts: Arc<Counts>,
) {
    for round in 0.. {
        counts.calls.fetch_add(1, Ordering::Relaxed);
        let number = number + 1_000 * round;
        let outcome = match held {
            Held::AbandonedPages => abandon(sender.clone(), &url, number).await,
            Held::Open(call) => hold(sender.clone(), &url, call, number).await,
        };
        if outcome.is_err() {
            counts.refused.fetch_add(1, Ordering::Relaxed);
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}

/// Makes one call; returns when the server has ended it.
async fn hold(sender: SendRequest<Bytes>, url: &str, call: OpenCall, number: usize) -> Result<()> {
    let mut sender = sender.ready().await?;
    let (path, message, end) = request(call, number);
    let request = http::Request::post(format!("{url}{path}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())?;
    let (response, mut stream) = sender.send_request(request, false)?;
    stream.send_data(message, end)?;
    let response = response.await?;
    if response.headers().contains_key("grpc-status") {
        anyhow::bail!("refused");
    }
    let mut body = response.into_body();
    match call {
        OpenCall::SlowList => loop {
            let piece = body.data().await.context("the end of the list")??;
            body.flow_control().release_capacity(piece.len())?;
            tokio::time::sleep(Duration::from_secs(1) * u32::try_from(piece.len())? / SLOW_BYTES_PER_SECOND)
                .await;
        },
        // With a window of 0 nothing arrives but the end.
        OpenCall::Unfinished { .. } | OpenCall::Unread(_) | OpenCall::StuckWatch => {
            while let Some(piece) = body.data().await {
                piece?;
            }
            body.trailers().await?;
            anyhow::bail!("ended by the server")
        }
    }
}

/// A page of ten keys, of a list with an end of its own: its pages are a series of their own.
fn first_page(number: usize) -> RangeRequest {
    RangeRequest {
        key: dataset::DIRECT_LIST.into(),
        range_end: format!("/direct/list0{number}").into(),
        limit: 10,
        ..RangeRequest::default()
    }
}

/// Reads two pages of a list, and never requests the third.
async fn abandon(sender: SendRequest<Bytes>, url: &str, number: usize) -> Result<()> {
    let first = read_page(sender.clone(), url, &first_page(number)).await?;
    let last = first.kvs.last().context("an empty page")?;
    let next = RangeRequest {
        key: [&last.key[..], &[0]].concat(),
        revision: first.header.context("a header")?.revision,
        ..first_page(number)
    };
    read_page(sender, url, &next).await?;
    Ok(())
}

async fn read_page(sender: SendRequest<Bytes>, url: &str, page: &RangeRequest) -> Result<RangeResponse> {
    let mut sender = sender.ready().await?;
    let request = http::Request::post(format!("{url}{RANGE}"))
        .header("content-type", "application/grpc")
        .header("te", "trailers")
        .body(())?;
    let (response, mut stream) = sender.send_request(request, false)?;
    stream.send_data(frame(&page.encode_to_vec()), true)?;
    let mut body = response.await?.into_body();
    let mut message = Vec::new();
    while let Some(piece) = body.data().await {
        let piece = piece?;
        body.flow_control().release_capacity(piece.len())?;
        message.extend_from_slice(&piece);
    }
    // The prefix of gRPC's message has five bytes.
    Ok(RangeResponse::decode(message.get(5..).context("no message")?)?)
}

/// Path, first bytes, and whether the request ends with them.
fn request(call: OpenCall, number: usize) -> (&'static str, Bytes, bool) {
    let range = |request: RangeRequest| frame(&request.encode_to_vec());
    match call {
        OpenCall::Unfinished { path } => {
            let put = PutRequest {
                key: b"/unfinished".to_vec(),
                value: vec![b'u'; 2 * UNFINISHED_BYTES],
                lease: 0,
            };
            (path, frame(&put.encode_to_vec()).slice(..UNFINISHED_BYTES), false)
        }
        OpenCall::Unread(Unread::Value) => {
            let key = format!("{}{:02}", dataset::LARGE, number % dataset::LARGE_KEYS);
            (RANGE, range(RangeRequest::one(key)), true)
        }
        OpenCall::Unread(Unread::List) => (RANGE, range(dataset::all(dataset::WIDE)), true),
        OpenCall::Unread(Unread::Stream) => (RANGE_STREAM, range(dataset::all(dataset::WIDE)), true),
        OpenCall::Unread(Unread::Scan) if number.is_multiple_of(2) => {
            (RANGE, range(dataset::filtered(1)), true)
        }
        OpenCall::Unread(Unread::Scan) => (RANGE, range(dataset::sorted()), true),
        OpenCall::Unread(Unread::Watch) => (WATCH, watch(), false),
        OpenCall::StuckWatch => {
            let progress = WatchRequest {
                progress_request: Some(WatchProgressRequest {}),
                ..WatchRequest::default()
            };
            let progress = frame(&progress.encode_to_vec());
            let requests = progress.repeat(STUCK_BYTES / progress.len());
            (WATCH, [&watch()[..], &requests].concat().into(), false)
        }
        OpenCall::SlowList => (RANGE, range(dataset::all(dataset::HOT)), true),
    }
}

/// Request for a watch over the overwritten keys.
fn watch() -> Bytes {
    let create = WatchCreateRequest {
        key: dataset::HOT.into(),
        range_end: prefix_end(dataset::HOT.as_bytes()),
        ..WatchCreateRequest::default()
    };
    let watch = WatchRequest {
        create_request: Some(create),
        ..WatchRequest::default()
    };
    frame(&watch.encode_to_vec())
}

/// Overwrites the hot keys, forever.
pub(crate) async fn overwrite(address: String, pause: Duration) {
    loop {
        if let Ok(client) = Client::try_connect(&format!("http://{address}")).await {
            for number in 0.. {
                let key = format!("{}{:03}", dataset::HOT, number % dataset::HOT_KEYS);
                if client.put(key, dataset::hot_value(number)).await.is_err() {
                    break;
                }
                tokio::time::sleep(pause).await;
            }
        }
        tokio::time::sleep(RETRY_PAUSE).await;
    }
}
