//! Keys from a neighbour (`--warm-from`): another rangecache of the same etcd, or the process that this one replaces, sends what it has
//! in memory. It is only a beginning: [`adopt`](super::adopt) proves that it is of etcd's history, and brings it up to date.

use std::time::Duration;

use tokio::time::Instant;
use tonic::metadata::MetadataValue;

use super::begin::Load;
use super::error::LoadError;
use super::gather::{build, push_all};
use super::loaded::{Previous, Source};
use etcd_store::cache::TreeBuilder;
use etcd_wire::etcdserverpb::RangeRequest;
use etcd_wire::etcdserverpb::kv_client::KvClient;
use etcd_wire::grpc::fields::EXPLAIN;
use etcd_wire::grpc::metadata::OUTCOME;
use rangecache_base::net::Url;
use rangecache_upstream::{ConnectError, ReceiveWindow};

/// Timeout for connecting to a neighbour and for the head of its response: the load from etcd waits meanwhile.
const HEAD_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for each message that follows: many that start at once may share the neighbour's processors.
const MESSAGE_TIMEOUT: Duration = Duration::from_secs(5);
/// Beginning of the outcome of a read that memory has answered.
const FROM_MEMORY: &str = "hit;";

/// Why a neighbour is of no use.
#[derive(Debug, thiserror::Error)]
enum Useless {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{} ({:?})", .0.message(), .0.code())]
    Status(#[from] tonic::Status),
    #[error("it does not answer in time")]
    TimedOut,
    #[error("it does not have the keys in memory")]
    Cold,
    #[error("its response is not whole")]
    NotWhole,
    #[error("its keys take more memory than --cache-max-bytes allows without packing and leaving out values")]
    TooLarge,
    #[error(transparent)]
    Keys(#[from] LoadError),
}

/// The keys of the first neighbour that has them in memory.
pub(super) async fn ask_neighbours(load: &Load<'_>) -> Option<Previous> {
    for url in load.set.warm_from() {
        let began = Instant::now();
        match ask(load, &url).await {
            Ok(previous) => {
                tracing::info!(
                    mirror = load.mirror.name,
                    neighbour = %url,
                    keys = previous.tree.len(),
                    seconds = began.elapsed().as_secs_f64(),
                    "a neighbour has sent its keys"
                );
                return Some(previous);
            }
            Err(error) => {
                tracing::info!(mirror = load.mirror.name, neighbour = %url, %error, "a neighbour is of no use")
            }
        }
    }
    None
}

async fn ask(load: &Load<'_>, url: &Url) -> Result<Previous, Useless> {
    let deadline = Instant::now() + HEAD_TIMEOUT;
    let connection = load
        .upstream
        .neighbour(url, ReceiveWindow::LOAD, deadline)
        .await?;
    let (channel, origin) = connection.own_channel();
    let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(usize::MAX);
    let scope = &load.mirror.scope;
    let mut request = tonic::Request::new(RangeRequest {
        key: scope.key(),
        range_end: scope.range_end(),
        ..RangeRequest::default()
    });
    request
        .metadata_mut()
        .insert(EXPLAIN.0, MetadataValue::from_static("true"));
    let response = tokio::time::timeout_at(deadline, client.range_stream(request));
    let response = response.await.map_err(|_| Useless::TimedOut)??;
    let outcome = response.metadata().get(OUTCOME.as_str());
    // Dropped otherwise, before its etcd has sent much for it.
    if !outcome.is_some_and(|outcome| outcome.as_bytes().starts_with(FROM_MEMORY.as_bytes())) {
        return Err(Useless::Cold);
    }
    let mut stream = response.into_inner();
    let (max_bytes, mut builder) = (load.set.budget_of(load.mirror), TreeBuilder::new(load.packing));
    let mut cluster_id = None;
    loop {
        let message = tokio::time::timeout(MESSAGE_TIMEOUT, stream.message());
        let Some(chunk) = message.await.map_err(|_| Useless::TimedOut)?? else {
            break;
        };
        let Some(response) = chunk.range_response else {
            continue;
        };
        // Only the last chunk has a header.
        cluster_id = cluster_id.or(response.header.map(|header| header.cluster_id));
        builder = push_all(builder, response.kvs, load.packing).await?;
        load.mirror.record_loading(builder.memory_bytes());
        if builder.memory_bytes() > max_bytes {
            return Err(Useless::TooLarge);
        }
    }
    Ok(Previous {
        cluster_id: Some(cluster_id.ok_or(Useless::NotWhole)?),
        tree: build(builder).await?,
        source: Source::Neighbour,
    })
}
