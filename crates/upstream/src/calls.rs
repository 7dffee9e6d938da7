//! Small calls that rangecache makes itself, shared by `mirror` and `doctor`.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use etcd_wire::etcdserverpb::{
    Member, MemberListRequest, RangeRequest, RangeResponse, RequestOp, ResponseHeader, TxnRequest,
    WatchCreateRequest, WatchRequest,
};
use etcd_wire::etcdserverpb::{
    cluster_client::ClusterClient, kv_client::KvClient, watch_client::WatchClient,
    watch_request::RequestUnion,
};
use etcd_wire::grpc::metadata::{HEALTH, remove_own_metadata};
use etcd_wire::grpc::method::RANGE;
use etcd_wire::grpc_health::{HealthCheckRequest, HealthCheckResponse};
use etcd_wire::grpc_health::{health_check_response::ServingStatus, health_client::HealthClient};
use http::HeaderMap;
use tokio::sync::mpsc;
use tonic::metadata::{MetadataMap, MetadataValue};
use tonic::{Code, codegen::tokio_stream::wrappers::ReceiverStream};

use super::connection::Connection;
use super::standing::{Behind, Lineage};

/// Key that quorum checks read. It need not exist: only the header of the response matters.
const CHECK_KEY: &[u8] = b"rangecache/quorum-check";
/// Headers that describe the caller's message and deadline, not its identity.
const MESSAGE_HEADERS: [&str; 4] = [
    "content-length",
    "grpc-encoding",
    "grpc-accept-encoding",
    "grpc-timeout",
];
/// Timeout of [`range`].
pub(super) const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of the calls that find out what etcd has compacted.
const COMPACTION_TIMEOUT: Duration = Duration::from_secs(2);

/// Quorum check without credentials: a linearizable Range for one key that does not exist, the cheapest read that
/// etcd has, at `revision` unless that is 0. Where auth is on, etcd refuses it, but only after asking the quorum.
/// `metadata` is sent along. A check that `may_wait` may be one that a hub makes for others. Also returns the lineage of the response, if
/// that is proven.
///
/// # Errors
/// etcd's status; see [`is_refusal`], [`is_compaction`] and [`is_future_revision`].
pub async fn anonymous_check(
    connection: &Arc<Connection>,
    revision: i64,
    may_wait: bool,
    mut metadata: MetadataMap,
) -> Result<(Option<ResponseHeader>, Option<Lineage>), tonic::Status> {
    let message = RangeRequest {
        revision,
        ..header_request(Bytes::from_static(CHECK_KEY))
    };
    connection.peer.mark_check(&mut metadata, may_wait);
    if connection.may_act_as_user() {
        // With auth on, etcd would take the common name of a certificate for a user, but not in addition to a token
        // that was never issued. With auth off, etcd ignores tokens.
        metadata.insert("token", MetadataValue::from_static("anonymous"));
    }
    if let Some(lean) = connection.lean() {
        let called = connection.call_lean::<RangeResponse>(lean, RANGE, &message, metadata);
        let (response, lineage) = called.await?;
        return Ok((response.header, lineage));
    }
    let (channel, origin) = connection.channel();
    let mut request = tonic::Request::new(message);
    *request.metadata_mut() = metadata;
    let response = KvClient::with_origin(channel, origin).range(request).await?;
    let lineage = connection.peer.lineage_of(response.extensions());
    Ok((response.into_inner().header, lineage))
}

/// Whether `key` is the one that quorum checks read.
#[must_use]
pub fn is_check_key(key: &[u8]) -> bool {
    key == CHECK_KEY
}

/// The caller's metadata for a call with its credentials: without the headers that describe its message, and without those
/// that address rangecache.
#[must_use]
pub fn caller_identity(caller: &HeaderMap) -> MetadataMap {
    let mut metadata = caller.clone();
    remove_own_metadata(&mut metadata);
    MESSAGE_HEADERS
        .iter()
        .for_each(|name| drop(metadata.remove(*name)));
    MetadataMap::from_headers(metadata)
}

/// Whether `status` is etcd's refusal of a caller. etcd has several messages for callers without credentials, and
/// sends them only while auth is on.
#[must_use]
pub fn is_refusal(status: &tonic::Status) -> bool {
    matches!(
        status.code(),
        Code::InvalidArgument | Code::PermissionDenied | Code::Unauthenticated
    )
}

/// Whether `status` is etcd's response to a read at a revision that it has compacted.
#[must_use]
pub fn is_compaction(status: &tonic::Status) -> bool {
    status.code() == Code::OutOfRange && status.message().contains("compacted")
}

