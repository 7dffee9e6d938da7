//! Connections to a collector of traces. They are rare, so that the files are read for each of them.

use std::{io, path::PathBuf, sync::Arc};

use rangecache_base::net::{self, SILENCE_TIMEOUT, Stream, Url};
use rustls::{ClientConfig, crypto::aws_lc_rs, sign::SingleCertAndKey};
use tokio_rustls::TlsConnector;
use tokio_util::either::Either;

use super::crypto::{H2, HTTP_1_1};
use super::files::{FileError, Files, system_authorities};

const CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_CERTIFICATE";
const CLIENT_CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE";
const CLIENT_KEY: &str = "OTEL_EXPORTER_OTLP_CLIENT_KEY";

/// Makes TLS connections to a collector.
#[derive(Clone, Debug)]
pub struct Collector {
    paths: Vec<(&'static str, PathBuf)>,
}

impl Collector {
    /// Trusts the CA in `certificate`, otherwise the system's, and presents `client`, a certificate and its key.
    #[must_use]
    pub fn new(certificate: Option<PathBuf>, client: Option<(PathBuf, PathBuf)>) -> Collector {
        let mut paths = Vec::new();
        paths.extend(certificate.map(|path| (CERTIFICATE, path)));
        if let Some((certificate, key)) = client {
            paths.extend([(CLIENT_CERTIFICATE, certificate), (CLIENT_KEY, key)]);
        }
        Collector { paths }
    }

    /// Reads the files once.
    ///
    /// # Errors
    /// The file that is invalid, and why.
    pub fn check(&self) -> Result<(), FileError> {
        self.config().map(drop)
    }

    fn config(&self) -> Result<ClientConfig, FileError> {
        let files = Files::read(&self.paths)?;
        let provider = Arc::new(aws_lc_rs::default_provider());
        let authorities = match files.get(CERTIFICATE) {
            Some(file) => file.authorities()?.0,
            None => system_authorities().map_err(|_| {
                let text = format!("this system has no CA certificates: set {CERTIFICATE}");
                FileError::Other(text)
            })?,
        };
        let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
            .with_safe_default_protocol_versions()
            .map_err(|error| FileError::Other(error.to_string()))?
            .with_root_certificates(authorities);
        Ok(match (files.get(CLIENT_CERTIFICATE), files.get(CLIENT_KEY)) {
            (Some(certificate), Some(key)) => {
                let (certified, _) = certificate.with_key(key, &provider)?;
                builder.with_client_cert_resolver(Arc::new(SingleCertAndKey::from(certified)))
            }
            _ => builder.with_no_client_auth(),
        })
    }

    /// Connects to `url`: if it asks for TLS, with ALPN for HTTP/2 or HTTP/1.1.
    ///
    /// # Errors
    /// The error of the socket, of a file or of the handshake.
    pub async fn connect(&self, url: &Url, http2: bool) -> io::Result<Stream> {
        if !url.tls {
            return Ok(Either::Left(net::connect(url, SILENCE_TIMEOUT).await?));
        }
        let mut config = self.config().map_err(io::Error::other)?;
        config.alpn_protocols = vec![if http2 { H2 } else { HTTP_1_1 }.to_vec()];
        let name = url
            .server_name()
            .ok_or_else(|| io::Error::other("this host name cannot be in a certificate"))?;
        let stream = net::connect(url, SILENCE_TIMEOUT).await?;
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
        let stream = Box::pin(connecting).await?;
        Ok(Either::Right(Box::new(stream.into())))
    }
}
