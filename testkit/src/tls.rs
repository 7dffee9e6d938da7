//! CAs and certificates of every kind, etcd with TLS, and TLS connections.

use std::error::Error;
use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use ::http::Method;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DistinguishedName, DnType, DnValue,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose, RevokedCertParams,
    SerialNumber, date_time_ymd,
};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::CryptoProvider;
use rustls::crypto::aws_lc_rs;
use rustls::pki_types::UnixTime;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme, SupportedProtocolVersion};
use tempfile::TempDir;
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use crate::etcd::{Version, free_port};
use crate::grpc::Client;
use crate::http;
use crate::process::Process;
use crate::wait::{SOON, until};

type AnyError = Box<dyn Error + Send + Sync>;
type Socket = Either<TcpStream, UnixStream>;

/// Properties of a certificate to issue.
pub struct Leaf<'a> {
    pub names: &'a [&'a str],
    pub common_name: Option<&'a str>,
    pub serial: u64,
    pub expired: bool,
    /// Time until it expires, if not for long.
    pub expires_in: Option<Duration>,
    /// Encoding of the common name.
    pub encoding: Encoding,
}

/// Encoding of a name in a certificate.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Encoding {
    Utf8,
    /// Latin letters of older certificates.
    T61,
    /// Two bytes per letter.
    Bmp,
}

impl Default for Leaf<'_> {
    fn default() -> Self {
        Leaf {
            names: &["127.0.0.1", "localhost", "rangecache.sock", "etcd.sock"],
            common_name: None,
            serial: 7,
            expired: false,
            expires_in: None,
            encoding: Encoding::Utf8,
        }
    }
}

/// A CA, with a folder for the certificates that it issues.
pub struct Ca {
    issuer: Issuer<'static, KeyPair>,
    dir: TempDir,
}

/// Paths of a certificate and its key.
#[derive(Clone)]
pub struct Pair {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Default for Ca {
    fn default() -> Self {
        Self::new()
    }
}

impl Ca {
    pub fn new() -> Self {
        Self::named("a CA of the tests")
    }

    /// A CA of this name.
    pub fn named(name: &str) -> Self {
        let dir = TempDir::with_prefix("rangecache-ca-").unwrap();
        let key = KeyPair::generate().unwrap();
        let mut params = CertificateParams::default();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
        params.distinguished_name = named(DnType::OrganizationName, name);
        let certificate = params.self_signed(&key).unwrap();
        std::fs::write(dir.path().join("ca.crt"), certificate.pem()).unwrap();
        let issuer = Issuer::new(params, key);
        Self { issuer, dir }
    }

    /// Path of the CA's certificate.
    pub fn cert(&self) -> PathBuf {
        self.dir.path().join("ca.crt")
    }

    /// Path of a file of that name in the CA's folder.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Issues a certificate for servers and clients; replaces an earlier one of that name.
    pub fn issue(&self, name: &str, leaf: &Leaf<'_>) -> Pair {
        let key = KeyPair::generate().unwrap();
        let names: Vec<_> = leaf.names.iter().map(|name| (*name).to_owned()).collect();
        let mut params = CertificateParams::new(names).unwrap();
        params.distinguished_name = leaf.common_name.map_or_else(
            || named(DnType::OrganizationName, "a test"),
            |name| named_as(DnType::CommonName, name, leaf.encoding),
        );
        params.extended_key_usages = vec![
            ExtendedKeyUsagePurpose::ServerAuth,
            ExtendedKeyUsagePurpose::ClientAuth,
        ];
        params.serial_number = Some(SerialNumber::from(leaf.serial));
        if leaf.expired {
            params.not_after = date_time_ymd(2020, 1, 1);
        }
        if let Some(expires_in) = leaf.expires_in {
            params.not_after = (SystemTime::now() + expires_in).into();
        }
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        let pair = Pair {
            cert: self.path(&format!("{name}.crt")),
            key: self.path(&format!("{name}.key")),
        };
        replace(&pair.cert, &certificate.pem());
        replace(&pair.key, &key.serialize_pem());
        pair
    }

