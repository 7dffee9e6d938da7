//! Connections to etcd, with TLS for `https://` and `unixs://`.

use std::sync::{Arc, OnceLock};
use std::{fmt, io, time::Duration};

use rangecache_base::net::{self, Plain, SILENCE_TIMEOUT, Stream, Url};
use rangecache_base::telemetry::{Metrics, clients::ClientName};
use rustls::client::{WebPkiServerVerifier, danger::ServerCertVerifier};
use rustls::pki_types::{ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, HandshakeKind, sign::SingleCertAndKey};
use tokio::{io::AsyncBufReadExt, sync::watch};
use tokio_rustls::{TlsConnector, client::TlsStream};
use tokio_util::{either::Either, sync::CancellationToken, task::TaskTracker};

use super::crypto::{H2, HTTP_1_1, NoVerification, provider, versions};
use super::explain::{self, TlsFilePaths};
use super::facts::{self, CertificateFacts};
use super::files::{FileError, Files, system_authorities};
use super::flags::TlsConfig;
use super::watched::{LoadedFiles, Watched};

/// Time to wait for the first bytes of a server, which may send only after the client does.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_millis(100);

/// Application protocol of a connection to etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// gRPC.
    Http2,
    /// HTTP/1.1: health, metrics and the JSON gateway.
    Http1,
}

/// Makes connections to etcd.
pub struct Connector {
    /// `None` if no endpoint uses TLS.
    tls: Option<Tls>,
}

struct Tls {
    current: Arc<Watched<TlsClient>>,
    files: TlsFilePaths,
    reload_interval: Duration,
    named: NamedConnection,
}

/// Held by a connection whose client certificate has a common name, which etcd may take for a user. The connection keeps
/// that name when the certificate is replaced.
#[derive(Clone, Debug, Default)]
pub struct NamedConnection(Arc<()>);

struct TlsClient {
    http2: Arc<ClientConfig>,
    http1: Arc<ClientConfig>,
    verifier: Arc<dyn ServerCertVerifier>,
    common_name: Option<String>,
}

impl TlsClient {
    /// Verifies the certificate of a resumed session, which may have expired since the ticket was issued.
    fn verify_resumed(&self, name: &ServerName<'_>, connection: &ClientConnection) -> io::Result<()> {
        if connection.handshake_kind() != Some(HandshakeKind::Resumed) {
            return Ok(());
        }
        let Some([own, intermediates @ ..]) = connection.peer_certificates() else {
            return Err(io::Error::other("the resumed session has no certificate"));
        };
        let verified = self
            .verifier
            .verify_server_cert(own, intermediates, name, &[], UnixTime::now());
        verified
            .map(drop)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
    }
}

impl fmt::Debug for Connector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connector")
            .field("tls", &self.tls.is_some())
            .finish()
    }
}

impl Connector {
    /// A connector without TLS.
    #[must_use]
    pub fn plaintext() -> Arc<Connector> {
        Arc::new(Connector { tls: None })
    }

    /// Whether it can connect to endpoints with TLS.
    #[must_use]
    pub fn has_tls(&self) -> bool {
        self.tls.is_some()
    }

    /// Reads the files that the flags name, if any endpoint has TLS. With `names_callers` the common name of the client
    /// certificate must stay the same when its file is replaced.
    ///
    /// # Errors
    /// The file that is invalid, and why.
    pub fn open(
        flags: &TlsConfig,
        endpoints: &[Url],
        names_callers: bool,
        metrics: &Arc<Metrics>,
    ) -> Result<Arc<Connector>, FileError> {
        if !endpoints.iter().any(|url| url.tls) {
            return Ok(Connector::plaintext());
        }
        let flags = flags.clone();
        if flags.insecure_skip_tls_verify {
            tracing::warn!(
                "--insecure-skip-tls-verify: etcd's certificate is not verified; do not use this in production"
            );
        }
        let mut paths = Vec::new();
        for (flag, path) in [
            ("cacert", &flags.cacert),
            ("cert", &flags.cert),
            ("key", &flags.key),
        ] {
            paths.extend(path.clone().map(|path| (flag, path)));
        }
        let files = TlsFilePaths {
            cacert: flags.cacert.clone(),
            cert: flags.cert.clone(),
        };
        let reload_interval = flags.tls_reload_interval;
        let name = OnceLock::new();
        let load = Box::new(move |files: &Files| {
            let loaded = load(&flags, files)?;
            if names_callers {
                keep_name(&name, loaded.value.common_name.as_deref())?;
            }
            Ok(loaded)
        });
        let tls = Tls {
            current: Arc::new(Watched::open("etcd", paths, metrics, load)?),
            files,
            reload_interval,
            named: NamedConnection::default(),
        };
        Ok(Arc::new(Connector { tls: Some(tls) }))
    }

