//! The peer of a connection: etcd, or rangecaches (hubs), with their proofs and what they tell of the etcd behind them. A balancer may
//! send each call to another one: the history that a proof is of has to be compared once for each of them, and again when that one has
//! another.

use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use etcd_wire::grpc::hub::{CLUSTER, ENDPOINTS, HISTORY, HubHistory, HubProof, Origin};
use etcd_wire::grpc::metadata::{CHECK, PROBE};
use http::{Extensions, HeaderName, Response};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::Instant;
use tonic::metadata::{MetadataMap, MetadataValue};

/// Rangecaches that are remembered: those behind a balancer are few.
const MAX_HUBS: usize = 16;

/// History of etcd that a response is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lineage {
    /// History of the member that has responded: its raft log shows it.
    Member,
    /// History of a hub, which has compared raft logs itself.
    Hub(HubHistory),
}

/// History that a connection stands for, since a moment.
#[derive(Clone, Copy, Debug)]
pub struct Standing {
    /// The history.
    pub lineage: Lineage,
    /// Since when each quorum check on the connection has shown it: for a member since it was opened. A hub has proven no other one on
    /// the connection since, and the connections have been open on which it has checked.
    pub since: Instant,
}

/// Last proof of one rangecache.
#[derive(Debug)]
struct Hub {
    history: HubHistory,
    /// [`Standing::since`].
    since: Instant,
    /// Number of the known history to which its one was found to belong.
    known_as: Option<u64>,
}

/// Rangecaches that have proven something on a connection.
#[derive(Debug, Default)]
pub(super) struct Hubs {
    /// The one that has proven something last is the last.
    all: Vec<Hub>,
    /// When one of them has proven another history than any before.
    changed: Option<Instant>,
}

impl Hubs {
    /// Records a proof on the connection that was `opened` then. Histories of one hub do not come back.
    pub(super) fn note(&mut self, proof: HubProof, opened: Instant) {
        let (HubProof { history, age }, now) = (proof, Instant::now());
        // Later than it was by the time of the response's way.
        let checked_since = now.checked_sub(age).unwrap_or(opened);
        let is_of_hub = |hub: &Hub| hub.history.instance == history.instance;
        let before = self.all.iter().position(is_of_hub).map(|at| self.all.remove(at));
        let mut hub = match before {
            Some(hub) if hub.history == history => hub,
            None if self.all.is_empty() && self.changed.is_none() => Hub {
                history,
                since: checked_since,
                known_as: None,
            },
            _ => {
                self.changed = Some(now);
                Hub {
                    history,
                    since: now,
                    known_as: None,
                }
            }
        };
        hub.since = hub.since.max(checked_since);
        if self.all.len() == MAX_HUBS {
            self.all.remove(0);
        }
        self.all.push(hub);
    }

    /// The last proof.
    pub(super) fn last(&self) -> Option<Standing> {
        self.all.last().map(Hub::standing)
    }

    /// The last proof of `history`, unless its hub has proven another one since.
    pub(super) fn proven(&self, history: HubHistory) -> Option<Standing> {
        self.find(history).map(Hub::standing)
    }

    /// The history that each has proven last.
    pub(super) fn lineages(&self) -> Vec<Lineage> {
        self.all.iter().map(|hub| Lineage::Hub(hub.history)).collect()
    }

    /// When another history was proven than any before; `None` if there was only one.
    pub(super) fn changed(&self) -> Option<Instant> {
        self.changed
    }

    /// Whether `of_hub` was found to be the known `history`.
    pub(super) fn is_of_history(&self, of_hub: HubHistory, history: u64) -> bool {
        self.find(of_hub).is_some_and(|hub| hub.known_as == Some(history))
    }

    /// Sets [`Hubs::is_of_history`], unless the hub of `of_hub` has proven another one since.
    pub(super) fn set_history(&mut self, of_hub: HubHistory, history: u64) {
        let mut all = self.all.iter_mut();
        if let Some(hub) = all.find(|hub| hub.history == of_hub) {
            hub.known_as = Some(history);
        }
    }

    fn find(&self, history: HubHistory) -> Option<&Hub> {
        self.all.iter().find(|hub| hub.history == history)
    }
}

impl Hub {
    fn standing(&self) -> Standing {
        let (lineage, since) = (Lineage::Hub(self.history), self.since);
        Standing { lineage, since }
    }
}

