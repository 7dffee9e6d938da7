//! A member's unary calls and RangeStream.

use std::sync::atomic::Ordering;
use std::time::Duration;

use etcd_wire::etcdserverpb::StatusResponse;
use etcd_wire::grpc_health::HealthCheckResponse;
use etcd_wire::grpc_health::health_check_response::ServingStatus;
use prost::Message;
use testkit::grpc::{FAILED_PRECONDITION, OUT_OF_RANGE, Status, UNIMPLEMENTED};
use testkit::kv::{PUT, RANGE, RANGE_STREAM, TXN};
use testkit::pb::request_op::Request;
use testkit::pb::{
    AuthenticateRequest, AuthenticateResponse, CompactionRequest, CompactionResponse, Compare,
    DeleteRangeRequest, DeleteRangeResponse, Empty, LeaseGrantRequest, LeaseGrantResponse,
    LeaseRevokeRequest, LeaseRevokeResponse, PutRequest, PutResponse, RangeRequest, RangeResponse,
    RangeStreamResponse, RequestOp, ResponseOp, TxnRequest, TxnResponse,
};
use tokio::time::Instant;

use crate::auth::{AUTHENTICATE, DISABLE, ENABLE, Identity, Needs, Refusal, User};
use crate::caller::PREFIX;
use crate::cluster::{Cluster, State, unavailable};
use crate::members::From;
use crate::read::CHECK_KEY;
use crate::server::Messages;
use crate::store::{Change, History};

pub const DELETE: &str = "/etcdserverpb.KV/DeleteRange";
pub const COMPACT: &str = "/etcdserverpb.KV/Compact";
pub const LEASE_GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
pub const LEASE_REVOKE: &str = "/etcdserverpb.Lease/LeaseRevoke";
const STATUS: &str = "/etcdserverpb.Maintenance/Status";
const HEALTH: &str = "/grpc.health.v1.Health/Check";
/// gRPC's numbers of statuses.
pub const NOT_FOUND: i32 = 5;
/// Keys of a RangeStream's chunk, at most: all keys take several.
const CHUNK_KEYS: usize = 3;
/// etcd's number of the comparison target.
pub const MOD_REVISION: i32 = 2;

/// Caller, and the member that it calls.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    pub member: usize,
    pub from: From,
    pub identity: Option<Identity>,
}

impl Caller {
    /// Whether the member allows a call that `needs` this.
    pub fn allowed(&self, state: &State, needs: &[Needs]) -> Result<(), Status> {
        let auth = state.applied(self.member).auth;
        let allowed = auth.allows(self.identity, state.histories.len(), needs);
        allowed.map_err(Refusal::status)
    }
}

fn out_of_range(what: &str) -> Status {
    Status {
        code: OUT_OF_RANGE,
        message: format!("etcdserver: mvcc: required revision {what}"),
    }
}

fn decoded<M: Message + Default>(message: &[u8]) -> M {
    M::decode(message).expect("rangecache forwards valid requests")
}

/// Refuses what a learner does not serve, as etcd's interceptors do.
pub fn refuse_at_learner(state: &State, member: usize, path: &str, message: &[u8]) -> Result<(), Status> {
    let is_served = match path {
        STATUS => true,
        RANGE => decoded::<RangeRequest>(message).serializable,
        _ => false,
    };
    if state.members[member].is_learner && !is_served {
        return Err(unavailable("etcdserver: rpc not supported for learner"));
    }
    Ok(())
}

/// Whether a call reads keys of clients, rather than etcd's revision.
pub fn reads_keys(path: &str, message: &[u8]) -> bool {
    match path {
        RANGE => {
            let request = decoded::<RangeRequest>(message);
            let is_check = request.limit == 1 && request.keys_only;
            request.key.starts_with(PREFIX.as_bytes()) || request.key == CHECK_KEY.as_bytes() && !is_check
        }
        other => other == RANGE_STREAM,
    }
}

