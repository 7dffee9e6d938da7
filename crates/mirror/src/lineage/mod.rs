//! etcd's history as far as it is known: which one is current, what was seen of it, and what distinguishes it from another.
//!
//! | file | subject |
//! |---|---|
//! | `known` | one history: its identity and revisions, and what an image keeps of them |
//! | `cluster_state` | the current history, and the one function that replaces it (I4); revisions served (I11) |
//! | `auth_state` | whether etcd's auth is on (I8) |
//! | `proofs` | when checks were sent, and what they proved: the age of a view |
//! | `position` | where a member is in etcd's history |
//! | `compaction` | the revision of etcd's last compaction, as etcd reports it |
//! | `recent_events` | the newest events of a mirror, which the proofs of a feed compare |
//! | `compare` | the newest keys of a mirror or a load, compared where events cannot be had |

mod auth_state;
mod cluster_state;
mod compaction;
mod compare;
mod known;
mod position;
mod proofs;
mod recent_events;

pub use auth_state::{Auth, AuthChange};
pub use cluster_state::{ClusterState, Verdict};
pub(super) use compaction::Compaction;
pub(super) use compare::Keys;
pub(super) use known::Fingerprint;
pub use known::{Before, History, HistoryId};
pub(super) use position::Position;
pub(super) use recent_events::RecentEvents;
