//! Listening sockets: TCP or unix. Socket files are created with a mode, removed when stale, replaced without a gap.

use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::{io, net::IpAddr, sync::Arc, time::Duration};

use rangecache_base::net::{self, Address, Plain, Url};
use rustix::io::Errno;
use socket2::{Domain, SockAddr, Type};
use tokio::net::{TcpListener, TcpSocket, UnixListener, UnixStream};
use tokio::time::{Instant, sleep};
use tokio_util::either::Either;

use crate::tls::Acceptor;

#[cfg(debug_assertions)]
use rangecache_base::simulated;

/// Time for a client to answer a ping, and to acknowledge bytes: etcd's.
pub(super) const PING_TIMEOUT: Duration = Duration::from_secs(20);
/// Connections that the kernel queues before they are accepted, as far as `net.core.somaxconn` allows. Over it, clients
/// that connect at once, for instance after a restart, would wait a second or more before they try again.
const BACKLOG: u32 = 4096;
/// Pause after `accept` failed because the system had no file descriptor or memory left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Time for a process that does not share its port to end. A kubelet starts a container that ended again after ten
/// seconds, twenty, and so on.
const PORT_TIMEOUT: Duration = Duration::from_secs(60);
/// Interval at which such a port is tried.
const PORT_INTERVAL: Duration = Duration::from_millis(20);

/// A bound TCP port or unix socket.
#[derive(Debug)]
pub struct Listener {
    socket: Socket,
    url: Url,
    /// Set exactly if the URL is one with TLS.
    tls: Option<Arc<Acceptor>>,
    /// Of a unix socket, until it is served.
    file: Option<SocketFile>,
}

#[derive(Debug)]
enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
    #[cfg(debug_assertions)]
    Simulated(parking_lot::Mutex<tokio::sync::mpsc::Receiver<tokio::io::DuplexStream>>),
}

impl Listener {
    /// Binds `url`; connections use `tls` if the URL is one with TLS. A unix socket's file gets `unix_socket_mode`; a
    /// stale socket file is replaced. With `reuse_port` a TCP port may be bound by other processes at the same time
    /// (SO_REUSEPORT), and a unix socket takes over the name of another process's socket, which keeps serving the
    /// connections that it has. A port that another process does not share is waited for, because that process is to end.
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
        #[cfg(debug_assertions)]
        if let Some(connections) = simulated::listen(&url.authority()) {
            return Ok(Listener {
                socket: Socket::Simulated(parking_lot::Mutex::new(connections)),
                url: url.clone(),
                tls,
                file: None,
            });
        }
        let mut file = None;
        let (socket, address) = match &url.address {
            Address::Tcp { host, port } => {
                let listener = if reuse_port {
                    bind_when_free(host, *port).await?
                } else {
                    bind_tcp(host, *port, false).await?
                };
                let (host, port) = (host.clone(), listener.local_addr()?.port());
                (Socket::Tcp(listener), Address::Tcp { host, port })
            }
            Address::Unix(path) => {
                let (listener, created) = if reuse_port {
                    replace_file(path, unix_socket_mode).await?
                } else {
                    bind_file(path, unix_socket_mode).await?
                };
                file = Some(created);
                (Socket::Unix(listener), url.address.clone())
            }
        };
        let url = Url {
            tls: url.tls,
            address,
        };
        Ok(Listener {
            socket,
            url,
            tls,
            file,
        })
    }

    /// Leaves the file of a unix socket in its place when the listener is dropped: it is served from now on.
    pub(super) fn keep_file(&mut self) {
        if let Some(file) = self.file.take() {
            file.keep();
        }
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

    /// The next connection, before any handshake, and the client's address; `None` for a unix socket. While the
    /// system has no file descriptor left, clients wait in the kernel's queue, and `exhausted` is called again and again.
    pub(super) async fn accept(&self, exhausted: impl Fn()) -> (Plain, Option<IpAddr>) {
        loop {
            let accepted = match &self.socket {
                Socket::Tcp(listener) => listener.accept().await.and_then(|(stream, peer)| {
                    net::tune(&stream, PING_TIMEOUT)?;
                    Ok((Either::Left(stream), Some(peer.ip())))
                }),
                Socket::Unix(listener) => {
                    let accepted = listener.accept().await;
                    accepted.map(|(stream, _)| (net::from_unix(stream), None))
                }
                #[cfg(debug_assertions)]
                Socket::Simulated(connections) => {
                    match std::future::poll_fn(|context| connections.lock().poll_recv(context)).await {
                        Some(stream) => Ok((Either::Right(Either::Right(stream)), None)),
                        // Another listener has the address now.
                        None => std::future::pending().await,
                    }
                }
            };
            match accepted {
                Ok(accepted) => return accepted,
                Err(error) if is_exhausted(&error) => {
                    tracing::warn!(%error, "accepting a connection failed");
                    exhausted();
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
                // The client has closed the connection already. It must not delay others.
                Err(error) => tracing::debug!(%error, "a connection ended before it was accepted"),
            }
        }
    }
}

/// Whether `accept` fails until the system has more of something.
fn is_exhausted(error: &io::Error) -> bool {
    matches!(
        Errno::from_io_error(error),
        Some(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM)
    )
}

/// Binds a port that is shared with the processes that share it, and waits until it is free of others.
async fn bind_when_free(host: &str, port: u16) -> io::Result<TcpListener> {
    let started = Instant::now();
    let mut is_waiting = false;
    loop {
        match bind_tcp(host, port, true).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse && started.elapsed() < PORT_TIMEOUT => {
                if !std::mem::replace(&mut is_waiting, true) {
                    tracing::warn!(
                        host,
                        port,
                        seconds = PORT_TIMEOUT.as_secs(),
                        "another process has the port and does not share it; waiting until it ends"
                    );
                }
                sleep(PORT_INTERVAL).await;
            }
            bound => return bound,
        }
    }
}

