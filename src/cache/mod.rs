//! The cache: what a mirror knows, and how a Range is answered from it.
//!
//! No I/O, no clock, no async and no locks: time comes in as a [`std::time::Duration`] since an epoch of the caller's,
//! and whoever shares a [`Store`] between threads brings the lock. Everything handed out ([`Tree`], [`Entry`],
//! [`Selection`], [`Answer`], [`Rope`]) is an immutable snapshot that outlives any later change.
//!
//! | file | subject |
//! |---|---|
//! | `entry` | one key-value, stored once, encoded as it will be sent |
//! | `tree`, `node`, `bulk` | the persistent B+tree in key order with counts and sizes |
//! | `history` | the current tree, the events, and the state at any revision of the window |
//! | `query`, `select` | a RangeRequest, and which entries etcd would answer it with |
//! | `answer`, `rope` | the bytes of the RangeResponse, produced piece by piece |
//! | `chunks` | the same, cut into the chunks of a RangeStream |
//! | `wire`, `memory` | protobuf's varints; what an allocation really takes |
//!
//! This room imports none of the others; `mirror` writes to it and `proxy` reads from it.

#![cfg_attr(
    test,
    allow(
        clippy::cast_possible_truncation,
        reason = "tests make small numbers of all kinds"
    )
)]

mod answer;
mod bulk;
mod chunks;
mod entry;
mod event_log;
mod history;
mod leaf;
mod memory;
mod node;
mod query;
mod rope;
mod select;
mod separator;
#[cfg(test)]
pub(crate) mod testing;
mod tree;
mod wire;

pub use answer::{Answer, ResponseHeader};
pub use chunks::{ChunkSize, Chunks, chunk_head};
pub use entry::{Entry, KeyValueRef, MalformedKeyValue, Pieces};
pub use event_log::{Batch, Change, EventLog};
pub use history::{Applied, AtError, HistoryLimits, Rebuild, Rebuilt, Snapshot, Store};
pub use node::Summary;
pub use query::{
    Dialect, QueryError, RangeQuery, SortOrder, SortTarget, Undecodable, names_unknown_sort_target,
};
pub use rope::Rope;
pub use select::{Selected, Selection, select};
pub use tree::Tree;
