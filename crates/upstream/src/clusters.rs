//! The cluster that is used, if the endpoints lead to several: by mistake in `--endpoints`, or behind one name.
//!
//! Each connection records the id of its member's cluster. The cluster that most connections lead to is used, and
//! connections to others are left out, so that a wrong endpoint does not look like a replaced history again and again.
//! A connection that is lost still counts, because a member that restarts has not left its cluster. If another
//! connection shows that its member did leave it (a restore as a new cluster), the lost ones count no more. Connections to
//! endpoints that were added later count from the time on at which one of them leads to the cluster that is used: a wrong
//! list must not change the cluster.

use std::collections::{BTreeMap, BTreeSet};
use std::{sync::Arc, time::Duration};

use futures_util::future::join_all;
use parking_lot::Mutex;
use rangecache_base::net::Url;
use tokio::{sync::watch, time::Instant};

use super::{backoff::Backoff, class::ConnectionClass, connection::Connection, health::HEALTH_TIMEOUT};

/// Time for which a cluster that was left out is named.
const NAMED_FOR: Duration = Duration::from_secs(600);
/// Time after which a cluster that is left out is logged: at a start the first connection decides for a moment.
const SETTLED_AFTER: Duration = Duration::from_secs(1);
/// First pause before a member that has not told its cluster is asked again; it doubles up to [`ASK_PAUSE_LAST`].
const ASK_PAUSE_FIRST: Duration = Duration::from_millis(100);
/// Longest pause before a member that has not told its cluster is asked again: one that refuses the call is asked in
/// vain.
const ASK_PAUSE_LAST: Duration = Duration::from_secs(10);

/// Identity of a connection that is kept open: endpoint, class and number.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ConnectionSlot {
    pub(super) url: String,
    pub(super) class: ConnectionClass,
    pub(super) number: usize,
}

impl ConnectionSlot {
    pub(super) fn new(url: &Url, class: ConnectionClass, number: usize) -> ConnectionSlot {
        ConnectionSlot {
            url: url.to_string(),
            class,
            number,
        }
    }
}

/// Cluster that an endpoint leads to, while there are several.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ClusterOfEndpoint {
    /// URL of the endpoint.
    pub url: String,
    /// Id of the cluster.
    pub cluster_id: u64,
    /// Whether this cluster is used.
    pub is_used: bool,
}

#[derive(Debug, Default)]
struct Known {
    /// Cluster of each connection, and whether the connection is open.
    slots: BTreeMap<ConnectionSlot, (u64, bool)>,
    /// URLs of endpoints whose connections do not count yet.
    added: BTreeSet<String>,
    /// Endpoints and clusters whose connections were left out, and when last. Behind a name, the next connection may
    /// lead to the right one.
    left_out: BTreeMap<(String, u64), Instant>,
    /// Entries of `left_out` that were logged.
    logged: BTreeSet<(String, u64)>,
    /// When `left_out` gained an entry.
    changed: Option<Instant>,
}

/// The clusters that all connections lead to.
#[derive(Debug)]
pub(super) struct Clusters {
    known: Mutex<Known>,
    /// Id of the cluster that is used; 0 before the first is known.
    used: watch::Sender<u64>,
}

impl Default for Clusters {
    fn default() -> Self {
        Clusters {
            known: Mutex::default(),
            used: watch::Sender::new(0),
        }
    }
}

impl Clusters {
    /// Records that the connection `slot` leads to the cluster `id`.
    #[cfg(test)]
    fn record(&self, slot: &ConnectionSlot, id: u64) {
        self.record_all(vec![(slot.clone(), id)]);
    }

    /// Records the cluster that `connection`, which is that of `slot`, has told. If that is another one than the one that is used, and it
    /// leads to a hub, etcd may have become another cluster for connections that stay: `others` of the endpoint, and their
    /// slots, are asked again, and count together with it.
    pub(super) async fn record_told(
        &self,
        slot: &ConnectionSlot,
        connection: &Connection,
        others: impl FnOnce() -> Vec<(ConnectionSlot, Arc<Connection>)>,
    ) {
        let Some(id) = connection.cluster_id() else {
            return;
        };
        let mut told = vec![(slot.clone(), id)];
        if connection.outlives_etcd() && self.is_left_out(Some(id)) {
            let others = others();
            let asking = others
                .iter()
                .map(|(_, of)| tokio::time::timeout(HEALTH_TIMEOUT, Connection::member_status(of)));
            join_all(asking).await;
            let of_others = others
                .iter()
                .filter_map(|(slot, of)| Some((slot.clone(), of.cluster_id()?)));
            told.extend(of_others);
        }
        self.record_all(told);
    }