/// Facts that responses have shown of the peer of a connection.
#[derive(Debug)]
pub(crate) struct Peer {
    /// A [`Server`].
    server: AtomicU8,
    /// Proofs of rangecaches, if the peer is one, or a balancer that sends calls to several.
    pub(super) hubs: Mutex<Hubs>,
    /// Number, plus one, of the history to which the member was found to belong; 0 until then, and behind a hub.
    pub(super) checked_history: AtomicU64,
    /// When the connection was opened.
    pub(super) opened: Instant,
}

/// Kind of a peer.
#[derive(Clone, Copy)]
enum Server {
    /// A server that has not responded yet.
    Unknown,
    /// No response has come from another rangecache.
    Etcd,
    /// Another rangecache has responded.
    Hub,
}

impl Peer {
    /// The peer of a connection that is opened now.
    pub(crate) fn new() -> Peer {
        Peer {
            server: AtomicU8::new(Server::Unknown as u8),
            hubs: Mutex::default(),
            checked_history: AtomicU64::new(0),
            opened: Instant::now(),
        }
    }

    /// Takes what `response` of `endpoint` says about the rangecache that it comes from out of its headers, into its extensions: clients
    /// get etcd's.
    pub(crate) fn note_response<B>(&self, endpoint: &Mutex<EndpointPeer>, response: &mut Response<B>) {
        let Some(origin) = Origin::of(response.headers()) else {
            if self.server.load(Ordering::Relaxed) == Server::Unknown as u8 {
                self.server.store(Server::Etcd as u8, Ordering::Release);
            }
            return;
        };
        response.headers_mut().remove(HISTORY);
        self.server.store(Server::Hub as u8, Ordering::Release);
        if let Origin::Proven(proof) = origin {
            self.hubs.lock().note(proof, self.opened);
            self.checked_history.store(0, Ordering::Release);
        }
        response.extensions_mut().insert(origin);
        endpoint.lock().is_hub = true;
    }

    /// The lineage of a response with these `extensions`. `None` if the rangecache that it comes from has not proven any, or another one
    /// since, and if a balancer leads to hubs and to members.
    pub(crate) fn lineage_of(&self, extensions: &Extensions) -> Option<Lineage> {
        match extensions.get() {
            Some(Origin::Hub) => None,
            Some(Origin::Proven(proof)) => {
                let is_last = self.hubs.lock().proven(proof.history).is_some();
                is_last.then_some(Lineage::Hub(proof.history))
            }
            None => (!self.leads_to_hub()).then_some(Lineage::Member),
        }
    }

    /// Marks the metadata of a quorum check for a hub. One that `may_wait` may be one that the hub makes for others.
    pub(crate) fn mark_check(&self, metadata: &mut MetadataMap, may_wait: bool) {
        if may_wait && self.leads_to_hub() {
            metadata.insert(PROBE.0, MetadataValue::from_static("true"));
        }
        if self.may_lead_to_hub() {
            metadata.insert(CHECK.0, MetadataValue::from_static("true"));
        }
    }

    /// Whether the peer is another rangecache: each call may reach another member, and etcd may be replaced behind it.
    pub(super) fn leads_to_hub(&self) -> bool {
        self.server.load(Ordering::Acquire) == Server::Hub as u8
    }

    /// Whether the peer is another rangecache, or has not responded yet.
    pub(super) fn may_lead_to_hub(&self) -> bool {
        self.server.load(Ordering::Acquire) != Server::Etcd as u8
    }
}

/// Whether a response with these `extensions` comes from a rangecache that has not proven in which history.
pub(super) fn is_unproven(extensions: &Extensions) -> bool {
    matches!(extensions.get(), Some(Origin::Hub))
}

/// The etcd behind a rangecache, as that tells it in the response to a health check.
#[derive(Debug)]
pub(crate) struct Behind {
    /// The URLs of its endpoints, separated by commas.
    endpoints: String,
    /// Id of the cluster.
    pub(crate) cluster_id: u64,
}

impl Behind {
    /// Reads the metadata of a response; `None` if it does not come from a rangecache.
    pub(crate) fn of(metadata: &MetadataMap) -> Option<Behind> {
        let text = |name: &HeaderName| metadata.get(name.as_str())?.to_str().ok();
        Some(Behind {
            endpoints: text(&ENDPOINTS)?.to_owned(),
            cluster_id: u64::from_str_radix(text(&CLUSTER)?, 16).ok()?,
        })
    }
}

/// The rangecache at an endpoint, if there is one, as `/status` shows it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct EndpointPeer {
    pub(super) is_hub: bool,
    behind_hub: Option<String>,
}

