//! Endpoints: connections, opened again when lost, version and health.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::{convert::Infallible, sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use etcd_wire::etcdserverpb::StatusResponse;
use lean_h2::Lean;
use parking_lot::Mutex;
use rangecache_base::telemetry::state_changes::{ChangeKind, StateChanges};
use rangecache_base::{net::Url, panics::restarting};
use rangecache_edge::tls::Connector;
use tokio::{runtime::Handle, sync::Notify, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::capabilities::{LowestVersion, NoRangeStream, Role, ServerCapabilities};
use super::clusters::{Clusters, ConnectionSlot};
use super::health::{HealthMonitor, StatusReport};
use super::{
    backoff::Backoff, class::ConnectionClass, connection::Connection, credentials::Credentials,
    gates::Version, standing::EndpointPeer, transport::ConnectError,
};

/// First pause between attempts to connect.
const BACKOFF_FIRST: Duration = Duration::from_millis(20);
/// Longest pause: bounds the time until a restarted member is connected again.
const BACKOFF_LAST: Duration = Duration::from_millis(200);
/// Pause before a member of another cluster is tried again.
const LEFT_OUT_PAUSE: Duration = Duration::from_secs(1);
/// Number of health checks without a response after which a member is taken for one that hangs.
const UNANSWERED_CHECKS: u8 = 2;
/// Time for which an endpoint that responds but cannot serve is avoided at first.
const AVOID_FIRST: Duration = Duration::from_secs(2);
/// Longest time for which it is avoided.
const AVOID_LAST: Duration = Duration::from_secs(32);
/// Time after which it has served well for long enough to be avoided for [`AVOID_FIRST`] again.
const AVOID_FORGOTTEN: Duration = Duration::from_secs(10);
/// A connection that lived longer resets the pause.
const BACKOFF_RESET_AFTER: Duration = Duration::from_secs(5);

/// Whether the server has etcd's interface and is not etcd, whatever version it reports: a cluster's id is never 0. Nothing
/// that etcd guarantees may be concluded from it. Kine is one: it leaves fields out, and reads ranges in its own way.
fn is_emulation(status: &StatusResponse) -> bool {
    status
        .header
        .as_ref()
        .is_some_and(|header| header.cluster_id == 0)
}

/// Reason for which a connection ended.
enum ConnectionEnd {
    /// The connection was lost, for this reason.
    Lost(String),
    /// Its member is of another cluster than the one that is used.
    LeftOut,
    /// Its endpoint is used no more.
    Removed,
    /// Its peer takes no more calls; those in flight continue.
    Leaving,
}

/// Origin of an endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EndpointSource {
    /// `--endpoints` names it.
    Flag,
    /// A member of the cluster has it (`--endpoints-auto-sync-interval`).
    Members,
    /// `--fallback-endpoints` names it: it is used while none of the others serves.
    Fallback,
}

impl EndpointSource {
    /// Name in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            EndpointSource::Flag => "flag",
            EndpointSource::Members => "members",
            EndpointSource::Fallback => "fallback",
        }
    }
}

/// State of an endpoint at one moment, for operators.
#[derive(Clone, Debug)]
pub struct EndpointView {
    /// URL as configured, or as the member reports it.
    pub url: Url,
    /// Origin of the endpoint.
    pub source: EndpointSource,
    /// Whether it is left as soon as another one serves.
    pub is_leaving: bool,
    /// Id of the member that has responded last; `None` before.
    pub member_id: Option<u64>,
    /// Version that was reported last.
    pub version: Option<Version>,
    /// Role that was reported last on the current connection; [`Role::Unknown`] without one.
    pub role: Role,
    /// Open connections of all classes.
    pub connections: usize,
    /// Connections of all classes that are kept open.
    pub connections_wanted: usize,
    /// Calls in flight on them.
    pub calls: usize,
    /// Whether the check connection is open: without it nothing else counts.
    pub is_connected: bool,
    /// Whether the member serves, votes and knows a leader.
    pub is_healthy: bool,
    /// Whether other endpoints are preferred for a moment because calls failed on this one.
    pub is_avoided: bool,
    /// Error of the last lost or refused connection; empty if there was none.
    pub last_error: String,
    /// The rangecache at it, if there is one.
    pub peer: EndpointPeer,
    /// Why RangeStream is not used on the endpoint.
    pub no_range_stream: Option<NoRangeStream>,
}

