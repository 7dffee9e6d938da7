//! Protocol versions, cipher suites and ALPN names.

use std::sync::Arc;

use rustls::SupportedProtocolVersion;
use rustls::crypto::{CryptoProvider, aws_lc_rs};

use super::flags::{TlsConfig, TlsVersion};

/// HTTP/2 in ALPN.
pub(super) const H2: &[u8] = b"h2";
/// HTTP/1.1 in ALPN.
pub(super) const HTTP_1_1: &[u8] = b"http/1.1";

/// Cryptography with the cipher suites that the flags enable.
pub(super) fn provider(flags: &TlsConfig) -> Arc<CryptoProvider> {
    Arc::new(CryptoProvider {
        cipher_suites: flags.suites(),
        ..aws_lc_rs::default_provider()
    })
}

/// Versions that the flags enable, without those that have no enabled cipher suite.
pub(super) fn versions(flags: &TlsConfig) -> Vec<&'static SupportedProtocolVersion> {
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
