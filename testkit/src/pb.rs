//! etcd's messages as a client needs them. Field numbers and names are etcd's; enums are plain numbers, so that a test can
//! send ones that etcd does not know.

use std::fmt;

use prost::{Message, Oneof};

/// Ascending and descending, as [`RangeRequest::sort_order`] numbers them; 0 is none.
pub const ASCEND: i32 = 1;
/// See [`ASCEND`].
pub const DESCEND: i32 = 2;
/// Sort targets, as [`RangeRequest::sort_target`] numbers them.
pub const BY_KEY: i32 = 0;
/// See [`BY_KEY`].
pub const BY_VERSION: i32 = 1;
/// See [`BY_KEY`].
pub const BY_CREATE: i32 = 2;
/// See [`BY_KEY`].
pub const BY_MOD: i32 = 3;
/// See [`BY_KEY`].
pub const BY_VALUE: i32 = 4;

#[derive(Clone, PartialEq, Message)]
pub struct Header {
    #[prost(uint64, tag = "1")]
    pub cluster_id: u64,
    #[prost(uint64, tag = "2")]
    pub member_id: u64,
    #[prost(int64, tag = "3")]
    pub revision: i64,
    #[prost(uint64, tag = "4")]
    pub raft_term: u64,
}

#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub create_revision: i64,
    #[prost(int64, tag = "3")]
    pub mod_revision: i64,
    #[prost(int64, tag = "4")]
    pub version: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub lease: i64,
}

// The keys of a failed comparison are to be read by a person.
impl fmt::Debug for KeyValue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (key, start) = (
            self.key.escape_ascii(),
            self.value[..self.value.len().min(24)].escape_ascii(),
        );
        write!(f, "{key} = {start} ({} B)", self.value.len())?;
        let Self {
            create_revision,
            mod_revision,
            version,
            lease,
            ..
        } = self;
        write!(
            f,
            " create {create_revision} mod {mod_revision} version {version} lease {lease}"
        )
    }
}

#[derive(Clone, PartialEq, Message)]
#[prost(skip_debug)]
pub struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub limit: i64,
    #[prost(int64, tag = "4")]
    pub revision: i64,
    #[prost(int32, tag = "5")]
    pub sort_order: i32,
    #[prost(int32, tag = "6")]
    pub sort_target: i32,
    #[prost(bool, tag = "7")]
    pub serializable: bool,
    #[prost(bool, tag = "8")]
    pub keys_only: bool,
    #[prost(bool, tag = "9")]
    pub count_only: bool,
    #[prost(int64, tag = "10")]
    pub min_mod_revision: i64,
    #[prost(int64, tag = "11")]
    pub max_mod_revision: i64,
    #[prost(int64, tag = "12")]
    pub min_create_revision: i64,
    #[prost(int64, tag = "13")]
    pub max_create_revision: i64,
}

impl fmt::Debug for RangeRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Range [{}, {})",
            self.key.escape_ascii(),
            self.range_end.escape_ascii()
        )?;
        let numbers = [
            ("limit", self.limit),
            ("revision", self.revision),
            ("sort_order", self.sort_order.into()),
            ("sort_target", self.sort_target.into()),
            ("serializable", self.serializable.into()),
            ("keys_only", self.keys_only.into()),
            ("count_only", self.count_only.into()),
            ("min_mod", self.min_mod_revision),
            ("max_mod", self.max_mod_revision),
            ("min_create", self.min_create_revision),
            ("max_create", self.max_create_revision),
        ];
        numbers
            .iter()
            .filter(|(_, n)| *n != 0)
            .try_for_each(|(name, n)| write!(f, " {name} {n}"))
    }
}

impl RangeRequest {
    /// One key.
    pub fn one(key: impl AsRef<[u8]>) -> Self {
        Self {
            key: key.as_ref().to_vec(),
            ..Self::default()
        }
    }

