//! Clients' handshakes: bounded in time and in number, each in its connection's own task.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::server::{NoServerSessionStorage, ParsedCertificate, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme,
};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_rustls::TlsAcceptor;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::files::{FileError, Files};
use super::watched::{Made, Watched};
use super::{H2, HTTP_1_1, provider, versions};
use crate::config::Config;
use crate::net::{Plain, Stream};
use crate::telemetry::Metrics;

/// Refused handshakes are told in the log at most this often: anybody can cause one.
const WARN_INTERVAL: Duration = Duration::from_secs(10);
/// With what every TLS connection begins: a handshake record.
const HANDSHAKE_RECORD: u8 = 22;
/// Encrypted bytes that one connection holds: a piece of an answer (128 KiB) is passed on in one go.
const BUFFER_BYTES: usize = 160 << 10;

/// Wraps accepted connections.
pub struct Acceptor {
    current: Arc<Watched<ServerConfig>>,
    turns: Semaphore,
    timeout: Duration,
    reload_interval: Duration,
    metrics: Arc<Metrics>,
    warned: Mutex<Option<Instant>>,
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").finish_non_exhaustive()
    }
}

impl Acceptor {
    /// Reads the files of the flags; `None` if no listener wants TLS.
    ///
    /// # Errors
    /// What is wrong with which file.
    pub fn open(config: &Config, metrics: &Arc<Metrics>) -> Result<Option<Arc<Acceptor>>, FileError> {
        let mut urls = config.listen.urls();
        if !urls.any(|url| url.tls) {
            return Ok(None);
        }
        let flags = config.tls.clone();
        let mut paths = Vec::new();
        for (flag, path) in [
            ("cert-file", &flags.cert_file),
            ("key-file", &flags.key_file),
            ("trusted-ca-file", &flags.trusted_ca_file),
            ("client-crl-file", &flags.client_crl_file),
        ] {
            paths.extend(path.clone().map(|path| (flag, path)));
        }
        let (provider, versions) = (provider(&flags), versions(&flags));
        // Made once: a replaced CA must not change the certificate that stands beside it.
        let own = flags
            .auto_tls
            .then(|| self_signed(config, &provider))
            .transpose()?;
        let allowed_names = flags.client_cert_allowed_hostname.clone();
        let make = move |files: &Files| {
            let mut ends = Vec::new();
            let certified = match (files.get("cert-file"), files.get("key-file"), &own) {
                (Some(cert), Some(key), _) => {
                    let (certified, facts) = cert.with_key(key, &provider)?;
                    ends.push(("cert", facts.not_after_seconds));
                    certified
                }
                (_, _, Some(own)) => own.clone(),
                _ => return Err(FileError::Other("there is no certificate".to_owned())),
            };
            let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(&versions)
                .map_err(|error| FileError::Other(error.to_string()))?;
            let builder = match client_verifier(files, &provider, &allowed_names, &mut ends)? {
                Some(verifier) => builder.with_client_cert_verifier(verifier),
                None => builder.with_no_client_auth(),
            };
            let mut value = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
            value.alpn_protocols = vec![H2.to_vec(), HTTP_1_1.to_vec()];
            // A resumed session would skip the look at the client's certificate and at the revocation list; connections
            // live long, so that little is lost.
            value.session_storage = Arc::new(NoServerSessionStorage {});
            value.send_tls13_tickets = 0;
            Ok(Made { value, ends })
        };
        Ok(Some(Arc::new(Acceptor {
            current: Arc::new(Watched::open("clients", paths, metrics, Box::new(make))?),
            turns: Semaphore::new(config.tls.tls_max_handshakes as usize),
            timeout: config.tls.tls_handshake_timeout,
            reload_interval: config.tls.tls_reload_interval,
            metrics: Arc::clone(metrics),
            warned: Mutex::new(None),
        })))
    }

    /// Looks for replaced files until `stop`; the task is `tasks`' to join.
    pub fn keep_fresh(&self, tasks: &TaskTracker, stop: &CancellationToken) {
        let (current, interval, stop) = (Arc::clone(&self.current), self.reload_interval, stop.clone());
        tasks.spawn(async move { stop.run_until_cancelled(current.keep_fresh(interval)).await });
    }

