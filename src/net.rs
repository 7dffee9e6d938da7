//! Addresses and byte streams, for both sides of the proxy.
//!
//! [`Url`] is what a flag may hold; [`Plain`] is what the system accepts and connects; [`Stream`] is what calls go over:
//! a [`Plain`], or one that [`tls`](crate::tls) has wrapped.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;
use tokio_util::either::Either;

/// A connected socket.
pub type Plain = Either<TcpStream, UnixStream>;

/// A connected byte stream. It passes vectored writes through, which the answer path lives on. TLS alone is boxed, so
/// that its state does not make the others large.
pub type Stream = Either<Plain, Box<TlsStream<Plain>>>;

/// How long unacknowledged bytes may be under way before the kernel gives the connection up: what bounds a half-open
/// connection, together with HTTP/2 pings.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(10);

/// How long one address of a name is tried before the next is tried beside it.
const HEAD_START: Duration = Duration::from_millis(250);

/// Where to connect or to listen, and whether with TLS.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Url {
    /// `https://` and `unixs://`.
    pub tls: bool,
    /// Behind the scheme.
    pub address: Address,
}

/// The address of a [`Url`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// `host:port`; port 0 takes a free one when listening.
    Tcp {
        /// Name or address, without the brackets of an IPv6 address.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// `/path` or `path` of a unix socket.
    Unix(PathBuf),
}

/// Why a URL was refused, with what to write instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UrlError {
    /// No `scheme://` in front.
    #[error("{0:?} has no scheme: write http://{0}, or https://{0} for TLS")]
    NoScheme(String),
    /// Some other scheme.
    #[error(
        "{0:?}: unknown scheme: write http://host:port, https://host:port, unix:///path or unixs:///path"
    )]
    Scheme(String),
    /// A host without a port.
    #[error("{0:?} has no port: write {1}://host:port, for example {1}://127.0.0.1:2379")]
    NoPort(String, &'static str),
    /// Not a host and a port.
    #[error("{0:?} is not a host and a port: write {1}://host:port, for example {1}://127.0.0.1:2379")]
    Malformed(String, &'static str),
    /// A unix socket without a path.
    #[error("{0:?} has no path: write unix:///path or unixs:///path")]
    NoPath(String),
    /// Something behind the port.
    #[error("{0:?} has a path: write only {1}://host:port")]
    HasPath(String, &'static str),
}

impl FromStr for Url {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let given = || text.to_owned();
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| UrlError::NoScheme(given()))?;
        let (tls, scheme) = match scheme {
            "http" => (false, "http"),
            "https" => (true, "https"),
            "unix" | "unixs" if rest.is_empty() => return Err(UrlError::NoPath(given())),
            "unix" | "unixs" => {
                return Ok(Url {
                    tls: scheme == "unixs",
                    address: Address::Unix(PathBuf::from(rest)),
                });
            }
            _ => return Err(UrlError::Scheme(given())),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains('/') {
            return Err(UrlError::HasPath(given(), scheme));
        }
        let authority: http::uri::Authority =
            rest.parse().map_err(|_| UrlError::Malformed(given(), scheme))?;
        if rest.contains('@') || authority.host().is_empty() {
            return Err(UrlError::Malformed(given(), scheme));
        }
        let Some(port) = authority.port_u16() else {
            let names_a_port = rest.rsplit(']').next().is_some_and(|tail| tail.contains(':'));
            return Err(if names_a_port {
                UrlError::Malformed(given(), scheme)
            } else {
                UrlError::NoPort(given(), scheme)
            });
        };
        let host = authority
            .host()
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned();
        let address = Address::Tcp { host, port };
        Ok(Url { tls, address })
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.tls { "s" } else { "" };
        match &self.address {
            Address::Tcp { .. } => write!(f, "http{s}://{}", self.authority()),
            Address::Unix(path) => write!(f, "unix{s}://{}", path.display()),
        }
    }
}

impl Url {
    /// What goes into `:authority` of a request to this address.
    #[must_use]
    pub fn authority(&self) -> String {
        match &self.address {
            Address::Tcp { host, port } if host.contains(':') => format!("[{host}]:{port}"),
            Address::Tcp { host, port } => format!("{host}:{port}"),
            Address::Unix(_) => "localhost".to_owned(),
        }
    }

    /// What goes into `:scheme` of a request to this address.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    /// The name that the server's certificate must be for: the host; for a unix socket the name of its file, as in
    /// etcd's own client. `None` if no certificate can be for such a name.
    #[must_use]
    pub fn server_name(&self) -> Option<ServerName<'static>> {
        let name = match &self.address {
            Address::Tcp { host, .. } => host.clone(),
            Address::Unix(path) => path.file_name()?.to_str()?.to_owned(),
        };
        ServerName::try_from(name).ok()
    }
}