    /// Spawns a task on `tasks` that reloads replaced files, also at once when `look` changes, until `stop` is cancelled.
    pub fn keep_fresh(&self, tasks: &TaskTracker, look: &watch::Sender<()>, stop: &CancellationToken) {
        if let Some(tls) = &self.tls {
            let (current, interval) = (Arc::clone(&tls.current), tls.reload_interval);
            let (look, stop) = (look.subscribe(), stop.clone());
            tasks.spawn(async move { stop.run_until_cancelled(current.keep_fresh(interval, look)).await });
        }
    }

    /// Reads replaced files at once.
    #[cfg(test)]
    pub(super) fn reload(&self) {
        if let Some(tls) = &self.tls {
            tls.current.reload();
        }
    }

    /// Common name of the client certificate. If etcd's auth is on, callers without credentials of their own act as the
    /// user of this name.
    #[must_use]
    pub fn common_name(&self) -> Option<String> {
        self.tls.as_ref()?.current.current().common_name.clone()
    }

    /// Whether the client certificate has a common name, or that of an open connection has.
    #[must_use]
    pub fn names_a_user(&self) -> bool {
        let names =
            |tls: &Tls| tls.current.current().common_name.is_some() || Arc::strong_count(&tls.named.0) > 1;
        self.tls.as_ref().is_some_and(names)
    }

    /// Connects to `url`, with TLS if the URL asks for it, and with [`SILENCE_TIMEOUT`] for unacknowledged bytes.
    ///
    /// # Errors
    /// The error of the socket or of the handshake; the latter names the flag and the remedy.
    pub async fn connect(&self, url: &Url, protocol: Protocol) -> io::Result<Stream> {
        Ok(self.connect_named(url, protocol, SILENCE_TIMEOUT).await?.0)
    }

    /// [`Connector::connect`] with a time for the peer to acknowledge bytes, also with what the connection has to hold if its client
    /// certificate has a common name.
    ///
    /// # Errors
    /// Those of [`Connector::connect`].
    pub async fn connect_named(
        &self,
        url: &Url,
        protocol: Protocol,
        unacknowledged: Duration,
    ) -> io::Result<(Stream, Option<NamedConnection>)> {
        let stream = net::connect(url, unacknowledged).await?;
        self.handshake(url, protocol, stream).await
    }

    /// Completes the handshake with `url` on a connected socket.
    pub(super) async fn handshake(
        &self,
        url: &Url,
        protocol: Protocol,
        stream: Plain,
    ) -> io::Result<(Stream, Option<NamedConnection>)> {
        if !url.tls {
            return Ok((Either::Left(stream), None));
        }
        let (Some(tls), Some(name)) = (&self.tls, url.server_name()) else {
            return Err(io::Error::other("TLS is not configured"));
        };
        let client = tls.current.current();
        // The files may be replaced during the handshake.
        let named = client.common_name.is_some().then(|| tls.named.clone());
        let config = match protocol {
            Protocol::Http2 => &client.http2,
            Protocol::Http1 => &client.http1,
        };
        let shaking = TlsConnector::from(Arc::clone(config)).connect(name.clone(), stream);
        match Box::pin(shaking).await {
            Ok(stream) if protocol == Protocol::Http2 && stream.get_ref().1.alpn_protocol() != Some(H2) => {
                Err(io::Error::other(explain::NO_HTTP_2))
            }
            Ok(mut stream) => {
                client
                    .verify_resumed(&name, stream.get_ref().1)
                    .map_err(|error| explain::towards_etcd(error, url, &tls.files))?;
                if protocol == Protocol::Http2 {
                    first_bytes(&mut stream)
                        .await
                        .map_err(|error| explain::no_first_bytes(error, url, &tls.files))?;
                }
                Ok((Either::Right(Box::new(stream.into())), named))
            }
            Err(error) => Err(explain::towards_etcd(error, url, &tls.files)),
        }
    }

