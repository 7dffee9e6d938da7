//! Keys that the tour reads.

use bytes::Bytes;
use etcd_wire::etcdserverpb::RangeRequest;

/// The range that the tour reads.
pub(crate) struct ReadTarget {
    /// A key that exists.
    pub(crate) key: Bytes,
    /// Start and end of the listed range, and its name in the output.
    pub(crate) start: Bytes,
    pub(crate) end: Bytes,
    pub(crate) name: String,
    /// Number of keys in the range.
    pub(crate) keys: i64,
}

impl ReadTarget {
    /// A list of all its keys.
    pub(crate) fn range(&self) -> RangeRequest {
        RangeRequest {
            key: self.start.clone(),
            range_end: self.end.clone(),
            ..Default::default()
        }
    }
}
