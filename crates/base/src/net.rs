//! Addresses and byte streams of both sides of the proxy. A leaf.
//!
//! [`Url`] is the value of a flag, [`Plain`] a connected socket, and [`Stream`] a socket with or without TLS, over
//! which calls go.

use std::net::{IpAddr, Ipv6Addr};
use std::{fmt, io, path::PathBuf, str::FromStr, time::Duration};

use futures_util::{StreamExt, stream::FuturesUnordered};
use rustls::pki_types::ServerName;
use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsStream;
use tokio_util::either::Either;

#[cfg(debug_assertions)]
use crate::simulated;

/// A connection within this host: a unix socket.
#[cfg(not(debug_assertions))]
pub type Local = UnixStream;
/// A connection within this host: a unix socket or, in tests, a simulated connection.
#[cfg(debug_assertions)]
pub type Local = Either<UnixStream, tokio::io::DuplexStream>;

/// A connected socket.
pub type Plain = Either<TcpStream, Local>;

/// A connected byte stream. It supports vectored writes, on which the speed of responses depends. Only TLS is boxed, so
/// that its state does not enlarge the other variants.
pub type Stream = Either<Plain, Box<TlsStream<Plain>>>;

/// Transport by which a client's request arrived.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transport {
    /// Whether the connection has TLS.
    pub tls: bool,
    /// Whether the connection came through a unix socket.
    pub unix: bool,
    /// Whether the connection came from this host: through a unix socket, or from a loopback address.
    pub local: bool,
}

/// Address by which a client is named and counted: its IPv4 address, or the network of 64 bits of its IPv6 address. A host is
/// given such a network, and may use all addresses in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientAddress(IpAddr);

impl ClientAddress {
    /// Whether the client is on this host.
    #[must_use]
    pub fn is_loopback(self) -> bool {
        self.0.is_loopback()
    }
}

impl From<IpAddr> for ClientAddress {
    fn from(address: IpAddr) -> ClientAddress {
        ClientAddress(match address.to_canonical() {
            IpAddr::V6(address) if !address.is_loopback() => {
                let network = u128::from(address) >> 64 << 64;
                IpAddr::V6(Ipv6Addr::from(network))
            }
            address => address,
        })
    }
}

impl fmt::Display for ClientAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            IpAddr::V6(network) if !network.is_loopback() => write!(f, "{network}/64"),
            address => write!(f, "{address}"),
        }
    }
}

/// Time that a peer has to answer a ping, and to acknowledge bytes, on a connection that carries calls of clients: as long as any of
/// them waits by its own keepalive, a kube-apiserver (30 s of silence, then 10 s) or etcd's client (10 s, then 20 s). A write whose
/// outcome is unknown must not end before.
pub const SILENCE_TIMEOUT: Duration = Duration::from_secs(30);

/// Time before the next address of a host name is tried in parallel.
const ATTEMPT_DELAY: Duration = Duration::from_millis(250);

/// Address to connect to or to listen on, with or without TLS.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Url {
    /// Whether the scheme is `https://` or `unixs://`.
    pub tls: bool,
    /// The part after the scheme.
    pub address: Address,
}

/// The address of a [`Url`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Address {
    /// `host:port`; when listening, port 0 takes a free port.
    Tcp {
        /// Host name or IP address, without the brackets of an IPv6 address.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// Path of a unix socket, absolute or relative.
    Unix(PathBuf),
}

/// Error in a URL, with what to write instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UrlError {
    /// No `scheme://`.
    #[error("{0:?} has no scheme: write http://{0}, or https://{0} for TLS")]
    NoScheme(String),
    /// An unknown scheme.
    #[error(
        "{0:?}: unknown scheme: write http://host:port, https://host:port, unix:///path or unixs:///path"
    )]
    Scheme(String),
    /// A host without a port.
    #[error("{0:?} has no port: write {1}://host:port, for example {1}://127.0.0.1:2379")]
    NoPort(String, &'static str),
    /// Invalid host or port.
    #[error("{0:?} is not a host and a port: write {1}://host:port, for example {1}://127.0.0.1:2379")]
    Malformed(String, &'static str),
    /// A unix socket without a path.
    #[error("{0:?} has no path: write unix:///path or unixs:///path")]
    NoPath(String),
    /// A path after the port.
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
    /// Value of `:authority` in requests to this address.
    #[must_use]
    pub fn authority(&self) -> String {
        match &self.address {
            Address::Tcp { host, port } if host.contains(':') => format!("[{host}]:{port}"),
            Address::Tcp { host, port } => format!("{host}:{port}"),
            Address::Unix(_) => "localhost".to_owned(),
        }
    }

    /// Value of `:scheme` in requests to this address.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        if self.tls { "https" } else { "http" }
    }

    /// Whether what is sent to this address leaves the machine without TLS. Host names count as other machines, since their
    /// addresses may change; localhost does not.
    #[must_use]
    pub fn is_plaintext_beyond_loopback(&self) -> bool {
        match &self.address {
            Address::Tcp { host, .. } if !self.tls => {
                host != "localhost" && !host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
            }
            _ => false,
        }
    }

    /// Name that must be in the server's certificate: the host, or the file name of a unix socket, as in etcd's client.
    /// `None` if it cannot be in a certificate.
    #[must_use]
    pub fn server_name(&self) -> Option<ServerName<'static>> {
        let name = match &self.address {
            Address::Tcp { host, .. } => host.clone(),
            Address::Unix(path) => path.file_name()?.to_str()?.to_owned(),
        };
        ServerName::try_from(name).ok()
    }
}

/// Connects to `url`, without TLS, and [tunes](tune) the connection. Host names are resolved each time.
pub async fn connect(url: &Url, unacknowledged: Duration) -> io::Result<Plain> {
    match &url.address {
        Address::Tcp { host, port } => {
            #[cfg(debug_assertions)]
            if let Some(connected) = simulated::connect(&url.authority()) {
                return Ok(Either::Right(Either::Right(connected?)));
            }
            let stream = connect_tcp(host, *port).await?;
            tune(&stream, unacknowledged)?;
            Ok(Either::Left(stream))
        }
        Address::Unix(path) => Ok(from_unix(UnixStream::connect(path).await?)),
    }
}

/// A connected unix socket as a [`Plain`].
#[must_use]
pub fn from_unix(stream: UnixStream) -> Plain {
    #[cfg(debug_assertions)]
    let stream = Either::Left(stream);
    Either::Right(stream)
}

/// Connects to one of a host's addresses. The next one is tried as soon as one refuses, and in parallel if one does not
/// respond (RFC 8305): otherwise an unreachable address would use up the timeout.
async fn connect_tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let mut addresses = tokio::net::lookup_host((host, port)).await?.peekable();
    let mut attempts = FuturesUnordered::new();
    let mut refusal = io::Error::other("the host name has no address");
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
            () = tokio::time::sleep(ATTEMPT_DELAY), if has_next => {}
        }
    }
}

/// Sets the options of every TCP connection on either side: no delay for small frames, keepalive, and the time after which the
/// kernel closes it with `unacknowledged` bytes. Together with HTTP/2 pings, that bounds half-open connections.
pub fn tune(stream: &TcpStream, unacknowledged: Duration) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(
        &TcpKeepalive::new()
            .with_time(Duration::from_secs(15))
            .with_interval(Duration::from_secs(5)),
    )?;
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(unacknowledged))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_urls_are_parsed_and_printed_alike() {
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
    fn server_name_is_the_host_or_the_socket_file() {
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
    fn errors_of_invalid_urls_say_what_to_write() {
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
