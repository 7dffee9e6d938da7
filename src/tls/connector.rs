//! Connecting to etcd, with TLS where the URL says so.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::sign::SingleCertAndKey;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio::io::AsyncBufReadExt;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::explain;
use super::facts::{self, Facts};
use super::files::{FileError, Files};
use super::watched::{Made, Watched};
use super::{H2, HTTP_1_1, provider, versions};
use crate::config::Config;
use crate::net::{self, Plain, Stream, Url};
use crate::telemetry::Metrics;

/// How long a server is waited for that speaks only after us.
const FIRST_WORD_TIMEOUT: Duration = Duration::from_millis(100);

/// What will be spoken on a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC.
    Http2,
    /// Health, metrics and the JSON gateway.
    Http1,
}

/// Makes connections to etcd.
pub struct Connector {
    /// `None` when no endpoint wants TLS.
    tls: Option<Tls>,
}

struct Tls {
    current: Arc<Watched<Client>>,
    files: Shown,
    reload_interval: Duration,
}

/// The files, as words for errors.
#[derive(Clone, Debug, Default)]
pub(super) struct Shown {
    pub(super) cacert: Option<PathBuf>,
    pub(super) cert: Option<PathBuf>,
}

struct Client {
    http2: Arc<ClientConfig>,
    http1: Arc<ClientConfig>,
    common_name: Option<String>,
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("tls", &self.tls.is_some())
            .finish()
    }
}

impl Connector {
    /// One that speaks no TLS.
    #[must_use]
    pub fn plaintext() -> Arc<Connector> {
        Arc::new(Connector { tls: None })
    }