/// Binds a port. With `reuse_port` other processes may have bound it as well: the kernel gives each new connection to one
/// of them.
async fn bind_tcp(host: &str, port: u16, reuse_port: bool) -> io::Result<TcpListener> {
    let mut refused = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in tokio::net::lookup_host((host, port)).await? {
        let socket = if address.is_ipv4() {
            TcpSocket::new_v4()
        } else {
            TcpSocket::new_v6()
        }?;
        socket.set_reuseaddr(true)?;
        socket.set_reuseport(reuse_port)?;
        match socket.bind(address).and_then(|()| socket.listen(BACKLOG)) {
            Ok(listener) => return Ok(listener),
            Err(error) => refused = error,
        }
    }
    Err(refused)
}

/// Listens at `path`. A socket file that an earlier process left behind is removed; one with a live listener is not.
///
/// # Errors
/// The system's, `AddrInUse` among them.
async fn bind_file(path: &Path, mode: u32) -> io::Result<(UnixListener, SocketFile)> {
    remove_stale(path).await?;
    listen_at(path, mode)
}

/// Listens at a name next to `path`, and then renames it to `path` in one step, so that clients find a listener at any moment.
/// A file that is not a socket is not replaced.
///
/// # Errors
/// The system's.
async fn replace_file(path: &Path, mode: u32) -> io::Result<(UnixListener, SocketFile)> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket()) {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    remove_stale(Path::new(&temporary)).await?;
    let (listener, mut file) = listen_at(Path::new(&temporary), mode)?;
    std::fs::rename(temporary, path)?;
    path.clone_into(&mut file.path);
    Ok((listener, file))
}

/// The file of a listening socket. Dropping it before [`SocketFile::keep`] removes the file, unless another process has
/// replaced it: a start that fails must not leave a socket on which nothing listens.
#[derive(Debug)]
struct SocketFile {
    path: PathBuf,
    inode: Option<u64>,
}

impl SocketFile {
    fn new(path: &Path) -> SocketFile {
        SocketFile {
            path: path.to_owned(),
            inode: inode(path),
        }
    }

