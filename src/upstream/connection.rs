//! One HTTP/2 connection to one endpoint.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use tokio::time::Instant;

use super::NoEndpoint;
use super::credentials::Credentials;
use super::outgoing::{BoxError, Outgoing};
use super::range_stream::{NoRangeStream, Server};
use crate::etcdserverpb::maintenance_client::MaintenanceClient;
use crate::etcdserverpb::{StatusRequest, StatusResponse};
use crate::net::Url;
use crate::tls::{Connector, Protocol};

/// How often a connection with calls under way is pinged. etcd closes connections that ping more often than every 5 s,
/// and idle ones that ping at all.
const PING_INTERVAL: Duration = Duration::from_secs(10);
/// How long an answer to a ping may take.
const PING_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for TCP, TLS and, with TLS, a first answer.
const OPEN_TIMEOUT: Duration = Duration::from_secs(3);
/// Metadata that etcd may answer with.
const MAX_HEADER_BYTES: u32 = 1 << 20;

/// Receive windows of a connection, in bytes.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveWindow {
    /// Of one stream: what one slow reader can hold.
    pub stream: u32,
}

impl ReceiveWindow {
    /// For answers that are passed on as they come.
    pub const SHARED: ReceiveWindow = ReceiveWindow { stream: 1 << 20 };
    /// For one feed or one load, which is always drained.
    pub const DEDICATED: ReceiveWindow = ReceiveWindow { stream: 8 << 20 };
}

/// Why there is no connection.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// TCP or unix socket.
    #[error("{url}: {source}")]
    Connect {
        /// The endpoint.
        url: Url,
        /// What the system said.
        source: std::io::Error,
    },
    /// HTTP/2.
    #[error("{url}: {source}")]
    Handshake {
        /// The endpoint.
        url: Url,
        /// What hyper said.
        source: hyper::Error,
    },
    /// It was up, and ended before anything was answered.
    #[error("{url}: {reason}")]
    Refused {
        /// The endpoint.
        url: Url,
        /// In words, with what to do.
        reason: String,
    },
    /// No answer in time.
    #[error("no answer in time")]
    TimedOut,
    /// No endpoint is there.
    #[error(transparent)]
    None(#[from] NoEndpoint),
}

impl ConnectError {
    pub(super) fn none(error: NoEndpoint) -> ConnectError {
        ConnectError::None(error)
    }
}

/// Why a call got no response.
#[derive(Debug)]
pub enum SendFailure {
    /// It never left: here it is again, for another connection.
    NotSent(Box<Request<Outgoing>>, hyper::Error),
    /// It may have reached etcd.
    Lost(hyper::Error),
}

/// A live connection. Its driver is somebody else's task; when that ends, calls fail.
#[derive(Debug)]
pub struct Connection {
    url: Url,
    /// Scheme and authority of every request.
    origin: Uri,
    sender: http2::SendRequest<Outgoing>,
    in_flight: AtomicUsize,
    vetted: AtomicBool,
    /// The certificate that was shown on it names a user.
    names_a_user: bool,
    credentials: Arc<Credentials>,
    /// Shared with the endpoint's other connections.
    server: Arc<Server>,
}

/// Counts a call as under way until dropped.
#[derive(Debug)]
pub struct InFlight(Arc<Connection>);

