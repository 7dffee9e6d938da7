//! Capabilities of the servers behind the endpoints: version, the member's role in its cluster, and whether KV.RangeStream (KEP-5966)
//! is implemented.
//!
//! A version implies RangeStream until an endpoint answers that the method is not implemented: a proxy in front of a
//! new etcd does, and an etcd that was just replaced by an older one. That answer is dropped when a connection to the
//! endpoint is opened again and when the endpoint reports another version, so that upgrades and downgrades are
//! noticed.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use etcd_wire::etcdserverpb::StatusResponse;
use parking_lot::Mutex;
use tokio::{sync::watch, time::Instant};
use tokio_util::sync::CancellationToken;

use super::gates::{self, EndpointReport, Version};
use super::standing::EndpointPeer;

/// Start of etcd's messages for an `Unimplemented` that concerns the *request*; any other concerns the method.
const SHAPE_REFUSED: &str = "RangeStream does not support";
/// Time after which the lean client is tried again on new connections: what it did not know may have been the error page of a load
/// balancer that was about to restart.
const LEAN_RETRY_AFTER: Duration = Duration::from_secs(600);

/// Why a read that could be sent to etcd as a RangeStream is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoRangeStream {
    /// `--range-stream=off`.
    Off,
    /// Every connected endpoint is older than 3.7.
    Version,
    /// The endpoint answered that the method is not implemented, now or since it was last connected.
    Unimplemented,
    /// The endpoint refuses requests of this shape, or its response differs from that of a Range.
    Shape,
}

impl NoRangeStream {
    /// The label in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            NoRangeStream::Off => "off",
            NoRangeStream::Version => "version",
            NoRangeStream::Unimplemented => "unimplemented",
            NoRangeStream::Shape => "shape",
        }
    }

    /// Meaning of an `Unimplemented` status with this message on a RangeStream call: [`NoRangeStream::Shape`] or
    /// [`NoRangeStream::Unimplemented`].
    pub(super) fn from_unimplemented(message: &str) -> NoRangeStream {
        if message.starts_with(SHAPE_REFUSED) {
            NoRangeStream::Shape
        } else {
            NoRangeStream::Unimplemented
        }
    }
}

/// Whether the lean client may be tried now on a server that has last sent what it does not know at this time.
fn may_be_lean_again(not_lean_since: Option<Instant>) -> bool {
    not_lean_since.is_none_or(|since| since.elapsed() >= LEAN_RETRY_AFTER)
}

/// Known capabilities of the server behind one endpoint, shared by the endpoint's connections.
#[derive(Debug, Default)]
pub(super) struct ServerCapabilities {
    version: Mutex<Option<Version>>,
    lacks_range_stream: AtomicBool,
    is_emulation: AtomicBool,
    pub(super) peer: Mutex<EndpointPeer>,
    /// When it has last sent what the lean client does not know.
    not_lean_since: Mutex<Option<Instant>>,
    /// Number of responses on all connections.
    responses: AtomicU64,
    /// Cancelled once the endpoint is used no more.
    removed: CancellationToken,
}

impl ServerCapabilities {
    /// Records that the endpoint is used no more.
    pub(super) fn remove(&self) {
        self.removed.cancel();
    }

    /// Cancelled once the endpoint is used no more.
    pub(super) fn removed(&self) -> &CancellationToken {
        &self.removed
    }

    /// Records a response to any call.
    pub(super) fn record_response(&self) {
        self.responses.fetch_add(1, Ordering::Relaxed);
    }

    /// Number of responses so far, to calls on any connection.
    pub(super) fn responses(&self) -> u64 {
        self.responses.load(Ordering::Relaxed)
    }

    /// Version that was reported last.
    pub(super) fn version(&self) -> Option<Version> {
        *self.version.lock()
    }

    /// Records the reported version; returns whether it changed.
    pub(super) fn record_version(&self, version: Version) -> bool {
        self.is_emulation.store(false, Ordering::Relaxed);
        let is_new = self.version.lock().replace(version) != Some(version);
        if is_new {
            self.lacks_range_stream.store(false, Ordering::Relaxed);
            *self.not_lean_since.lock() = None;
        }
        is_new
    }

