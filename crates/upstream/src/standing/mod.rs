//! History of etcd that a connection stands for, since a moment. Members of etcd and other rangecaches (hubs) are distinguished here,
//! and nowhere outside this crate.

mod peer;

use std::sync::{Arc, atomic::Ordering};

use etcd_wire::etcdserverpb::{RangeRequest, ResponseHeader, StatusResponse};
use etcd_wire::grpc::{hub::HubHistory, metadata::set_bypass};
use http::HeaderMap;
use tokio::time::Instant;
use tonic::metadata::MetadataMap;

use super::calls::{READ_TIMEOUT, anonymous_check, is_refusal, range_response};
use super::connection::Connection;
use peer::is_unproven;

pub(super) use peer::{Behind, Peer};

pub use peer::{EndpointPeer, Lineage, Standing};

/// Attempts at a proof of one hub: a balancer may lead to others.
const PROOF_ATTEMPTS: u32 = 16;

impl Connection {
    /// Standing of the last response; `None` behind a hub that has proven nothing.
    #[must_use]
    pub fn standing(&self) -> Option<Standing> {
        let of_hub = self.peer.hubs.lock().last();
        if of_hub.is_some() || self.peer.leads_to_hub() {
            return of_hub;
        }
        Some(Standing {
            lineage: Lineage::Member,
            since: self.opened(),
        })
    }

    /// [`Standing::since`] of `lineage`.
    #[must_use]
    pub fn stands_since(&self, lineage: Lineage) -> Instant {
        let proven = match lineage {
            Lineage::Member => None,
            Lineage::Hub(history) => self.peer.hubs.lock().proven(history),
        };
        proven.map_or_else(|| self.opened(), |standing| standing.since)
    }

    /// Since when the connection has led to the same process of etcd: since it was opened. Behind a hub, etcd may be replaced
    /// while the connection stays: since now.
    #[must_use]
    pub fn opened(&self) -> Instant {
        if self.peer.leads_to_hub() {
            Instant::now()
        } else {
            self.peer.opened
        }
    }

    /// Since when nothing has shown that the history behind the connection has changed: since it was opened, unless a hub has
    /// proven another one since.
    #[must_use]
    pub fn unchanged_since(&self) -> Instant {
        self.peer.hubs.lock().changed().unwrap_or(self.peer.opened)
    }

    /// The lineage at the time of the call. A balancer may lead to several hubs: of the one of `before`, unless others respond to each
    /// of [`PROOF_ATTEMPTS`].
    ///
    /// # Errors
    /// The status with which a hub has proven none.
    pub async fn prove_lineage(self: &Arc<Self>, before: Lineage) -> Result<Lineage, tonic::Status> {
        let mut lineage = Lineage::Member;
        for _ in 0..PROOF_ATTEMPTS {
            if !self.peer.leads_to_hub() {
                return Ok(Lineage::Member);
            }
            let (_, proven) = hub_check(self).await?;
            lineage = Lineage::Hub(proven);
            match before {
                Lineage::Hub(before) if before.instance != proven.instance => {}
                _ => break,
            }
        }
        Ok(lineage)
    }

    /// Whether all that the connection has brought since it was opened is of one history, which may be that of now. What a hub has sent
    /// between two proofs of one history is of that history.
    pub async fn has_one_lineage(self: &Arc<Self>) -> bool {
        !self.peer.leads_to_hub()
            || hub_check(self).await.is_ok() && self.peer.hubs.lock().changed().is_none()
    }

    /// The lineages that were proven last on the connection, of each hub behind it.
    #[must_use]
    pub fn proven_lineages(&self) -> Vec<Lineage> {
        self.peer.hubs.lock().lineages()
    }

    /// The lineage of all that the connection has brought since `before` were those of [`Connection::proven_lineages`]; `None` if it
    /// may have been of several, or a raft log shows it.
    #[must_use]
    pub fn lineage_since(&self, before: &[Lineage]) -> Option<Lineage> {
        let hubs = self.peer.hubs.lock();
        let Standing { lineage, .. } = hubs.last()?;
        let is_same = before.contains(&lineage) || before.is_empty() && hubs.changed().is_none();
        is_same.then_some(lineage)
    }

