//! One endpoint: its connections, made again when lost, its version and its health.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use arc_swap::ArcSwapOption;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::connection::{ConnectError, Connection, ReceiveWindow};
use super::range_stream::{NoRangeStream, Server};
use super::{Backoff, ConnectionClass, Upstream, Version, health};
use crate::etcdserverpb::StatusResponse;
use crate::net::Url;
use crate::panics::restarting;

/// First pause between attempts to connect.
const BACKOFF_FIRST: Duration = Duration::from_millis(20);
/// Longest pause: a restarted member is found within this time of its being back.
const BACKOFF_LAST: Duration = Duration::from_millis(200);

/// What a member is to its cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// It has not told.
    Unknown,
    /// It leads.
    Leader,
    /// It votes, and knows its leader.
    Follower,
    /// It does not vote.
    Learner,
    /// It votes, but knows no leader.
    Leaderless,
}

impl Role {
    /// What the member that tells `status` says that it is.
    #[must_use]
    pub fn of(status: &StatusResponse) -> Role {
        let member_id = status.header.as_ref().map_or(0, |header| header.member_id);
        match status.leader {
            _ if status.is_learner => Role::Learner,
            0 => Role::Leaderless,
            leader if leader == member_id => Role::Leader,
            _ => Role::Follower,
        }
    }
}

/// An endpoint as operators see it, at one moment.
#[derive(Clone, Debug)]
pub struct EndpointView {
    /// Its URL.
    pub url: Url,
    /// The version that it told last.
    pub version: Option<Version>,
    /// Its role, as it was told last on the connection that stands; [`Role::Unknown`] while there is none.
    pub role: Role,
    /// Connections of all classes that stand.
    pub connections: usize,
    /// Connections of all classes that are kept up.
    pub connections_wanted: usize,
    /// Calls under way on them.
    pub calls: usize,
    /// Health and probes can be asked: without that nothing else counts.
    pub is_connected: bool,
    /// It serves, votes and knows a leader.
    pub is_well: bool,
    /// It is left for others for a moment, because calls failed on it.
    pub is_avoided: bool,
    /// What its last lost or refused connection was lost to, in words.
    pub last_error: String,
    /// Why RangeStream is not used on it.
    pub no_range_stream: Option<NoRangeStream>,
}

/// An endpoint and its connections.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) url: Url,
    unary: Vec<ArcSwapOption<Connection>>,
    stream: Vec<ArcSwapOption<Connection>>,
    check: Vec<ArcSwapOption<Connection>>,
    /// What its connections know together.
    pub(super) server: Arc<Server>,
    last_error: Mutex<Option<String>>,
    /// It serves, votes and knows a leader, as far as it has told.
    well: AtomicBool,
    /// A [`Role`].
    role: AtomicU8,
    /// Until when it is left for others, in milliseconds since `born`.
    avoided_until_millis: AtomicU64,
    born: Instant,
}

impl Endpoint {
    pub(super) fn new(url: Url) -> Endpoint {
        let slots =
            |class: ConnectionClass| (0..class.connections()).map(|_| ArcSwapOption::empty()).collect();
        Endpoint {
            url,
            unary: slots(ConnectionClass::Unary),
            stream: slots(ConnectionClass::Stream),
            check: slots(ConnectionClass::Check),
            server: Arc::default(),
            last_error: Mutex::new(None),
            well: AtomicBool::new(false),
            role: AtomicU8::new(Role::Unknown as u8),
            avoided_until_millis: AtomicU64::new(0),
            born: Instant::now(),
        }
    }

    fn slots(&self, class: ConnectionClass) -> &[ArcSwapOption<Connection>] {
        match class {
            ConnectionClass::Unary => &self.unary,
            ConnectionClass::Stream => &self.stream,
            ConnectionClass::Check => &self.check,
        }
    }

    /// Its live connections of `class`.
    pub(super) fn live(&self, class: ConnectionClass) -> impl Iterator<Item = Arc<Connection>> {
        self.slots(class)
            .iter()
            .filter_map(ArcSwapOption::load_full)
            .filter(|connection| connection.is_live())
    }

    pub(super) fn version(&self) -> Option<Version> {
        self.server.version()
    }

    /// Takes what it told; whether that is new.
    pub(super) fn set_version(&self, version: Version) -> bool {
        self.server.told(version)
    }

    pub(super) fn set_well(&self, well: bool) {
        if self.well.swap(well, Ordering::Relaxed) && !well {
            tracing::warn!(endpoint = %self.url,
                "this member does not serve, has no leader or does not vote: calls go to others while there are any");
        }
    }

    pub(super) fn is_well(&self) -> bool {
        self.well.load(Ordering::Relaxed)
    }

    /// Which endpoint to prefer: the lowest.
    pub(super) fn rank(&self) -> u8 {
        u8::from(self.is_avoided()) + 2 * u8::from(!self.is_well())
    }

    pub(super) fn last_error(&self) -> String {
        self.last_error
            .lock()
            .clone()
            .unwrap_or_else(|| format!("{}: not connected yet", self.url))
    }

