//! Keys from a neighbour (`--warm-from`): another rangecache of the same etcd, or the process that this one replaces, sends what it has
//! in memory. It is only a beginning: [`adopt`](super::adopt) proves that it is of etcd's history, and brings it up to date.

use std::time::Duration;

use etcd_wire::etcdserverpb::{RangeRequest, kv_client::KvClient};
use etcd_wire::grpc::metadata::{EXPLAIN, OUTCOME};
use rangecache_base::net::Url;
use rangecache_upstream::{Channel, ConnectError, ReceiveWindow, Upstream};
use tokio::time::Instant;
use tonic::metadata::{MetadataMap, MetadataValue};

use super::begin::{Load, LoadError};
use super::gather::{build, push_all};
use super::have::{Have, Source};
use crate::lineage::{Anchor, Fingerprint};
use crate::{set::MirrorSet, view::Mirror};

/// Timeout for connecting to a neighbour and for the head of its response: the load from etcd waits meanwhile.
const HEAD_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for each message that follows: many that start at once may share the neighbour's processors.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Rate below which etcd is read instead, once a neighbour was waited for for [`MESSAGE_TIMEOUT`]: etcd sends more.
const LEAST_BYTES_PER_SECOND: u64 = 8 << 20;
/// Interval at which neighbours are asked whether they have the keys: what a start would find is known before it.
const CHECK_INTERVAL: Duration = Duration::from_secs(60);
/// Beginning of the outcome of a read that memory has answered.
const FROM_MEMORY: &str = "hit;";

