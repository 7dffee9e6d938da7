//! etcd's endpoints: connections, versions, and which one a call goes to.
//!
//! Every endpoint has a few connections that are made at once and made again when lost ([`endpoint`]); a call takes
//! the least busy live one of its [`ConnectionClass`]. Feeds and loads open a connection of their own (I9). This room knows
//! nothing of mirrors or requests; `mirror` and `proxy` use it.

mod backoff;
mod connection;
mod credentials;
mod endpoint;
#[cfg(test)]
pub(crate) mod fake;
mod health;
mod outgoing;
mod range_stream;
#[cfg(test)]
mod tests;
mod version;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use backoff::{Backoff, jittered};
pub use connection::{Channel, ConnectError, Connection, InFlight, ReceiveWindow, SendFailure};
pub use credentials::Credentials;
pub use endpoint::{EndpointView, Role};
pub use health::serves;
pub use outgoing::{BoxError, Outgoing};
pub use range_stream::NoRangeStream;
pub use version::Version;

use crate::net::Url;
use crate::telemetry::Metrics;
use crate::tls::Connector;
use endpoint::Endpoint;

/// Which connections a call may use: calls of different classes never share one, so that a long answer or a slow
/// reader of one class does not delay another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionClass {
    /// Short unary calls.
    Unary,
    /// Streams and answers of any length.
    Stream,
    /// Quorum checks and probes.
    Check,
}

impl ConnectionClass {
    /// How many connections per endpoint.
    const fn connections(self) -> usize {
        match self {
            ConnectionClass::Unary | ConnectionClass::Stream => 2,
            ConnectionClass::Check => 1,
        }
    }
}

/// No endpoint could be used in time.
#[derive(Clone, Debug, thiserror::Error)]
#[error("no etcd endpoint could be reached within {waited:?}: {causes}")]
pub struct NoEndpoint {
    waited: Duration,
    causes: String,
}

/// A connection to `url` for who looks once and keeps no [`Upstream`]. The task, which is `tasks`' to join, ends with the
/// connection and says why.
///
/// # Errors
/// Why there is none, at `deadline` at the latest.
pub async fn open_once(
    connector: &Connector,
    url: &Url,
    credentials: &Arc<Credentials>,
    tasks: &TaskTracker,
    deadline: Instant,
) -> Result<(Arc<Connection>, JoinHandle<String>), ConnectError> {
    let server = Arc::default();
    let (connection, driver) = Connection::open(
        connector,
        url,
        &server,
        ReceiveWindow::SHARED,
        credentials,
        deadline,
    )
    .await?;
    Ok((connection, tasks.spawn(driver)))
}

/// What is known of the endpoints' versions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Versions {
    /// The lowest version among the endpoints that have told theirs; `None` before the first has.
    pub lowest: Option<Version>,
}

/// etcd, as rangecache sees it.
#[derive(Debug)]
pub struct Upstream {
    endpoints: Vec<Arc<Endpoint>>,
    connector: Arc<Connector>,
    /// Where the search for the least busy connection starts, so that ties go round.
    next: AtomicUsize,
    /// Woken whenever a connection has come up.
    connected: Arc<Notify>,
    versions: ArcSwap<Versions>,
    versions_changed: watch::Sender<()>,
    credentials: Arc<Credentials>,
    /// Whether RangeStream may be used at all.
    may_stream: bool,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Upstream {
    /// Starts to connect to every endpoint by `connector`, and keeps doing so until `stop`. Calls that originate here are
    /// made as the user of `credentials`. Tasks are `tasks`' to join. `may_stream`: whether RangeStream may be used where an
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
        let connected = Arc::new(Notify::new());
        let endpoints: Vec<_> = urls
            .iter()
            .map(|url| Arc::new(Endpoint::new(url.clone())))
            .collect();
        let upstream = Arc::new(Upstream {
            endpoints,
            connector: Arc::clone(connector),
            next: AtomicUsize::new(0),
            connected,
            versions: ArcSwap::default(),
            versions_changed: watch::Sender::new(()),
            credentials,
            may_stream,
            tasks: tasks.clone(),
            stop: stop.clone(),
        });
        for endpoint in &upstream.endpoints {
            endpoint.keep_connected(&upstream);
        }
        if upstream.credentials.is_configured() {
            let (kept, stop) = (Arc::clone(&upstream), stop.clone());
            tasks.spawn(async move {
                stop.run_until_cancelled(kept.credentials.keep(&kept)).await;
            });
        }
        upstream
    }

    /// A live connection of `class`, waiting for one until `deadline`.
    ///
    /// # Errors
    /// [`NoEndpoint`] when none has come up by then.
    pub async fn connection(
        &self,
        class: ConnectionClass,
        deadline: Instant,
    ) -> Result<Arc<Connection>, NoEndpoint> {
        if let Some(connection) = self.live(class, |_| true) {
            return Ok(connection);
        }
        let began = Instant::now();
        loop {
            // Registered before the look, so that a connection that comes up in between is not missed.
            let connected = self.connected.notified();
            if let Some(connection) = self.live(class, |_| true) {
                return Ok(connection);
            }
            if tokio::time::timeout_at(deadline, connected).await.is_err() {
                let causes: Vec<_> = self
                    .endpoints
                    .iter()
                    .map(|endpoint| endpoint.last_error())
                    .collect();
                return Err(NoEndpoint {
                    waited: began.elapsed(),
                    causes: causes.join("; "),
                });
            }
        }
    }