    fn now_millis(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    pub(super) fn avoid_for(&self, duration: Duration) {
        let until = self
            .now_millis()
            .saturating_add(u64::try_from(duration.as_millis()).unwrap_or(u64::MAX));
        self.avoided_until_millis.store(until, Ordering::Relaxed);
    }

    fn is_avoided(&self) -> bool {
        let until = self.avoided_until_millis.load(Ordering::Relaxed);
        until != 0 && self.now_millis() < until
    }

    pub(super) fn set_role(&self, role: Role) {
        self.role.store(role as u8, Ordering::Relaxed);
    }

    fn role(&self) -> Role {
        let known = [Role::Leader, Role::Follower, Role::Learner, Role::Leaderless];
        let told = self.role.load(Ordering::Relaxed);
        known
            .into_iter()
            .find(|role| *role as u8 == told)
            .unwrap_or(Role::Unknown)
    }

    pub(super) fn view(&self) -> EndpointView {
        let classes = [
            ConnectionClass::Unary,
            ConnectionClass::Stream,
            ConnectionClass::Check,
        ];
        let live: Vec<_> = classes.into_iter().flat_map(|class| self.live(class)).collect();
        EndpointView {
            url: self.url.clone(),
            version: self.version(),
            role: self.role(),
            connections: live.len(),
            connections_wanted: classes.into_iter().map(ConnectionClass::connections).sum(),
            calls: live.iter().map(|connection| connection.in_flight()).sum(),
            is_connected: self.live(ConnectionClass::Check).next().is_some(),
            is_well: self.is_well(),
            is_avoided: self.is_avoided(),
            last_error: self.last_error(),
            no_range_stream: self.server.no_range_stream(),
        }
    }

    /// Starts one task per connection, which makes it, drives it, and makes it again, until `upstream` stops.
    pub(super) fn keep_connected(self: &Arc<Self>, upstream: &Arc<Upstream>) {
        for class in [
            ConnectionClass::Unary,
            ConnectionClass::Stream,
            ConnectionClass::Check,
        ] {
            for slot in 0..class.connections() {
                let (endpoint, upstream_of_task) = (Arc::clone(self), Arc::clone(upstream));
                let stop = upstream.stop.clone();
                upstream.tasks.spawn(async move {
                    // Calls under way at a stop are bounded by the drain that comes before it.
                    let keeping = restarting("endpoint", || endpoint.run(class, slot, &upstream_of_task));
                    stop.run_until_cancelled(keeping).await;
                });
            }
        }
    }

    async fn run(&self, class: ConnectionClass, slot: usize, upstream: &Upstream) {
        let slot = &self.slots(class)[slot];
        let mut backoff = Backoff::new(BACKOFF_FIRST, BACKOFF_LAST);
        // One connection of the endpoint speaks for all in the log.
        let speaks = class == ConnectionClass::Check;
        let mut silent = false;
        loop {
            let far = Instant::now() + Duration::from_secs(3600);
            match Connection::open(
                &upstream.connector,
                &self.url,
                &self.server,
                ReceiveWindow::SHARED,
                &upstream.credentials,
                far,
            )
            .await
            {
                Ok((connection, driver)) => {
                    let began = Instant::now();
                    self.server.reconnected();
                    slot.store(Some(Arc::clone(&connection)));
                    upstream.connected.notify_waiters();
                    let answered = AtomicBool::new(false);
                    let reason = if speaks {
                        let reason = tokio::select! {
                            reason = driver => reason,
                            never = health::watch(self, &connection, upstream, &answered) => match never {},
                        };
                        self.well.store(false, Ordering::Relaxed);
                        self.set_role(Role::Unknown);
                        reason
                    } else {
                        driver.await
                    };
                    slot.store(None);
                    tracing::debug!(endpoint = %self.url, reason, "a connection to etcd ended");
                    if !speaks || answered.into_inner() {
                        if speaks && !upstream.stop.is_cancelled() {
                            tracing::warn!(endpoint = %self.url, "lost the connection to etcd; connecting again");
                            silent = true;
                        }
                        *self.last_error.lock() = Some(format!("{}: the connection was lost", self.url));
                    } else {
                        let url = self.url.clone();
                        let reason = upstream.connector.explain(&url, &reason);
                        self.cannot_connect(&ConnectError::Refused { url, reason }, &mut silent);
                    }
                    if began.elapsed() > Duration::from_secs(5) {
                        backoff.reset();
                    }
                }
                Err(error) if speaks => self.cannot_connect(&error, &mut silent),
                Err(error) => *self.last_error.lock() = Some(error.to_string()),
            }
            tokio::time::sleep(backoff.pause()).await;
        }
    }

    /// Says it once, until there was a connection again.
    fn cannot_connect(&self, error: &ConnectError, silent: &mut bool) {
        if !*silent {
            tracing::warn!(endpoint = %self.url, %error, "cannot connect to etcd; trying on");
            *silent = true;
        }
        *self.last_error.lock() = Some(error.to_string());
    }
}
