//! The pulse: what has to be asked of etcd even while no client reads.
//!
//! Each beat makes one quorum check (is history the same, is auth off, how far is etcd), which keeps quiet mirrors near
//! etcd's revision; asks one member for its raft index, by which a restore is known; and makes one small read at the oldest revision that is kept: the cheapest way to learn that others have
//! compacted. (A watch from revision 1 would tell too, but on a store that was never compacted etcd reads all of it.)

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, MissedTickBehavior};
use tonic::Code;
use tonic::codegen::tokio_stream::wrappers::ReceiverStream;

use super::Mirrors;
use crate::etcdserverpb::kv_client::KvClient;
use crate::etcdserverpb::watch_client::WatchClient;
use crate::etcdserverpb::watch_request::RequestUnion;
use crate::etcdserverpb::{RangeRequest, WatchCreateRequest, WatchRequest};
use crate::upstream::{Class, Connection};

const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// A key that need not exist.
const PROBE_KEY: &[u8] = b"rangecache/compaction-probe";

/// Beats every `interval` until cancelled.
pub(super) async fn run(mirrors: &Arc<Mirrors>, interval: Duration) {
    let mut beat = tokio::time::interval(interval);
    beat.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        beat.tick().await;
        mirrors.all.iter().for_each(super::state::Mirror::age);
        let raft_index = raft_index(mirrors).await;
        if let Ok(proof) = mirrors.freshness.prove().await {
            if let Some(raft_index) = raft_index {
                mirrors
                    .knowledge
                    .note_raft_index(raft_index, proof.header.revision);
            }
            for mirror in mirrors.all.iter() {
                if let Ok(view) = mirror.view() {
                    mirror
                        .metrics
                        .lag_revisions
                        .set((proof.header.revision - view.revision).max(0));
                    mirror.want(proof.header.revision);
                }
            }
        }
        if let Some(oldest) = mirrors
            .all
            .iter()
            .filter_map(super::state::Mirror::oldest_revision)
            .min()
            && let Ok(connection) = mirrors
                .upstream
                .connection(Class::Check, Instant::now() + ANSWER_TIMEOUT)
                .await
            && is_compacted(&connection, oldest).await
            && let Some(compacted) = compact_revision(&connection, oldest).await
        {
            tracing::debug!(revision = compacted, "etcd has compacted");
            mirrors.compacted(compacted);
        }
    }
}

async fn raft_index(mirrors: &Mirrors) -> Option<u64> {
    let connection = mirrors
        .upstream
        .connection(Class::Check, Instant::now() + ANSWER_TIMEOUT)
        .await
        .ok()?;
    let asking = tokio::time::timeout(ANSWER_TIMEOUT, connection.ask_status());
    Some(asking.await.ok()?.ok()?.raft_index)
}

/// Whether etcd has compacted past `revision`.
async fn is_compacted(connection: &Arc<Connection>, revision: i64) -> bool {
    let (channel, origin) = connection.channel();
    let mut client = KvClient::with_origin(channel, origin);
    let request = RangeRequest {
        key: PROBE_KEY.into(),
        revision,
        serializable: true,
        keys_only: true,
        ..RangeRequest::default()
    };
    let answer = tokio::time::timeout(ANSWER_TIMEOUT, client.range(request)).await;
    matches!(answer, Ok(Err(status)) if status.code() == Code::OutOfRange && status.message().contains("compacted"))
}

/// Up to which revision etcd has compacted, given that it is past `below`: a watch from there is cancelled with it.
async fn compact_revision(connection: &Arc<Connection>, below: i64) -> Option<i64> {
    let (channel, origin) = connection.channel();
    let mut client = WatchClient::with_origin(channel, origin);
    let (requests, queue) = mpsc::channel(1);
    let create = WatchCreateRequest {
        key: PROBE_KEY.into(),
        start_revision: below,
        ..WatchCreateRequest::default()
    };
    requests
        .send(WatchRequest {
            request_union: Some(RequestUnion::CreateRequest(create)),
        })
        .await
        .ok()?;
    let asking = async {
        let mut responses = client.watch(ReceiverStream::new(queue)).await.ok()?.into_inner();
        while let Ok(Some(response)) = responses.message().await {
            if response.compact_revision > 0 {
                return Some(response.compact_revision);
            }
        }
        None
    };
    tokio::time::timeout(ANSWER_TIMEOUT, asking).await.ok().flatten()
}
