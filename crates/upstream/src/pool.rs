//! All endpoints: choice of a connection for each call.

use std::sync::atomic::{AtomicU64, Ordering};
use std::{io, sync::Arc, time::Duration};

use arc_swap::Guard;
use parking_lot::Mutex;
use rangecache_base::net::{Stream, Url};
use rangecache_base::panics::restarting;
use rangecache_base::telemetry::state_changes::{StateChange, StateChanges};
use rangecache_base::telemetry::{Metrics, metrics::gauge};
use rangecache_edge::tls::{Connector, Protocol};
use tokio::sync::{Notify, watch};
use tokio::{runtime::Handle, time::Instant};
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::authentication::{AUTHENTICATE_TIMEOUT, keep_authenticated};
use super::capabilities::{LowestVersion, NoRangeStream, Role, ServerCapabilities};
use super::class::{Client, ConnectionClass, ReceiveWindow, Timeouts};
use super::clusters::{ClusterOfEndpoint, Clusters};
use super::endpoint::{ConnectionContext, Endpoint, EndpointSource, EndpointView};
use super::gates::{self, GateState, Version, VersionGate};
use super::list::{EndpointList, EndpointMetrics, Left};
use super::transport::{ConnectError, NoEndpoint};
use super::{connection::Connection, credentials::Credentials};

/// Time for which an endpoint has served before feeds return to it from a fallback.
const RETURN_AFTER: Duration = Duration::from_secs(10);
/// Time after the start in which no fallback is used: the others may not be connected yet.
const FALLBACK_DELAY: Duration = Duration::from_secs(1);
/// Interval at which a feed of a fallback looks at the others.
const RETURN_INTERVAL: Duration = Duration::from_secs(1);

/// Calls in flight on the leader, for each on the least busy follower, above which writes are sent to any member.
const BUSY_LEADER_FACTOR: usize = 2;
/// Calls in flight on the leader that are never too many.
const BUSY_LEADER_CALLS: usize = 64;

/// The place `among` endpoints at which search number `number` begins. Places that followed each other would give calls that a client
/// makes in turn always the same endpoints, of which one may hang.
fn scattered(number: u64, among: usize) -> usize {
    // Multiples of the golden ratio spread evenly and never repeat (Knuth, The Art of Computer Programming 3, 6.4).
    let fraction = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    usize::try_from((fraction * among as u64) >> 32).unwrap_or_default()
}

/// etcd: all endpoints with their connections, versions and health.
#[derive(Debug)]
pub struct Upstream {
    endpoints: EndpointList,
    /// Held while the lowest version is computed after a change of the list.
    refreshing: Mutex<()>,
    /// Time from which on fallbacks are used.
    fallback_from: Instant,
    /// Number of searches for the least busy connection, which decides ties.
    searches: AtomicU64,
    context: Arc<ConnectionContext>,
    /// Whether RangeStream may be used at all.
    may_stream: bool,
    /// The newest changes of the endpoints.
    changes: Arc<StateChanges>,
}

impl Upstream {
    /// Starts to connect to every endpoint by `connector`, and keeps the connections open until `stop`. rangecache's
    /// own calls are made with `credentials`. `tasks` joins all tasks. `may_stream` permits RangeStream where an
    /// endpoint has it.
    #[must_use]
    pub fn start(
        urls: &[Url],
        connector: &Arc<Connector>,
        may_stream: bool,
        credentials: Arc<Credentials>,
        tasks: &TaskTracker,
        stop: &CancellationToken,
    ) -> Arc<Upstream> {
        let changes = Arc::<StateChanges>::default();
        let context = Arc::new(ConnectionContext {
            connector: Arc::clone(connector),
            credentials,
            connected: Notify::new(),
            lowest_version: LowestVersion::default(),
            clusters: Clusters::default(),
            tasks: tasks.clone(),
            runtime: Handle::current(),
            stop: stop.clone(),
        });
        let upstream = Arc::new(Upstream {
            endpoints: EndpointList::new(urls, Arc::clone(&changes)),
            refreshing: Mutex::new(()),
            fallback_from: Instant::now() + FALLBACK_DELAY,
            searches: AtomicU64::new(0),
            context,
            may_stream,
            changes,
        });
        for endpoint in upstream.list().iter() {
            endpoint.keep_connected(&upstream.context);
        }
        upstream.refresh_lowest_version();
        let leaving = Arc::clone(&upstream);
        upstream.spawn("endpoints that are left", move || {
            let leaving = Arc::clone(&leaving);
            async move { leaving.endpoints.leave(|left| leaving.note_left(left)).await }
        });
        if upstream.credentials().is_configured() {
            let (credentials, stop) = (Arc::clone(&upstream.context.credentials), stop.clone());
            let connecting = Arc::clone(&upstream);
            let connect = move || {
                let upstream = Arc::clone(&connecting);
                let deadline = Instant::now() + AUTHENTICATE_TIMEOUT;
                async move { upstream.connection(ConnectionClass::Check, deadline).await }
            };
            tasks.spawn(async move {
                stop.run_until_cancelled(keep_authenticated(&credentials, connect))
                    .await;
            });
        }
        upstream
    }