/// Largest message that is decoded as a whole, in bytes. etcd sends less: chunks and fragments of 1.5 MiB, or ten keys; pages that
/// are larger are asked for with fewer keys.
pub const MAX_MESSAGE_BYTES: usize = 64 << 20;

/// Whether `status` is the decoder's refusal of a message that is larger than it may be, of which nothing was read.
#[must_use]
pub fn is_too_large(status: &tonic::Status) -> bool {
    status.code() == Code::OutOfRange && status.message().contains("message length too large")
}

/// Whether `status` is etcd's response to a read at a revision that it has not reached.
#[must_use]
pub fn is_future_revision(status: &tonic::Status) -> bool {
    status.code() == Code::OutOfRange && status.message().contains("future")
}

/// A Range as rangecache's own user, on a connection of which it waits at most for [`READ_TIMEOUT`]. The caller bounds the
/// response by its request.
///
/// # Errors
/// etcd's status, and `DeadlineExceeded`.
pub async fn range(
    connection: &Arc<Connection>,
    request: RangeRequest,
) -> Result<RangeResponse, tonic::Status> {
    Ok(range_response(connection, request).await?.into_inner())
}

pub(super) async fn range_response(
    connection: &Arc<Connection>,
    request: RangeRequest,
) -> Result<tonic::Response<RangeResponse>, tonic::Status> {
    let (channel, origin) = connection.own_channel();
    let mut client = KvClient::with_origin(channel, origin).max_decoding_message_size(MAX_MESSAGE_BYTES);
    tokio::time::timeout(READ_TIMEOUT, client.range(request))
        .await
        .map_err(|_| tonic::Status::deadline_exceeded("no response to a read in time"))?
}

/// The members of the cluster: as a quorum knows them if `linearizable`, otherwise as this one does.
///
/// # Errors
/// etcd's status.
pub async fn members(connection: &Arc<Connection>, linearizable: bool) -> Result<Vec<Member>, tonic::Status> {
    let (channel, origin) = connection.own_channel();
    let mut client = ClusterClient::with_origin(channel, origin);
    let response = client.member_list(MemberListRequest { linearizable }).await?;
    Ok(response.into_inner().members)
}

/// The smallest linearizable read of `key`, for the header of its response.
#[must_use]
pub fn header_request(key: Bytes) -> RangeRequest {
    RangeRequest {
        key,
        limit: 1,
        keys_only: true,
        ..RangeRequest::default()
    }
}

/// Checks permission to read `range` without reading a key, as the caller that `caller` identifies, or without it as
/// rangecache's own user. The call is a quorum check as well, unless the range is serializable. Given a `revision`
/// other than 0, it fails if etcd has compacted that revision. Also returns the lineage of the response, if it is proven.
///
/// The call is a transaction that compares nothing and has the range in the branch that is never taken. etcd checks a
/// transaction's ranges against the caller's permissions in both branches, by the same function as a Range's, before
/// it carries out either: so it checks this very `key` and `range_end` (`\0` ends included) without reading a key,
/// which no Range of any shape does (each counts its range). A transaction that only reads takes no raft entry, and a
/// linearizable one waits for the quorum before permissions are checked.
///
/// etcd compares revisions with its compaction only in the branch that is taken. With a `revision` that branch counts
/// the range's first key, which the caller may read if it may read the range, and which is looked up in the index only.
///
/// # Errors
/// etcd's status; see [`is_refusal`], [`is_compaction`] and [`is_future_revision`].
pub async fn check_read_permission(
    connection: &Arc<Connection>,
    range: RangeRequest,
    revision: i64,
    caller: Option<MetadataMap>,
) -> Result<(Option<ResponseHeader>, Option<Lineage>), tonic::Status> {
    let counted = (revision > 0).then(|| RequestOp {
        request_range: Some(RangeRequest {
            key: range.key.clone(),
            revision,
            count_only: true,
            serializable: range.serializable,
            ..RangeRequest::default()
        }),
    });
    let mut request = tonic::Request::new(TxnRequest {
        success: counted.into_iter().collect(),
        failure: vec![RequestOp {
            request_range: Some(range),
        }],
    });
    let (channel, origin) = match caller {
        Some(metadata) => {
            *request.metadata_mut() = metadata;
            connection.channel()
        }
        None => connection.own_channel(),
    };
    let response = KvClient::with_origin(channel, origin).txn(request).await?;
    // A hub proves nothing of what it forwards.
    let lineage = connection.peer.lineage_of(response.extensions());
    Ok((response.into_inner().header, lineage))
}

