//! **accept**: TCP or unix socket, TLS where the URL says so; HTTP/2 (by ALPN or prior knowledge) and HTTP/1 on one
//! port, as etcd has it.

use std::future::Future;
use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use hyper::rt::Executor;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use socket2::{Domain, SockAddr, Socket as RawSocket, Type};
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::Proxy;
use super::first::first_bytes;
use super::gather::gather;
use super::route::answer;
use crate::net::{self, Address, Plain, Stream, Url};
use crate::panics::restarting;
use crate::tls::Acceptor;

/// How much of a request one stream may have under way: etcd's largest request fits.
const STREAM_WINDOW_BYTES: u32 = 2 << 20;
/// For all streams of a connection together.
const CONNECTION_WINDOW_BYTES: u32 = 16 << 20;
/// Answers queued on a connection beside what its reader's window takes (I5).
const SEND_BUFFER_BYTES: usize = 1 << 20;
/// Metadata of a request: tokens and trace state are well below.
const MAX_HEADER_BYTES: u32 = 1 << 20;
/// Streams that a client may reset before they were looked at, without being taken for an attacker.
const MAX_PENDING_RESETS: usize = 1024;
/// How often a silent client is pinged, so that half-open connections end.
const PING_INTERVAL: Duration = Duration::from_secs(30);
/// How long it may take to answer.
const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Connections that the kernel lets in before they are accepted.
const BACKLOG: u32 = 1024;
/// Pause after an accept failed for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A bound port or socket.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    url: Url,
    /// There exactly if the URL is one with TLS.
    tls: Option<Arc<Acceptor>>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Spawns hyper's tasks where they are counted and joined.
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

