//! Handshakes with clients: bounded in time, each in the task of its connection, and computed in turns, so that a
//! storm of them does not delay the requests of connected clients.
//!
//! Sessions are resumed by tickets. A resumed session has no certificate in its handshake: the one of the ticket is
//! verified again, by the same rules as in a full handshake.

use std::task::{Context, Poll, ready};
use std::{fmt, io, pin::Pin, sync::Arc, time::Duration};

use rangecache_base::net::{Plain, Stream, Url};
use rangecache_base::telemetry::{Metrics, metrics::Counted};
use rustls::crypto::{CryptoProvider, aws_lc_rs::Ticketer};
use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::{Acceptor as ClientHello, NoServerSessionStorage, WebPkiClientVerifier};
use rustls::sign::{CertifiedKey, SingleCertAndKey};
use rustls::{HandshakeKind, ServerConfig, ServerConnection, server::danger::ClientCertVerifier};
use tokio::io::{AsyncRead as _, AsyncWriteExt as _, ReadBuf};
use tokio::sync::{Semaphore, watch};
use tokio_rustls::server::StartHandshake;
use tokio_util::{either::Either, sync::CancellationToken, task::TaskTracker};

use super::crypto::{AllowedNames, H2, HTTP_1_1, provider, versions};
use super::files::{FileError, Files};
use super::watched::{LoadedFiles, TlsMetrics, Watched};
use super::{facts, flags::TlsConfig};

/// First byte of every TLS connection: the type of a handshake record.
const HANDSHAKE_RECORD: u8 = 22;
/// Longest first message of a client, in bytes: those of etcd's clients have less than 2 KiB.
const MAX_HELLO_BYTES: usize = 16 << 10;
/// Encrypted bytes buffered for one connection, which no budget counts: as many as the kernel takes at once.
const BUFFER_BYTES: usize = 64 << 10;

/// Completes handshakes on accepted connections.
pub struct Acceptor {
    pub(super) current: Arc<Watched<Server>>,
    turns: Semaphore,
    timeout: Duration,
    reload_interval: Duration,
    metrics: Arc<TlsMetrics>,
}

/// Settings of handshakes with clients.
pub(super) struct Server {
    config: Arc<ServerConfig>,
    /// `None` if clients need no certificate.
    verifier: Option<Arc<dyn ClientCertVerifier>>,
}

impl Server {
    /// Verifies the certificate of a resumed session, which may have expired or been revoked since the ticket was
    /// issued.
    fn verify_resumed(&self, connection: &ServerConnection) -> io::Result<()> {
        let Some(verifier) = &self.verifier else {
            return Ok(());
        };
        if connection.handshake_kind() != Some(HandshakeKind::Resumed) {
            return Ok(());
        }
        let Some([own, intermediates @ ..]) = connection.peer_certificates() else {
            return Err(io::Error::other("the resumed session has no certificate"));
        };
        verifier
            .verify_client_cert(own, intermediates, UnixTime::now())
            .map_err(io::Error::other)?;
        Ok(())
    }
}

impl fmt::Debug for Acceptor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Acceptor").finish_non_exhaustive()
    }
}

impl Acceptor {
    /// Reads the files that the flags name; `None` if no listener uses TLS. `urls` are those of all listeners.
    ///
    /// # Errors
    /// The file that is invalid, and why.
    pub fn open(
        flags: &TlsConfig,
        urls: &[&Url],
        max_handshakes: usize,
        metrics: &Arc<Metrics>,
    ) -> Result<Option<Arc<Acceptor>>, FileError> {
        if !urls.iter().any(|url| url.tls) {
            return Ok(None);
        }
        let (timeout, reload_interval) = (flags.tls_handshake_timeout, flags.tls_reload_interval);
        let flags = flags.clone();
        let mut paths = Vec::new();
        for (flag, path) in [
            ("cert-file", &flags.cert_file),
            ("key-file", &flags.key_file),
            ("trusted-ca-file", &flags.trusted_ca_file),
            ("client-crl-file", &flags.client_crl_file),
        ] {
            paths.extend(path.clone().map(|path| (flag, path)));
        }
        // Made once: a replaced CA must not change the self-signed certificate.
        let own = flags
            .auto_tls
            .then(|| self_signed(urls, &provider(&flags)))
            .transpose()?;
        let load = Box::new(move |files: &Files| load(&flags, own.as_ref(), files));
        Ok(Some(Arc::new(Acceptor {
            current: Arc::new(Watched::open("clients", paths, metrics, load)?),
            turns: Semaphore::new(max_handshakes),
            timeout,
            reload_interval,
            metrics: metrics.group(),
        })))
    }