    /// Reads the files of the flags.
    ///
    /// # Errors
    /// What is wrong with which file.
    pub fn open(config: &Config, metrics: &Arc<Metrics>) -> Result<Arc<Connector>, FileError> {
        if !config.etcd.endpoints.iter().any(|url| url.tls) {
            return Ok(Connector::plaintext());
        }
        let flags = config.tls.clone();
        let mut paths = Vec::new();
        for (flag, path) in [
            ("cacert", &flags.cacert),
            ("cert", &flags.cert),
            ("key", &flags.key),
        ] {
            paths.extend(path.clone().map(|path| (flag, path)));
        }
        let files = Shown {
            cacert: flags.cacert.clone(),
            cert: flags.cert.clone(),
        };
        let reload_interval = flags.tls_reload_interval;
        let (provider, versions) = (provider(&flags), versions(&flags));
        let make = move |files: &Files| {
            let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(&versions)
                .map_err(|error| FileError::Other(error.to_string()))?;
            let mut ends = Vec::new();
            let builder = if flags.insecure_skip_tls_verify {
                let anybody = Arc::new(Anybody(Arc::clone(&provider)));
                builder.dangerous().with_custom_certificate_verifier(anybody)
            } else {
                let authorities = match files.get("cacert") {
                    Some(file) => {
                        let (store, end) = file.authorities()?;
                        ends.push(("ca", end));
                        store
                    }
                    None => system_authorities()?,
                };
                builder.with_root_certificates(authorities)
            };
            let mut common_name = None;
            let mut http2 = match (files.get("cert"), files.get("key")) {
                (Some(cert), Some(key)) => {
                    let (certified, facts) = cert.with_key(key, &provider)?;
                    ends.push(("cert", facts.not_after_seconds));
                    common_name = facts.common_name;
                    builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified)))
                }
                _ => builder.with_no_client_auth(),
            };
            let mut http1 = http2.clone();
            http2.alpn_protocols = vec![H2.to_vec()];
            http1.alpn_protocols = vec![HTTP_1_1.to_vec()];
            let value = Client {
                http2: Arc::new(http2),
                http1: Arc::new(http1),
                common_name,
            };
            Ok(Made { value, ends })
        };
        if config.tls.insecure_skip_tls_verify {
            tracing::warn!(
                "--insecure-skip-tls-verify: any certificate is taken for etcd's; do not use this in production"
            );
        }
        let tls = Tls {
            current: Arc::new(Watched::open("etcd", paths, metrics, Box::new(make))?),
            files,
            reload_interval,
        };
        Ok(Arc::new(Connector { tls: Some(tls) }))
    }

    /// Looks for replaced files until `stop`; the task is `tasks`' to join.
    pub fn keep_fresh(&self, tasks: &TaskTracker, stop: &CancellationToken) {
        if let Some(tls) = &self.tls {
            let (current, interval, stop) = (Arc::clone(&tls.current), tls.reload_interval, stop.clone());
            tasks.spawn(async move { stop.run_until_cancelled(current.keep_fresh(interval)).await });
        }
    }

    /// The common name in the certificate that is shown to etcd: with its auth on, whom every caller without
    /// credentials of its own acts as.
    #[must_use]
    pub fn common_name(&self) -> Option<String> {
        self.tls.as_ref()?.current.current().common_name.clone()
    }

    /// Whether there is such a name.
    #[must_use]
    pub fn names_a_user(&self) -> bool {
        let names = |tls: &Tls| tls.current.current().common_name.is_some();
        self.tls.as_ref().is_some_and(names)
    }

    /// Connects to `url`, and shakes hands where it is one with TLS.
    ///
    /// # Errors
    /// What the system or the handshake said; of the latter also which flag it is about and what to do.
    pub async fn connect(&self, url: &Url, protocol: Protocol) -> io::Result<Stream> {
        let stream = net::connect(url).await?;
        if !url.tls {
            return Ok(Either::Left(stream));
        }
        let (Some(tls), Some(name)) = (&self.tls, url.server_name()) else {
            return Err(io::Error::other("TLS is not set up"));
        };
        let client = tls.current.current();
        let config = match protocol {
            Protocol::Http2 => &client.http2,
            Protocol::Http1 => &client.http1,
        };
        let shaking = TlsConnector::from(Arc::clone(config)).connect(name, stream);
        match Box::pin(shaking).await {
            Ok(stream) if protocol == Protocol::Http2 && stream.get_ref().1.alpn_protocol() != Some(H2) => {
                Err(io::Error::other(explain::NO_HTTP_2))
            }
            Ok(mut stream) => {
                if protocol == Protocol::Http2 {
                    first_word(&mut stream)
                        .await
                        .map_err(|error| explain::instead_of_a_first_word(error, url, &tls.files))?;
                }
                Ok(Either::Right(Box::new(stream.into())))
            }
            Err(error) => Err(explain::towards_etcd(error, url, &tls.files)),
        }
    }

    /// What the certificate says of itself that is shown at `url`; `None` where no TLS is spoken, or nothing can be read.
    ///
    /// # Errors
    /// As [`Connector::connect`].
    pub async fn look_at_peer(&self, url: &Url) -> io::Result<Option<Facts>> {
        let Either::Right(stream) = self.connect(url, Protocol::Http2).await? else {
            return Ok(None);
        };
        let shown = stream.get_ref().1.peer_certificates();
        Ok(shown
            .and_then(<[_]>::first)
            .and_then(|certificate| facts::of_certificate(certificate).ok()))
    }

    /// Words for what ended a connection to `url` before anything was answered on it.
    pub(crate) fn explain(&self, url: &Url, text: &str) -> String {
        let files = self.tls.as_ref().map(|tls| tls.files.clone());
        explain::after_handshake(text, url, &files.unwrap_or_default())
    }
}

/// Waits for what the server says first, and leaves it to be read. etcd begins HTTP/2 without waiting for us, or says why
/// it refuses our certificate; had we written by then, the failing write would hide that.
async fn first_word(stream: &mut TlsStream<Plain>) -> io::Result<()> {
    match tokio::time::timeout(FIRST_WORD_TIMEOUT, stream.fill_buf()).await {
        Ok(Ok([])) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(Err(error)) => Err(error),
        // A server may also let us begin.
        Ok(Ok(_)) | Err(_) => Ok(()),
    }
}

pub(super) fn system_authorities() -> Result<RootCertStore, FileError> {
    let found = rustls_native_certs::load_native_certs();
    let mut store = RootCertStore::empty();
    // A system's bundle may hold one that is odd; the others count.
    store.add_parsable_certificates(found.certs);
    if store.is_empty() {
        return Err(FileError::NoSystemCas);
    }
    Ok(store)
}

/// A path in words, or what stands for it.
pub(super) fn named(flag: &str, path: Option<&Path>, otherwise: &str) -> String {
    path.map_or_else(
        || otherwise.to_owned(),
        |path| format!("--{flag} {}", path.display()),
    )
}

/// Takes any certificate for etcd's, but not a handshake that its key has not signed.
#[derive(Debug)]
struct Anybody(Arc<CryptoProvider>);

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(
            message,
            certificate,
            signed,
            &self.0.signature_verification_algorithms,
        )
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(
            message,
            certificate,
            signed,
            &self.0.signature_verification_algorithms,
        )
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