/// Carries out a unary call to a member.
pub async fn unary(cluster: &Cluster, caller: Caller, path: &str, message: &[u8]) -> Result<Vec<u8>, Status> {
    let Caller { member, from, .. } = caller;
    let header = || Some(cluster.look(|state| state.header(member)));
    Ok(match path {
        RANGE => {
            let response = range(cluster, caller, &decoded(message)).await?;
            if response.more && from == From::Rangecache {
                cluster.parts.fetch_add(1, Ordering::Relaxed);
            }
            if response.more && cluster.breaks_off(from) {
                return Err(unavailable("the page was broken off"));
            }
            response.encode_to_vec()
        }
        PUT => {
            let PutRequest { key, value, lease } = decoded(message);
            let put = Change::Put(key, value, lease);
            let revision = propose(cluster, caller, &[Needs::Write], |history| {
                let has_lease = history.has_lease(lease);
                let done = has_lease.then(|| history.commit(&[put]));
                done.ok_or_else(no_lease)
            });
            let revision = revision.await?;
            let header = header().map(|header| testkit::pb::ResponseHeader { revision, ..header });
            PutResponse { header }.encode_to_vec()
        }
        DELETE => {
            let DeleteRangeRequest { key, .. } = decoded(message);
            let delete = |history: &mut History| Ok(history.commit(&[Change::Delete(key)]));
            let revision = propose(cluster, caller, &[Needs::Write], delete).await?;
            let header = header().map(|header| testkit::pb::ResponseHeader { revision, ..header });
            DeleteRangeResponse { header, deleted: 0 }.encode_to_vec()
        }
        TXN => txn(cluster, caller, decoded(message)).await?.encode_to_vec(),
        COMPACT => {
            let CompactionRequest { revision, .. } = decoded(message);
            compact(cluster, member, revision).await?;
            CompactionResponse { header: header() }.encode_to_vec()
        }
        LEASE_GRANT => {
            let LeaseGrantRequest { id, ttl } = decoded(message);
            let expires =
                Instant::now() + Duration::from_secs(u64::try_from(ttl).expect("clients ask for some"));
            let is_new = cluster
                .propose(member, |history| history.grant(id, expires))
                .await?;
            if !is_new {
                return Err(Status {
                    code: FAILED_PRECONDITION,
                    message: "etcdserver: lease already exists".to_owned(),
                });
            }
            let header = header();
            LeaseGrantResponse { header, id, ttl }.encode_to_vec()
        }
        LEASE_REVOKE => {
            let LeaseRevokeRequest { id } = decoded(message);
            let revoked = propose(cluster, caller, &[Needs::Write], |history| {
                let is_granted = history.revoke(id);
                is_granted.then(|| history.newest().revision).ok_or_else(no_lease)
            });
            let revision = revoked.await?;
            let header = header().map(|header| testkit::pb::ResponseHeader { revision, ..header });
            LeaseRevokeResponse { header }.encode_to_vec()
        }
        AUTHENTICATE => {
            let AuthenticateRequest { name, .. } = decoded(message);
            let user = User::named(&name).expect("a user of the model");
            cluster.read_index(member).await?;
            if !cluster.look(|state| state.applied(member).auth.is_on) {
                return Err(Refusal::NotEnabled.status());
            }
            let issue = |history: &mut History| {
                history.pass();
                history.newest().auth.tokens
            };
            let tokens = cluster.propose(member, issue).await?;
            let identity = Identity {
                user,
                history: cluster.look(|state| state.histories.len()),
                tokens,
            };
            let (header, token) = (header(), identity.token());
            AuthenticateResponse { header, token }.encode_to_vec()
        }
        ENABLE | DISABLE => {
            let needs: &[Needs] = if path == DISABLE {
                &[Needs::Administer]
            } else {
                &[]
            };
            let switch = |history: &mut History| {
                history.change_auth(|auth| auth.switch(path == ENABLE));
                Ok(())
            };
            propose(cluster, caller, needs, switch).await?;
            Empty {}.encode_to_vec()
        }
        STATUS => cluster
            .look(|state| status(state, member, cluster.version))
            .encode_to_vec(),
        HEALTH => HealthCheckResponse {
            status: ServingStatus::Serving.into(),
        }
        .encode_to_vec(),
        other => {
            return Err(Status {
                code: UNIMPLEMENTED,
                message: format!("unknown method {other}"),
            });
        }
    })
}

fn no_lease() -> Status {
    Status {
        code: NOT_FOUND,
        message: "etcdserver: requested lease not found".to_owned(),
    }
}

/// Appends an entry for `caller`, if its rights suffice when the entry is applied.
async fn propose<T>(
    cluster: &Cluster,
    caller: Caller,
    needs: &[Needs],
    append: impl FnOnce(&mut History) -> Result<T, Status>,
) -> Result<T, Status> {
    let info = cluster.look(|state| {
        let auth = state.applied(caller.member).auth;
        auth.identify(caller.identity, state.histories.len())
    });
    let info = info.map_err(Refusal::status)?;
    let proposed = cluster.propose(caller.member, |history| {
        let permitted = history.newest().auth.permit(info, needs);
        permitted.map_err(Refusal::status).and_then(|()| append(history))
    });
    proposed.await?
}