    /// The facts of the certificate that the server at `url` presents; `None` without TLS, or if it cannot be parsed.
    ///
    /// # Errors
    /// The errors of [`Connector::connect`].
    pub async fn look_at_peer(&self, url: &Url) -> io::Result<Option<CertificateFacts>> {
        let Either::Right(stream) = self.connect(url, Protocol::Http2).await? else {
            return Ok(None);
        };
        let shown = stream.get_ref().1.peer_certificates();
        Ok(shown
            .and_then(<[_]>::first)
            .and_then(|certificate| facts::of_certificate(certificate).ok()))
    }

    /// Explains why a connection to `url` was closed before the first response.
    pub fn explain(&self, url: &Url, text: &str) -> String {
        let files = self.tls.as_ref().map(|tls| tls.files.clone());
        explain::after_handshake(text, url, &files.unwrap_or_default())
    }
}

/// Checks that callers can be compared with the certificate's `common_name`, and that it is the one of the first
/// certificate. Open connections keep theirs, so that with another name etcd would take one call for that of the former
/// user and the next for that of the new one.
fn keep_name(first: &OnceLock<String>, common_name: Option<&str>) -> Result<(), FileError> {
    let other = |text: String| Err(FileError::Other(text));
    let Some(name) = common_name.filter(|name| ClientName::may_be_certificate(name)) else {
        return other(
            "--caller-is=certificate: the certificate in --cert has no common name of at most 124 bytes, by which callers \
             could be known; give one with the name of a user of etcd"
                .to_owned(),
        );
    };
    let first = first.get_or_init(|| name.to_owned());
    if first != name {
        return other(format!(
            "--caller-is=certificate: the certificate in --cert has the common name {name:?} instead of {first:?}; restart \
             rangecache to answer callers of another name"
        ));
    }
    Ok(())
}

/// Builds the settings of connections to etcd.
fn load(flags: &TlsConfig, files: &Files) -> Result<LoadedFiles<TlsClient>, FileError> {
    let provider = provider(flags);
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&versions(flags))
        .map_err(|error| FileError::Other(error.to_string()))?;
    let mut expiries = Vec::new();
    let verifier: Arc<dyn ServerCertVerifier> = if flags.insecure_skip_tls_verify {
        Arc::new(NoVerification(Arc::clone(&provider)))
    } else {
        let authorities = match files.get("cacert") {
            Some(file) => {
                let (store, expiry) = file.authorities()?;
                expiries.push(("ca", expiry));
                store
            }
            None => system_authorities()?,
        };
        WebPkiServerVerifier::builder_with_provider(Arc::new(authorities), Arc::clone(&provider))
            .build()
            .map_err(|error| FileError::Other(error.to_string()))?
    };
    let builder = builder
        .dangerous()
        .with_custom_certificate_verifier(Arc::clone(&verifier));
    let mut common_name = None;
    let mut http2 = match (files.get("cert"), files.get("key")) {
        (Some(cert), Some(key)) => {
            let (certified, facts) = cert.with_key(key, &provider)?;
            expiries.push(("cert", facts.not_after_seconds));
            common_name = facts.common_name;
            builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified)))
        }
        _ => builder.with_no_client_auth(),
    };
    let mut http1 = http2.clone();
    http2.alpn_protocols = vec![H2.to_vec()];
    http1.alpn_protocols = vec![HTTP_1_1.to_vec()];
    let value = TlsClient {
        http2: Arc::new(http2),
        http1: Arc::new(http1),
        verifier,
        common_name,
    };
    Ok(LoadedFiles { value, expiries })
}