/// State shared by the connection tasks of all endpoints.
#[derive(Debug)]
pub(super) struct ConnectionContext {
    pub(super) connector: Arc<Connector>,
    pub(super) credentials: Arc<Credentials>,
    /// Notified whenever a connection was opened.
    pub(super) connected: Notify,
    pub(super) lowest_version: LowestVersion,
    pub(super) clusters: Clusters,
    pub(super) tasks: TaskTracker,
    /// Runtime of the connections: that of the calls that they carry.
    pub(super) runtime: Handle,
    pub(super) stop: CancellationToken,
}

/// Endpoint and its connections.
#[derive(Debug)]
pub(super) struct Endpoint {
    pub(super) url: Url,
    source: AtomicU8,
    /// Whether it is left as soon as another endpoint serves.
    pub(super) is_leaving: AtomicBool,
    /// Id of the member that has responded last; 0 before.
    member_id: AtomicU64,
    unary: Vec<ArcSwapOption<Connection>>,
    short: Vec<ArcSwapOption<Connection>>,
    stream: Vec<ArcSwapOption<Connection>>,
    endless: Vec<ArcSwapOption<Connection>>,
    check: Vec<ArcSwapOption<Connection>>,
    authorization: Vec<ArcSwapOption<Connection>>,
    /// Shared with every connection of the endpoint.
    pub(super) server: Arc<ServerCapabilities>,
    last_error: Mutex<Option<String>>,
    /// Whether the last health checks found that the member serves, votes and knows a leader.
    healthy: AtomicBool,
    /// Since when it has not been healthy, once it has been.
    unhealthy_since: Mutex<Option<Instant>>,
    /// Number of the last health checks, one after the other, to which the member has not responded.
    unanswered: AtomicU8,
    /// A [`Role`].
    role: AtomicU8,
    /// Responses at the end of the last health check.
    responses_seen: AtomicU64,
    /// Time until which other endpoints are preferred, in milliseconds since `created`.
    avoided_until_millis: AtomicU64,
    /// Time for which it is or was avoided last.
    avoided_for: Mutex<Duration>,
    created: Instant,
    /// The newest changes of all endpoints.
    changes: Arc<StateChanges>,
}

impl Endpoint {
    pub(super) fn new(url: Url, source: EndpointSource, changes: Arc<StateChanges>) -> Endpoint {
        let slots =
            |class: ConnectionClass| (0..class.connections()).map(|_| ArcSwapOption::empty()).collect();
        Endpoint {
            url,
            source: AtomicU8::new(source as u8),
            is_leaving: AtomicBool::new(false),
            member_id: AtomicU64::new(0),
            unary: slots(ConnectionClass::Unary),
            short: slots(ConnectionClass::Short),
            stream: slots(ConnectionClass::Stream),
            endless: slots(ConnectionClass::Endless),
            check: slots(ConnectionClass::Check),
            authorization: slots(ConnectionClass::Authorization),
            server: Arc::default(),
            last_error: Mutex::new(None),
            healthy: AtomicBool::new(false),
            unhealthy_since: Mutex::new(None),
            unanswered: AtomicU8::new(0),
            role: AtomicU8::new(Role::Unknown as u8),
            responses_seen: AtomicU64::new(0),
            avoided_until_millis: AtomicU64::new(0),
            avoided_for: Mutex::default(),
            created: Instant::now(),
            changes,
        }
    }

    fn slots(&self, class: ConnectionClass) -> &[ArcSwapOption<Connection>] {
        match class {
            ConnectionClass::Unary => &self.unary,
            ConnectionClass::Short => &self.short,
            ConnectionClass::Stream => &self.stream,
            ConnectionClass::Endless => &self.endless,
            ConnectionClass::Check => &self.check,
            ConnectionClass::Authorization => &self.authorization,
        }
    }

    pub(super) fn source(&self) -> EndpointSource {
        let stored = self.source.load(Ordering::Relaxed);
        let known = [EndpointSource::Members, EndpointSource::Fallback];
        let mut known = known.into_iter();
        known
            .find(|source| *source as u8 == stored)
            .unwrap_or(EndpointSource::Flag)
    }

    pub(super) fn set_source(&self, source: EndpointSource) {
        self.source.store(source as u8, Ordering::Relaxed);
    }

    /// Whether it is left as soon as another endpoint serves.
    pub(super) fn is_leaving(&self) -> bool {
        self.is_leaving.load(Ordering::Relaxed)
    }

