//! Listening sockets: TCP or unix, TLS for `https` and `unixs` URLs; HTTP/2 (by ALPN or prior knowledge) and HTTP/1 on one
//! port, as etcd has it.

use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use http::{Request, Response};
use hyper::body::{Body, Incoming};
use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use prometheus_client::metrics::gauge::Gauge;
use tokio::net::{TcpListener, TcpSocket, UnixListener};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::preface::read_preface;
use super::unix;
use super::write_batching::batch_writes;
use crate::net::{self, Address, Plain, Stream, Url};
use crate::panics::restarting;
use crate::tls::Acceptor;

/// Receive window of one stream, in bytes.
const STREAM_WINDOW_BYTES: u32 = 256 << 10;
/// Receive window of a connection, for all of its streams together: what a client can make this process hold without
/// being counted in `--buffer-max-bytes`.
const CONNECTION_WINDOW_BYTES: u32 = 1 << 20;
/// Response bytes queued per stream, in addition to one frame, although its client's window would take more (I5).
const SEND_BUFFER_BYTES: usize = 256 << 10;
/// Bound on a request's metadata: tokens and trace state are far below.
const MAX_HEADER_BYTES: u32 = 1 << 20;
/// Streams that a client may reset before they were handled, before hyper takes it for an attacker and closes the connection.
const MAX_PENDING_RESETS: usize = 1024;
/// Interval of HTTP/2 pings to a silent client, so that half-open connections are closed.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// Time for the client to answer a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Connections that the kernel queues before they are accepted.
const BACKLOG: u32 = 1024;
/// Pause after `accept` failed, for instance because no file descriptors were left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A bound TCP port or unix socket.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    url: Url,
    /// Set exactly if the URL is one with TLS.
    tls: Option<Arc<Acceptor>>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// An executor for hyper that spawns tasks where they are counted and joined.
#[derive(Clone, Debug)]
pub struct Tracked(pub TaskTracker);

impl<F> Executor<F> for Tracked
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    fn execute(&self, future: F) {
        self.0.spawn(future);
    }
}

/// How [`Listener::serve`] serves connections; the same for all listeners of a process.
#[derive(Clone, Debug)]
pub struct ServeConfig {
    /// One permit per open connection.
    pub connections: Arc<Semaphore>,
    /// Connections that are open now.
    pub open: Gauge,
    /// Bound on the calls in flight per HTTP/2 connection.
    pub max_concurrent_streams: u32,
    /// Counts and joins the tasks of connections and calls.
    pub tasks: TaskTracker,
    /// No more connections are taken, and the port is closed.
    pub closing: CancellationToken,
    /// No more calls are taken; calls in flight may finish.
    pub drain: CancellationToken,
}

impl Listener {
    /// Binds `url`; connections use `tls` if the URL is one with TLS. A unix socket's file gets `unix_socket_mode`; a stale socket file
    /// is replaced. With `reuse_port` a TCP port may be bound by other processes at the same time (SO_REUSEPORT), and a unix
    /// socket takes over the name of another process's socket, which keeps serving the connections that it has.
    ///
    /// # Errors
    /// The system's.
    pub async fn bind(
        url: &Url,
        tls: Option<&Arc<Acceptor>>,
        unix_socket_mode: u32,
        reuse_port: bool,
    ) -> io::Result<Listener> {
        let tls = tls.filter(|_| url.tls).cloned();
        if url.tls && tls.is_none() {
            return Err(io::Error::other("TLS is not set up"));
        }
        let (socket, address) = match &url.address {
            Address::Tcp { host, port } => {
                let listener = if reuse_port {
                    bind_shared(host, *port).await?
                } else {
                    TcpListener::bind((host.as_str(), *port)).await?
                };
                let (host, port) = (host.clone(), listener.local_addr()?.port());
                (Socket::Tcp(listener), Address::Tcp { host, port })
            }
            Address::Unix(path) => {
                let listener = if reuse_port {
                    unix::replace(path, unix_socket_mode, BACKLOG).await?
                } else {
                    unix::bind(path, unix_socket_mode, BACKLOG).await?
                };
                (Socket::Unix(listener), url.address.clone())
            }
        };
        let url = Url {
            tls: url.tls,
            address,
        };
        Ok(Listener { socket, url, tls })
    }

    /// The bound URL; port 0 is replaced by the port that the system chose.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// Does the TLS handshakes; `None` without TLS.
    #[must_use]
    pub fn tls(&self) -> Option<Arc<Acceptor>> {
        self.tls.clone()
    }

