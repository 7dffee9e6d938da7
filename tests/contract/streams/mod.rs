//! RangeStream through rangecache equals etcd's: from memory for every version of etcd, forwarded if etcd has
//! RangeStream, put together from pages if not. Merged it equals the unary response, and no client ever gets
//! `Unimplemented`.

mod around;
mod equal;
mod etcdctl;
mod mid_stream;
mod negotiation;
mod scripted;
use testkit::etcd::Etcd;
use testkit::grpc::{Client, Status, Stream};
use testkit::pb::{RangeRequest, RangeResponse, RangeStreamResponse, RequestOp};
use testkit::proxy::{Builder, Rangecache};
use testkit::wait::SOON;

const NOT_MIRRORED: &[(&str, &str)] = &[("--cache-prefix", "/elsewhere/")];
const NEVER_STREAMED: &[(&str, &str)] = &[("--cache-prefix", "/elsewhere/"), ("--range-stream", "off")];

const PREFIX: &str = "/streams/";

/// Writes `keys` keys of `bytes` bytes each under [`PREFIX`].
async fn fill(etcd: &Client, keys: usize, bytes: usize) {
    let at_once = (1 << 20) / bytes.max(1);
    for start in (0..keys).step_by(at_once.clamp(1, 100)) {
        let end = keys.min(start + at_once.clamp(1, 100));
        let puts = (start..end).map(|n| RequestOp::put(key(n), vec![b'a' + (n % 26) as u8; bytes]));
        etcd.transact(puts.collect()).await.expect("etcd writes");
    }
}

fn key(number: usize) -> String {
    format!("{PREFIX}{number:06}")
}

fn list() -> RangeRequest {
    RangeRequest::prefix(PREFIX)
}

/// Number of calls of a method that etcd has started.
async fn started(etcd: &Etcd, method: &str) -> f64 {
    let metrics = etcd.metrics().await;
    let of_method = |name: &str| {
        name.starts_with("grpc_server_started_total") && name.contains(&format!("grpc_method=\"{method}\""))
    };
    metrics
        .0
        .iter()
        .filter(|(name, _)| of_method(name))
        .map(|(_, count)| count)
        .sum()
}

/// Reads one chunk.
async fn chunk(stream: &mut Stream) -> Option<RangeResponse> {
    let chunk: RangeStreamResponse = stream.next_as(SOON).await?;
    chunk.range_response
}

/// Reads the chunks after `first`, and the status.
async fn rest(stream: &mut Stream, first: RangeResponse) -> (Vec<RangeResponse>, Status) {
    let mut chunks = vec![first];
    while let Some(next) = chunk(stream).await {
        chunks.push(next);
    }
    (chunks, stream.end().expect("it has ended").clone())
}

/// Starts rangecache with these flags.
async fn start(etcd: &Etcd, flags: &[(&str, &str)]) -> Rangecache {
    start_with(Rangecache::before(etcd), flags).await
}

/// Starts a rangecache whose etcd is another one.
async fn start_before(behind: Rangecache, flags: &[(&str, &str)]) -> Rangecache {
    start_with(Rangecache::before_another(behind), flags).await
}

async fn start_with(mut builder: Builder, flags: &[(&str, &str)]) -> Rangecache {
    for (flag, value) in flags {
        builder = builder.with(flag, value);
    }
    builder.start().await
}

async fn current(etcd: &Client) -> i64 {
    etcd.range(&RangeRequest::one("any"))
        .await
        .expect("etcd answers")
        .revision()
}
