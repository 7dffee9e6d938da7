//! Protocol versions, cipher suites and ALPN names, and verification of certificates beyond rustls' own: none at all, and by host
//! name for clients.

use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, aws_lc_rs, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, SignatureScheme,
    SupportedProtocolVersion, server::ParsedCertificate,
};

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

/// Accepts every certificate of etcd, for `--insecure-skip-tls-verify`. The handshake must still be signed with the
/// certificate's key.
#[derive(Debug)]
pub(super) struct NoVerification(pub(super) Arc<CryptoProvider>);

impl ServerCertVerifier for NoVerification {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls12_signature(message, certificate, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.0.signature_verification_algorithms;
        verify_tls13_signature(message, certificate, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

/// Accepts clients whose certificate `verifier` accepts and is for one of `names`, for
/// `--client-cert-allowed-hostname`.
#[derive(Debug)]
pub(super) struct AllowedNames {
    pub(super) verifier: Arc<dyn ClientCertVerifier>,
    pub(super) names: Vec<ServerName<'static>>,
}

impl ClientCertVerifier for AllowedNames {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.verifier.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.verifier.verify_client_cert(end_entity, intermediates, now)?;
        let parsed = ParsedCertificate::try_from(end_entity)?;
        let is_for = |name| rustls::client::verify_server_name(&parsed, name).is_ok();
        if self.names.iter().any(is_for) {
            Ok(verified)
        } else {
            Err(CertificateError::NotValidForName.into())
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
