//! The cache: a mirror's keys with their history, and the Range responses built from them.
//!
//! No I/O, no clock, no async and no locks: time is passed in as a [`std::time::Duration`] since an origin of the
//! caller's, and a caller that shares a [`Store`] between threads adds the lock. Everything handed out ([`Tree`],
//! [`Entry`], [`Selection`], [`Answer`], [`Rope`]) is an immutable snapshot that outlives any later change.
//!
//! | file | subject |
//! |---|---|
//! | `entry` | one key-value pair, stored once, in the encoding in which it is sent |
//! | `stored` | an entry as a leaf keeps it: plain, or in a packed block, with its value or without |
//! | `gather` | key-values of a load, and small entries of a leaf in one allocation |
//! | `packed` | entries of a leaf, compressed together, or without values |
//! | `repack` | leaves of a tree in use, packed, unpacked, without values and with them again |
//! | `ledger` | memory of a tree, as modifications count it |
//! | `tree`, `node`, `leaf`, `separator` | the persistent B+tree in key order, with counts and sizes |
//! | `builder` | a tree that is being loaded |
//! | `event_log` | the events of the window, found by revision, and those that a follower has missed |
//! | `history` | the current tree, and the state at any revision of the window |
//! | `interval_tree` | which of the intervals that watchers name contain a key |
//! | `query`, `select`, `selection` | a RangeRequest, and the entries that etcd would return for it |
//! | `answer`, `rope` | the encoded RangeResponse, produced piece by piece |
//! | `json` | the same response as text of etcd's JSON gateway |
//! | `chunks` | the same response as the chunks of a RangeStream |
//! | `memory` | allocations: sizes, rounding included, and blocks of small entries |
//!
//! `fuzzing`, `testing` and the files named `model` are compiled for tests and fuzz targets only.
//!
//! This room imports `keyspace`, `protobuf` and the generated messages only; `mirror`, `proxy` and `doctor` import it.

#![cfg_attr(
    test,
    allow(
        clippy::cast_possible_truncation,
        reason = "tests make small numbers of all kinds"
    )
)]

mod answer;
mod builder;
mod chunks;
mod entry;
mod event;
mod event_log;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod fuzzing;
mod gather;
mod history;
mod interval_tree;
mod json;
mod leaf;
mod ledger;
mod memory;
mod node;
mod packed;
mod query;
mod repack;
mod rope;
mod select;
mod selection;
mod separator;
mod stored;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub mod testing;
mod tree;

pub use answer::{Answer, ResponseHeader};
pub use builder::{Packing, TreeBuilder};
pub use chunks::{ChunkSize, Chunks, chunk_head};
pub use entry::{Entry, KeyValueRef, MalformedKeyValue, Pieces};
pub use event::{WatchEvent, WatchFields, fragments};
pub use event_log::{Batch, Change, ChangeKind, EventLog, Missed, MissedEvent};
pub use history::{Applied, AtError, HistoryLimits, NotApplied, Rebuild, Rebuilt, Snapshot, Store};
pub use interval_tree::IntervalTree;
pub use json::{JsonAnswer, JsonFields};
pub use ledger::TreeMemory;
pub use node::Summary;
pub use query::{
    Dialect, QueryError, RangeQuery, SortOrder, SortTarget, Undecodable, names_unknown_sort_target,
};
pub use repack::{NotHeld, Repacked, Repacking};
pub use rope::Rope;
pub use select::{Scan, Selecting, begin_select, select};
pub use selection::{Selected, Selection};
pub use stored::{MemoryError, StoredEntry};
pub use tree::{Tree, WeakTree};