    /// Whether what is behind this connection was found to be of `history`, the number of a known one (I4). A connection that was opened
    /// again may lead to an etcd that was restored in between.
    #[must_use]
    pub fn is_of_history(&self, history: u64, lineage: Lineage) -> bool {
        match lineage {
            Lineage::Member => self.peer.checked_history.load(Ordering::Acquire) == history + 1,
            Lineage::Hub(of_hub) => self.peer.hubs.lock().is_of_history(of_hub, history),
        }
    }

    /// Sets [`Connection::is_of_history`], unless a hub behind the connection has proven another lineage since.
    pub fn set_history(&self, history: u64, lineage: Lineage) {
        let mut hubs = self.peer.hubs.lock();
        match lineage {
            Lineage::Hub(of_hub) => hubs.set_history(of_hub, history),
            Lineage::Member if hubs.last().is_none() => {
                self.peer.checked_history.store(history + 1, Ordering::Release);
            }
            Lineage::Member => {}
        }
    }

    /// Unsets [`Connection::is_of_history`] of a member: the next check has to show it again.
    pub fn compare_again(&self) {
        self.peer.checked_history.store(0, Ordering::Release);
    }

    /// Status with the raft log of the member with this id ([`Connection::status_of`]); `None` where raft logs cannot be compared.
    ///
    /// # Errors
    /// Those of [`Connection::status_of`]; `Unavailable` if only other members have responded.
    pub async fn raft_status(
        self: &Arc<Self>,
        member_id: u64,
    ) -> Result<Option<StatusResponse>, tonic::Status> {
        if self.peer.leads_to_hub() {
            return Ok(None);
        }
        match self.status_of(member_id).await? {
            Some(status) => Ok(Some(status)),
            None => Err(tonic::Status::unavailable(
                "the status of the member that answered a read cannot be had",
            )),
        }
    }

    /// Whether etcd may be replaced behind the connection while that stays open.
    pub(super) fn outlives_etcd(&self) -> bool {
        self.peer.leads_to_hub()
    }

    /// Whether etcd itself may be what responds: it alone authorizes callers.
    #[must_use]
    pub fn may_authorize(&self) -> bool {
        !self.peer.leads_to_hub()
    }

    /// Makes a call with these headers one that etcd answers, also if a hub with a memory of its own is before it.
    pub fn set_bypass(&self, headers: &mut HeaderMap) {
        set_bypass(headers, self.peer.may_lead_to_hub());
    }
}

/// A quorum check by the hub behind `connection`: etcd's header, and the history in which the hub has proven it. What the hub
/// has sent before was of that history, too, if an earlier check has shown the same one: histories do not come back.
///
/// # Errors
/// etcd's status; `Unavailable` if the hub has not proven its history, as while etcd's auth is on.
async fn hub_check(connection: &Arc<Connection>) -> Result<(ResponseHeader, HubHistory), tonic::Status> {
    let checking = anonymous_check(connection, 0, false, MetadataMap::new());
    let checked = tokio::time::timeout(READ_TIMEOUT, checking).await;
    let checked =
        checked.map_err(|_| tonic::Status::deadline_exceeded("no response to a quorum check in time"))?;
    match checked {
        Ok((Some(header), Some(Lineage::Hub(history)))) => Ok((header, history)),
        Err(status) if is_refusal(&status) => Err(tonic::Status::unavailable(
            "while etcd's auth is on, another rangecache proves nothing: reads are forwarded to it",
        )),
        Err(status) => Err(status),
        Ok(_) => Err(tonic::Status::unavailable(
            "the rangecache behind the connection has not proven its history",
        )),
    }
}