fn status(state: &State, member: usize, version: &str) -> StatusResponse {
    let header = state.header(member);
    let raft_index = state.history().raft_index(state.members[member].applied);
    let leader = state.leader.filter(|_| !state.members[member].is_isolated);
    StatusResponse {
        header: Some(etcd_wire::etcdserverpb::ResponseHeader {
            cluster_id: header.cluster_id,
            member_id: header.member_id,
            revision: header.revision,
            raft_term: header.raft_term,
            ..Default::default()
        }),
        version: version.to_owned(),
        leader: leader.map_or(0, |leader| state.members[leader].id),
        is_learner: state.members[member].is_learner,
        raft_index,
        raft_term: state.term,
        raft_applied_index: raft_index,
        errors: Vec::from_iter(leader.is_none().then(|| "etcdserver: no leader".to_owned())),
        ..StatusResponse::default()
    }
}

/// The revision that a read is at, if the member can read it.
fn readable(state: &State, member: usize, requested: i64) -> Result<i64, Status> {
    let now = state.applied(member);
    let revision = if requested > 0 { requested } else { now.revision };
    if revision > now.revision {
        return Err(out_of_range("is a future revision"));
    }
    if revision < now.compacted {
        return Err(out_of_range("has been compacted"));
    }
    Ok(revision)
}

async fn range(cluster: &Cluster, caller: Caller, request: &RangeRequest) -> Result<RangeResponse, Status> {
    let member = caller.member;
    if !request.serializable {
        cluster.read_index(member).await?;
    }
    cluster.look(|state| {
        caller.allowed(state, &[Needs::to_read(request)])?;
        let revision = readable(state, member, request.revision)?;
        let mut response = state.history().range(request, revision);
        response.header = Some(state.header(member));
        Ok(response)
    })
}

/// Streams a Range in chunks of a few keys.
pub async fn range_stream(cluster: &Cluster, caller: Caller, message: &[u8], messages: &Messages) {
    if let Err(status) = chunks(cluster, caller, decoded(message), messages).await {
        let _ = messages.send(Err(status));
    }
}

async fn chunks(
    cluster: &Cluster,
    caller: Caller,
    request: RangeRequest,
    messages: &Messages,
) -> Result<(), Status> {
    let Caller { member, from, .. } = caller;
    let filters = request.min_mod_revision
        + request.max_mod_revision
        + request.min_create_revision
        + request.max_create_revision;
    if cluster.version < "3.7" {
        return Err(Status {
            code: UNIMPLEMENTED,
            message: "unknown method RangeStream for service etcdserverpb.KV".to_owned(),
        });
    }
    for (is_refused, shape) in [
        (request.sort_order != 0, "custom sort orders"),
        (filters != 0, "revision filters"),
    ] {
        if is_refused {
            return Err(Status {
                code: UNIMPLEMENTED,
                message: format!("RangeStream does not support {shape}"),
            });
        }
    }
    if !request.serializable {
        cluster.read_index(member).await?;
    }
    let number = cluster.look(|state| state.histories.len());
    let (auth, revision) = cluster.look(|state| {
        caller.allowed(state, &[Needs::to_read(&request)])?;
        let auth = state.applied(member).auth;
        readable(state, member, request.revision).map(|revision| (auth, revision))
    })?;
    let whole = cluster.look(|state| state.history().range(&request, revision));
    let mut sent = 0;
    loop {
        // The first chunk is read at once: its revision is not compacted.
        if sent > 0 {
            cluster.travel(member).await;
            if cluster.breaks_off(from) {
                return Err(unavailable("the stream was broken off"));
            }
        }
        let end = whole.kvs.len().min(sent + 1 + cluster.chance.below(CHUNK_KEYS));
        let mut response = RangeResponse {
            kvs: whole.kvs[sent..end].to_vec(),
            ..RangeResponse::default()
        };
        sent = end;
        let is_last = sent == whole.kvs.len();
        if !is_last && from == From::Rangecache {
            cluster.parts.fetch_add(1, Ordering::Relaxed);
        }
        let header = cluster.look(|state| {
            if state.histories.len() != number {
                return Err(unavailable("etcdserver: server stopped"));
            }
            let now = state.applied(member).auth;
            if is_last && auth.is_on && caller.identity.is_some() && now.revision != auth.revision {
                return Err(Refusal::OldRevision.status());
            }
            readable(state, member, revision).map(|_| state.header(member))
        })?;
        if is_last {
            response.count = whole.count;
            response.more = whole.more;
            response.header = Some(testkit::pb::ResponseHeader {
                // A stream without a revision is of the revision of its first chunk.
                revision: if request.revision > 0 {
                    header.revision
                } else {
                    revision
                },
                ..header
            });
        }
        let chunk = RangeStreamResponse {
            range_response: Some(response),
        };
        if messages.send(Ok(chunk.encode_to_vec())).is_err() || is_last {
            return Ok(());
        }
    }
}

