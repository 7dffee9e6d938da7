//! Clients of the proxy: who they are, and what they cost.

use serde::Serialize;

use rangecache_base::telemetry::clients::ClientFigures;

/// Clients on the page.
pub(super) const SHOWN: usize = 20;

/// Figures of one client. Counts are since the start, rates those of the last seconds.
#[derive(Debug, Serialize)]
pub(crate) struct ClientStatus {
    /// `certificate`, `user`, `address`, `unix`, or `others` for those beyond the bound on clients.
    pub(crate) kind: &'static str,
    pub(crate) name: String,
    pub(crate) connections: u64,
    pub(crate) calls_in_flight: u64,
    /// Open Watch streams.
    pub(crate) watches: u64,
    pub(crate) calls_per_second: f64,
    /// Calls that etcd answered.
    pub(crate) etcd_calls_per_second: f64,
    pub(crate) bytes_per_second: f64,
    /// The figure that clients are sorted by, in bytes per second.
    pub(crate) cost: f64,
    pub(crate) calls: u64,
    pub(crate) lists: u64,
    pub(crate) from_memory: u64,
    pub(crate) from_etcd: u64,
    pub(crate) refused: u64,
    pub(crate) received_bytes: u64,
    pub(crate) sent_bytes: u64,
    /// User agent of the newest connection.
    pub(crate) user_agent: String,
    /// Begin of the last call: UTC, RFC 3339.
    pub(crate) last_seen: Option<String>,
}

pub(super) fn client(figures: &ClientFigures) -> ClientStatus {
    ClientStatus {
        kind: figures.name.kind().as_str(),
        name: figures.name.as_str().to_owned(),
        connections: figures.connections,
        calls_in_flight: figures.in_flight,
        watches: figures.watches,
        calls_per_second: figures.rates.calls,
        etcd_calls_per_second: figures.rates.from_etcd,
        bytes_per_second: figures.rates.bytes,
        cost: figures.rates.cost(),
        calls: figures.calls,
        lists: figures.lists,
        from_memory: figures.from_memory,
        from_etcd: figures.from_etcd,
        refused: figures.refused,
        received_bytes: figures.received_bytes,
        sent_bytes: figures.sent_bytes,
        user_agent: figures.agent.to_string(),
        last_seen: figures
            .last_seen
            .map(|at| humantime::format_rfc3339_seconds(at).to_string()),
    }
}
