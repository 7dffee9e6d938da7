//! Result of a load, and the keys that it need not read.

use std::sync::Arc;

use etcd_store::cache::{ResponseHeader, Tree};
use rangecache_upstream::Connection;

/// The connection of a load, unless the load was interrupted. As long as it responds, its member has kept the history of
/// the load.
pub(crate) type LoadedBy = Option<Arc<Connection>>;

/// A scope's keys at one revision.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// Keys and values.
    pub(crate) tree: Tree,
    /// etcd's header; the keys were read at its revision.
    pub(crate) header: ResponseHeader,
    /// The connection of the load.
    pub(crate) connection: LoadedBy,
    /// Part that the mirror had already; `None` if everything was read.
    pub(crate) adopted: Option<Adopted>,
}

/// Keys that a load need not read, as far as etcd still has them.
#[derive(Debug)]
pub(crate) struct Previous {
    pub(crate) tree: Tree,
    pub(crate) source: AdoptedFrom,
    /// Cluster of the keys; `None` for that of the mirror.
    pub(crate) cluster_id: Option<u64>,
}

/// Source of such keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AdoptedFrom {
    /// The mirror had them before.
    Memory,
    /// A neighbour had them.
    Neighbour,
    /// They were on the disk.
    Image,
}

impl AdoptedFrom {
    /// Value of the label `source`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            AdoptedFrom::Memory => "memory",
            AdoptedFrom::Neighbour => "neighbour",
            AdoptedFrom::Image => "image",
        }
    }
}

/// Part that a load did not have to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Adopted {
    pub(crate) source: AdoptedFrom,
    /// Keys.
    pub(crate) keys: u64,
    /// Length of their entries, in bytes.
    pub(crate) bytes: u64,
}