    /// Records that the server is not etcd, and so has no version of etcd's; returns whether that is new.
    pub(super) fn record_emulation(&self) -> bool {
        *self.version.lock() = None;
        !self.is_emulation.swap(true, Ordering::Relaxed)
    }

    /// Whether the server is known not to be etcd.
    pub(super) fn is_emulation(&self) -> bool {
        self.is_emulation.load(Ordering::Relaxed)
    }

    /// Records that a connection was opened again: another server may be behind the endpoint.
    pub(super) fn record_reconnected(&self) {
        self.lacks_range_stream.store(false, Ordering::Relaxed);
        *self.peer.lock() = EndpointPeer::default();
    }

    /// Whether the lean client may be used.
    pub(super) fn may_be_asked_leanly(&self) -> bool {
        may_be_lean_again(*self.not_lean_since.lock())
    }

    /// Records that the lean client does not know what the server sends; returns whether that is new.
    pub(super) fn record_not_lean(&self) -> bool {
        may_be_lean_again(self.not_lean_since.lock().replace(Instant::now()))
    }

    /// Records that RangeStream is not implemented; returns whether that is new.
    pub(super) fn record_no_range_stream(&self) -> bool {
        !self.lacks_range_stream.swap(true, Ordering::Relaxed)
    }

    /// Why a RangeStream would fail, if that is known.
    pub(super) fn no_range_stream(&self) -> Option<NoRangeStream> {
        if self.lacks_range_stream.load(Ordering::Relaxed) {
            Some(NoRangeStream::Unimplemented)
        } else if self
            .version()
            .is_some_and(|version| !gates::RANGE_STREAM.is_open(version))
        {
            Some(NoRangeStream::Version)
        } else {
            None
        }
    }

    /// Facts by which `gate` is assessed.
    pub(super) fn report(&self, gate: &gates::VersionGate) -> EndpointReport {
        EndpointReport {
            version: self.version(),
            is_unimplemented: *gate == gates::RANGE_STREAM && self.lacks_range_stream.load(Ordering::Relaxed),
        }
    }
}

/// Lowest version among the endpoints that have reported theirs.
#[derive(Debug)]
pub(super) struct LowestVersion {
    servers: ArcSwap<Vec<Arc<ServerCapabilities>>>,
    /// Read for every request; `None` before the first report.
    lowest: ArcSwap<Option<Version>>,
    changed: watch::Sender<()>,
}

impl Default for LowestVersion {
    fn default() -> Self {
        LowestVersion {
            servers: ArcSwap::default(),
            lowest: ArcSwap::default(),
            changed: watch::Sender::new(()),
        }
    }
}

impl LowestVersion {
    pub(super) fn get(&self) -> Option<Version> {
        **self.lowest.load()
    }

    /// Changes whenever [`LowestVersion::get`] does.
    pub(super) fn changes(&self) -> watch::Receiver<()> {
        self.changed.subscribe()
    }

    /// Considers these servers from now on.
    pub(super) fn set_servers(&self, servers: Vec<Arc<ServerCapabilities>>) {
        self.servers.store(Arc::new(servers));
        self.refresh();
    }

    /// Computes the lowest version again, after a server has reported another one.
    pub(super) fn refresh(&self) {
        let servers = self.servers.load();
        let lowest = servers.iter().filter_map(|server| server.version()).min();
        if self.get() != lowest {
            self.lowest.store(Arc::new(lowest));
            self.changed.send_replace(());
        }
    }
}

/// Role of a member in its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// No status was received yet.
    Unknown,
    /// Leader.
    Leader,
    /// Voting member that knows its leader.
    Follower,
    /// Non-voting member.
    Learner,
    /// Voting member that knows no leader.
    Leaderless,
}

impl Role {
    /// Role that a member reports in its Maintenance.Status response.
    #[must_use]
    pub fn from_status(status: &StatusResponse) -> Role {
        let member_id = status.header.as_ref().map_or(0, |header| header.member_id);
        match status.leader {
            _ if status.is_learner => Role::Learner,
            0 => Role::Leaderless,
            leader if leader == member_id => Role::Leader,
            _ => Role::Follower,
        }
    }

    /// Whether the member can answer linearizable reads: it votes and knows a leader. etcd before 3.4 reports
    /// neither, and a balancer may hide them; no version reports a leader of 0 while it has one.
    #[must_use]
    pub fn can_prove(self) -> bool {
        !matches!(self, Role::Learner | Role::Leaderless)
    }
}

