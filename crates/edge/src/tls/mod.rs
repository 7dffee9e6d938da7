//! TLS on both sides: towards etcd ([`Connector`]) and towards clients ([`Acceptor`]).
//!
//! Files are read once before a port is bound and checked for changes every `--tls-reload-interval` (`watched`). New
//! connections use the last files that were valid. Requests never touch this room, only handshakes do.
//!
//! | file | contents |
//! |---|---|
//! | `flags` | the flags |
//! | `connector` | connections to etcd |
//! | `collector` | connections to a collector of traces |
//! | `acceptor` | handshakes with clients, bounded in time and number |
//! | `crypto` | protocol versions, cipher suites, ALPN, verification of certificates beyond rustls' own |
//! | `files`, `facts` | contents of certificate files, and errors in them |
//! | `watched` | files that are replaced while rangecache runs; metrics |
//! | `explain` | error messages for failed handshakes: endpoint, flag, remedy |
//!
//! Uses `net` and `telemetry`.

mod acceptor;
mod collector;
mod connector;
mod crypto;
mod explain;
mod facts;
mod files;
mod flags;
#[cfg(test)]
mod tests;
mod watched;

pub use acceptor::Acceptor;
pub use collector::Collector;
pub use connector::{Connector, NamedConnection, Protocol};
pub use facts::{CertificateFacts, client_common_name};
pub use files::{FileError, look_at_file, warn_of_secret_open_to_others};
pub use flags::{TlsConfig, TlsFlagError, TlsVersion};
pub use watched::TlsMetrics;