    /// The keys in `[key, end)`; an end of `\0` means every key from `key` on.
    pub fn range(key: impl AsRef<[u8]>, end: impl AsRef<[u8]>) -> Self {
        Self {
            key: key.as_ref().to_vec(),
            range_end: end.as_ref().to_vec(),
            ..Self::default()
        }
    }

    /// The keys that start with `prefix`.
    pub fn prefix(prefix: impl AsRef<[u8]>) -> Self {
        Self::range(prefix.as_ref(), prefix_end(prefix.as_ref()))
    }

    /// Every key of the store.
    pub fn everything() -> Self {
        Self::range(b"\0", b"\0")
    }
}

/// The end of the range of all keys that start with `prefix`, which must hold a byte other than 0xff.
pub fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let last = prefix.iter().rposition(|b| *b != 0xff).unwrap();
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    end
}

#[derive(Clone, PartialEq, Message)]
pub struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    pub kvs: Vec<KeyValue>,
    #[prost(bool, tag = "3")]
    pub more: bool,
    #[prost(int64, tag = "4")]
    pub count: i64,
}

impl RangeResponse {
    /// The store's revision that the answer names.
    pub fn revision(&self) -> i64 {
        self.header.as_ref().expect("an answer has a header").revision
    }
}

#[derive(Clone, PartialEq, Message)]
pub struct RangeStreamResponse {
    #[prost(message, optional, tag = "1")]
    pub range_response: Option<RangeResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub lease: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
}

/// The answer of any call of which only the header matters: put, delete, compact and others begin alike.
#[derive(Clone, PartialEq, Message)]
pub struct Done {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
}

impl Done {
    /// The store's revision that the answer names.
    pub fn revision(&self) -> i64 {
        self.header.as_ref().expect("an answer has a header").revision
    }
}

#[derive(Clone, PartialEq, Oneof)]
pub enum Op {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
}

#[derive(Clone, PartialEq, Message)]
pub struct RequestOp {
    #[prost(oneof = "Op", tags = "1, 2, 3")]
    pub op: Option<Op>,
}

impl RequestOp {
    /// Puts `value` at `key`.
    pub fn put(key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> Self {
        let put = PutRequest {
            key: key.as_ref().to_vec(),
            value: value.as_ref().to_vec(),
            lease: 0,
        };
        Self {
            op: Some(Op::Put(put)),
        }
    }

    /// Reads `key`.
    pub fn read(key: impl AsRef<[u8]>) -> Self {
        Self {
            op: Some(Op::Range(RangeRequest::one(key))),
        }
    }

    /// Deletes `key`.
    pub fn delete(key: impl AsRef<[u8]>) -> Self {
        Self {
            op: Some(Op::Delete(DeleteRangeRequest {
                key: key.as_ref().to_vec(),
                range_end: Vec::new(),
            })),
        }
    }
}

#[derive(Clone, PartialEq, Message)]
pub struct Compare {
    #[prost(int32, tag = "1")]
    pub result: i32,
    #[prost(int32, tag = "2")]
    pub target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub key: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub mod_revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Message)]
pub struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub responses: Vec<ResponseOp>,
}

/// The answer to one operation of a transaction; of what is not read only that it is there.
#[derive(Clone, PartialEq, Message)]
pub struct ResponseOp {
    #[prost(message, optional, tag = "1")]
    pub range: Option<RangeResponse>,
}