    /// Shakes hands. `None` means that it did not come to that, which is counted and told in the log.
    pub async fn accept(&self, stream: Plain) -> Option<Stream> {
        let peer = match &stream {
            Either::Left(tcp) => tcp.peer_addr().map(|peer| peer.to_string()).ok(),
            Either::Right(_) => None,
        };
        self.metrics.tls.handshaking.inc();
        let ended = tokio::time::timeout(self.timeout, self.shake_hands(stream)).await;
        self.metrics.tls.handshaking.dec();
        let (result, error) = match ended {
            Ok(Ok(stream)) => {
                self.metrics.tls.record_handshake("ok");
                return Some(stream);
            }
            Ok(Err(error)) => ("refused", error.to_string()),
            Err(_) => (
                "timed_out",
                format!("no handshake within --tls-handshake-timeout {:?}", self.timeout),
            ),
        };
        self.metrics.tls.record_handshake(result);
        let peer = peer.unwrap_or_else(|| "unix socket".to_owned());
        if self.may_warn() {
            tracing::warn!(%peer, error, "a client's TLS handshake failed; see rangecache_tls_handshakes_total for how many");
        } else {
            tracing::debug!(%peer, error, "a client's TLS handshake failed");
        }
        None
    }

    async fn shake_hands(&self, stream: Plain) -> io::Result<Stream> {
        let _turn = self.turns.acquire().await.map_err(io::Error::other)?;
        if let Either::Left(tcp) = &stream {
            // As etcd does: who does not begin with TLS gets no answer, not even an alert.
            let mut first = [0];
            if tcp.peek(&mut first).await? == 1 && first[0] != HANDSHAKE_RECORD {
                return Err(io::Error::other(
                    "it did not begin with TLS; is the client's URL https://?",
                ));
            }
        }
        let acceptor = TlsAcceptor::from(self.current.current());
        let shaking = acceptor.accept_with(stream, |connection| {
            connection.set_buffer_limit(Some(BUFFER_BYTES));
        });
        let stream = shaking.await?;
        Ok(Either::Right(Box::new(stream.into())))
    }

    fn may_warn(&self) -> bool {
        let mut warned = self.warned.lock();
        let may = warned.is_none_or(|last| last.elapsed() >= WARN_INTERVAL);
        if may {
            *warned = Some(Instant::now());
        }
        may
    }
}

/// A certificate for this run, for the hosts that are listened on.
fn self_signed(config: &Config, provider: &CryptoProvider) -> Result<CertifiedKey, FileError> {
    let other = |error: rcgen::Error| FileError::Other(error.to_string());
    let mut names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).into();
    for url in config.listen.urls() {
        if let Some(name) = url.server_name() {
            names.push(name.to_str().into_owned());
        }
    }
    names.sort();
    names.dedup();
    let key = rcgen::KeyPair::generate().map_err(other)?;
    let mut params = rcgen::CertificateParams::new(names).map_err(other)?;
    params.distinguished_name = rcgen::DistinguishedName::new();
    params
        .distinguished_name
        .push(rcgen::DnType::OrganizationName, "rangecache");
    params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ServerAuth];
    let certificate = params.self_signed(&key).map_err(other)?;
    let key = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialize_der()));
    CertifiedKey::from_der(vec![certificate.der().clone()], key, provider)
        .map_err(|error| FileError::Other(error.to_string()))
}

/// What judges clients' certificates; `None` if no CA is given.
fn client_verifier(
    files: &Files,
    provider: &Arc<CryptoProvider>,
    allowed_names: &[String],
    ends: &mut Vec<(&'static str, i64)>,
) -> Result<Option<Arc<dyn ClientCertVerifier>>, FileError> {
    let Some(file) = files.get("trusted-ca-file") else {
        return Ok(None);
    };
    let (authorities, end) = file.authorities()?;
    ends.push(("ca", end));
    let mut builder =
        WebPkiClientVerifier::builder_with_provider(Arc::new(authorities), Arc::clone(provider));
    if let Some(file) = files.get("client-crl-file") {
        let (lists, next_update) = file.revocation_lists()?;
        ends.extend(next_update.map(|end| ("crl", end)));
        // A list speaks of one CA's certificates; those of the others are judged without.
        builder = builder.with_crls(lists).allow_unknown_revocation_status();
    }
    let verifier = builder.build().map_err(|error| {
        let file = files.get("client-crl-file").unwrap_or(file);
        file.wrong(format!(
            "clients' certificates cannot be judged by it: {error}; make it anew"
        ))
    })?;
    if allowed_names.is_empty() {
        return Ok(Some(verifier));
    }
    let names = allowed_names
        .iter()
        .filter_map(|name| ServerName::try_from(name.clone()).ok())
        .collect();
    Ok(Some(Arc::new(Named { verifier, names })))
}

/// Lets only clients in whose certificate is for one of these names, too.
#[derive(Debug)]
struct Named {
    verifier: Arc<dyn ClientCertVerifier>,
    names: Vec<ServerName<'static>>,
}

impl ClientCertVerifier for Named {
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
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, Error> {
        self.verifier.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<rustls::client::danger::HandshakeSignatureValid, Error> {
        self.verifier.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier.supported_verify_schemes()
    }
}