/// Header of etcd's response to a linearizable `request`, of a lineage that is proven.
///
/// # Errors
/// Those of [`range`](super::range); `Unavailable` if a hub has not proven its history.
pub async fn proven_header(
    connection: &Arc<Connection>,
    request: RangeRequest,
) -> Result<ResponseHeader, tonic::Status> {
    let response = range_response(connection, request).await?;
    let header = if is_unproven(response.extensions()) {
        // Memory of the hub does not have the key, or is not in service.
        Some(hub_check(connection).await?.0)
    } else {
        response.into_inner().header
    };
    Ok(header.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use etcd_wire::grpc::metadata::is_bypassing;
    use http::Extensions;

    use super::*;
    use crate::{calls::is_serving, fake::FakeEtcd, testing::open};

    /// A server, and a connection to it on which it has responded.
    async fn connected() -> (FakeEtcd, Arc<Connection>) {
        let server = FakeEtcd::start(async |_, _| Ok(Vec::new())).await;
        let connection = open(&server.url).await.unwrap();
        is_serving(&connection).await;
        (server, connection)
    }

    #[tokio::test]
    async fn connection_stands_for_a_member_or_for_what_a_hub_has_proven_last() {
        let (server, connection) = connected().await;
        let standing = connection.standing().unwrap();
        assert_eq!(
            (standing.lineage, standing.since),
            (Lineage::Member, connection.opened())
        );
        assert!(connection.may_authorize() && connection.has_one_lineage().await);
        assert_eq!(connection.lineage_since(&[]), None, "the raft log shows it");
        let respond = async |value| {
            *server.history.lock() = Some(value);
            is_serving(&connection).await;
            connection.standing().map(|standing| standing.lineage)
        };
        assert_eq!(respond("0a").await, None, "a hub that has proven nothing");
        assert_eq!(
            connection.peer.lineage_of(&Extensions::new()),
            None,
            "a balancer leads to it and to a member"
        );
        assert!(!connection.may_authorize());
        let first = respond("0a.1.0").await.unwrap();
        assert_eq!(connection.lineage_since(&[]), Some(first), "the only one");
        let proven = connection.proven_lineages();
        assert_eq!(proven, [first]);
        let second = respond("0a.2.0").await.unwrap();
        assert_ne!(first, second);
        assert_eq!(connection.lineage_since(&proven), None, "another one since");
        assert_eq!(connection.lineage_since(&[second]), Some(second));
        assert_eq!(connection.raft_status(1).await.unwrap(), None);
        connection.set_history(0, first);
        assert!(!connection.is_of_history(0, first), "it has ended");
        connection.set_history(0, second);
        assert!(connection.is_of_history(0, second) && !connection.is_of_history(1, second));
    }

    #[tokio::test]
    async fn history_behind_a_hub_is_as_old_as_the_youngest_connection_that_has_shown_it() {
        let (server, connection) = connected().await;
        let since = async |value| {
            *server.history.lock() = Some(value);
            is_serving(&connection).await;
            connection.standing().unwrap().since
        };
        let began = Instant::now();
        let first = since("0a.1.3600000").await;
        assert!(first < began, "the hub has checked on it for an hour");
        let second = since("0a.1.0").await;
        assert!(second >= began, "it is new");
        assert_eq!(since("0a.1.3600000").await, second);
        assert!(since("0a.2.3600000").await >= second, "another history");
    }

    #[tokio::test]
    async fn read_around_hubs_is_marked_until_the_peer_is_known_to_be_etcd() {
        let server = FakeEtcd::start(async |_, _| Ok(Vec::new())).await;
        let connection = open(&server.url).await.unwrap();
        let is_marked = || {
            let mut headers = HeaderMap::new();
            connection.set_bypass(&mut headers);
            is_bypassing(&headers)
        };
        assert!(is_marked(), "no response");
        is_serving(&connection).await;
        assert!(!is_marked(), "a response of etcd");
        *server.history.lock() = Some("0a");
        is_serving(&connection).await;
        assert!(is_marked(), "a response of a hub");
    }
}