    /// The endpoints of now.
    fn list(&self) -> Guard<Arc<Vec<Arc<Endpoint>>>> {
        self.endpoints.load()
    }

    /// Uses `urls` in the place of the endpoints that the flags named before. Those are left as soon as one of `urls`
    /// serves, or when none of them is connected; feeds on them move, and calls on them end in peace.
    pub fn set_endpoints(&self, urls: &[Url]) {
        self.name(urls, EndpointSource::Flag);
    }

    /// Uses `urls` in the place of those that were used before while no other endpoint served.
    pub fn set_fallback(&self, urls: &[Url]) {
        self.name(urls, EndpointSource::Fallback);
    }

    fn name(&self, urls: &[Url], source: EndpointSource) {
        for endpoint in self.endpoints.name(urls, source) {
            self.context.clusters.add(&endpoint.url);
            endpoint.keep_connected(&self.context);
        }
        self.refresh_lowest_version();
    }

    /// Runs a task until the process stops, and again if it panics.
    pub(super) fn spawn<F>(&self, name: &'static str, run: impl FnMut() -> F + Send + 'static)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let stop = self.context.stop.clone();
        self.context
            .tasks
            .spawn(stop.run_until_cancelled_owned(restarting(name, run)));
    }

    /// Notes that endpoints were left.
    fn note_left(&self, left: Left) {
        if left == Left::None {
            return;
        }
        self.refresh_lowest_version();
        if left == Left::WithoutAnother {
            self.context.clusters.count_all();
        }
    }

    /// Computes the lowest version among the endpoints of now.
    fn refresh_lowest_version(&self) {
        let _refreshing = self.refreshing.lock();
        let endpoints = self.list();
        let servers = endpoints.iter().map(|endpoint| Arc::clone(&endpoint.server));
        self.context.lowest_version.set_servers(servers.collect());
    }

    /// Leaves the endpoints that are to be left, if that is possible now.
    #[cfg(test)]
    pub(super) fn leave_what_can_be(&self) -> Left {
        self.endpoints.leave_what_can_be()
    }

    /// Uses the endpoint of a member that was found; returns whether it is new.
    pub(super) fn adopt(&self, url: &Url) -> bool {
        let adopted = self.endpoints.adopt(url);
        if let Some(endpoint) = &adopted {
            self.context.clusters.add(&endpoint.url);
            endpoint.keep_connected(&self.context);
            self.refresh_lowest_version();
        }
        adopted.is_some()
    }

    /// Leaves the endpoint `url` as soon as another one serves.
    pub(super) fn want_to_leave(&self, url: &Url) {
        self.endpoints.want_to_leave(url);
    }

    /// The newest changes of the endpoints and their health, the oldest first.
    #[must_use]
    pub fn state_changes(&self) -> Vec<StateChange> {
        self.changes.list()
    }

    /// A live connection of `class`; waits for one until `deadline`.
    ///
    /// # Errors
    /// [`NoEndpoint`] if none was opened by then.
    pub async fn connection(
        &self,
        class: ConnectionClass,
        deadline: Instant,
    ) -> Result<Arc<Connection>, NoEndpoint> {
        if let Some(connection) = self.least_busy(class, |_| true) {
            return Ok(connection);
        }
        let began = Instant::now();
        loop {
            // Registered before the search, so that a connection that is opened in between is not missed.
            let connected = self.context.connected.notified();
            if let Some(connection) = self.least_busy(class, |_| true) {
                return Ok(connection);
            }
            if self.waits_for_fallbacks(deadline) {
                let _ = tokio::time::timeout_at(self.fallback_from, connected).await;
                continue;
            }
            if tokio::time::timeout_at(deadline, connected).await.is_err() {
                let causes: Vec<_> = self.list().iter().map(|endpoint| endpoint.last_error()).collect();
                return Err(NoEndpoint {
                    waited: began.elapsed(),
                    causes: causes.join("; "),
                });
            }
        }
    }

    /// Whether a fallback is not used yet.
    fn is_too_early_for(&self, endpoint: &Endpoint) -> bool {
        endpoint.is_fallback() && Instant::now() < self.fallback_from
    }

    /// Whether fallbacks may not be used yet, but before `deadline`.
    fn waits_for_fallbacks(&self, deadline: Instant) -> bool {
        self.fallback_from < deadline && self.list().iter().any(|endpoint| self.is_too_early_for(endpoint))
    }

    /// A live connection of `class`, to the leader unless that is not known or much busier than another member; waits for
    /// one until `deadline`.
    ///
    /// # Errors
    /// [`NoEndpoint`] if none was opened by then.
    pub async fn connection_to_leader(
        &self,
        class: ConnectionClass,
        deadline: Instant,
    ) -> Result<Arc<Connection>, NoEndpoint> {
        match self.leader(class) {
            Some(connection) => Ok(connection),
            None => self.connection(class, deadline).await,
        }
    }

    /// The least busy connection of `class` to the leader, unless that serves nothing now, or is much busier than another
    /// member.
    fn leader(&self, class: ConnectionClass) -> Option<Arc<Connection>> {
        let endpoints = self.list();
        let is_leader = |endpoint: &&Arc<Endpoint>| {
            endpoint.role() == Role::Leader
                && endpoint.rank() == 0
                && !endpoint.server.peer.lock().is_rangecache()
        };
        let leader = endpoints.iter().find(is_leader)?;
        let busy =
            |endpoint: &Endpoint| -> usize { endpoint.usable(class).map(|live| live.in_flight()).sum() };
        let of_others = endpoints
            .iter()
            .filter(|other| other.rank() == 0 && other.role() == Role::Follower);
        let least = of_others.map(|other| busy(other)).min();
        if least.is_some_and(|least| busy(leader) > least * BUSY_LEADER_FACTOR + BUSY_LEADER_CALLS) {
            return None;
        }
        leader
            .usable(class)
            .filter(|connection| !self.is_left_out(connection.cluster_id()))
            .min_by_key(|connection| connection.in_flight())
    }

    /// A live connection of class `Stream` to an endpoint that may have RangeStream; waits until `deadline` for any
    /// endpoint to be connected. In a cluster of mixed versions, an endpoint that has RangeStream is preferred, unless it serves
    /// worse than another: pages of that one come sooner than the end of a stream that hangs.
    ///
    /// # Errors
    /// [`NoEndpoint`], or within `Ok` why no connected endpoint can be used.
    pub async fn streaming(
        &self,
        deadline: Instant,
    ) -> Result<Result<Arc<Connection>, NoRangeStream>, NoEndpoint> {
        if !self.may_stream {
            return Ok(Err(NoRangeStream::Off));
        }
        let any = self.connection(ConnectionClass::Stream, deadline).await?;
        let rank = |connection: &Connection| {
            let endpoints = self.list();
            let of = endpoints
                .iter()
                .find(|endpoint| endpoint.url == *connection.url());
            of.map(|endpoint| endpoint.rank())
        };
        let best = rank(&any);
        let is_capable =
            |connection: &Connection| connection.lacks_range_stream().is_none() && rank(connection) <= best;
        Ok(
            match (
                self.least_busy(ConnectionClass::Stream, is_capable),
                any.lacks_range_stream(),
            ) {
                (Some(connection), _) => Ok(connection),
                (None, Some(reason)) => Err(reason),
                // The connection was just lost; sending on it fails.
                (None, None) => Ok(any),
            },
        )
    }

    /// Why RangeStream must not be used on `connection`, if there is a reason.
    #[must_use]
    pub fn lacks_range_stream(&self, connection: &Connection) -> Option<NoRangeStream> {
        if self.may_stream {
            connection.lacks_range_stream()
        } else {
            Some(NoRangeStream::Off)
        }
    }

    /// The least busy live connection of `class` that `is_wanted`; unhealthy and avoided endpoints are used only if
    /// there is no other.
    fn least_busy(
        &self,
        class: ConnectionClass,
        is_wanted: impl Fn(&Connection) -> bool,
    ) -> Option<Arc<Connection>> {
        let mut best: Option<(u8, usize, Arc<Connection>)> = None;
        let endpoints = self.list();
        let start = scattered(self.searches.fetch_add(1, Ordering::Relaxed), endpoints.len());
        for offset in 0..endpoints.len() {
            let endpoint = &endpoints[(start + offset) % endpoints.len()];
            if self.is_too_early_for(endpoint) {
                continue;
            }
            let rank = endpoint.rank();
            let live = endpoint.usable(class);
            for connection in
                live.filter(|connection| !self.is_left_out(connection.cluster_id()) && is_wanted(connection))
            {
                let busy = connection.in_flight();
                if best
                    .as_ref()
                    .is_none_or(|(other_rank, other_busy, _)| (rank, busy) < (*other_rank, *other_busy))
                {
                    best = Some((rank, busy, connection));
                }
            }
        }
        best.map(|(_, _, connection)| connection)
    }

    /// A new connection for one feed or load alone (I9), to a connected endpoint; `avoided` is used only if there is
    /// no other.
    ///
    /// # Errors
    /// The error of the endpoint that was tried last.
    pub async fn dedicated(
        &self,
        windows: ReceiveWindow,
        avoided: Option<&Url>,
        deadline: Instant,
    ) -> Result<Arc<Connection>, ConnectError> {
        // A live check connection shows that its endpoint is there.
        let first = self.connection(ConnectionClass::Check, deadline).await?;
        let mut endpoints = Vec::clone(&self.list());
        endpoints.sort_by_key(|endpoint| {
            (
                Some(&endpoint.url) == avoided,
                self.is_too_early_for(endpoint),
                endpoint.rank(),
                endpoint.url != *first.url(),
            )
        });
        let mut last = None;
        for endpoint in endpoints {
            match self
                .open(&endpoint.url, &endpoint.server, windows, deadline)
                .await
            {
                Ok(connection) => return Ok(connection),
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or(ConnectError::TimedOut))
    }

    /// A new connection to a server that is none of the endpoints, by the same TLS files and as the same user.
    ///
    /// # Errors
    /// [`ConnectError`], at `deadline` at the latest.
    pub async fn neighbour(
        &self,
        url: &Url,
        windows: ReceiveWindow,
        deadline: Instant,
    ) -> Result<Arc<Connection>, ConnectError> {
        self.open(url, &Arc::default(), windows, deadline).await
    }

    /// Opens a connection, which a task drives.
    async fn open(
        &self,
        url: &Url,
        server: &Arc<ServerCapabilities>,
        windows: ReceiveWindow,
        deadline: Instant,
    ) -> Result<Arc<Connection>, ConnectError> {
        let context = &self.context;
        let (connector, credentials) = (&context.connector, &context.credentials);
        let client = Client::Hyper(windows);
        let timeouts = Timeouts::OWN;
        let opening = Connection::open(connector, url, server, client, timeouts, credentials, deadline);
        let (connection, driver) = opening.await?;
        context.tasks.spawn(async move {
            let reason = driver.await;
            tracing::debug!(reason, "a connection to etcd ended");
        });
        Ok(connection)
    }

    /// Prefers other endpoints to `url` for 2 to 32 seconds, because it responds but cannot serve (no leader, no quorum).
    pub fn avoid(&self, url: &Url) {
        if let Some(endpoint) = self.list().iter().find(|endpoint| endpoint.url == *url) {
            endpoint.avoid();
        }
    }

    /// Whether a member of the cluster `id`, once that is known, is of another cluster than the one that most endpoints
    /// lead to.
    #[must_use]
    pub fn is_left_out(&self, id: Option<u64>) -> bool {
        self.context.clusters.is_left_out(id)
    }

    /// Resolves once `connection` is known to be left out ([`Upstream::is_left_out`]).
    pub async fn until_left_out(&self, connection: &Connection) {
        self.context.clusters.until_left_out(connection).await;
    }

    /// The endpoints with their clusters, if there are several.
    #[must_use]
    pub fn mixed_clusters(&self) -> Vec<ClusterOfEndpoint> {
        self.context.clusters.mixed()
    }

    /// Whether `url` is unhealthy and another endpoint is connected and healthy.
    #[must_use]
    pub fn has_better_than(&self, url: &Url) -> bool {
        let endpoints = self.list();
        let mut of_url = endpoints.iter().filter(|endpoint| endpoint.url == *url);
        of_url.all(|endpoint| !endpoint.is_healthy()) && self.has_another_than(url)
    }

    /// Whether an endpoint other than `url` is connected and healthy.
    #[must_use]
    pub fn has_another_than(&self, url: &Url) -> bool {
        let endpoints = self.list();
        let mut others = endpoints.iter().filter(|endpoint| endpoint.url != *url);
        others.any(|endpoint| endpoint.serves())
    }

    /// Resolves once `url` is a fallback, and an endpoint that is preferred to it has served for [`RETURN_AFTER`]. An endpoint
    /// that comes and goes would otherwise take every feed with it.
    pub async fn until_preferred_serves(&self, url: &Url) {
        let mut serves_since = None;
        loop {
            tokio::time::sleep(RETURN_INTERVAL).await;
            let endpoints = self.list();
            let is_fallback = endpoints.iter().any(|of| of.url == *url && of.is_fallback());
            let serves = |endpoint: &Arc<Endpoint>| endpoint.serves() && !endpoint.is_fallback();
            if is_fallback && endpoints.iter().any(serves) {
                let since = *serves_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= RETURN_AFTER {
                    return;
                }
            } else {
                serves_since = None;
            }
        }
    }

    /// Whether an endpoint is known to have a memory of its own: to be another rangecache.
    #[must_use]
    pub fn has_memory(&self) -> bool {
        self.list()
            .iter()
            .any(|endpoint| endpoint.server.peer.lock().is_rangecache())
    }

    /// The URLs of the endpoints, separated by commas, those that serve first; `None` if none is connected and healthy.
    #[must_use]
    pub fn serving_endpoints(&self) -> Option<String> {
        let endpoints = self.list();
        let (serving, others): (Vec<_>, Vec<_>) = endpoints.iter().partition(|endpoint| endpoint.serves());
        let urls = serving
            .iter()
            .chain(&others)
            .map(|endpoint| endpoint.url.to_string());
        (!serving.is_empty()).then(|| urls.collect::<Vec<_>>().join(", "))
    }

    /// Id of the cluster that is used, once it is known.
    #[must_use]
    pub fn cluster_id(&self) -> Option<u64> {
        self.context.clusters.used()
    }

    /// Number of endpoints that are used.
    #[must_use]
    pub fn endpoint_count(&self) -> usize {
        self.list().len()
    }

    /// Whether no member answers: none is connected, or those that are do not respond to health checks.
    #[must_use]
    pub fn is_silent(&self) -> bool {
        self.list().iter().all(|endpoint| endpoint.is_silent())
    }

    /// rangecache's own identity.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.context.credentials
    }

    /// The connector that opens all connections.
    #[must_use]
    pub fn connector(&self) -> &Arc<Connector> {
        &self.context.connector
    }

    /// A new connection to `url` for HTTP/1, with TLS if the URL asks for it.
    ///
    /// # Errors
    /// The error of the socket or of the handshake.
    pub async fn open_http1(&self, url: &Url) -> io::Result<Stream> {
        self.connector().connect(url, Protocol::Http1).await
    }

    /// The lowest version among the endpoints that have reported theirs; `None` before the first report.
    #[must_use]
    pub fn lowest_version(&self) -> Option<Version> {
        self.context.lowest_version.get()
    }

    /// Whether an endpoint leads to a server with etcd's interface that is not etcd.
    #[must_use]
    pub fn is_emulation(&self) -> bool {
        self.list().iter().any(|endpoint| endpoint.server.is_emulation())
    }

    /// Changes whenever [`Upstream::lowest_version`] does.
    #[must_use]
    pub fn version_changes(&self) -> watch::Receiver<()> {
        self.context.lowest_version.changes()
    }

    /// State of every gate, in the order of [`gates::ALL`].
    #[must_use]
    pub fn gates(&self) -> Vec<(&'static VersionGate, GateState)> {
        let endpoints = self.list();
        let assess = |gate: &'static VersionGate| {
            let is_off = *gate == gates::RANGE_STREAM && !self.may_stream;
            let servers = endpoints.iter().map(|endpoint| &endpoint.server);
            let reports: Vec<_> = servers.map(|server| server.report(gate)).collect();
            (gate, gate.assess(is_off, &reports))
        };
        gates::ALL.iter().copied().map(assess).collect()
    }

    /// State of every endpoint, in the order of `--endpoints`; others after them.
    #[must_use]
    pub fn endpoints(&self) -> Vec<EndpointView> {
        let endpoints = self.list();
        let views = endpoints.iter().map(|endpoint| endpoint.view());
        views
            .map(|view| EndpointView {
                no_range_stream: if self.may_stream {
                    view.no_range_stream
                } else {
                    Some(NoRangeStream::Off)
                },
                ..view
            })
            .collect()
    }

    /// Sets the metrics of every endpoint.
    pub fn export(&self, metrics: &Metrics) {
        let (mixed, metrics) = (self.context.clusters.mixed(), metrics.group::<EndpointMetrics>());
        for url in self.endpoints.take_left() {
            metrics.forget(&url.to_string());
        }
        for view in self.endpoints() {
            let url = view.url.to_string();
            let is_left_out = mixed.iter().any(|of| !of.is_used && of.url == url);
            let gauges = metrics.of(&url);
            gauges
                .healthy
                .set(i64::from(view.is_connected && view.is_healthy));
            gauges.connections.set(gauge(view.connections));
            gauges.calls.set(gauge(view.calls));
            gauges.left_out.set(i64::from(is_left_out));
        }
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use http::Request;

    use super::*;
    use crate::outgoing::Outgoing;
    use crate::testing::{SOON, member, start, until};

    /// Class of connections on which only tests make calls.
    const QUIET: ConnectionClass = ConnectionClass::Authorization;

    /// Whether all connections of each endpoint are open, and its version is known.
    fn is_settled(upstream: &Upstream) -> bool {
        let views = upstream.endpoints();
        views
            .iter()
            .all(|view| view.connections == view.connections_wanted && view.version.is_some())
    }

    /// Waits until all connections are open, and the endpoint at each position is as healthy as `expected`.
    async fn settled(upstream: &Upstream, expected: &[bool]) {
        until(|| {
            let views = upstream.endpoints();
            let healthy: Vec<_> = views.iter().map(|view| view.is_healthy).collect();
            is_settled(upstream) && healthy == expected
        })
        .await;
    }

    /// [`settled`], and the clock stands still from then on: no health check changes the choice.
    async fn settled_for_good(upstream: &Upstream, expected: &[bool]) {
        settled(upstream, expected).await;
        tokio::time::pause();
    }

    async fn chosen(upstream: &Upstream) -> Url {
        let connection = upstream.connection(QUIET, Instant::now() + SOON).await;
        connection.unwrap().url().clone()
    }

    /// The connection to `url`.
    fn to(upstream: &Upstream, url: &Url) -> Arc<Connection> {
        let of_url = upstream.least_busy(QUIET, |connection| connection.url() == url);
        of_url.unwrap()
    }

    /// The endpoints of eight choices in turn.
    async fn chosen_of_eight(upstream: &Upstream) -> std::collections::BTreeSet<String> {
        let mut urls = std::collections::BTreeSet::new();
        for _ in 0..8 {
            urls.insert(chosen(upstream).await.to_string());
        }
        urls
    }

    #[tokio::test]
    async fn calls_go_to_the_least_busy_connection_and_ties_to_each() {
        let (a, b) = (member("3.6.0", 7, 2).await, member("3.6.0", 7, 2).await);
        let (upstream, _stop) = start(&[&a.url, &b.url], true);
        settled(&upstream, &[true, true]).await;
        let busy = to(&upstream, &a.url);
        assert_eq!(busy.url(), &a.url);
        let body = Outgoing::whole(Bytes::from_static(b"\0\0\0\0\0"));
        let held = busy.send(Request::post("/a").body(body).unwrap()).await.unwrap();
        settled_for_good(&upstream, &[true, true]).await;
        for _ in 0..4 {
            assert_eq!(chosen(&upstream).await, b.url);
        }
        drop(held);
        assert_eq!(chosen_of_eight(&upstream).await.len(), 2);
    }

    #[test]
    fn calls_in_turn_reach_every_endpoint_whatever_their_pattern() {
        for among in 1..=5 {
            for every in 1..=12_u64 {
                let mut chosen = vec![0; among];
                for number in 0..1_200 {
                    chosen[scattered(number * every, among)] += 1;
                }
                let (least, even) = (*chosen.iter().min().unwrap(), 1_200 / among);
                assert!(least * 10 > even * 9, "every {every} of {among}: {chosen:?}");
            }
        }
    }

    #[tokio::test]
    async fn avoided_endpoint_is_used_only_where_it_is_asked_for() {
        let (a, b) = (member("3.6.0", 7, 2).await, member("3.6.0", 7, 2).await);
        let (upstream, _stop) = start(&[&a.url, &b.url], true);
        settled_for_good(&upstream, &[true, true]).await;
        upstream.avoid(&a.url);
        for _ in 0..4 {
            assert_eq!(chosen(&upstream).await, b.url);
        }
        assert_eq!(to(&upstream, &a.url).url(), &a.url);
        upstream.avoid(&b.url);
        assert_eq!(chosen_of_eight(&upstream).await.len(), 2, "neither is better");
    }

    #[tokio::test]
    async fn member_without_a_leader_is_used_only_after_the_others() {
        let (a, b) = (member("3.6.0", 7, 0).await, member("3.6.0", 7, 2).await);
        let (upstream, _stop) = start(&[&a.url, &b.url], true);
        settled_for_good(&upstream, &[false, true]).await;
        for _ in 0..4 {
            assert_eq!(chosen(&upstream).await, b.url);
        }
        assert!(upstream.has_better_than(&a.url) && !upstream.has_better_than(&b.url));
        assert!(!upstream.has_another_than(&b.url), "the other is not healthy");
        tokio::time::resume();
        let dedicated = async |avoided| {
            settled(&upstream, &[false, true]).await;
            let deadline = Instant::now() + SOON;
            let opened = upstream.dedicated(ReceiveWindow::LOAD, avoided, deadline);
            opened.await.unwrap().url().clone()
        };
        assert_eq!(dedicated(None).await, b.url);
        assert_eq!(dedicated(Some(&b.url)).await, a.url);
    }

    #[tokio::test]
    async fn streams_go_to_the_endpoint_that_has_them() {
        let (old, new) = (member("3.6.0", 7, 2).await, member("3.7.0", 7, 2).await);
        let (upstream, _stop) = start(&[&old.url, &new.url], true);
        settled(&upstream, &[true, true]).await;
        assert_eq!(upstream.lowest_version(), Some(Version::new(3, 6, 0)));
        let streaming = async || upstream.streaming(Instant::now() + SOON).await.unwrap();
        for _ in 0..4 {
            assert_eq!(streaming().await.unwrap().url(), &new.url);
        }
        let connection = streaming().await.unwrap();
        connection.refused_range_stream("unknown method RangeStream");
        let reason = streaming().await.unwrap_err();
        assert!(
            matches!(reason, NoRangeStream::Version | NoRangeStream::Unimplemented),
            "{reason:?}"
        );
    }

    #[tokio::test]
    async fn streams_are_done_without_while_the_only_endpoint_that_has_them_serves_worse() {
        let (old, new) = (member("3.6.0", 7, 2).await, member("3.7.0", 7, 2).await);
        let (upstream, _stop) = start(&[&old.url, &new.url], true);
        settled(&upstream, &[true, true]).await;
        upstream.avoid(&new.url);
        let streaming = upstream.streaming(Instant::now() + SOON).await.unwrap();
        assert_eq!(streaming.unwrap_err(), NoRangeStream::Version);
        upstream.avoid(&old.url);
        let streaming = upstream.streaming(Instant::now() + SOON).await.unwrap();
        assert_eq!(streaming.unwrap().url(), &new.url);
    }

    #[tokio::test]
    async fn streams_that_are_switched_off_are_not_looked_for() {
        let new = member("3.7.0", 7, 2).await;
        let (upstream, _stop) = start(&[&new.url], false);
        let streaming = upstream.streaming(Instant::now()).await;
        assert_eq!(
            streaming.unwrap().err(),
            Some(NoRangeStream::Off),
            "nothing is waited for"
        );
        settled(&upstream, &[true]).await;
        let connection = upstream.connection(QUIET, Instant::now() + SOON).await.unwrap();
        assert_eq!(connection.lacks_range_stream(), None);
        assert_eq!(upstream.lacks_range_stream(&connection), Some(NoRangeStream::Off));
        assert_eq!(upstream.endpoints()[0].no_range_stream, Some(NoRangeStream::Off));
    }

    #[tokio::test]
    async fn member_of_another_cluster_than_most_is_left_out() {
        let (a, b) = (member("3.6.0", 7, 2).await, member("3.6.0", 7, 2).await);
        let other = member("3.6.0", 8, 2).await;
        let (upstream, _stop) = start(&[&other.url, &a.url, &b.url], true);
        until(|| {
            let views = upstream.endpoints();
            let are_open = |view: &EndpointView| view.connections == view.connections_wanted;
            views[0].connections == 0
                && views[1..].iter().all(are_open)
                && upstream
                    .mixed_clusters()
                    .iter()
                    .any(|of| !of.is_used && of.cluster_id == 8)
        })
        .await;
        assert!(upstream.is_left_out(Some(8)) && !upstream.is_left_out(Some(7)));
        for _ in 0..6 {
            assert_ne!(chosen(&upstream).await, other.url);
        }
    }

    #[tokio::test]
    async fn error_without_any_connection_names_every_endpoint_and_why() {
        let urls = ["http://127.0.0.1:1", "http://127.0.0.1:2"].map(|url| url.parse().unwrap());
        let (upstream, _stop) = start(&[&urls[0], &urls[1]], true);
        assert!(upstream.is_silent());
        until(|| {
            let views = upstream.endpoints();
            views
                .iter()
                .all(|view| !view.last_error.ends_with("not connected yet"))
        })
        .await;
        let error = upstream.connection(QUIET, Instant::now()).await.unwrap_err();
        for url in &urls {
            assert!(error.causes.contains(&format!("{url}: ")), "{error}");
        }
        assert!(error.causes.contains("refused"), "{error}");
    }

    #[tokio::test]
    async fn writes_go_to_the_leader_unless_it_is_much_busier() {
        // Each member's id is 2.
        let (leader, follower) = (member("3.6.0", 7, 2).await, member("3.6.0", 7, 3).await);
        let (upstream, _stop) = start(&[&leader.url, &follower.url], true);
        until(|| {
            let roles: Vec<_> = upstream.endpoints().iter().map(|view| view.role).collect();
            roles == [Role::Leader, Role::Follower]
        })
        .await;
        settled_for_good(&upstream, &[true, true]).await;
        let chosen = async || {
            let connection = upstream.connection_to_leader(QUIET, Instant::now() + SOON).await;
            connection.unwrap().url().clone()
        };
        for _ in 0..4 {
            assert_eq!(chosen().await, leader.url);
        }
        let busy = to(&upstream, &leader.url);
        let mut held = Vec::new();
        for _ in 0..=BUSY_LEADER_CALLS {
            let body = Outgoing::whole(Bytes::from_static(b"\0\0\0\0\0"));
            held.push(busy.send(Request::post("/a").body(body).unwrap()).await.unwrap());
        }
        assert_eq!(chosen().await, follower.url, "the leader is much busier");
        held.pop();
        assert_eq!(chosen().await, leader.url);
        upstream.avoid(&leader.url);
        assert_eq!(chosen().await, follower.url, "calls failed on the leader");
    }
}