    /// Id of the member that has responded last; `None` before.
    fn member_id(&self) -> Option<u64> {
        Some(self.member_id.load(Ordering::Relaxed)).filter(|id| *id != 0)
    }

    /// Whether a connection of any class is open.
    pub(super) fn is_connected(&self) -> bool {
        ConnectionClass::ALL.into_iter().any(|class| self.has_live(class))
    }

    /// Whether a connection of `class` is open.
    fn has_live(&self, class: ConnectionClass) -> bool {
        self.live(class).next().is_some()
    }

    /// Whether the check connection is open, and its member is healthy.
    pub(super) fn serves(&self) -> bool {
        self.is_healthy() && self.has_live(ConnectionClass::Check)
    }

    /// Live connections of `class`.
    pub(super) fn live(&self, class: ConnectionClass) -> impl Iterator<Item = Arc<Connection>> {
        self.slots(class)
            .iter()
            .filter_map(ArcSwapOption::load_full)
            .filter(|connection| connection.is_live())
    }

    /// Live connections for calls of `class`: short calls go where the others go while there is none for them.
    pub(super) fn usable(&self, class: ConnectionClass) -> impl Iterator<Item = Arc<Connection>> {
        let mut live = self.live(class).peekable();
        let is_without = class == ConnectionClass::Short && live.peek().is_none();
        let others = is_without.then(|| self.live(ConnectionClass::Unary));
        live.chain(others.into_iter().flatten())
    }

    pub(super) fn version(&self) -> Option<Version> {
        self.server.version()
    }

    fn set_healthy(&self, healthy: bool) {
        let was_healthy = self.healthy.swap(healthy, Ordering::Relaxed);
        if healthy != was_healthy {
            let kind = if healthy {
                ChangeKind::MemberHealthy
            } else {
                ChangeKind::MemberUnhealthy
            };
            self.changes.record(kind, self.url.to_string(), "");
        }
        if was_healthy && !healthy {
            *self.unhealthy_since.lock() = Some(Instant::now());
            tracing::warn!(endpoint = %self.url,
                "this member does not serve, has no leader or does not vote; others are preferred, if there are any");
        } else if healthy && let Some(since) = self.unhealthy_since.lock().take() {
            tracing::info!(endpoint = %self.url, seconds = since.elapsed().as_secs_f64(), "this member serves again");
        }
    }

    /// Records that the connection that checks its health is lost.
    fn set_unknown(&self) {
        if self.healthy.swap(false, Ordering::Relaxed) {
            *self.unhealthy_since.lock() = Some(Instant::now());
            self.changes
                .record(ChangeKind::MemberLost, self.url.to_string(), "");
        }
        self.set_role(Role::Unknown);
    }

    /// Whether the member is not connected, or has responded to no call since it has left [`UNANSWERED_CHECKS`] health checks
    /// unanswered.
    pub(super) fn is_silent(&self) -> bool {
        let has_responded = self.server.responses() != self.responses_seen.load(Ordering::Relaxed);
        (self.unanswered.load(Ordering::Relaxed) >= UNANSWERED_CHECKS && !has_responded)
            || !self.is_connected()
    }

    fn record_health(&self, is_serving: Option<bool>, can_prove: bool) {
        let responses = self.server.responses();
        let has_responded = self.responses_seen.swap(responses, Ordering::Relaxed) != responses;
        let unanswered = match is_serving {
            None if !has_responded => self.unanswered.load(Ordering::Relaxed).saturating_add(1),
            _ => 0,
        };
        self.unanswered.store(unanswered, Ordering::Relaxed);
        self.set_healthy(can_prove && is_serving.unwrap_or(false));
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.healthy.load(Ordering::Relaxed)
    }

    /// Order of preference: the endpoint with the lowest rank is used. A fallback comes behind those that can serve now, and
    /// before those that cannot.
    pub(super) fn rank(&self) -> u8 {
        u8::from(self.is_fallback()) + 2 * u8::from(self.is_avoided()) + 4 * u8::from(!self.is_healthy())
    }

    /// Whether `--fallback-endpoints` names it.
    pub(super) fn is_fallback(&self) -> bool {
        self.source() == EndpointSource::Fallback
    }

    /// Why a call finds no connection.
    pub(super) fn last_error(&self) -> String {
        let error = self.last_error.lock().clone();
        error.unwrap_or_else(|| format!("{}: not connected yet", self.url))
    }