/// Why a neighbour is of no use.
#[derive(Debug, thiserror::Error)]
enum NeighbourError {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
    #[error("it does not answer in time")]
    TimedOut,
    #[error("it sends less than {LEAST_BYTES_PER_SECOND} bytes per second")]
    TooSlow,
    #[error("it does not have the keys in memory")]
    Cold,
    #[error("it is of another etcd cluster")]
    AnotherCluster,
    #[error("its response is not whole")]
    NotWhole,
    #[error("its keys take more memory than --cache-max-bytes allows without packing and leaving out values")]
    TooLarge,
    #[error(transparent)]
    Keys(#[from] LoadError),
}

/// The keys of the first neighbour that has them in memory.
pub(super) async fn ask_neighbours(load: &Load<'_>) -> Option<Have> {
    for url in load.set.warm_from() {
        let began = Instant::now();
        let answer = ask(load, &url).await;
        let neighbours = &load.set.neighbours;
        neighbours.record(&url, &load.mirror.name, answer.as_ref().err());
        if let Ok(have) = answer {
            tracing::info!(
                mirror = load.mirror.name,
                neighbour = %url,
                keys = have.anchor.tree.len(),
                seconds = began.elapsed().as_secs_f64(),
                "a neighbour has sent its keys"
            );
            return Some(have);
        }
    }
    None
}

/// Asks every neighbour, each minute, whether it has the keys of each mirror.
pub(crate) async fn check_neighbours(set: &MirrorSet, upstream: &Upstream) {
    loop {
        tokio::time::sleep(CHECK_INTERVAL).await;
        check_each(set, upstream).await;
    }
}

pub(super) async fn check_each(set: &MirrorSet, upstream: &Upstream) {
    for url in set.warm_from() {
        for mirror in set.all() {
            let answer = check(set, upstream, mirror, &url).await;
            set.neighbours.record(&url, &mirror.name, answer.as_ref().err());
        }
    }
}

/// Fails unless the neighbour counts the keys of `mirror` in its memory.
async fn check(
    set: &MirrorSet,
    upstream: &Upstream,
    mirror: &Mirror,
    url: &Url,
) -> Result<(), NeighbourError> {
    let deadline = Instant::now() + HEAD_TIMEOUT;
    let mut client = connect(set, upstream, url, ReceiveWindow::SMALL, deadline).await?;
    let counting = client.range(request(RangeRequest {
        count_only: true,
        serializable: true,
        ..keys_of(mirror)
    }));
    let response = within(deadline, counting).await?;
    is_from_memory(response.metadata())?;
    let header = response.into_inner().header.ok_or(NeighbourError::NotWhole)?;
    let is_same = set
        .cluster_state
        .before_check()
        .history
        .may_be_of_cluster(header.cluster_id);
    if is_same {
        Ok(())
    } else {
        Err(NeighbourError::AnotherCluster)
    }
}

async fn ask(load: &Load<'_>, url: &Url) -> Result<Have, NeighbourError> {
    let deadline = Instant::now() + HEAD_TIMEOUT;
    let mut client = connect(load.set, load.upstream, url, ReceiveWindow::LOAD, deadline).await?;
    let response = within(deadline, client.range_stream(request(keys_of(load.mirror)))).await?;
    // Dropped otherwise, before its etcd has sent much for it.
    is_from_memory(response.metadata())?;
    let mut stream = response.into_inner();
    let (max_bytes, mut builder) = (load.set.budget_of(load.mirror), load.builder.clone());
    let (mut waited, mut received_bytes) = (Duration::ZERO, 0);
    let mut lineage = None;
    loop {
        let (began, longest) = (Instant::now(), longest_wait(received_bytes));
        let timeout = longest.saturating_sub(waited).min(MESSAGE_TIMEOUT);
        let message = within(began + timeout, stream.message()).await;
        waited += began.elapsed();
        if waited >= longest {
            return Err(NeighbourError::TooSlow);
        }
        let Some(chunk) = message? else {
            break;
        };
        let Some(response) = chunk.range_response else {
            continue;
        };
        // Only the last chunk has a header.
        lineage = lineage.or(response.header.as_ref().map(Fingerprint::of_header));
        received_bytes += response
            .kvs
            .iter()
            .map(|key_value| key_value.len() as u64)
            .sum::<u64>();
        builder = push_all(builder, response.kvs).await?;
        load.mirror.record_loading(builder.memory_bytes());
        if builder.memory_bytes() > max_bytes {
            return Err(NeighbourError::TooLarge);
        }
    }
    let lineage = lineage.ok_or(NeighbourError::NotWhole)?;
    Ok(Have {
        anchor: Anchor::loaded(build(builder).await?, lineage.revision),
        lineage: Some(lineage),
        from: Source::Neighbour,
        // By another process, whose etcd may be a copy of this one.
        verified: false,
    })
}

/// Longest time for which a neighbour that has sent `bytes` may be waited for.
fn longest_wait(bytes: u64) -> Duration {
    MESSAGE_TIMEOUT + Duration::from_millis(bytes * 1_000 / LEAST_BYTES_PER_SECOND)
}

async fn connect(
    set: &MirrorSet,
    upstream: &Upstream,
    url: &Url,
    windows: ReceiveWindow,
    deadline: Instant,
) -> Result<KvClient<Channel>, NeighbourError> {
    let connection = upstream.neighbour(url, windows, deadline).await?;
    let (channel, origin) = connection.own_channel();
    Ok(KvClient::with_origin(channel, origin).max_decoding_message_size(set.max_message_bytes()))
}

/// Every key of `mirror`.
fn keys_of(mirror: &Mirror) -> RangeRequest {
    RangeRequest {
        key: mirror.scope.key(),
        range_end: mirror.scope.range_end(),
        ..RangeRequest::default()
    }
}

/// A request whose response says whether memory has answered it.
fn request(message: RangeRequest) -> tonic::Request<RangeRequest> {
    let mut request = tonic::Request::new(message);
    let explain = MetadataValue::from_static("true");
    request.metadata_mut().insert(EXPLAIN.0, explain);
    request
}

/// The response of `call`, if it arrives in time.
async fn within<T>(
    deadline: Instant,
    call: impl Future<Output = Result<T, tonic::Status>>,
) -> Result<T, NeighbourError> {
    let response = tokio::time::timeout_at(deadline, call).await;
    Ok(response.map_err(|_| NeighbourError::TimedOut)??)
}

fn is_from_memory(metadata: &MetadataMap) -> Result<(), NeighbourError> {
    let outcome = metadata.get(OUTCOME.as_str());
    let is_hit = outcome.is_some_and(|outcome| outcome.as_bytes().starts_with(FROM_MEMORY.as_bytes()));
    if is_hit { Ok(()) } else { Err(NeighbourError::Cold) }
}