/// Connects to `url`, without TLS; names are looked up anew each time.
pub async fn connect(url: &Url) -> io::Result<Plain> {
    match &url.address {
        Address::Tcp { host, port } => {
            let stream = connect_tcp(host, *port).await?;
            tune(&stream)?;
            Ok(Either::Left(stream))
        }
        Address::Unix(path) => Ok(Either::Right(UnixStream::connect(path).await?)),
    }
}

/// Connects to one of a host's addresses. The next one is tried as soon as one refuses, and beside one that is silent
/// (RFC 8305): else an address that is gone would take all the time there is.
async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut addresses = tokio::net::lookup_host((host, port)).await?.peekable();
    let mut attempts = FuturesUnordered::new();
    let mut refusal = io::Error::other("the name has no address");
    loop {
        if let Some(address) = addresses.next() {
            attempts.push(TcpStream::connect(address));
        }
        let has_next = addresses.peek().is_some();
        tokio::select! {
            biased;
            ended = attempts.next() => match ended {
                Some(Ok(stream)) => return Ok(stream),
                Some(Err(error)) => refusal = error,
                None => return Err(refusal),
            },
            () = tokio::time::sleep(HEAD_START), if has_next => {}
        }
    }
}

/// Sets what every TCP connection has, on either side: no delay for small frames, and an end to silence.
pub fn tune(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(Duration::from_secs(15))
            .with_interval(Duration::from_secs(5)),
    )?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(UNACKNOWLEDGED_TIMEOUT))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_that_are_understood() {
        let tcp = |tls, host: &str, port| {
            let host = host.into();
            let address = Address::Tcp { host, port };
            Ok(Url { tls, address })
        };
        assert_eq!("http://127.0.0.1:2379".parse(), tcp(false, "127.0.0.1", 2379));
        assert_eq!("http://etcd.example:0/".parse(), tcp(false, "etcd.example", 0));
        assert_eq!("https://[::1]:2379".parse(), tcp(true, "::1", 2379));
        for (text, tls) in [("unix:///run/etcd.sock", false), ("unixs:///run/etcd.sock", true)] {
            let address = Address::Unix("/run/etcd.sock".into());
            assert_eq!(text.parse(), Ok(Url { tls, address }));
        }
        for text in [
            "http://[::1]:2379",
            "https://a:1",
            "unix:///a/b",
            "unixs:///a/b",
            "unix://a",
        ] {
            assert_eq!(text.parse::<Url>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn the_name_that_a_certificate_must_be_for() {
        let name = |text: &str| {
            let name = text.parse::<Url>().unwrap().server_name();
            name.map(|name| name.to_str().into_owned())
        };
        assert_eq!(name("https://etcd.example:1").as_deref(), Some("etcd.example"));
        assert_eq!(name("https://[::1]:1").as_deref(), Some("::1"));
        assert_eq!(name("unixs:///run/etcd.sock").as_deref(), Some("etcd.sock"));
        assert_eq!(name("unixs:///run/not a name"), None);
    }

    #[test]
    fn urls_that_are_refused_say_what_to_write() {
        for (text, says) in [
            ("127.0.0.1:2379", "write http://127.0.0.1:2379"),
            ("http://127.0.0.1", "has no port"),
            ("https://127.0.0.1", "write https://"),
            ("http://127.0.0.1:99999", "not a host and a port"),
            ("https://:2379", "not a host and a port"),
            ("http://a:1/v3", "has a path"),
            ("ftp://a:1", "unknown scheme"),
            ("unix://", "has no path"),
        ] {
            let error = text.parse::<Url>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