#[derive(Clone, PartialEq, Message)]
pub struct DeleteRangeResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    #[prost(int64, tag = "2")]
    pub deleted: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct MoveLeaderRequest {
    #[prost(uint64, tag = "1")]
    pub target: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct MemberAddRequest {
    #[prost(string, repeated, tag = "1")]
    pub peer_urls: Vec<String>,
    #[prost(bool, tag = "2")]
    pub is_learner: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct Member {
    #[prost(uint64, tag = "1")]
    pub id: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct MemberAddResponse {
    #[prost(message, optional, tag = "2")]
    pub member: Option<Member>,
}

#[derive(Clone, PartialEq, Message)]
pub struct MemberPromoteRequest {
    #[prost(uint64, tag = "1")]
    pub id: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct CompactionRequest {
    #[prost(int64, tag = "1")]
    pub revision: i64,
    #[prost(bool, tag = "2")]
    pub physical: bool,
}

#[derive(Clone, PartialEq, Message)]
pub struct LeaseGrantRequest {
    #[prost(int64, tag = "1")]
    pub ttl_seconds: i64,
    #[prost(int64, tag = "2")]
    pub id: i64,
}

/// A message without fields, or one whose fields do not matter.
#[derive(Clone, PartialEq, Message)]
pub struct Empty {}

#[derive(Clone, PartialEq, Message)]
pub struct StatusResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    #[prost(string, tag = "2")]
    pub version: String,
    #[prost(int64, tag = "3")]
    pub db_size_bytes: i64,
    #[prost(uint64, tag = "4")]
    pub leader: u64,
}

#[derive(Clone, PartialEq, Message)]
pub struct SnapshotResponse {
    #[prost(bytes = "vec", tag = "3")]
    pub blob: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchCreate {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub start_revision: i64,
    #[prost(bool, tag = "6")]
    pub prev_kv: bool,
    #[prost(int64, tag = "7")]
    pub watch_id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchCancel {
    #[prost(int64, tag = "1")]
    pub watch_id: i64,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub create: Option<WatchCreate>,
    #[prost(message, optional, tag = "2")]
    pub cancel: Option<WatchCancel>,
    #[prost(message, optional, tag = "3")]
    pub progress: Option<Empty>,
}

#[derive(Clone, PartialEq, Message)]
pub struct Event {
    /// 0 is a put, 1 a delete.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    #[prost(message, optional, tag = "2")]
    pub kv: Option<KeyValue>,
    #[prost(message, optional, tag = "3")]
    pub prev_kv: Option<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
pub struct WatchResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    #[prost(int64, tag = "2")]
    pub watch_id: i64,
    #[prost(bool, tag = "3")]
    pub created: bool,
    #[prost(bool, tag = "4")]
    pub canceled: bool,
    #[prost(int64, tag = "5")]
    pub compact_revision: i64,
    #[prost(message, repeated, tag = "11")]
    pub events: Vec<Event>,
}

/// `AuthUserAdd` and `Authenticate` take the same two fields.
#[derive(Clone, PartialEq, Message)]
pub struct NameAndPassword {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub password: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct UserAndRole {
    #[prost(string, tag = "1")]
    pub user: String,
    #[prost(string, tag = "2")]
    pub role: String,
}

#[derive(Clone, PartialEq, Message)]
pub struct AuthenticateResponse {
    #[prost(message, optional, tag = "1")]
    pub header: Option<Header>,
    #[prost(string, tag = "2")]
    pub token: String,
}

/// A right of a role; `AuthRoleGrantPermission` takes it.
#[derive(Clone, PartialEq, Message)]
pub struct Permission {
    /// 0 reads, 1 writes, 2 does both.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    #[prost(bytes = "vec", tag = "2")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub range_end: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RoleGrant {
    #[prost(string, tag = "1")]
    pub role: String,
    #[prost(message, optional, tag = "2")]
    pub permission: Option<Permission>,
}

#[derive(Clone, PartialEq, Message)]
pub struct RoleRevoke {
    #[prost(string, tag = "1")]
    pub role: String,
    #[prost(bytes = "vec", tag = "2")]
    pub key: Vec<u8>,
    #[prost(bytes = "vec", tag = "3")]
    pub range_end: Vec<u8>,
}

/// `AuthUserRevokeRole`'s fields have names of their own.
#[derive(Clone, PartialEq, Message)]
pub struct NameAndRole {
    #[prost(string, tag = "1")]
    pub name: String,
    #[prost(string, tag = "2")]
    pub role: String,
}
