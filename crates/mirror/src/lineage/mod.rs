//! etcd's history as far as it is known: which one is current, what was seen of it, and what distinguishes it from another.
//!
//! | file | subject |
//! |---|---|
//! | `judge` | what shows whether a history continues, and what that misses (I4); where a member is in it |
//! | `known` | one history: its identity and revisions, what checks proved of them and when, and what an image keeps |
//! | `cluster_state` | the current history, and the one function that replaces it (I4); revisions served (I11) |
//! | `auth_state` | whether etcd's auth is on (I8) |
//! | `compaction` | the revision of etcd's last compaction, as etcd reports it |
//! | `events` | the newest events of a mirror, compared with what a feed delivers again |
//! | `keys` | the newest keys of a mirror or a load, compared where events cannot be had |

mod auth_state;
mod cluster_state;
mod compaction;
mod events;
mod judge;
mod keys;
mod known;

pub use auth_state::{Auth, AuthChange};
pub use cluster_state::{ClusterState, Transition};
pub use known::{Before, History, HistoryId};

pub(super) use compaction::Compaction;
pub(super) use events::{EventComparison, RecentEvents};
pub(super) use judge::{Anchor, Evidence, Position, Verdict};
pub(super) use keys::Keys;
pub(super) use known::Fingerprint;