    /// Records that open connections lead to these clusters.
    fn record_all(&self, slots: Vec<(ConnectionSlot, u64)>) {
        let mut known = self.known.lock();
        let (mut is_new, mut left) = (false, BTreeSet::new());
        for (slot, id) in slots {
            if id == *self.used.borrow() {
                known.added.remove(&slot.url);
            }
            let before = known.slots.insert(slot, (id, true));
            is_new |= before != Some((id, true));
            left.extend(before.map(|(before, _)| before).filter(|before| *before != id));
        }
        if is_new {
            known
                .slots
                .retain(|_, (of, is_open)| *is_open || !left.contains(of));
            let used = known.largest(*self.used.borrow());
            // Also if it is the same: the connection waits for its own id.
            self.used.send_replace(used);
            known.leave_out(used);
        }
        known.log(*self.used.borrow());
    }

    /// Records that the connection `slot` was lost.
    pub(super) fn record_lost(&self, slot: &ConnectionSlot) {
        if let Some((_, is_open)) = self.known.lock().slots.get_mut(slot) {
            *is_open = false;
        }
    }

    /// Records that the endpoint `url` was added: its connections do not count until one leads to the cluster that is used.
    pub(super) fn add(&self, url: &Url) {
        self.known.lock().added.insert(url.to_string());
    }

    /// Counts the connections of all endpoints.
    pub(super) fn count_all(&self) {
        let mut known = self.known.lock();
        known.added.clear();
        self.choose(&mut known);
    }

    fn choose(&self, known: &mut Known) {
        let used = known.largest(*self.used.borrow());
        if used != *self.used.borrow() {
            self.used.send_replace(used);
            known.leave_out(used);
        }
    }

    /// Forgets the connection `slot`, whose endpoint is used no more.
    pub(super) fn forget(&self, slot: &ConnectionSlot) {
        let mut known = self.known.lock();
        known.slots.remove(slot);
        self.choose(&mut known);
        let is_gone = |url: &String| !known.slots.keys().any(|other| other.url == *url);
        if is_gone(&slot.url) {
            known.added.remove(&slot.url);
            known.left_out.retain(|(url, _), _| *url != slot.url);
        }
    }

    /// Id of the cluster that is used, once it is known.
    pub(super) fn used(&self) -> Option<u64> {
        Some(*self.used.borrow()).filter(|id| *id != 0)
    }

    /// Whether `id`, once it is known, is not the cluster that is used.
    pub(super) fn is_left_out(&self, id: Option<u64>) -> bool {
        let used = *self.used.borrow();
        // A server that is not etcd may send no id.
        id.is_some_and(|id| id != 0 && used != 0 && id != used)
    }

    /// Requests the id of the cluster behind a connection, and returns whether its member has responded. Without a
    /// response in time the id stays unknown. `others` are those of [`Clusters::record_told`].
    pub(super) async fn ask(
        &self,
        slot: &ConnectionSlot,
        connection: &Arc<Connection>,
        others: impl FnOnce() -> Vec<(ConnectionSlot, Arc<Connection>)>,
    ) -> bool {
        let credentials = connection.credentials();
        // The first token is requested on a connection that is in use.
        if credentials.is_configured() && !credentials.have_token() {
            return false;
        }
        let status = tokio::time::timeout(HEALTH_TIMEOUT, connection.member_status()).await;
        self.record_told(slot, connection, others).await;
        matches!(status, Ok(Ok(_)))
    }

    /// Asks again until the member has responded: a member that starts may accept connections before it can.
    pub(super) async fn ask_again(
        &self,
        slot: &ConnectionSlot,
        connection: &Arc<Connection>,
        others: impl Fn() -> Vec<(ConnectionSlot, Arc<Connection>)>,
    ) {
        let mut pauses = Backoff::new(ASK_PAUSE_FIRST, ASK_PAUSE_LAST);
        loop {
            tokio::time::sleep(pauses.pause()).await;
            if self.ask(slot, connection, &others).await {
                return;
            }
        }
    }