    /// The last error, for operators; empty if there was none.
    fn recorded_error(&self) -> String {
        if !self.has_live(ConnectionClass::Check) {
            return self.last_error();
        }
        self.last_error.lock().clone().unwrap_or_default()
    }

    fn now_millis(&self) -> u64 {
        u64::try_from(self.created.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Prefers other endpoints for [`AVOID_FIRST`], or for twice as long as the last time if that has just ended: each time that the
    /// endpoint is tried again, calls may hang there.
    pub(super) fn avoid(&self) {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX);
        let mut avoided_for = self.avoided_for.lock();
        let (now, until) = (
            self.now_millis(),
            self.avoided_until_millis.load(Ordering::Relaxed),
        );
        if until == 0 || now >= until + millis(AVOID_FORGOTTEN) {
            *avoided_for = AVOID_FIRST;
        } else if now >= until {
            *avoided_for = (*avoided_for * 2).min(AVOID_LAST);
        }
        self.avoided_until_millis
            .store(now + millis(*avoided_for), Ordering::Relaxed);
    }

    fn is_avoided(&self) -> bool {
        let until = self.avoided_until_millis.load(Ordering::Relaxed);
        until != 0 && self.now_millis() < until
    }

    fn set_role(&self, role: Role) {
        self.role.store(role as u8, Ordering::Relaxed);
    }

    pub(super) fn role(&self) -> Role {
        let known = [Role::Leader, Role::Follower, Role::Learner, Role::Leaderless];
        let stored = self.role.load(Ordering::Relaxed);
        known
            .into_iter()
            .find(|role| *role as u8 == stored)
            .unwrap_or(Role::Unknown)
    }

    pub(super) fn view(&self) -> EndpointView {
        let classes = ConnectionClass::ALL;
        let live: Vec<_> = classes.into_iter().flat_map(|class| self.live(class)).collect();
        EndpointView {
            url: self.url.clone(),
            source: self.source(),
            is_leaving: self.is_leaving(),
            member_id: self.member_id(),
            version: self.version(),
            role: self.role(),
            connections: live.len(),
            connections_wanted: classes.into_iter().map(ConnectionClass::connections).sum(),
            calls: live.iter().map(|connection| connection.in_flight()).sum(),
            is_connected: self.has_live(ConnectionClass::Check),
            is_healthy: self.is_healthy(),
            is_avoided: self.is_avoided(),
            last_error: self.recorded_error(),
            peer: self.server.peer.lock().clone(),
            no_range_stream: self.server.no_range_stream(),
        }
    }

    /// Starts one task per connection, which opens it, drives it, and opens it again until the context's `stop`.
    pub(super) fn keep_connected(self: &Arc<Self>, context: &Arc<ConnectionContext>) {
        for class in ConnectionClass::ALL {
            for slot in 0..class.connections() {
                let (endpoint, context_of_task) = (Arc::clone(self), Arc::clone(context));
                let stop = context.stop.clone();
                let keeping = async move {
                    // Calls in flight at a stop are bounded by the drain that precedes it.
                    let keeping = restarting("endpoint", || endpoint.run(class, slot, &context_of_task));
                    stop.run_until_cancelled(keeping).await;
                };
                context.tasks.spawn_on(keeping, &context.runtime);
            }
        }
    }

    async fn run(&self, class: ConnectionClass, number: usize, context: &ConnectionContext) {
        let slot = ConnectionSlot::new(&self.url, class, number);
        let removed = self.server.removed();
        let mut backoff = Backoff::new(BACKOFF_FIRST, BACKOFF_LAST);
        // Only the check connection logs: one line per endpoint, not one per connection.
        let logs = class == ConnectionClass::Check;
        // Set once a failure was logged.
        let mut silent = false;
        loop {
            // The connection's own timeout bounds the attempt.
            let no_deadline = Instant::now() + Duration::from_secs(3600);
            let opening = Connection::open(
                &context.connector,
                &self.url,
                &self.server,
                class.client(),
                class.timeouts(),
                &context.credentials,
                no_deadline,
            );
            let Some(opened) = removed.run_until_cancelled(opening).await else {
                break;
            };
            match opened {
                Ok((connection, mut driver)) => {
                    let opened = Instant::now();
                    self.server.record_reconnected();
                    let answered = AtomicBool::new(false);
                    let ended = self
                        .use_connection(&slot, &connection, &mut driver, context, &answered)
                        .await;
                    self.slots(class)[number].store(None);
                    context.clusters.record_lost(&slot);
                    if logs && !matches!(ended, ConnectionEnd::Removed) {
                        self.set_unknown();
                    }
                    if !matches!(ended, ConnectionEnd::Lost(_)) {
                        // Ends with the last call in flight. Without it a call would wait for ever for a peer that is
                        // gone: hyper sends no pings then.
                        let stop = context.stop.clone();
                        context
                            .tasks
                            .spawn(async move { stop.run_until_cancelled(driver).await });
                    }
                    let too_tight = connection.lean().and_then(Lean::too_tight);
                    let answered = !logs || answered.into_inner();
                    let mut record_lost =
                        |reason: &str| self.record_lost(reason, answered, logs, context, &mut silent);
                    match (ended, too_tight) {
                        (ConnectionEnd::Removed, _) => break,
                        (ConnectionEnd::LeftOut, _) => {
                            *self.last_error.lock() =
                                Some(format!("{}: a member of another cluster", self.url));
                            removed
                                .run_until_cancelled(tokio::time::sleep(LEFT_OUT_PAUSE))
                                .await;
                        }
                        (_, Some(announced)) => self.record_not_lean(announced),
                        (ConnectionEnd::Leaving, None) => record_lost("the peer takes no more calls"),
                        (ConnectionEnd::Lost(reason), None) => record_lost(&reason),
                    }
                    if opened.elapsed() > BACKOFF_RESET_AFTER {
                        backoff.reset();
                    }
                }
                Err(error) if logs => self.record_connect_error(&error, &mut silent),
                Err(error) => *self.last_error.lock() = Some(error.to_string()),
            }
            let pause = tokio::time::sleep(backoff.pause());
            if removed.run_until_cancelled(pause).await.is_none() {
                break;
            }
        }
        context.clusters.forget(&slot);
    }

    /// Uses an open connection for calls until it ends or takes no more of them, or its member turns out to be of another cluster.
    async fn use_connection(
        &self,
        slot: &ConnectionSlot,
        connection: &Arc<Connection>,
        driver: &mut (impl Future<Output = String> + Unpin),
        context: &ConnectionContext,
        answered: &AtomicBool,
    ) -> ConnectionEnd {
        // Before any call: one that reaches another cluster looks like a replaced history.
        let has_told = tokio::select! {
            biased;
            reason = &mut *driver => return ConnectionEnd::Lost(reason),
            () = self.server.removed().cancelled() => return ConnectionEnd::Removed,
            has_told = context.clusters.ask(slot, connection, || self.others(slot)) => has_told,
        };
        if context.clusters.is_left_out(connection.cluster_id()) {
            return ConnectionEnd::LeftOut;
        }
        if slot.class == ConnectionClass::Check {
            self.unanswered.store(0, Ordering::Relaxed);
        }
        self.slots(slot.class)[slot.number].store(Some(Arc::clone(connection)));
        context.connected.notify_waiters();
        let watch_health = async {
            if slot.class == ConnectionClass::Check {
                match self.watch_health(slot, connection, context, answered).await {}
            }
            std::future::pending().await
        };
        let ask_again = async {
            if !has_told {
                context
                    .clusters
                    .ask_again(slot, connection, || self.others(slot))
                    .await;
            }
            std::future::pending().await
        };
        tokio::select! {
            // The driver first: its end closes the connection, too, and it must not be polled again after it.
            biased;
            reason = driver => ConnectionEnd::Lost(reason),
            () = self.server.removed().cancelled() => ConnectionEnd::Removed,
            () = context.clusters.until_left_out(connection) => ConnectionEnd::LeftOut,
            () = connection.until_closed() => ConnectionEnd::Leaving,
            never = watch_health => match never {},
            never = ask_again => match never {},
        }
    }

    /// Records a lost connection. If its peer has never `answered`, it may be something else than etcd.
    fn record_lost(
        &self,
        reason: &str,
        answered: bool,
        logs: bool,
        context: &ConnectionContext,
        silent: &mut bool,
    ) {
        tracing::debug!(endpoint = %self.url, reason, "a connection to etcd ended");
        if !answered {
            let url = self.url.clone();
            let reason = context.connector.explain(&url, reason);
            return self.record_connect_error(&ConnectError::Refused { url, reason }, silent);
        }
        if logs && !context.stop.is_cancelled() {
            tracing::warn!(endpoint = %self.url, "lost the connection to etcd, reconnecting");
            *silent = true;
        }
        *self.last_error.lock() = Some(format!("{}: the connection was lost", self.url));
    }

    /// Records that the peer has `announced` what the lean client cannot keep to: its connections are opened with hyper from now on.
    fn record_not_lean(&self, announced: &str) {
        let reason = format!("the peer announces {announced}: calls may have to wait");
        if self.server.record_not_lean() {
            tracing::info!(endpoint = %self.url, reason, "short calls and quorum checks go through the general client");
        }
        *self.last_error.lock() = Some(format!("{}: {reason}", self.url));
    }

    /// Applies what health checks find, for as long as the connection is open. Sets `answered` with the first
    /// response: until then the peer may be something else than etcd.
    async fn watch_health(
        &self,
        slot: &ConnectionSlot,
        connection: &Arc<Connection>,
        context: &ConnectionContext,
        answered: &AtomicBool,
    ) -> Infallible {
        let mut monitor = HealthMonitor::new(connection);
        // Of the last status that was received.
        let mut can_prove = true;
        loop {
            let is_due = monitor.tick().await;
            if is_due || self.version().is_none() || !answered.load(Ordering::Relaxed) {
                let report = monitor.status().await;
                let is_response = matches!(report, StatusReport::Status(_) | StatusReport::Refused(_));
                if is_response && !answered.swap(true, Ordering::Relaxed) {
                    tracing::info!(endpoint = %self.url, "connected to etcd");
                }
                match report {
                    StatusReport::Status(status) => {
                        let member_id = status.header.as_ref().map_or(0, |header| header.member_id);
                        self.member_id.store(member_id, Ordering::Relaxed);
                        let role = Role::from_status(&status);
                        self.set_role(role);
                        can_prove = role.can_prove();
                        self.record_version(&status, context);
                        self.record_cluster(slot, connection, context).await;
                    }
                    StatusReport::Refused(status) | StatusReport::Lost(status) => {
                        tracing::debug!(endpoint = %self.url, code = ?status.code(), message_of_etcd = status.message(),
                            "the status call failed");
                    }
                    StatusReport::TimedOut => {}
                }
            }
            let health = monitor.health().await;
            let is_serving = health.as_ref().map(|health| health.is_serving);
            let behind = health.and_then(|health| health.behind);
            // A hub that answers by itself has looked at the roles of its members.
            self.record_health(is_serving, can_prove || behind.is_some());
            let cluster_id = behind.as_ref().map(|behind| behind.cluster_id);
            self.server.peer.lock().record_behind(behind);
            if let Some(id) = cluster_id {
                connection.set_cluster_id(id);
                self.record_cluster(slot, connection, context).await;
            }
        }
    }

    async fn record_cluster(
        &self,
        slot: &ConnectionSlot,
        connection: &Connection,
        context: &ConnectionContext,
    ) {
        let recording = context
            .clusters
            .record_told(slot, connection, || self.others(slot));
        recording.await;
    }

    /// The live connections but that of `slot`, with their slots.
    fn others(&self, slot: &ConnectionSlot) -> Vec<(ConnectionSlot, Arc<Connection>)> {
        let mut others = Vec::new();
        for class in ConnectionClass::ALL {
            for (number, connection) in self.slots(class).iter().enumerate() {
                let other = ConnectionSlot::new(&self.url, class, number);
                if let Some(connection) = connection.load_full().filter(|of| of.is_live() && other != *slot) {
                    others.push((other, connection));
                }
            }
        }
        others
    }

    fn record_version(&self, status: &StatusResponse, context: &ConnectionContext) {
        if is_emulation(status) {
            if self.server.record_emulation() {
                tracing::warn!(endpoint = %self.url, version = status.version,
                    "this server is not etcd: it has no cluster id. Forwarding everything to it");
                context.lowest_version.refresh();
            }
            return;
        }
        match status.version.parse::<Version>() {
            Ok(version) if self.server.record_version(version) => {
                tracing::info!(endpoint = %self.url, %version, "etcd reported its version");
                context.lowest_version.refresh();
            }
            Ok(_) => {}
            Err(error) => {
                tracing::debug!(endpoint = %self.url, %error, "the status has no version");
            }
        }
    }

    /// Records the error, and logs it if no failure was logged before.
    fn record_connect_error(&self, error: &ConnectError, silent: &mut bool) {
        if !*silent {
            tracing::warn!(endpoint = %self.url, %error, "cannot connect to etcd, retrying");
            *silent = true;
        }
        *self.last_error.lock() = Some(error.to_string());
    }
}

#[cfg(test)]
mod tests {
    use etcd_wire::etcdserverpb::ResponseHeader;