    /// Spawns a task on `tasks` that reloads replaced files, also at once when `look` changes, until `stop` is cancelled.
    pub fn keep_fresh(&self, tasks: &TaskTracker, look: &watch::Sender<()>, stop: &CancellationToken) {
        let (current, interval) = (Arc::clone(&self.current), self.reload_interval);
        let (look, stop) = (look.subscribe(), stop.clone());
        tasks.spawn(async move { stop.run_until_cancelled(current.keep_fresh(interval, look)).await });
    }

    /// Completes a handshake. `None` if it failed, which is counted and logged.
    pub async fn accept(&self, stream: Plain) -> Option<Stream> {
        let peer = match &stream {
            Either::Left(tcp) => tcp.peer_addr().map(|peer| peer.to_string()).ok(),
            Either::Right(_) => None,
        };
        let counted = Counted::on(&self.metrics.handshaking);
        let ended = tokio::time::timeout(self.timeout, self.handshake(stream)).await;
        drop(counted);
        let (result, error) = match ended {
            Ok(Ok(stream)) => {
                self.metrics.record_handshake("ok");
                return Some(stream);
            }
            Ok(Err(error)) => ("refused", error.to_string()),
            Err(_) => (
                "timed_out",
                format!("no handshake within --tls-handshake-timeout {:?}", self.timeout),
            ),
        };
        self.metrics.record_handshake(result);
        let peer = peer.unwrap_or_else(|| "unix socket".to_owned());
        tracing::warn!(%peer, error,
            "a client's TLS handshake failed; rangecache_tls_handshakes_total counts them");
        None
    }

    async fn handshake(&self, stream: Plain) -> io::Result<Stream> {
        if let Either::Left(tcp) = &stream {
            // As in etcd, a client that does not use TLS gets no response, not even an alert.
            let mut first = [0];
            if tcp.peek(&mut first).await? == 1 && first[0] != HANDSHAKE_RECORD {
                return Err(io::Error::other(
                    "the client does not use TLS; is its URL https://?",
                ));
            }
        }
        // Until its first message is complete, a client costs a buffer and no turn.
        let started = read_hello(stream).await?;
        let server = self.current.current();
        let shaking = started.into_stream_with(Arc::clone(&server.config), |connection| {
            connection.set_buffer_limit(Some(BUFFER_BYTES));
        });
        let stream = self.in_turn(shaking).await?;
        server.verify_resumed(stream.get_ref().1)?;
        Ok(Either::Right(Box::new(stream.into())))
    }

    /// Completes `shaking`. Its first step, which computes keys and a signature, has a turn, and other tasks that are
    /// ready run before the next one's. What follows waits for the client, and has none.
    async fn in_turn<T>(&self, shaking: impl Future<Output = io::Result<T>>) -> io::Result<T> {
        let turn = self.turns.acquire().await.map_err(io::Error::other)?;
        tokio::pin!(shaking);
        let step = std::future::poll_fn(|context| Poll::Ready(shaking.as_mut().poll(context))).await;
        tokio::task::yield_now().await;
        drop(turn);
        match step {
            Poll::Ready(ended) => ended,
            Poll::Pending => shaking.await,
        }
    }
}

/// Reads the first message of a client, which must not be longer than [`MAX_HELLO_BYTES`].
async fn read_hello(mut stream: Plain) -> io::Result<StartHandshake<Plain>> {
    let (mut hello, mut received) = (ClientHello::default(), 0);
    while received < MAX_HELLO_BYTES {
        received += std::future::poll_fn(|cx| poll_hello(&mut hello, &mut stream, cx)).await?;
        match hello.accept() {
            Ok(Some(accepted)) => return Ok(StartHandshake::from_parts(accepted, stream)),
            Ok(None) => {}
            Err((error, mut alert)) => {
                let mut bytes = Vec::new();
                alert.write_all(&mut bytes)?;
                // The client may not be there to read it.
                let _ = stream.write_all(&bytes).await;
                return Err(io::Error::new(io::ErrorKind::InvalidData, error));
            }
        }
    }
    Err(io::Error::other(format!(
        "the client's first message has more than {MAX_HELLO_BYTES} bytes"
    )))
}

