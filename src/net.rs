//! Addresses and byte streams, for both sides of the proxy.
//!
//! [`Url`] is what a flag may hold; [`Stream`] is what a listener accepts and a connector makes. TLS will wrap a
//! [`Stream`] in [`connect`] and in the listener, and nowhere else.

use std::fmt;
use std::io;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use socket2::{SockRef, TcpKeepalive};
use tokio::net::{TcpStream, UnixStream};
use tokio_util::either::Either;

/// A connected byte stream. It passes vectored writes through, which the answer path lives on.
pub type Stream = Either<TcpStream, UnixStream>;

/// How long unacknowledged bytes may be under way before the kernel gives the connection up: what bounds a half-open
/// connection, together with HTTP/2 pings.
const UNACKNOWLEDGED_TIMEOUT: Duration = Duration::from_secs(10);

/// Where to connect or to listen.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Url {
    /// `http://host:port`; port 0 takes a free one when listening.
    Tcp {
        /// Name or address, without the brackets of an IPv6 address.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// `unix:///path` or `unix://path`.
    Unix(PathBuf),
}

/// Why a URL was refused, with what to write instead.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum UrlError {
    /// No `scheme://` in front.
    #[error("{0:?} has no scheme: write http://{0}")]
    NoScheme(String),
    /// TLS is asked for.
    #[error("{0:?}: this version speaks plaintext only: write http:// or unix://")]
    Tls(String),
    /// Some other scheme.
    #[error("{0:?}: unknown scheme: write http://host:port or unix:///path")]
    Scheme(String),
    /// A host without a port.
    #[error("{0:?} has no port: write http://host:port, for example http://127.0.0.1:2379")]
    NoPort(String),
    /// Not a host and a port.
    #[error("{0:?} is not a host and a port: write http://host:port, for example http://127.0.0.1:2379")]
    Malformed(String),
    /// Something behind the port.
    #[error("{0:?} has a path: write only http://host:port")]
    HasPath(String),
}

impl FromStr for Url {
    type Err = UrlError;

    fn from_str(text: &str) -> Result<Self, UrlError> {
        let given = || text.to_owned();
        let (scheme, rest) = text
            .split_once("://")
            .ok_or_else(|| UrlError::NoScheme(given()))?;
        match scheme {
            "http" => {}
            "unix" if rest.is_empty() => return Err(UrlError::Malformed(given())),
            "unix" => return Ok(Url::Unix(PathBuf::from(rest))),
            "https" | "unixs" => return Err(UrlError::Tls(given())),
            _ => return Err(UrlError::Scheme(given())),
        }
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        if rest.contains('/') {
            return Err(UrlError::HasPath(given()));
        }
        let authority: http::uri::Authority = rest.parse().map_err(|_| UrlError::Malformed(given()))?;
        if rest.contains('@') || authority.host().is_empty() {
            return Err(UrlError::Malformed(given()));
        }
        let Some(port) = authority.port_u16() else {
            let names_a_port = rest.rsplit(']').next().is_some_and(|tail| tail.contains(':'));
            return Err(if names_a_port {
                UrlError::Malformed(given())
            } else {
                UrlError::NoPort(given())
            });
        };
        let host = authority
            .host()
            .trim_start_matches('[')
            .trim_end_matches(']')
            .to_owned();
        Ok(Url::Tcp { host, port })
    }
}

impl fmt::Display for Url {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Url::Tcp { .. } => write!(f, "http://{}", self.authority()),
            Url::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

impl Url {
    /// What goes into `:authority` of a request to this address.
    #[must_use]
    pub fn authority(&self) -> String {
        match self {
            Url::Tcp { host, port } if host.contains(':') => format!("[{host}]:{port}"),
            Url::Tcp { host, port } => format!("{host}:{port}"),
            Url::Unix(_) => "localhost".to_owned(),
        }
    }
}

/// Connects to `url`; names are looked up anew each time.
pub async fn connect(url: &Url) -> io::Result<Stream> {
    match url {
        Url::Tcp { host, port } => {
            let stream = TcpStream::connect((host.as_str(), *port)).await?;
            tune(&stream)?;
            Ok(Either::Left(stream))
        }
        Url::Unix(path) => Ok(Either::Right(UnixStream::connect(path).await?)),
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
        let tcp = |host: &str, port| {
            Ok(Url::Tcp {
                host: host.into(),
                port,
            })
        };
        assert_eq!("http://127.0.0.1:2379".parse(), tcp("127.0.0.1", 2379));
        assert_eq!("http://etcd.example:0/".parse(), tcp("etcd.example", 0));
        assert_eq!("http://[::1]:2379".parse(), tcp("::1", 2379));
        assert_eq!(
            "unix:///run/etcd.sock".parse(),
            Ok(Url::Unix("/run/etcd.sock".into()))
        );
        assert_eq!(
            "http://[::1]:2379".parse::<Url>().unwrap().to_string(),
            "http://[::1]:2379"
        );
    }

    #[test]
    fn urls_that_are_refused_say_what_to_write() {
        for (text, says) in [
            ("127.0.0.1:2379", "write http://127.0.0.1:2379"),
            ("https://127.0.0.1:2379", "plaintext only"),
            ("http://127.0.0.1", "has no port"),
            ("http://127.0.0.1:99999", "not a host and a port"),
            ("http://:2379", "not a host and a port"),
            ("http://a:1/v3", "has a path"),
            ("ftp://a:1", "unknown scheme"),
            ("unix://", "not a host"),
        ] {
            let error = text.parse::<Url>().unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