    use super::*;
    use crate::class::{Client, ReceiveWindow, Timeouts};
    use crate::fake::FakeEtcd;

    #[tokio::test]
    async fn member_that_responds_on_any_connection_is_not_silent() {
        let etcd = FakeEtcd::start(async |_, _| Err((14, "no call is sent"))).await;
        let endpoint = Endpoint::new(etcd.url.clone(), EndpointSource::Flag, Arc::default());
        assert!(endpoint.is_silent(), "no connection");
        let (connector, credentials) = (Connector::plaintext(), Credentials::new(None));
        let opening = Connection::open(
            &connector,
            &endpoint.url,
            &endpoint.server,
            Client::Hyper(ReceiveWindow::SHARED),
            Timeouts::OWN,
            &credentials,
            Instant::now() + Duration::from_secs(20),
        );
        let (connection, driver) = opening.await.unwrap();
        let driver = tokio::spawn(driver);
        endpoint.unary[0].store(Some(connection));
        assert!(!endpoint.is_silent(), "a connection for clients' calls alone");
        for _ in 0..UNANSWERED_CHECKS {
            assert!(!endpoint.is_silent());
            endpoint.record_health(None, true);
        }
        assert!(endpoint.is_silent(), "no response to health checks");
        endpoint.server.record_response();
        assert!(!endpoint.is_silent(), "a response since the last health check");
        driver.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn endpoint_that_cannot_serve_again_is_avoided_for_longer() {
        let url = "http://a:1".parse().unwrap();
        let endpoint = Endpoint::new(url, EndpointSource::Flag, Arc::default());
        let avoided = async || {
            endpoint.avoid();
            let began = Instant::now();
            while endpoint.is_avoided() {
                tokio::time::advance(Duration::from_secs(1)).await;
            }
            began.elapsed().as_secs()
        };
        assert!(!endpoint.is_avoided());
        let mut times = Vec::new();
        for _ in 0..6 {
            times.push(avoided().await);
            // The calls that are in flight fail later.
            tokio::time::advance(AVOID_FORGOTTEN / 2).await;
        }
        assert_eq!(times, [2, 4, 8, 16, 32, 32]);
        endpoint.avoid();
        tokio::time::advance(AVOID_LAST + AVOID_FORGOTTEN).await;
        assert_eq!(avoided().await, 2, "it has served meanwhile");
        endpoint.avoid();
        endpoint.avoid();
        assert_eq!(avoided().await, 4, "calls that fail together count once");
    }

    #[test]
    fn changes_of_health_are_recorded_once() {
        let changes = Arc::<StateChanges>::default();
        let url: Url = "http://etcd:2379".parse().unwrap();
        let endpoint = Endpoint::new(url, EndpointSource::Flag, Arc::clone(&changes));
        endpoint.set_healthy(false);
        endpoint.set_healthy(true);
        endpoint.set_healthy(true);
        endpoint.set_healthy(false);
        endpoint.set_unknown();
        endpoint.set_healthy(true);
        endpoint.set_unknown();
        let kinds: Vec<_> = changes.list().iter().map(|change| change.kind).collect();
        assert_eq!(
            kinds,
            [
                ChangeKind::MemberHealthy,
                ChangeKind::MemberUnhealthy,
                ChangeKind::MemberHealthy,
                ChangeKind::MemberLost,
            ]
        );
        assert!(changes.list()[0].subject.contains("etcd:2379"));
    }

    #[test]
    fn server_without_a_cluster_id_is_an_emulation() {
        let status = |header| StatusResponse {
            header,
            version: "3.6.11".to_owned(),
            ..StatusResponse::default()
        };
        let of_cluster = |cluster_id| {
            Some(ResponseHeader {
                cluster_id,
                ..ResponseHeader::default()
            })
        };
        assert!(is_emulation(&status(of_cluster(0))));
        assert!(!is_emulation(&status(of_cluster(7))));
        // Some tests' servers send no header at all.
        assert!(!is_emulation(&status(None)));
    }
}