impl EndpointPeer {
    /// Whether the endpoint is known to be another rangecache.
    #[must_use]
    pub fn is_rangecache(&self) -> bool {
        self.is_hub
    }

    /// The URLs to which it leads, separated by commas, if it is another rangecache that serves.
    #[must_use]
    pub fn leads_to(&self) -> Option<&str> {
        self.behind_hub.as_deref()
    }

    /// Records what it leads to; `None` if it is none, or has not answered the last health check by itself.
    pub(crate) fn record_behind(&mut self, behind: Option<Behind>) {
        self.behind_hub = behind.map(|behind| behind.endpoints);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use http::{HeaderMap, HeaderValue};

    use super::*;

    fn of(instance: u128, number: u64) -> HubHistory {
        HubHistory { instance, number }
    }

    /// Notes proofs of these histories, by connections that are an hour old.
    fn note(hubs: &mut Hubs, histories: &[HubHistory]) {
        for history in histories {
            let age = Duration::from_secs(3_600);
            let history = *history;
            hubs.note(HubProof { history, age }, Instant::now());
        }
    }

    #[test]
    fn what_was_compared_with_one_hub_is_kept_while_others_answer() {
        let mut hubs = Hubs::default();
        note(&mut hubs, &[of(1, 4)]);
        hubs.set_history(of(1, 4), 0);
        note(&mut hubs, &[of(2, 9)]);
        assert!(!hubs.is_of_history(of(2, 9), 0), "it was not compared");
        hubs.set_history(of(2, 9), 0);
        note(&mut hubs, &[of(1, 4), of(2, 9)]);
        assert!(hubs.is_of_history(of(1, 4), 0) && hubs.is_of_history(of(2, 9), 0));
        assert!(!hubs.is_of_history(of(1, 4), 1));
        note(&mut hubs, &[of(1, 5)]);
        assert!(!hubs.is_of_history(of(1, 5), 0), "another history");
        hubs.set_history(of(1, 4), 1);
        assert!(!hubs.is_of_history(of(1, 4), 1), "it has ended");
        assert!(hubs.is_of_history(of(2, 9), 0));
    }

    #[test]
    fn first_history_is_the_only_one_that_was_proven() {
        let mut hubs = Hubs::default();
        let began = Instant::now();
        note(&mut hubs, &[of(1, 4), of(1, 4)]);
        let last = hubs.last().unwrap();
        assert!(last.since < began && hubs.changed().is_none());
        note(&mut hubs, &[of(2, 9)]);
        let last = hubs.last().unwrap();
        assert_eq!(last.lineage, Lineage::Hub(of(2, 9)));
        assert!(last.since >= began && hubs.changed() >= Some(began));
        note(&mut hubs, &[of(1, 4)]);
        let first = hubs.last().unwrap();
        assert!(first.since < began, "it has not changed");
        assert_eq!(hubs.lineages(), [of(2, 9), of(1, 4)].map(Lineage::Hub));
    }

    #[test]
    fn hub_that_has_proven_nothing_for_long_is_forgotten() {
        let mut hubs = Hubs::default();
        note(&mut hubs, &[of(0, 1), of(1, 1), of(0, 1)]);
        for instance in 2..=MAX_HUBS as u128 {
            note(&mut hubs, &[of(instance, 1)]);
        }
        assert!(hubs.proven(of(1, 1)).is_none() && hubs.proven(of(0, 1)).is_some());
        assert_eq!(hubs.lineages().len(), MAX_HUBS);
    }

    fn told(fields: &[(HeaderName, &'static str)]) -> Option<(String, u64)> {
        let fields = fields.iter().cloned();
        let headers: HeaderMap = fields
            .map(|(name, value)| (name, HeaderValue::from_static(value)))
            .collect();
        let behind = Behind::of(&MetadataMap::from_headers(headers))?;
        Some((behind.endpoints, behind.cluster_id))
    }

    #[test]
    fn endpoints_and_cluster_are_told_together() {
        let urls = (ENDPOINTS, "http://a:1, http://b:1");
        assert_eq!(
            told(&[urls.clone(), (CLUSTER, "c1")]),
            Some((urls.1.to_owned(), 0xc1))
        );
        assert_eq!(told(&[]), None);
        assert_eq!(told(&[(CLUSTER, "c1")]), None);
        assert_eq!(told(&[urls, (CLUSTER, "x")]), None);
    }
}