    /// Leaves the file to the process that serves: the next one may take its path over at any moment.
    fn keep(mut self) {
        self.inode = None;
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.inode.is_some() && inode(&self.path) == self.inode {
            // The start has failed already, with an error of its own.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|found| found.ino())
}

/// Removes a socket file on which no process listens any more.
async fn remove_stale(path: &Path) -> io::Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket
        && let Err(error) = UnixStream::connect(path).await
        && error.kind() == io::ErrorKind::ConnectionRefused
    {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// Sets the mode between `bind` and `listen`, so that no other user can connect in between.
fn listen_at(path: &Path, mode: u32) -> io::Result<(UnixListener, SocketFile)> {
    let socket = socket2::Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFile::new(path);
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    socket.listen(BACKLOG.cast_signed())?;
    socket.set_nonblocking(true)?;
    Ok((UnixListener::from_std(socket.into())?, file))
}

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use testkit::tls::Ca;
    use tokio::net::{TcpStream, UnixStream};

    use super::*;

    async fn bind(url: &str, reuse_port: bool) -> io::Result<Listener> {
        Listener::bind(&url.parse().unwrap(), None, 0o600, reuse_port).await
    }

    fn port(listener: &Listener) -> u16 {
        match listener.url().address {
            Address::Tcp { port, .. } => port,
            Address::Unix(_) => panic!("no port"),
        }
    }

    /// A path for a socket, in a folder that is removed with the first value.
    fn socket() -> (Ca, PathBuf) {
        let folder = Ca::new();
        let path = folder.path("listener.sock");
        (folder, path)
    }

    async fn bind_unix(path: &Path) -> Listener {
        bind(&format!("unix://{}", path.display()), false).await.unwrap()
    }

    #[tokio::test]
    async fn port_that_is_not_shared_is_waited_for() {
        let alone = bind("http://127.0.0.1:0", false).await.unwrap();
        let url = format!("http://127.0.0.1:{}", port(&alone));
        let refused = bind(&url, false).await.unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::AddrInUse);
        let mut waiting = Box::pin(bind(&url, true));
        let early = tokio::time::timeout(5 * PORT_INTERVAL, &mut waiting).await;
        assert!(early.is_err(), "{early:?}");
        drop(alone);
        let next = waiting.await.unwrap();
        assert_eq!(
            port(&next),
            port(&bind(&url, true).await.unwrap()),
            "it is shared"
        );
    }

    #[tokio::test]
    async fn port_zero_is_replaced_by_the_port_that_clients_reach() {
        let listener = bind("http://127.0.0.1:0", false).await.unwrap();
        let client = TcpStream::connect(("127.0.0.1", port(&listener))).await.unwrap();
        let (stream, address) = listener.accept(|| panic!("exhausted")).await;
        assert_eq!(address, Some(client.local_addr().unwrap().ip()));
        let Either::Left(stream) = stream else {
            panic!("no TCP");
        };
        assert_eq!(stream.peer_addr().unwrap(), client.local_addr().unwrap());
    }

    #[tokio::test]
    async fn bound_port_is_shared_only_if_both_listeners_permit_it() {
        for (first, second, is_shared) in [(false, false, false), (true, false, false), (true, true, true)] {
            let listener = bind("http://127.0.0.1:0", first).await.unwrap();
            let again = bind(&format!("http://127.0.0.1:{}", port(&listener)), second).await;
            let error = again.as_ref().err().map(io::Error::kind);
            let expected = (!is_shared).then_some(io::ErrorKind::AddrInUse);
            assert_eq!(error, expected, "{first} {second}");
        }
    }

    #[tokio::test]
    async fn url_with_tls_is_refused_without_an_acceptor() {
        let refused = bind("https://127.0.0.1:0", false).await;
        assert_eq!(refused.unwrap_err().to_string(), "TLS is not set up");
    }

    #[tokio::test]
    async fn clients_of_a_unix_socket_have_no_address() {
        let (_folder, path) = socket();
        let listener = bind_unix(&path).await;
        let _client = UnixStream::connect(&path).await.unwrap();
        let (_, address) = listener.accept(|| panic!("exhausted")).await;
        assert_eq!(address, None);
    }

    #[tokio::test]
    async fn socket_file_stays_only_once_the_listener_is_served() {
        let (_folder, path) = socket();
        let listener = bind_unix(&path).await;
        assert!(path.exists());
        drop(listener);
        assert!(!path.exists(), "a start that failed has left its socket");
        let mut listener = bind_unix(&path).await;
        listener.keep_file();
        drop(listener);
        assert!(path.exists());
    }

    #[test]
    fn accept_pauses_only_while_the_system_has_too_little() {
        for (error, expected) in [
            (Errno::MFILE, true),
            (Errno::NFILE, true),
            (Errno::NOMEM, true),
            (Errno::CONNABORTED, false),
            (Errno::PERM, false),
        ] {
            assert_eq!(is_exhausted(&error.into()), expected, "{error}");
        }
        assert!(!is_exhausted(&io::Error::other("not the system's")));
    }
}