#[cfg(test)]
mod tests {
    use etcd_wire::etcdserverpb::ResponseHeader;

    use super::*;

    #[test]
    fn unimplemented_is_dropped_when_the_server_may_have_changed() {
        let server = ServerCapabilities::default();
        assert_eq!(
            server.no_range_stream(),
            None,
            "version not known: RangeStream is tried"
        );
        assert!(server.record_version(Version::new(3, 6, 16)));
        assert_eq!(server.no_range_stream(), Some(NoRangeStream::Version));
        assert!(server.record_version(Version::new(3, 7, 3)));
        assert_eq!(server.no_range_stream(), None);

        assert!(server.record_no_range_stream() && !server.record_no_range_stream());
        assert_eq!(server.no_range_stream(), Some(NoRangeStream::Unimplemented));
        assert!(
            !server.record_version(Version::new(3, 7, 3)),
            "the same version is not a change"
        );
        assert_eq!(server.no_range_stream(), Some(NoRangeStream::Unimplemented));
        server.record_reconnected();
        assert_eq!(server.no_range_stream(), None);

        server.record_no_range_stream();
        server.record_version(Version::new(3, 7, 4));
        assert_eq!(server.no_range_stream(), None);
    }

    #[tokio::test(start_paused = true)]
    async fn lean_client_is_tried_again_after_a_while_and_with_another_version() {
        let server = ServerCapabilities::default();
        assert!(server.may_be_asked_leanly());
        assert!(server.record_not_lean() && !server.record_not_lean());
        tokio::time::advance(LEAN_RETRY_AFTER - Duration::from_secs(1)).await;
        assert!(!server.may_be_asked_leanly());
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(server.may_be_asked_leanly());
        assert!(server.record_not_lean(), "it was tried again");
        assert!(!server.may_be_asked_leanly());
        server.record_version(Version::new(3, 7, 3));
        assert!(server.may_be_asked_leanly());
    }

    #[test]
    fn emulation_has_no_version() {
        let server = Arc::<ServerCapabilities>::default();
        let lowest = LowestVersion::default();
        lowest.set_servers(vec![Arc::clone(&server)]);
        server.record_version(Version::new(3, 6, 11));
        lowest.refresh();
        assert_eq!(lowest.get(), Some(Version::new(3, 6, 11)));
        assert!(server.record_emulation() && !server.record_emulation());
        lowest.refresh();
        assert_eq!((server.version(), lowest.get()), (None, None));
        assert!(server.record_version(Version::new(3, 6, 11)), "etcd in its place");
        assert!(server.record_emulation());
    }

    #[test]
    fn unimplemented_message_tells_shape_from_method() {
        for text in [
            "RangeStream does not support custom sort orders",
            "RangeStream does not support revision filters",
        ] {
            assert_eq!(
                NoRangeStream::from_unimplemented(text),
                NoRangeStream::Shape,
                "{text}"
            );
        }
        for text in [
            "unknown method RangeStream for service etcdserverpb.KV",
            "unknown service etcdserverpb.KV",
            "RangeStream is not supported by the gRPC proxy",
            "",
        ] {
            assert_eq!(
                NoRangeStream::from_unimplemented(text),
                NoRangeStream::Unimplemented,
                "{text}"
            );
        }
    }

    #[test]
    fn learners_and_members_without_a_leader_cannot_prove() {
        let follower = StatusResponse {
            leader: 7,
            ..StatusResponse::default()
        };
        let leader = StatusResponse {
            header: Some(ResponseHeader {
                member_id: 7,
                ..ResponseHeader::default()
            }),
            ..follower.clone()
        };
        let leaderless = StatusResponse {
            leader: 0,
            ..follower.clone()
        };
        let learner = StatusResponse {
            is_learner: true,
            ..follower.clone()
        };
        for (status, role, can_prove) in [
            (follower, Role::Follower, true),
            (leader, Role::Leader, true),
            (leaderless, Role::Leaderless, false),
            (learner, Role::Learner, false),
        ] {
            let found = Role::from_status(&status);
            assert_eq!((found, found.can_prove()), (role, can_prove));
        }
    }
}