/// Whether gRPC's health service reports that the member serves; a server without the service counts as serving.
pub async fn is_serving(connection: &Arc<Connection>) -> bool {
    is_healthy_response(&health_check(connection, MetadataMap::new()).await)
}

/// Result of a health check of an endpoint.
#[derive(Debug)]
pub(super) struct EndpointHealth {
    /// The member behind it serves, or the rangecache does.
    pub(super) is_serving: bool,
    /// Etcd that the rangecache behind it leads to, if it has answered by itself: it does so only while one of its endpoints serves,
    /// votes and knows a leader.
    pub(super) behind: Option<Behind>,
}

/// Health of the endpoint itself: another rangecache answers for the members behind it.
pub(super) async fn endpoint_health(connection: &Arc<Connection>) -> EndpointHealth {
    let mut metadata = MetadataMap::new();
    metadata.insert(HEALTH.0, MetadataValue::from_static("true"));
    let response = health_check(connection, metadata).await;
    EndpointHealth {
        is_serving: is_healthy_response(&response),
        behind: response.ok().and_then(|response| Behind::of(response.metadata())),
    }
}

async fn health_check(
    connection: &Arc<Connection>,
    metadata: MetadataMap,
) -> Result<tonic::Response<HealthCheckResponse>, tonic::Status> {
    let (channel, origin) = connection.channel();
    let mut request = tonic::Request::new(HealthCheckRequest::default());
    *request.metadata_mut() = metadata;
    HealthClient::with_origin(channel, origin).check(request).await
}

fn is_healthy_response(response: &Result<tonic::Response<HealthCheckResponse>, tonic::Status>) -> bool {
    match response {
        Ok(response) => response.get_ref().status() == ServingStatus::Serving,
        // With auth on, and behind a proxy that does not know the service: a response shows that the member is there.
        Err(status) => matches!(
            status.code(),
            Code::Unimplemented | Code::NotFound | Code::Unauthenticated | Code::PermissionDenied
        ),
    }
}

/// Whether etcd has compacted past `revision`. rangecache's own user must be allowed to read `key`, which need not
/// exist.
pub async fn is_compacted(connection: &Arc<Connection>, key: &Bytes, revision: i64) -> bool {
    let (channel, origin) = connection.own_channel();
    let mut client = KvClient::with_origin(channel, origin);
    let request = RangeRequest {
        key: key.clone(),
        revision,
        serializable: true,
        keys_only: true,
        ..RangeRequest::default()
    };
    let response = tokio::time::timeout(COMPACTION_TIMEOUT, client.range(request)).await;
    matches!(response, Ok(Err(status)) if is_compaction(&status))
}

/// Revision up to which etcd has compacted, given that it has compacted past `below`: etcd cancels a watch from there
/// and reports it.
pub async fn compact_revision(connection: &Arc<Connection>, key: &Bytes, below: i64) -> Option<i64> {
    let (channel, origin) = connection.own_channel();
    let mut client = WatchClient::with_origin(channel, origin);
    let (requests, queue) = mpsc::channel(1);
    let create = WatchCreateRequest {
        key: key.clone(),
        start_revision: below,
        ..WatchCreateRequest::default()
    };
    requests
        .send(WatchRequest {
            request_union: Some(RequestUnion::CreateRequest(create)),
        })
        .await
        .ok()?;
    let compacted = async {
        let mut responses = client.watch(ReceiverStream::new(queue)).await.ok()?.into_inner();
        while let Ok(Some(response)) = responses.message().await {
            if response.compact_revision > 0 {
                return Some(response.compact_revision);
            }
        }
        None
    };
    tokio::time::timeout(COMPACTION_TIMEOUT, compacted)
        .await
        .ok()
        .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_of_a_caller_has_nothing_that_addresses_rangecache() {
        let headers = [
            ("token", "of alice"),
            ("hasleader", "true"),
            ("rangecache-instance", "of another rangecache"),
            ("rangecache-min-revision", "7"),
            ("rangecache-max-staleness", "2s"),
            ("rangecache-bypass", "true"),
            ("grpc-timeout", "1S"),
        ];
        let headers = headers.map(|(name, value)| {
            let name = http::HeaderName::from_static(name);
            (name, http::HeaderValue::from_static(value))
        });
        let identity = caller_identity(&HeaderMap::from_iter(headers)).into_headers();
        let mut names: Vec<_> = identity.keys().map(http::HeaderName::as_str).collect();
        names.sort_unstable();
        assert_eq!(names, ["hasleader", "rangecache-instance", "token"]);
    }
}