/// Reads a piece of a client's first message; returns its length.
fn poll_hello(hello: &mut ClientHello, stream: &mut Plain, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
    // On the stack: a client that sends nothing costs no buffer.
    let mut piece = [0; 4 << 10];
    let mut piece = ReadBuf::new(&mut piece);
    ready!(Pin::new(stream).poll_read(cx, &mut piece))?;
    let mut rest = piece.filled();
    let length = rest.len();
    if length == 0 {
        return Poll::Ready(Err(io::ErrorKind::UnexpectedEof.into()));
    }
    while !rest.is_empty() {
        hello.read_tls(&mut rest)?;
    }
    Poll::Ready(Ok(length))
}

/// Builds the settings of handshakes with clients. `own` is the self-signed certificate of `--auto-tls`.
fn load(
    flags: &TlsConfig,
    own: Option<&CertifiedKey>,
    files: &Files,
) -> Result<LoadedFiles<Server>, FileError> {
    let provider = provider(flags);
    let mut expiries = Vec::new();
    let certified = match (files.get("cert-file"), files.get("key-file"), own) {
        (Some(cert), Some(key), _) => {
            let (certified, facts) = cert.with_key(key, &provider)?;
            expiries.push(("cert", facts.not_after_seconds));
            certified
        }
        (_, _, Some(own)) => own.clone(),
        _ => return Err(FileError::Other("there is no certificate".to_owned())),
    };
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider))
        .with_protocol_versions(&versions(flags))
        .map_err(|error| FileError::Other(error.to_string()))?;
    let allowed_names = &flags.client_cert_allowed_hostname;
    let verifier = client_verifier(files, &provider, allowed_names, &mut expiries)?;
    let builder = match &verifier {
        Some(verifier) => builder.with_client_cert_verifier(Arc::clone(verifier)),
        None => builder.with_no_client_auth(),
    };
    let mut config = builder.with_cert_resolver(Arc::new(SingleCertAndKey::from(certified)));
    config.alpn_protocols = vec![H2.to_vec(), HTTP_1_1.to_vec()];
    // Sessions are in their tickets and cost no memory here. The key is new with every reload, so that tickets of
    // connections under the old files are worthless.
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.ticketer = Ticketer::new().map_err(|error| FileError::Other(error.to_string()))?;
    config.send_tls13_tickets = 1;
    let value = Server {
        config: Arc::new(config),
        verifier,
    };
    Ok(LoadedFiles { value, expiries })
}

