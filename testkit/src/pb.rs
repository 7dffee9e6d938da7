//! etcd's messages, generated from `proto/etcd.proto`, with constructors for the requests that tests send most.

use std::fmt;

#[allow(clippy::all, unreachable_pub, reason = "generated")]
mod generated {
    include!(concat!(env!("OUT_DIR"), "/etcdserverpb.rs"));
}

pub use generated::*;
use request_op::Request;

/// [`RangeRequest::sort_order`]; 0 is none.
pub const ASCEND: i32 = 1;
/// See [`ASCEND`].
pub const DESCEND: i32 = 2;
/// [`RangeRequest::sort_target`].
pub const BY_KEY: i32 = 0;
/// See [`BY_KEY`].
pub const BY_VERSION: i32 = 1;
/// See [`BY_KEY`].
pub const BY_CREATE: i32 = 2;
/// See [`BY_KEY`].
pub const BY_MOD: i32 = 3;
/// See [`BY_KEY`].
pub const BY_VALUE: i32 = 4;

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
    /// Request for a single key.
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

/// Revision of the store in a response's header, which every response of etcd has.
fn header_revision(header: Option<&ResponseHeader>) -> i64 {
    header.expect("a response has a header").revision
}

impl RangeResponse {
    /// Revision of the store that the response is of.
    pub fn revision(&self) -> i64 {
        header_revision(self.header.as_ref())
    }
}

impl PutResponse {
    /// Revision of the write.
    pub fn revision(&self) -> i64 {
        header_revision(self.header.as_ref())
    }
}

impl DeleteRangeResponse {
    /// Revision of the write, or of the store if no key was deleted.
    pub fn revision(&self) -> i64 {
        header_revision(self.header.as_ref())
    }
}

impl TxnResponse {
    /// Revision of the store after the transaction.
    pub fn revision(&self) -> i64 {
        header_revision(self.header.as_ref())
    }
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
            request: Some(Request::RequestPut(put)),
        }
    }

    /// Reads `key`.
    pub fn read(key: impl AsRef<[u8]>) -> Self {
        Self {
            request: Some(Request::RequestRange(RangeRequest::one(key))),
        }
    }

    /// A transaction of its own with one operation. Of transactions side by side, one may delete what one before it has put, which
    /// operations of one transaction may not: their revision then has two events of the key (etcd 16380).
    pub fn nested(self) -> Self {
        Self {
            request: Some(Request::RequestTxn(TxnRequest {
                success: vec![self],
                ..TxnRequest::default()
            })),
        }
    }

    /// Deletes `key`.
    pub fn delete(key: impl AsRef<[u8]>) -> Self {
        Self {
            request: Some(Request::RequestDeleteRange(DeleteRangeRequest {
                key: key.as_ref().to_vec(),
                range_end: Vec::new(),
            })),
        }
    }
}