    /// Resolves once the connection's member is known to be of another cluster than the one that is used.
    pub(super) async fn until_left_out(&self, connection: &Connection) {
        let mut changed = self.used.subscribe();
        while !self.is_left_out(connection.cluster_id()) {
            // The sender lives as long as self, so there is no error.
            let _ = changed.changed().await;
        }
    }

    /// The endpoints with their clusters, if there are several.
    pub(super) fn mixed(&self) -> Vec<ClusterOfEndpoint> {
        let used = *self.used.borrow();
        self.known.lock().mixed(used)
    }
}

impl std::fmt::Display for ClusterOfEndpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let used = if self.is_used { "used" } else { "left out" };
        write!(f, "{} leads to cluster {:x} ({used})", self.url, self.cluster_id)
    }
}

impl Known {
    /// Cluster that most connections lead to; `used` if several are as large.
    fn largest(&self, used: u64) -> u64 {
        let mut sizes = BTreeMap::new();
        let counted = self
            .slots
            .iter()
            .filter(|(slot, _)| !self.added.contains(&slot.url));
        for (_, (id, _)) in counted {
            *sizes.entry(*id).or_insert(0_usize) += 1;
        }
        let largest = sizes.iter().max_by_key(|(id, size)| (**size, **id == used));
        largest.map_or(used, |(id, _)| *id)
    }

    /// Notes the connections that do not lead to `used`.
    fn leave_out(&mut self, used: u64) {
        let now = Instant::now();
        self.left_out
            .retain(|(_, id), seen| *id != used && now.duration_since(*seen) < NAMED_FOR);
        for (slot, (id, _)) in self.slots.iter().filter(|(_, (id, _))| *id != used) {
            if self.left_out.insert((slot.url.clone(), *id), now).is_none() {
                self.changed = Some(now);
            }
        }
    }

    /// Logs what is left out, once for each endpoint and cluster, after the first connections have settled it.
    fn log(&mut self, used: u64) {
        let is_settled = self
            .changed
            .is_some_and(|changed| changed.elapsed() >= SETTLED_AFTER);
        let is_logged = self.left_out.keys().all(|of| self.logged.contains(of));
        if !is_settled || is_logged {
            return;
        }
        self.logged = self.left_out.keys().cloned().collect();
        let list: Vec<_> = self.mixed(used).iter().map(ToString::to_string).collect();
        tracing::error!(
            clusters = list.join(", "),
            "the endpoints lead to different clusters: the one that most of them lead to is used, and the others are left \
             out. Correct --endpoints, or what is behind the name"
        );
    }

