//! TLS on both sides: towards etcd ([`Connector`]) and towards clients ([`Acceptor`]).
//!
//! Files are read once before a port is bound, and looked at again every `--tls-reload-interval` ([`watched`]); what was
//! read last and fits together is what new connections use. Nothing here is on the way of a request: only of a connection.
//!
//! | file | what it is about |
//! |---|---|
//! | `connector` | connecting to etcd |
//! | `collector` | connecting to a collector of traces |
//! | `acceptor` | clients' handshakes, bounded in time and number |
//! | `files`, `facts` | what is in the files, and what is wrong with it |
//! | `watched` | files that are replaced while rangecache runs |
//! | `explain` | a failed handshake in words: which endpoint, which flag, what to do |
//!
//! This room uses `config`, `net` and `telemetry`; `upstream`, `proxy`, `otlp`, `admin` and `main` use it.

mod acceptor;
mod collector;
mod connector;
mod explain;
mod facts;
mod files;
mod watched;

use std::sync::Arc;

use rustls::SupportedProtocolVersion;
use rustls::crypto::{CryptoProvider, aws_lc_rs};

pub use acceptor::Acceptor;
pub use collector::Collector;
pub use connector::{Connector, Protocol};
pub use facts::Facts;
pub use files::{FileError, look_at_file};

use crate::config::{TlsConfig, TlsVersion};

/// HTTP/2 in ALPN.
const H2: &[u8] = b"h2";
/// HTTP/1 in ALPN.
const HTTP_1_1: &[u8] = b"http/1.1";

/// Cryptography with the suites that the flags allow.
fn provider(flags: &TlsConfig) -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: flags.suites(),
        ..aws_lc_rs::default_provider()
    })
}

/// The versions that the flags allow, less those for which they leave no suite.
fn versions(flags: &TlsConfig) -> Vec<&'static SupportedProtocolVersion> {
    let suites = flags.suites();
    [
        (TlsVersion::V1_3, &rustls::version::TLS13),
        (TlsVersion::V1_2, &rustls::version::TLS12),
    ]
    .into_iter()
    .filter(|(version, _)| (flags.tls_min_version..=flags.tls_max_version).contains(version))
    .filter(|(_, supported)| {
        suites
            .iter()
            .any(|suite| suite.version().version == supported.version)
    })
    .map(|(_, supported)| supported)
    .collect()
}