/// A self-signed certificate for the hosts of the listeners, valid for this run.
fn self_signed(urls: &[&Url], provider: &CryptoProvider) -> Result<CertifiedKey, FileError> {
    let other = |error: rcgen::Error| FileError::Other(error.to_string());
    let mut names: Vec<String> = ["localhost", "127.0.0.1", "::1"].map(str::to_owned).into();
    for url in urls {
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

/// The verifier of clients' certificates; `None` if no CA is given.
fn client_verifier(
    files: &Files,
    provider: &Arc<CryptoProvider>,
    allowed_names: &[String],
    expiries: &mut Vec<(&'static str, i64)>,
) -> Result<Option<Arc<dyn ClientCertVerifier>>, FileError> {
    let Some(file) = files.get("trusted-ca-file") else {
        return Ok(None);
    };
    let (authorities, expiry) = file.authorities()?;
    expiries.push(("ca", expiry));
    let authorities = Arc::new(authorities);
    let mut builder =
        WebPkiClientVerifier::builder_with_provider(Arc::clone(&authorities), Arc::clone(provider));
    if let Some(file) = files.get("client-crl-file") {
        let (lists, next_update) = file.revocation_lists()?;
        expiries.extend(next_update.map(|expiry| ("crl", expiry)));
        let is_known = |issuer: Vec<u8>| authorities.subjects().iter().any(|name| name.as_ref() == issuer);
        let issuers = lists.iter().filter_map(|list| facts::issuer_of_list(list));
        if !issuers.into_iter().all(is_known) {
            tracing::warn!(
                "the issuer of --client-crl-file is not in --trusted-ca-file; the list counts only for certificates of \
                 an intermediate CA of that name"
            );
        }
        // A list covers the certificates of one CA; those of other CAs are accepted without a list.
        builder = builder.with_crls(lists).allow_unknown_revocation_status();
    }
    let verifier = builder.build().map_err(|error| {
        let file = files.get("client-crl-file").unwrap_or(file);
        file.invalid(format!(
            "clients' certificates cannot be verified with it: {error}; replace it"
        ))
    })?;
    if allowed_names.is_empty() {
        return Ok(Some(verifier));
    }
    let names = allowed_names
        .iter()
        .filter_map(|name| ServerName::try_from(name.clone()).ok())
        .collect();
    Ok(Some(Arc::new(AllowedNames { verifier, names })))
}

#[cfg(test)]
mod tests {
    use rangecache_base::net;
    use rustls::{ClientConfig, ClientConnection, RootCertStore, crypto::aws_lc_rs};
    use tokio::io::AsyncReadExt as _;
    use tokio::net::{TcpListener, TcpStream, UnixStream};

    use super::{super::tests::acceptor, *};

    /// First message of a client.
    fn hello() -> Vec<u8> {
        let config = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(RootCertStore::empty())
            .with_no_client_auth();
        let name = ServerName::try_from("localhost").unwrap();
        let mut hello = Vec::new();
        let mut client = ClientConnection::new(Arc::new(config), name).unwrap();
        client.write_tls(&mut hello).unwrap();
        hello
    }

    /// Result of reading `bytes` as a client's first message, and the response. The client closes its half after them.
    async fn read(bytes: &[u8]) -> (io::Result<()>, Vec<u8>) {
        let (mut near, far) = UnixStream::pair().unwrap();
        let client = async {
            let mut response = Vec::new();
            // What the server leaves unread resets the connection.
            if near.write_all(bytes).await.is_ok() && near.shutdown().await.is_ok() {
                let _ = near.read_to_end(&mut response).await;
            }
            response
        };
        let server = async { read_hello(net::from_unix(far)).await.map(drop) };
        tokio::join!(server, client)
    }

    #[tokio::test]
    async fn first_message_may_arrive_in_pieces() {
        let hello = hello();
        assert!(read(&hello).await.0.is_ok());
        let (mut near, far) = UnixStream::pair().unwrap();
        let mut reading = Box::pin(read_hello(net::from_unix(far)));
        for part in [&hello[..3], &hello[3..hello.len() - 1]] {
            near.write_all(part).await.unwrap();
            assert!(futures_util::poll!(&mut reading).is_pending());
        }
        near.write_all(&hello[hello.len() - 1..]).await.unwrap();
        assert!(reading.await.is_ok());
    }

    #[tokio::test]
    async fn client_that_leaves_during_its_first_message_gets_no_response() {
        let hello = hello();
        for length in [0, 3, hello.len() - 1] {
            let (result, response) = read(&hello[..length]).await;
            assert_eq!(result.unwrap_err().kind(), io::ErrorKind::UnexpectedEof);
            assert!(response.is_empty(), "{response:?}");
        }
    }

    #[tokio::test]
    async fn first_message_over_the_limit_is_refused() {
        // A hello of 60,000 bytes, in records of 1,000.
        let mut bytes = Vec::new();
        let record = |payload: &[u8]| {
            let length = u16::try_from(payload.len()).unwrap().to_be_bytes();
            [&[HANDSHAKE_RECORD, 3, 1], &length[..], payload].concat()
        };
        bytes.extend(record(&[1, 0, 0xea, 0x60]));
        while bytes.len() < MAX_HELLO_BYTES {
            bytes.extend(record(&[0; 1000]));
        }
        let (result, _) = read(&bytes).await;
        let error = result.unwrap_err().to_string();
        assert!(error.contains("more than 16384 bytes"), "{error}");
    }

    /// Refuses like etcd: an HTTP client would read a TLS alert as a response.
    #[tokio::test]
    async fn client_without_tls_gets_the_end_of_its_connection_alone() {
        let acceptor = acceptor(&["--auto-tls"]);
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let mut near = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (far, _) = listener.accept().await.unwrap();
        near.write_all(b"P").await.unwrap();
        assert!(acceptor.accept(Either::Left(far)).await.is_none());
        let mut response = Vec::new();
        let read = near.read_to_end(&mut response).await;
        // What the acceptor has not read resets the connection.
        assert!(response.is_empty(), "{read:?} {response:?}");
    }

    #[tokio::test]
    async fn handshake_that_waits_for_its_client_holds_no_turn() {
        let acceptor = acceptor(&["--auto-tls"]);
        assert_eq!(acceptor.turns.available_permits(), 1);
        let mut waiting = Box::pin(acceptor.in_turn(std::future::pending::<io::Result<()>>()));
        assert!(futures_util::poll!(&mut waiting).is_pending());
        let mut next = Box::pin(acceptor.in_turn(std::future::ready(Ok(1))));
        assert!(
            futures_util::poll!(&mut next).is_pending(),
            "two handshakes computed at once"
        );
        assert!(futures_util::poll!(&mut waiting).is_pending());
        assert_eq!(next.await.unwrap(), 1);
    }
}