impl Listener {
    /// Binds `url`; `tls` shakes hands where it is one with TLS. A unix socket's file gets `unix_socket_mode` and is made
    /// anew: a socket that is left from before is removed if nobody listens on it, and nothing else ever is.
    /// With `reuse_port` a TCP port is bound beside other processes that do so too (SO_REUSEPORT), and a unix socket takes
    /// the place of another, from whose process those keep being served who had connected to it.
    ///
    /// # Errors
    /// What the system says.
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
                    bind_beside(host, *port).await?
                } else {
                    TcpListener::bind((host.as_str(), *port)).await?
                };
                let (host, port) = (host.clone(), listener.local_addr()?.port());
                (Socket::Tcp(listener), Address::Tcp { host, port })
            }
            Address::Unix(path) => {
                let listener = if reuse_port {
                    take_over(path, unix_socket_mode).await?
                } else {
                    remove_left_over(path).await?;
                    bind_unix(path, unix_socket_mode)?
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

    /// Where it listens, with the port that it got.
    #[must_use]
    pub fn url(&self) -> &Url {
        &self.url
    }

    /// What shakes hands with its connections, if it is one with TLS.
    #[must_use]
    pub fn tls(&self) -> Option<Arc<Acceptor>> {
        self.tls.clone()
    }

    /// The next connection, before any handshake. Failures that pass (no descriptors left, a client gone) are waited out.
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

    /// Serves connections, at most as many at once as `room` has permits, until `closing`; those that the kernel has let in
    /// by then are served, too. When this returns the port is closed. With `drain` no new calls are taken, and those under
    /// way are finished by tasks that are `tasks`' to join.
    pub async fn serve(
        self,
        proxy: Arc<Proxy>,
        room: Arc<Semaphore>,
        tasks: TaskTracker,
        closing: CancellationToken,
        drain: CancellationToken,
    ) {
        let serving = Serving {
            tls: self.tls(),
            server: server(&tasks, proxy.max_concurrent_streams),
            proxy,
            tasks,
            drain,
        };
        let accepting = restarting("listener", async || {
            loop {
                if let Ok(permit) = Arc::clone(&room).acquire_owned().await {
                    serving.start(self.accept().await, permit);
                }
            }
        });
        closing.run_until_cancelled(accepting).await;
        while let Ok(permit) = Arc::clone(&room).try_acquire_owned()
            && let Some(stream) = self.accept().now_or_never()
        {
            serving.start(stream, permit);
        }
    }
}

/// What every connection of a listener needs.
struct Serving {
    tls: Option<Arc<Acceptor>>,
    server: auto::Builder<Tracked>,
    proxy: Arc<Proxy>,
    tasks: TaskTracker,
    drain: CancellationToken,
}

/// Counts a connection as open until dropped.
struct Open(Arc<Proxy>);

impl Open {
    fn new(proxy: &Arc<Proxy>) -> Open {
        proxy.telemetry.metrics.connections.open.inc();
        Open(Arc::clone(proxy))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.telemetry.metrics.connections.open.dec();
    }
}

impl Serving {
    /// Serves one connection in a task of its own.
    fn start(&self, stream: Plain, permit: OwnedSemaphorePermit) {
        let (server, drain, tls) = (self.server.clone(), self.drain.clone(), self.tls.clone());
        let open = Open::new(&self.proxy);
        self.tasks.spawn(async move {
            let _permit = permit;
            let over_tls = tls.is_some();
            let Some(stream) = secured(stream, tls, &drain).await else {
                return;
            };
            let opened = match drain.run_until_cancelled(first_bytes(stream)).await {
                Some(Ok(opened)) => opened,
                Some(Err(error)) => {
                    tracing::debug!(%error, "a client said too little");
                    return;
                }
                None => return,
            };
            let calls = Arc::clone(&open.0);
            let service = service_fn(move |request| answer(Arc::clone(&calls), request, over_tls));
            let connection = server.serve_connection_with_upgrades(TokioIo::new(opened), service);
            tokio::pin!(connection);
            let ended = tokio::select! {
                ended = gather(connection.as_mut()) => ended,
                () = drain.cancelled() => {
                    connection.as_mut().graceful_shutdown();
                    gather(connection.as_mut()).await
                }
            };
            if let Err(error) = ended {
                tracing::debug!(error, "a client's connection ended");
            }
        });
    }
}

/// Binds a port that others may be bound to as well: each new connection goes to one of them.
async fn bind_beside(host: &str, port: u16) -> io::Result<TcpListener> {
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

/// The connection as calls go over it. `None` if a handshake fails, or is under way at the stop.
pub async fn secured(stream: Plain, tls: Option<Arc<Acceptor>>, stop: &CancellationToken) -> Option<Stream> {
    match tls {
        None => Some(Either::Left(stream)),
        Some(tls) => Box::pin(stop.run_until_cancelled(tls.accept(stream))).await?,
    }
}

/// Removes a socket on which nobody listens any more.
async fn remove_left_over(path: &Path) -> io::Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket
        && let Err(error) = UnixStream::connect(path).await
        && error.kind() == io::ErrorKind::ConnectionRefused
    {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// Listens beside `path`, and then takes that name in one step, so that at no moment nobody listens there. What is no
/// socket is not replaced.
async fn take_over(path: &Path, mode: u32) -> io::Result<UnixListener> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket()) {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let mut beside = path.as_os_str().to_owned();
    beside.push(format!(".{}", std::process::id()));
    remove_left_over(Path::new(&beside)).await?;
    let listener = bind_unix(Path::new(&beside), mode)?;
    std::fs::rename(beside, path)?;
    Ok(listener)
}

/// Sets the mode before it listens, so that at no moment anybody else can connect.
fn bind_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let socket = RawSocket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&SockAddr::unix(path)?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    socket.listen(BACKLOG.cast_signed())?;
    socket.set_nonblocking(true)?;
    UnixListener::from_std(socket.into())
}

fn server(tasks: &TaskTracker, max_concurrent_streams: u32) -> auto::Builder<Tracked> {
    let mut server = auto::Builder::new(Tracked(tasks.clone()));
    server
        .http2()
        .timer(TokioTimer::new())
        .auto_date_header(false)
        .max_concurrent_streams(max_concurrent_streams)
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
