//! Keys that need not be read from etcd, and the result of a load.

use std::sync::Arc;

use etcd_store::cache::Tree;
use rangecache_upstream::Connection;

use crate::lineage::{Anchor, Fingerprint};

/// Keys of a scope that a load need not read, as far as etcd still has them.
#[derive(Debug)]
pub(crate) struct Have {
    /// The keys at one revision, and the newest events as far as they are known.
    pub(crate) anchor: Anchor,
    /// History of the keys; `None` for the present one of the mirror: what contradicts it replaces that.
    pub(crate) lineage: Option<Fingerprint>,
    /// Source of the keys, for metrics and logs.
    pub(crate) from: Source,
    /// Whether a feed of rangecache has proven them once. Otherwise every value is compared with etcd's.
    pub(crate) verified: bool,
}

impl Have {
    /// Keys that a mirror had at `revision`.
    pub(crate) fn of_memory(tree: Tree, revision: i64) -> Have {
        Have {
            anchor: Anchor::loaded(tree, revision),
            lineage: None,
            from: Source::Memory,
            verified: true,
        }
    }

    /// Result of a load where a feed continues these keys as they are: no connection has read them from etcd.
    pub(super) fn continued(self) -> Loaded {
        let adopted = Adopted {
            source: self.from,
            keys: self.anchor.tree.len(),
            bytes: self.anchor.tree.summary().encoded_bytes,
        };
        Loaded {
            anchor: self.anchor,
            connection: None,
            adopted: Some(adopted),
        }
    }
}

/// Source of such keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The mirror had them before.
    Memory,
    /// A neighbour had them.
    Neighbour,
    /// They were on the disk.
    Image {
        revision: i64,
        /// Length of the file.
        bytes: u64,
        /// When it was written, in seconds since 1970.
        written: u64,
    },
}

impl Source {
    /// Value of the label `source`.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Source::Memory => "memory",
            Source::Neighbour => "neighbour",
            Source::Image { .. } => "image",
        }
    }
}

/// The connection of a load, unless the load was interrupted. As long as it responds, its member has kept the history of
/// the load.
pub(crate) type LoadedBy = Option<Arc<Connection>>;

/// A scope's keys at one revision.
#[derive(Debug)]
pub(crate) struct Loaded {
    /// Keys and values.
    pub(crate) anchor: Anchor,
    /// The connection of the load.
    pub(crate) connection: LoadedBy,
    /// Part that was not read; `None` if everything was.
    pub(crate) adopted: Option<Adopted>,
}

/// Part that a load did not have to read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Adopted {
    pub(crate) source: Source,
    /// Keys.
    pub(crate) keys: u64,
    /// Length of their entries, in bytes.
    pub(crate) bytes: u64,
}