    /// Writes the certificate revocation list with these serials, and returns its path.
    pub fn revoke(&self, serials: &[u64]) -> PathBuf {
        let revoked = serials.iter().map(|serial| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        });
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2100, 1, 1),
            crl_number: SerialNumber::from(1u64),
            issuing_distribution_point: None,
            revoked_certs: revoked.collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let path = self.path("revoked.crl");
        let list = list.signed_by(&self.issuer).unwrap();
        replace(&path, &list.pem().unwrap());
        // etcd reads the DER form.
        std::fs::write(self.path("revoked.der"), list.der()).unwrap();
        path
    }
}

/// Replaces a file atomically, like tools that rotate certificates. Only its owner may read it.
pub fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, text).unwrap();
    std::fs::set_permissions(&new, Permissions::from_mode(0o600)).unwrap();
    std::fs::rename(&new, path).unwrap();
}

fn named_as(kind: DnType, value: &str, encoding: Encoding) -> DistinguishedName {
    let value = match encoding {
        Encoding::Utf8 => DnValue::Utf8String(value.to_owned()),
        Encoding::T61 => DnValue::TeletexString(value.try_into().unwrap()),
        Encoding::Bmp => DnValue::BmpString(value.try_into().unwrap()),
    };
    let mut name = DistinguishedName::new();
    name.push(kind, value);
    name
}

fn named(kind: DnType, value: &str) -> DistinguishedName {
    let mut name = DistinguishedName::new();
    name.push(kind, value);
    name
}

/// CA and client certificate of a test client.
#[derive(Clone)]
pub struct Trust {
    /// `None` accepts any server certificate.
    pub ca: Option<PathBuf>,
    pub pair: Option<Pair>,
    pub versions: Vec<&'static SupportedProtocolVersion>,
}

impl Trust {
    pub fn new(ca: &Ca) -> Self {
        Trust {
            ca: Some(ca.cert()),
            pair: None,
            versions: vec![&rustls::version::TLS13, &rustls::version::TLS12],
        }
    }

    /// Accepts any server certificate.
    pub fn accept_any(mut self) -> Self {
        self.ca = None;
        self
    }

    /// Allows one TLS version only.
    pub fn only(mut self, version: &'static SupportedProtocolVersion) -> Self {
        self.versions = vec![version];
        self
    }

    /// Sends this client certificate.
    pub fn with(mut self, pair: &Pair) -> Self {
        self.pair = Some(pair.clone());
        self
    }

