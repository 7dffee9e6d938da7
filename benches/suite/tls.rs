//! TLS files for the TLS cases: one certificate for every server, and a client that trusts it.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result};
use rustls::client::Resumption;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// Certificates, and a client; see the module.
pub(crate) struct Tls {
    /// The certificate, which is its own CA (PEM).
    pub(crate) cert: PathBuf,
    /// Its key (PEM).
    pub(crate) key: PathBuf,
    /// Client certificate of the proxies, which etcd does not require: grpc-proxy must have one, without a common
    /// name.
    pub(crate) client_cert: PathBuf,
    /// Its key (PEM).
    pub(crate) client_key: PathBuf,
    connector: TlsConnector,
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tls")
            .field("cert", &self.cert)
            .finish_non_exhaustive()
    }
}

impl Tls {
    /// Creates a certificate for 127.0.0.1 in `folder`. Sessions are not resumed: every handshake is a full one.
    pub(crate) fn new(folder: &Path) -> Result<Self> {
        let made = rcgen::generate_simple_self_signed(["127.0.0.1".to_owned()])?;
        let (cert, key) = (folder.join("server.crt"), folder.join("server.key"));
        fs::write(&cert, made.cert.pem())?;
        fs::write(&key, made.signing_key.serialize_pem())?;
        let (client_cert, client_key) = (folder.join("client.crt"), folder.join("client.key"));
        let mut nameless = rcgen::CertificateParams::new(["127.0.0.1".to_owned()])?;
        nameless.distinguished_name = rcgen::DistinguishedName::new();
        let pair = rcgen::KeyPair::generate()?;
        fs::write(&client_cert, nameless.self_signed(&pair)?.pem())?;
        fs::write(&client_key, pair.serialize_pem())?;
        let mut roots = RootCertStore::empty();
        roots.add(CertificateDer::from(made.cert.der().to_vec()))?;
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"h2".to_vec()];
        config.resumption = Resumption::disabled();
        Ok(Tls {
            cert,
            key,
            client_cert,
            client_key,
            connector: TlsConnector::from(Arc::new(config)),
        })
    }

    /// Completes a TLS handshake.
    pub(crate) async fn handshake(&self, stream: TcpStream) -> Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from("127.0.0.1").context("is a name")?;
        Ok(self.connector.connect(name, stream).await?)
    }
}
