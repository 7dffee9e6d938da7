//! Request of a watcher to join a fan-out.

use bytes::Bytes;

/// A watcher that joins a fan-out.
#[derive(Clone, Debug)]
pub struct Join {
    /// `key` of the create request; not empty.
    pub key: Bytes,
    /// `range_end` of the create request. Together with `key` inside the mirror's scope.
    pub range_end: Bytes,
    /// Revision of the first event that the watcher gets, if there is one. May be in the future.
    pub first_revision: i64,
    /// Highest revision that etcd is known to have reached. No client has got events of a later one.
    pub known_revision: i64,
}

impl Join {
    /// Revision up to which the watcher's events were delivered elsewhere, if there were any.
    pub(super) fn delivered_through(&self) -> i64 {
        self.known_revision.min(self.first_revision - 1)
    }
}