async fn txn(cluster: &Cluster, caller: Caller, request: TxnRequest) -> Result<TxnResponse, Status> {
    let member = caller.member;
    let operations = || flattened(&request.success).chain(flattened(&request.failure));
    let compared = request.compare.iter();
    let compared = compared.map(|compare| Needs::Read(compare.key.clone(), Vec::new()));
    let needs: Vec<_> = compared.chain(operations().filter_map(needs)).collect();
    let ranges: Vec<_> = operations().filter_map(range_of).collect();
    if ranges.len() == operations().count() {
        if !ranges.iter().all(|range| range.serializable) {
            cluster.read_index(member).await?;
        }
        return cluster.look(|state| {
            caller.allowed(state, &needs)?;
            let newest = state.applied(member).revision;
            let (succeeded, taken) = branch(state.history(), &request, newest);
            for range in taken.iter().filter_map(range_of) {
                readable(state, member, range.revision)?;
            }
            Ok(TxnResponse {
                header: Some(state.header(member)),
                succeeded,
                responses: vec![ResponseOp::default(); taken.len()],
            })
        });
    }
    let proposed = propose(cluster, caller, &needs, |history| {
        let (succeeded, taken) = branch(history, &request, history.newest().revision);
        let changes: Vec<_> = flattened(taken).filter_map(change).collect();
        Ok((succeeded, history.commit(&changes), taken.len()))
    });
    let (succeeded, revision, operations) = proposed.await?;
    let header = cluster.look(|state| state.header(member));
    Ok(TxnResponse {
        header: Some(testkit::pb::ResponseHeader { revision, ..header }),
        succeeded,
        responses: vec![ResponseOp::default(); operations],
    })
}

/// Whether the compares of a transaction hold, and the operations that are carried out.
fn branch<'a>(history: &History, request: &'a TxnRequest, newest: i64) -> (bool, &'a [RequestOp]) {
    let mut compares = request.compare.iter();
    let succeeded = compares.all(|compare| holds(history, compare, newest));
    let taken = if succeeded {
        &request.success
    } else {
        &request.failure
    };
    (succeeded, taken)
}

/// Operations with those of nested transactions, which compare nothing, in their place.
fn flattened(operations: &[RequestOp]) -> impl Iterator<Item = &RequestOp> {
    operations.iter().flat_map(|operation| match &operation.request {
        Some(Request::RequestTxn(nested)) => &nested.success[..],
        _ => std::slice::from_ref(operation),
    })
}

fn range_of(operation: &RequestOp) -> Option<&RangeRequest> {
    match operation.request.as_ref()? {
        Request::RequestRange(range) => Some(range),
        _ => None,
    }
}

fn needs(operation: &RequestOp) -> Option<Needs> {
    operation.request.as_ref()?;
    Some(range_of(operation).map_or(Needs::Write, Needs::to_read))
}

/// Clients compare for equal mod revisions alone.
fn holds(history: &History, compare: &Compare, newest: i64) -> bool {
    assert_eq!((compare.result, compare.target), (0, MOD_REVISION), "{compare:?}");
    let found = history.get(&compare.key, newest);
    found.map_or(0, |kv| kv.mod_revision) == compare.mod_revision
}

fn change(operation: &RequestOp) -> Option<Change> {
    match operation.request.as_ref()? {
        Request::RequestPut(put) => Some(Change::Put(put.key.clone(), put.value.clone(), put.lease)),
        Request::RequestDeleteRange(delete) => Some(Change::Delete(delete.key.clone())),
        Request::RequestRange(_) | Request::RequestTxn(_) => None,
    }
}

async fn compact(cluster: &Cluster, member: usize, revision: i64) -> Result<(), Status> {
    cluster
        .propose(member, |history| {
            let newest = history.newest();
            if revision > newest.revision {
                return Err(out_of_range("is a future revision"));
            }
            if revision <= newest.compacted {
                return Err(out_of_range("has been compacted"));
            }
            history.compact(revision);
            Ok(())
        })
        .await?
}