impl InFlight {
    /// Where the call is under way.
    #[must_use]
    pub fn url(&self) -> &Url {
        self.0.url()
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        self.0.in_flight.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Connection {
    /// Connects. The second value drives the connection and ends with it, in words; it must be polled.
    pub(super) async fn open(
        connector: &Connector,
        url: &Url,
        server: &Arc<Server>,
        windows: ReceiveWindow,
        credentials: &Arc<Credentials>,
        deadline: Instant,
    ) -> Result<(Arc<Connection>, impl Future<Output = String> + Send + use<>), ConnectError> {
        let deadline = deadline.min(Instant::now() + OPEN_TIMEOUT);
        let opening =
            async {
                let stream = connector.connect(url, Protocol::Http2).await.map_err(|source| {
                    ConnectError::Connect {
                        url: url.clone(),
                        source,
                    }
                })?;
                let (sender, driver) = http2::Builder::new(TokioExecutor::new())
                    .timer(TokioTimer::new())
                    .initial_stream_window_size(windows.stream)
                    // Streams alone bound what is under way: one that is not read must not stop the others.
                    .initial_connection_window_size((1 << 31) - 1)
                    .max_header_list_size(MAX_HEADER_BYTES)
                    .keep_alive_interval(PING_INTERVAL)
                    .keep_alive_timeout(PING_TIMEOUT)
                    .keep_alive_while_idle(false)
                    .handshake(TokioIo::new(stream))
                    .await
                    .map_err(|source| ConnectError::Handshake {
                        url: url.clone(),
                        source,
                    })?;
                let connection = Arc::new(Connection::new(connector, url, server, credentials, sender));
                let mut driver = Box::pin(async move {
                    match driver.await {
                        Ok(()) => "the connection was closed".to_owned(),
                        Err(error) => in_words(&error),
                    }
                });
                if url.tls {
                    // In TLS 1.3 etcd judges our certificate after the handshake has ended for us: a call must not be the
                    // first to learn that it is refused. Any answer will do.
                    tokio::select! {
                        biased;
                        ended = &mut driver => {
                            let (url, reason) = (url.clone(), connector.explain(url, &ended));
                            return Err(ConnectError::Refused { url, reason });
                        }
                        // As nobody: a token would have to be asked for over a connection first.
                        () = connection.wait_for_any_answer() => {}
                    }
                }
                Ok((connection, driver))
            };
        // It is long, and made rarely.
        Box::pin(tokio::time::timeout_at(deadline, opening))
            .await
            .map_err(|_| ConnectError::TimedOut)?
    }

    fn new(
        connector: &Connector,
        url: &Url,
        server: &Arc<Server>,
        credentials: &Arc<Credentials>,
        sender: http2::SendRequest<Outgoing>,
    ) -> Connection {
        let origin = Uri::builder()
            .scheme(url.scheme())
            .authority(url.authority())
            .path_and_query("/")
            .build()
            .unwrap_or_else(|_| Uri::from_static("http://localhost/"));
        Connection {
            url: url.clone(),
            origin,
            sender,
            in_flight: AtomicUsize::new(0),
            vetted: AtomicBool::new(false),
            names_a_user: connector.names_a_user(),
            credentials: Arc::clone(credentials),
            server: Arc::clone(server),
        }
    }

    /// Whether etcd, with its auth on, takes calls without a token for somebody's: rangecache's own user's, or that of the
    /// certificate.
    #[must_use]
    pub fn may_pass_for_someone(&self) -> bool {
        self.names_a_user || self.credentials.is_configured()
    }

    /// The endpoint.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Calls under way.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.in_flight.load(Ordering::Relaxed)
    }

    pub(super) fn is_live(&self) -> bool {
        !self.sender.is_closed()
    }

    /// Sends `request` to the path that it names; scheme and authority become this endpoint's.
    ///
    /// # Errors
    /// [`SendFailure`], which says whether etcd may have seen it.
    pub async fn send(
        self: &Arc<Self>,
        mut request: Request<Outgoing>,
    ) -> Result<(Response<Incoming>, InFlight), SendFailure> {
        let mut uri = self.origin.clone().into_parts();
        uri.path_and_query = request.uri().path_and_query().cloned().or(uri.path_and_query);
        if let Ok(uri) = Uri::from_parts(uri) {
            *request.uri_mut() = uri;
        }
        self.in_flight.fetch_add(1, Ordering::Relaxed);
        let guard = InFlight(Arc::clone(self));
        match self.sender.clone().try_send_request(request).await {
            Ok(response) => Ok((response, guard)),
            Err(mut failed) => match failed.take_message() {
                Some(request) => Err(SendFailure::NotSent(Box::new(request), failed.into_error())),
                None => Err(SendFailure::Lost(failed.into_error())),
            },
        }
    }

    /// Why RangeStream need not be tried on it, if there is a reason.
    #[must_use]
    pub fn lacks_range_stream(&self) -> Option<NoRangeStream> {
        self.server.no_range_stream()
    }

    /// What it means that the server behind it answered a RangeStream with `Unimplemented` and this text:
    /// [`NoRangeStream::Shape`], or [`NoRangeStream::Unimplemented`], and then its endpoint is not asked again until it
    /// reconnects or its version changes.
    pub fn refused_range_stream(&self, message: &str) -> NoRangeStream {
        let reason = NoRangeStream::of_unimplemented(message);
        if reason == NoRangeStream::Unimplemented && self.server.note_no_range_stream() {
            tracing::info!(endpoint = %self.url, "this endpoint has no RangeStream; it is asked for pages until it \
                reconnects or its version changes");
        }
        reason
    }

    /// A tonic channel over this connection, and the origin that its client wants. Its calls carry no credentials but
    /// what the request itself brings.
    #[must_use]
    pub fn channel(self: &Arc<Self>) -> (Channel, Uri) {
        self.channel_of(false)
    }

    /// The same for calls as rangecache's own user: never for what a client asked for.
    #[must_use]
    pub fn own_channel(self: &Arc<Self>) -> (Channel, Uri) {
        self.channel_of(true)
    }

    fn channel_of(self: &Arc<Self>, own_identity: bool) -> (Channel, Uri) {
        let channel = Channel {
            connection: Arc::clone(self),
            own_identity,
        };
        (channel, self.origin.clone())
    }

    /// rangecache's own identity.
    #[must_use]
    pub fn credentials(&self) -> &Credentials {
        &self.credentials
    }

    /// Asks the member how it is (Maintenance.Status), as rangecache's own user: where auth is on, etcd tells only users.
    ///
    /// # Errors
    /// etcd's status.
    pub async fn ask_own_status(self: &Arc<Self>) -> Result<StatusResponse, tonic::Status> {
        let (channel, origin) = self.own_channel();
        let mut client = MaintenanceClient::with_origin(channel, origin);
        Ok(client.status(StatusRequest {}).await?.into_inner())
    }

    async fn wait_for_any_answer(self: &Arc<Self>) {
        let (channel, origin) = self.channel();
        let mut client = MaintenanceClient::with_origin(channel, origin);
        let _ = client.status(StatusRequest {}).await;
    }

    /// Whether the history of the member behind it was found to be the one that is known. A connection that is made again
    /// may lead to an etcd that was restored meanwhile.
    #[must_use]
    pub fn is_vetted(&self) -> bool {
        self.vetted.load(Ordering::Acquire)
    }

    /// See [`Connection::is_vetted`].
    pub fn set_vetted(&self) {
        self.vetted.store(true, Ordering::Release);
    }
}

/// An error with its causes: hyper's own words name none.
fn in_words(error: &hyper::Error) -> String {
    let mut words = error.to_string();
    let mut cause = std::error::Error::source(error);
    while let Some(next) = cause {
        words = format!("{words}: {next}");
        cause = next.source();
    }
    words
}

/// A connection as the service that tonic's clients call.
#[derive(Clone, Debug)]
pub struct Channel {
    connection: Arc<Connection>,
    /// Whether calls carry the token of rangecache's own user.
    own_identity: bool,
}

impl tower_service::Service<Request<tonic::body::Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Incoming>, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<tonic::body::Body>) -> Self::Future {
        let Channel {
            connection,
            own_identity,
        } = self.clone();
        Box::pin(async move {
            let mut request = request.map(Outgoing::tonic);
            let token = if own_identity {
                connection.credentials.token().await
            } else {
                None
            };
            if let Some(token) = &token {
                request.headers_mut().insert("token", token.clone());
            }
            match connection.send(request).await {
                Ok((response, _in_flight)) => {
                    if own_identity {
                        connection.credentials.judge(token.as_ref(), response.headers());
                    }
                    Ok(response)
                }
                Err(SendFailure::NotSent(_, error) | SendFailure::Lost(error)) => Err(error.into()),
            }
        })
    }
}