    /// A live connection of class `Stream` to an endpoint that may have RangeStream, waiting until `deadline` for any
    /// endpoint to be there at all. In a cluster of mixed versions, those that have it are found.
    ///
    /// # Errors
    /// [`NoEndpoint`], or within `Ok` why none of those that are there is to be asked.
    pub async fn streaming(
        &self,
        deadline: Instant,
    ) -> Result<Result<Arc<Connection>, NoRangeStream>, NoEndpoint> {
        if !self.may_stream {
            return Ok(Err(NoRangeStream::Off));
        }
        let any = self.connection(ConnectionClass::Stream, deadline).await?;
        let knows = |connection: &Connection| connection.lacks_range_stream().is_none();
        Ok(
            match (
                self.live(ConnectionClass::Stream, knows),
                any.lacks_range_stream(),
            ) {
                (Some(connection), _) => Ok(connection),
                (None, Some(reason)) => Err(reason),
                // It was lost this very moment: who sends on it will find out.
                (None, None) => Ok(any),
            },
        )
    }

    /// Why RangeStream is not to be tried on `connection`, if there is a reason.
    #[must_use]
    pub fn lacks_range_stream(&self, connection: &Connection) -> Option<NoRangeStream> {
        if self.may_stream {
            connection.lacks_range_stream()
        } else {
            Some(NoRangeStream::Off)
        }
    }

    /// The least busy live connection of `class` that is `wanted`; endpoints that are unwell or lately failed a call only
    /// if there is no other.
    fn live(&self, class: ConnectionClass, wanted: impl Fn(&Connection) -> bool) -> Option<Arc<Connection>> {
        let start = self.next.fetch_add(1, Ordering::Relaxed);
        let mut best: Option<(u8, usize, Arc<Connection>)> = None;
        for offset in 0..self.endpoints.len() {
            let endpoint = &self.endpoints[(start + offset) % self.endpoints.len()];
            let rank = endpoint.rank();
            for connection in endpoint.live(class).filter(|connection| wanted(connection)) {
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

    /// A new connection for one feed or load alone, to an endpoint that is reachable, by preference not `but`.
    ///
    /// # Errors
    /// What the last endpoint tried said.
    pub async fn dedicated(
        &self,
        windows: ReceiveWindow,
        but: Option<&Url>,
        deadline: Instant,
    ) -> Result<Arc<Connection>, ConnectError> {
        // A live check connection shows which endpoints are there at all.
        let first = self
            .connection(ConnectionClass::Check, deadline)
            .await
            .map_err(ConnectError::none)?;
        let mut endpoints: Vec<_> = self.endpoints.iter().collect();
        // The one to leave goes last, and before it those that are unwell.
        endpoints.sort_by_key(|endpoint| {
            (
                Some(&endpoint.url) == but,
                endpoint.rank(),
                endpoint.url != *first.url(),
            )
        });
        let mut last = None;
        for endpoint in endpoints {
            let opening = Connection::open(
                &self.connector,
                &endpoint.url,
                &endpoint.server,
                windows,
                &self.credentials,
                deadline,
            );
            match opening.await {
                Ok((connection, driver)) => {
                    let ended = async move {
                        let reason = driver.await;
                        tracing::debug!(reason, "a connection to etcd ended");
                    };
                    self.tasks.spawn(ended);
                    return Ok(connection);
                }
                Err(error) => last = Some(error),
            }
        }
        Err(last.unwrap_or(ConnectError::TimedOut))
    }

    /// Leaves `url` for other endpoints for a moment, because it answers but cannot serve (no leader, no quorum).
    pub fn avoid(&self, url: &Url) {
        if let Some(endpoint) = self.endpoints.iter().find(|endpoint| endpoint.url == *url) {
            endpoint.avoid_for(Duration::from_secs(2));
        }
    }

    /// Whether `url` is unwell and another endpoint is connected and well.
    #[must_use]
    pub fn has_better_than(&self, url: &Url) -> bool {
        let (of_url, others): (Vec<_>, Vec<_>) =
            self.endpoints.iter().partition(|endpoint| endpoint.url == *url);
        of_url.iter().all(|endpoint| !endpoint.is_well())
            && others
                .iter()
                .any(|endpoint| endpoint.is_well() && endpoint.live(ConnectionClass::Check).next().is_some())
    }

    /// rangecache's own identity.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// What makes connections.
    #[must_use]
    pub fn connector(&self) -> &Arc<Connector> {
        &self.connector
    }

    /// What is known of versions now.
    #[must_use]
    pub fn versions(&self) -> Versions {
        **self.versions.load()
    }

    /// Changes whenever [`Upstream::versions`] does.
    #[must_use]
    pub fn versions_changed(&self) -> watch::Receiver<()> {
        self.versions_changed.subscribe()
    }

    /// Every endpoint, in the operator's order.
    #[must_use]
    pub fn endpoints(&self) -> Vec<EndpointView> {
        let views = self.endpoints.iter().map(|endpoint| endpoint.view());
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

    /// Tells `metrics` how every endpoint is.
    pub fn export(&self, metrics: &Metrics) {
        for view in self.endpoints() {
            let is_well = view.is_connected && view.is_well;
            metrics
                .upstream
                .set_endpoint(&view.url, is_well, view.connections, view.calls);
        }
    }

    /// An endpoint told its version.
    fn version_learned(&self) {
        let versions = Versions {
            lowest: self
                .endpoints
                .iter()
                .filter_map(|endpoint| endpoint.version())
                .min(),
        };
        if self.versions() != versions {
            self.versions.store(Arc::new(versions));
            self.versions_changed.send_replace(());
        }
    }
}