/// Waits for the first bytes of the server, and leaves them in the buffer. etcd starts HTTP/2 without waiting for the
/// client, or sends an alert that refuses the client's certificate; a write before that would fail and hide the alert.
async fn first_bytes(stream: &mut TlsStream<Plain>) -> io::Result<()> {
    match tokio::time::timeout(FIRST_BYTES_TIMEOUT, stream.fill_buf()).await {
        Ok(Ok([])) => Err(io::ErrorKind::UnexpectedEof.into()),
        Ok(Err(error)) => Err(error),
        // A server may also wait for the client.
        Ok(Ok(_)) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use rustls::{ServerConfig, crypto::aws_lc_rs, pki_types::PrivatePkcs8KeyDer};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::UnixStream;
    use tokio_rustls::{TlsAcceptor, server::TlsStream as ServerStream};

    use super::{super::tests::connector, *};

    /// Result of a connection over HTTP/2 to a server that selects one of `protocols`, and then does what `serve` says.
    async fn connect(
        protocols: &[&[u8]],
        serve: impl AsyncFnOnce(ServerStream<UnixStream>),
    ) -> io::Result<Stream> {
        let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
        let key = PrivatePkcs8KeyDer::from(made.signing_key.serialize_der());
        let mut config = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key.into())
            .unwrap();
        config.alpn_protocols = protocols.iter().map(|name| name.to_vec()).collect();
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let (near, far) = UnixStream::pair().unwrap();
        let (connector, url) = (
            connector(&["--insecure-skip-tls-verify"]),
            "https://localhost:1".parse().unwrap(),
        );
        let (connected, ()) = tokio::join!(
            connector.handshake(&url, Protocol::Http2, net::from_unix(near)),
            async {
                // The client may have refused the server meanwhile.
                if let Ok(stream) = acceptor.accept(far).await {
                    serve(stream).await;
                }
            }
        );
        connected.map(|(stream, _)| stream)
    }

    #[tokio::test]
    async fn server_without_http_2_is_refused() {
        let error = connect(&[], async |_| {}).await.unwrap_err();
        assert_eq!(error.to_string(), explain::NO_HTTP_2);
    }

    #[tokio::test]
    async fn first_bytes_of_the_server_are_left_for_the_connection() {
        let connected = connect(&[H2], async |mut server| {
            server.write_all(b"settings").await.unwrap();
            server.shutdown().await.unwrap();
        });
        let mut read = Vec::new();
        connected.await.unwrap().read_to_end(&mut read).await.unwrap();
        assert_eq!(read, b"settings");
    }

    #[tokio::test]
    async fn server_that_closes_the_connection_after_the_handshake_is_refused() {
        let error = connect(&[H2], async |mut server| server.shutdown().await.unwrap());
        let error = error.await.unwrap_err().to_string();
        assert!(error.contains("right after the TLS handshake"), "{error}");
    }

    #[tokio::test]
    async fn server_that_waits_for_the_client_is_connected() {
        let (done, may_end) = tokio::sync::oneshot::channel::<()>();
        let (connected, ()) = tokio::join!(
            async {
                let connected = connect(&[H2], async |server| {
                    let _ = may_end.await;
                    drop(server);
                });
                connected.await
            },
            async {
                // Longer than the connector waits for first bytes.
                tokio::time::sleep(FIRST_BYTES_TIMEOUT * 2).await;
                drop(done);
            }
        );
        assert!(connected.is_ok(), "{connected:?}");
    }

    #[tokio::test]
    async fn url_with_tls_needs_a_connector_with_tls() {
        let (near, _far) = UnixStream::pair().unwrap();
        let url = "https://localhost:1".parse().unwrap();
        let connected = Connector::plaintext()
            .handshake(&url, Protocol::Http2, net::from_unix(near))
            .await;
        assert_eq!(connected.unwrap_err().to_string(), "TLS is not configured");
    }

    #[test]
    fn certificate_by_which_callers_are_known_keeps_its_name() {
        let first = OnceLock::new();
        let missing = keep_name(&first, None).unwrap_err().to_string();
        assert!(missing.contains("has no common name"), "{missing}");
        let long = keep_name(&first, Some(&"a".repeat(125))).unwrap_err().to_string();
        assert!(long.contains("at most 124 bytes"), "{long}");
        keep_name(&first, Some("root")).unwrap();
        keep_name(&first, Some("root")).unwrap();
        let other = keep_name(&first, Some("kube")).unwrap_err().to_string();
        assert!(other.contains("\"kube\" instead of \"root\""), "{other}");
    }
}