    fn mixed(&self, used: u64) -> Vec<ClusterOfEndpoint> {
        let left_out = self
            .left_out
            .iter()
            .filter(|(_, seen)| seen.elapsed() < NAMED_FOR);
        let left_out: BTreeSet<_> = left_out.map(|((url, id), _)| (url.clone(), *id)).collect();
        if left_out.is_empty() {
            return Vec::new();
        }
        let open = self.slots.iter().map(|(slot, (id, _))| (slot.url.clone(), *id));
        let all: BTreeSet<_> = open.chain(left_out).collect();
        all.into_iter()
            .map(|(url, cluster_id)| ClusterOfEndpoint {
                url,
                cluster_id,
                is_used: cluster_id == used,
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use etcd_wire::etcdserverpb::{ResponseHeader, StatusResponse};
    use prost::Message as _;

    use super::*;
    use crate::{fake::FakeEtcd, testing::open};

    fn slot(endpoint: &str) -> ConnectionSlot {
        ConnectionSlot {
            url: endpoint.to_owned(),
            class: ConnectionClass::Check,
            number: 0,
        }
    }

    fn used(records: &[(&str, u64)]) -> u64 {
        let clusters = Clusters::default();
        for (endpoint, id) in records {
            clusters.record(&slot(endpoint), *id);
        }
        *clusters.used.borrow()
    }

    #[test]
    fn largest_cluster_is_used_and_a_tie_changes_nothing() {
        assert_eq!(used(&[("a", 1), ("b", 2)]), 1);
        assert_eq!(used(&[("a", 2), ("b", 1)]), 2);
        assert_eq!(used(&[("a", 2), ("b", 1), ("c", 1)]), 1);
    }

    #[tokio::test]
    async fn connections_to_a_hub_lead_to_another_cluster_together() {
        let of_etcd = Arc::new(AtomicU64::new(1));
        let told = Arc::clone(&of_etcd);
        let hub = FakeEtcd::start(move |_, _| {
            let header = Some(ResponseHeader {
                cluster_id: told.load(Ordering::SeqCst),
                ..ResponseHeader::default()
            });
            let status = StatusResponse {
                header,
                ..StatusResponse::default()
            };
            std::future::ready(Ok(status.encode_to_vec()))
        })
        .await;
        *hub.history.lock() = Some("0a");
        let clusters = Clusters::default();
        let mut all = Vec::new();
        for class in ConnectionClass::ALL {
            let (slot, connection) = (
                ConnectionSlot { class, ..slot("hub") },
                open(&hub.url).await.unwrap(),
            );
            assert!(clusters.ask(&slot, &connection, Vec::new).await);
            all.push((slot, connection));
        }
        clusters.record(&slot("fallback"), 2);
        assert_eq!(clusters.used(), Some(1));
        // A restore behind the hub, which a health check on one of the connections shows.
        of_etcd.store(2, Ordering::SeqCst);
        let (slot, connection) = all.swap_remove(0);
        connection.set_cluster_id(2);
        let others = all.clone();
        clusters.record_told(&slot, &connection, || others).await;
        assert_eq!(clusters.used(), Some(2));
        assert!(all.iter().all(|(_, of)| !clusters.is_left_out(of.cluster_id())));
        // One of another hub behind the same address does not know it yet.
        connection.set_cluster_id(1);
        clusters.record_told(&slot, &connection, || all.clone()).await;
        assert_eq!(clusters.used(), Some(2));
        assert!(clusters.is_left_out(connection.cluster_id()));
        // It is asked itself once it is opened again.
        assert!(clusters.ask(&slot, &connection, || all.clone()).await);
        assert!(!clusters.is_left_out(connection.cluster_id()));
    }

    #[test]
    fn endpoints_are_named_while_there_are_several_clusters() {
        let clusters = Clusters::default();
        clusters.record(&slot("a"), 10);
        assert!(clusters.mixed().is_empty() && !clusters.is_left_out(Some(10)));
        clusters.record(&slot("b"), 11);
        let named: Vec<_> = clusters.mixed().iter().map(ToString::to_string).collect();
        assert_eq!(
            named,
            ["a leads to cluster a (used)", "b leads to cluster b (left out)"]
        );
        assert!(clusters.is_left_out(Some(11)) && !clusters.is_left_out(None));
        clusters.record(&slot("b"), 10);
        let named: Vec<_> = clusters.mixed().iter().map(ToString::to_string).collect();
        assert_eq!(
            named.len(),
            3,
            "the next connection may be left out again: {named:?}"
        );
    }

    #[test]
    fn lost_connection_counts_until_its_cluster_is_left() {
        let clusters = Clusters::default();
        for endpoint in ["a", "b", "c"] {
            clusters.record(&slot(endpoint), 1);
        }
        // A wrong endpoint, while the others restart.
        for endpoint in ["a", "b", "c"] {
            clusters.record_lost(&slot(endpoint));
        }
        clusters.record(&slot("d"), 2);
        assert_eq!(*clusters.used.borrow(), 1);
        // One member is restored as a new cluster; the others do not come back.
        clusters.record(&slot("a"), 2);
        assert_eq!(*clusters.used.borrow(), 2);
    }

    #[test]
    fn connections_to_added_endpoints_count_once_one_leads_to_the_cluster_that_is_used() {
        let clusters = Clusters::default();
        let url = |name: &str| format!("http://{name}:1").parse::<Url>().unwrap();
        let of = |name: &str| ConnectionSlot::new(&url(name), ConnectionClass::Check, 0);
        clusters.record(&of("a"), 1);
        for added in ["b", "c", "d"] {
            clusters.add(&url(added));
            clusters.record(&of(added), 2);
        }
        assert_eq!(
            *clusters.used.borrow(),
            1,
            "most of what was added leads to another cluster"
        );
        clusters.record(&of("b"), 1);
        clusters.record(&of("b"), 2);
        assert_eq!(*clusters.used.borrow(), 1, "a tie");
        clusters.count_all();
        assert_eq!(*clusters.used.borrow(), 2);
    }
}
