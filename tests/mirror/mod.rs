//! The mirror under faults: etcd restarts, fails over, is restored or unreachable, and no response is ever stale.

mod bounds;
mod cluster;
mod endpoints;
mod faults;
mod feeds;
mod hub;
mod images;
mod lagging;
mod members;
mod never_stale;
mod newer_etcd;
mod past_revisions;
mod race_windows;
mod resume;
mod rollbacks;
mod service_account;
mod stale;
mod two_events;
mod warm_start;
mod watches;

/// Held by tests that run three members of etcd, or keep a machine of two cores busy: two of them at once would starve
/// the members' heartbeats.
static EXCLUSIVE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
