//! Requests whose responses did not fit the bytes for complete responses: for a while they are neither converted nor
//! shared again, because etcd would read most of the response twice. They are forwarded, and flow control bounds their
//! buffered bytes.

use std::time::Duration;

use bytes::Bytes;

use super::expiring_map::ExpiringMap;

/// Time until another attempt.
const TTL: Duration = Duration::from_secs(60);
/// Bound on the bytes of the requests.
const MAX_BYTES: u64 = 256 << 10;

/// Framed requests of lists that were too large.
#[derive(Debug)]
pub(super) struct TooLarge(ExpiringMap<Bytes, ()>);

impl TooLarge {
    pub(super) fn new() -> TooLarge {
        TooLarge(ExpiringMap::new(TTL, MAX_BYTES))
    }

    pub(super) fn contains(&self, framed: &Bytes) -> bool {
        self.0.contains(framed)
    }

    /// Adds a request.
    pub(super) fn add(&self, framed: &Bytes) {
        // A copy: `framed` may keep a larger buffer alive.
        let copy = Bytes::copy_from_slice(framed);
        let bytes = copy.len() as u64;
        self.0.insert(copy, (), bytes);
    }
}
