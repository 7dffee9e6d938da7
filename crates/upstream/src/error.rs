//! Errors of connecting to etcd.

use std::time::Duration;

use rangecache_base::net::Url;

/// No endpoint could be used in time.
#[derive(Clone, Debug, thiserror::Error)]
#[error("no etcd endpoint could be reached within {waited:?}: {causes}")]
pub struct NoEndpoint {
    /// Time spent waiting for a connection.
    pub(super) waited: Duration,
    /// The last error of every endpoint.
    pub(super) causes: String,
}

/// Why a connection could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// TCP, unix socket or TLS.
    #[error("{url}: {source}")]
    Connect {
        /// The endpoint.
        url: Url,
        /// The system's error.
        source: std::io::Error,
    },
    /// HTTP/2.
    #[error("{url}: {source}")]
    Handshake {
        /// The endpoint.
        url: Url,
        /// hyper's error.
        source: hyper::Error,
    },
    /// The connection was opened, and closed before the first response.
    #[error("{url}: {reason}")]
    Refused {
        /// The endpoint.
        url: Url,
        /// Cause and remedy, in words.
        reason: String,
    },
    /// The deadline passed.
    #[error("timed out")]
    TimedOut,
    /// No endpoint is connected.
    #[error(transparent)]
    NoEndpoint(#[from] NoEndpoint),
}