    fn config(&self, alpn: &[&str]) -> ClientConfig {
        let mut roots = RootCertStore::empty();
        if let Some(ca) = &self.ca {
            roots.add(CertificateDer::from_pem_file(ca).unwrap()).unwrap();
        }
        let provider = Arc::new(aws_lc_rs::default_provider());
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_protocol_versions(&self.versions)
            .unwrap();
        let builder = if self.ca.is_some() {
            builder.with_root_certificates(roots)
        } else {
            builder
                .dangerous()
                .with_custom_certificate_verifier(Arc::new(NoVerification(provider)))
        };
        let mut config = match &self.pair {
            Some(pair) => {
                let chain = CertificateDer::pem_file_iter(&pair.cert)
                    .unwrap()
                    .map(Result::unwrap)
                    .collect();
                let key = PrivateKeyDer::from_pem_file(&pair.key).unwrap();
                builder.with_client_auth_cert(chain, key).unwrap()
            }
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        config
    }
}

/// Connects a socket of any of the four schemes, without a handshake; returns it with the host name to verify.
async fn socket(url: &str) -> Result<(Socket, String), AnyError> {
    let (scheme, rest) = url.split_once("://").unwrap();
    if scheme.starts_with("unix") {
        let name = Path::new(rest).file_name().unwrap().to_str().unwrap();
        return Ok((Either::Right(UnixStream::connect(rest).await?), name.to_owned()));
    }
    let tcp = timeout(SOON, TcpStream::connect(rest)).await??;
    tcp.set_nodelay(true)?;
    let host = rest.rsplit_once(':').unwrap().0;
    Ok((Either::Left(tcp), host.to_owned()))
}

/// Connects to `https://` or `unixs://`, and completes the TLS handshake.
pub async fn handshake(url: &str, trust: &Trust, alpn: &[&str]) -> Result<TlsStream<Socket>, AnyError> {
    let (socket, host) = socket(url).await?;
    let connector = TlsConnector::from(Arc::new(trust.config(alpn)));
    Ok(timeout(SOON, connector.connect(ServerName::try_from(host)?, socket)).await??)
}

fn is_tls(url: &str) -> bool {
    url.starts_with("https://") || url.starts_with("unixs://")
}

/// Opens a gRPC connection to a URL of any scheme.
pub async fn try_connect(url: &str, trust: &Trust) -> Result<Client, AnyError> {
    if is_tls(url) {
        let stream = handshake(url, trust, &["h2"]).await?;
        return Client::over(stream, "https://localhost").await;
    }
    Client::over(socket(url).await?.0, "http://localhost").await
}

/// Like [`try_connect`], retrying until a call succeeds.
pub async fn connect(url: &str, trust: &Trust) -> Client {
    until(SOON, &format!("a connection to {url}"), async || {
        let client = try_connect(url, trust).await.ok()?;
        client.status().await.ok()?;
        Some(client)
    })
    .await
    .0
}

/// Sends one HTTP/1 request to a URL of any scheme.
pub async fn call_http(
    url: &str,
    trust: &Trust,
    method: Method,
    path: &str,
    body: &str,
) -> Result<http::Response, String> {
    let body = body.to_owned();
    if is_tls(url) {
        let stream = handshake(url, trust, &["http/1.1"])
            .await
            .map_err(|e| e.to_string())?;
        return http::over(stream, method, "localhost", path, body).await;
    }
    let (stream, _) = socket(url).await.map_err(|e| e.to_string())?;
    http::over(stream, method, "localhost", path, body).await
}

/// etcd with the caller's client URL scheme and TLS flags.
pub struct SecureEtcd {
    process: Process,
    _dir: TempDir,
    url: String,
}

impl SecureEtcd {
    /// Starts it on a free port with `scheme` and `flags`; returns once a client with `trust` gets a response.
    pub async fn start(scheme: &str, flags: &[&str], trust: &Trust) -> Self {
        Self::start_version(Version::V3_7, scheme, flags, trust).await
    }

    pub async fn start_version(version: Version, scheme: &str, flags: &[&str], trust: &Trust) -> Self {
        let dir = TempDir::with_prefix("rangecache-etcd-").unwrap();
        let url = if scheme.starts_with("unix") {
            format!("{scheme}://{}", dir.path().join("etcd.sock").display())
        } else {
            format!("{scheme}://127.0.0.1:{}", free_port())
        };
        // Members must announce a URL with a port, though no client uses it in this setup.
        let announced = if scheme.starts_with("unix") {
            "http://127.0.0.1:1"
        } else {
            &url
        };
        let peer = format!("http://127.0.0.1:{}", free_port());
        let mut command = Command::new(version.binary());
        command
            .args(["--name", "alone", "--log-level", "warn", "--unsafe-no-fsync"])
            .arg("--data-dir")
            .arg(dir.path().join("data"))
            .args(["--listen-client-urls", &url, "--advertise-client-urls", announced])
            .args([
                "--listen-peer-urls",
                &peer,
                "--initial-advertise-peer-urls",
                &peer,
            ])
            .args(["--initial-cluster", &format!("alone={peer}")])
            .args(flags)
            // A unix socket's path is relative to the working directory.
            .current_dir(dir.path());
        let process = Process::spawn("etcd", &mut command, &dir.path().join("log"));
        let etcd = Self {
            process,
            _dir: dir,
            url,
        };
        connect(&etcd.url, trust).await;
        etcd
    }

    pub fn url(&self) -> &str {
        &self.url
    }

    pub fn log(&self) -> String {
        self.process.log()
    }
}

/// A path as a command-line argument.
pub fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[derive(Debug)]
struct NoVerification(Arc<CryptoProvider>);

impl ServerCertVerifier for NoVerification {
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
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