    /// The next connection, before any handshake. Transient failures (no descriptors left, client gone) are retried.
    pub async fn accept(&self) -> Plain {
        loop {
            let accepted = match &self.socket {
                Socket::Tcp(listener) => listener.accept().await.and_then(|(stream, _)| {
                    net::tune(&stream)?;
                    Ok(Either::Left(stream))
                }),
                Socket::Unix(listener) => listener.accept().await.map(|(stream, _)| Either::Right(stream)),
            };
            match accepted {
                Ok(stream) => return stream,
                Err(error) => {
                    tracing::warn!(%error, "accepting a connection failed");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    /// Serves each connection by a new handler until `closing`, then also those that the kernel has queued by then. A handler gets each
    /// request of its connection, and whether it came over TLS. The port is closed when this returns; calls in flight continue in `tasks`.
    pub async fn serve<N, H, F, B, E>(self, new_handler: N, config: ServeConfig)
    where
        N: Fn() -> H,
        H: Fn(Request<Incoming>, bool) -> F + Clone + Send + 'static,
        F: Future<Output = Result<Response<B>, E>> + Send + 'static,
        B: Body + Send + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
        E: Into<Box<dyn std::error::Error + Send + Sync>> + 'static,
    {
        let server = server(&config);
        let start = |stream, permit| {
            let (tls, server, handler) = (self.tls(), server.clone(), new_handler());
            let connection = serve_connection(stream, permit, tls, server, handler, config.clone());
            config.tasks.spawn(connection);
        };
        let accepting = restarting("listener", async || {
            loop {
                if let Ok(permit) = Arc::clone(&config.connections).acquire_owned().await {
                    start(self.accept().await, permit);
                }
            }
        });
        config.closing.run_until_cancelled(accepting).await;
        while let Ok(permit) = Arc::clone(&config.connections).try_acquire_owned()
            && let Some(stream) = self.accept().now_or_never()
        {
            start(stream, permit);
        }
    }
}

/// Counts a connection as open until dropped.
struct Open(Gauge);

impl Open {
    fn new(open: &Gauge) -> Open {
        open.inc();
        Open(open.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

/// Serves one connection until it is closed, or until its last call has ended after `drain`.
async fn serve_connection<H, F, B, E>(
    stream: Plain,
    permit: OwnedSemaphorePermit,
    tls: Option<Arc<Acceptor>>,
    server: auto::Builder<Tracked>,
    handler: H,
    config: ServeConfig,
) where
    H: Fn(Request<Incoming>, bool) -> F + Clone + Send + 'static,
    F: Future<Output = Result<Response<B>, E>> + Send + 'static,
    B: Body + Send + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let _permit = permit;
    let drain = &config.drain;
    let _open = Open::new(&config.open);
    let over_tls = tls.is_some();
    let Some(stream) = secured(stream, tls, drain).await else {
        return;
    };
    let stream = match drain.run_until_cancelled(read_preface(stream)).await {
        Some(Ok(stream)) => stream,
        Some(Err(error)) => {
            tracing::debug!(%error, "a client did not send the start of a request; its connection is closed");
            return;
        }
        None => return,
    };
    let service = service_fn(move |request| handler(request, over_tls));
    let connection = server.serve_connection_with_upgrades(TokioIo::new(stream), service);
    tokio::pin!(connection);
    let closed = tokio::select! {
        closed = batch_writes(connection.as_mut()) => closed,
        () = drain.cancelled() => {
            connection.as_mut().graceful_shutdown();
            batch_writes(connection.as_mut()).await
        }
    };
    if let Err(error) = closed {
        tracing::debug!(error, "a client's connection was closed");
    }
}

/// Binds a port that other processes may have bound as well: the kernel gives each new connection to one of them.
async fn bind_shared(host: &str, port: u16) -> io::Result<TcpListener> {
    let mut refused = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in tokio::net::lookup_host((host, port)).await? {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        socket.set_reuseaddr(true)?;
        socket.set_reuseport(true)?;
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

/// The connection after its TLS handshake, if it has one. `None` if the handshake fails or is cut off by `stop`.
pub async fn secured(stream: Plain, tls: Option<Arc<Acceptor>>, stop: &CancellationToken) -> Option<Stream> {
    match tls {
        None => Some(Either::Left(stream)),
        Some(tls) => Box::pin(stop.run_until_cancelled(tls.accept(stream))).await?,
    }
}

fn server(config: &ServeConfig) -> auto::Builder<Tracked> {
    let mut server = auto::Builder::new(Tracked(config.tasks.clone()));
    server
        .http2()
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .max_concurrent_streams(config.max_concurrent_streams)
        .initial_stream_window_size(STREAM_WINDOW_BYTES)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_send_buf_size(SEND_BUFFER_BYTES)
        .max_header_list_size(MAX_HEADER_BYTES)
        .max_pending_accept_reset_streams(MAX_PENDING_RESETS)
        .keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT);
    server
        .http1()
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .keep_alive(true);
    server
}
