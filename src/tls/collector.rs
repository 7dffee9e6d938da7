//! Connecting to a collector of traces. Its files are few and its connections are rare: they are read for each of them.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use rustls::ClientConfig;
use rustls::crypto::aws_lc_rs;
use rustls::sign::SingleCertAndKey;
use tokio_rustls::TlsConnector;
use tokio_util::either::Either;

use super::connector::system_authorities;
use super::files::{FileError, Files};
use super::{H2, HTTP_1_1};
use crate::net::{self, Stream, Url};

const CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_CERTIFICATE";
const CLIENT_CERTIFICATE: &str = "OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE";
const CLIENT_KEY: &str = "OTEL_EXPORTER_OTLP_CLIENT_KEY";

/// Makes TLS connections to a collector.
#[derive(Clone, Debug)]
pub struct Collector {
    paths: Vec<(&'static str, PathBuf)>,
}

impl Collector {
    /// With this CA, else the system's, and as the owner of `client`, a certificate and its key.
    ///
    /// # Errors
    /// What is wrong with which file.
    pub fn open(
        certificate: Option<PathBuf>,
        client: Option<(PathBuf, PathBuf)>,
    ) -> Result<Collector, FileError> {
        let mut paths = Vec::new();
        paths.extend(certificate.map(|path| (CERTIFICATE, path)));
        if let Some((certificate, key)) = client {
            paths.extend([(CLIENT_CERTIFICATE, certificate), (CLIENT_KEY, key)]);
        }
        let collector = Collector { paths };
        collector.config()?;
        Ok(collector)
    }

    fn config(&self) -> Result<ClientConfig, FileError> {
        let files = Files::read(&self.paths)?;
        let provider = Arc::new(aws_lc_rs::default_provider());
        let authorities = match files.get(CERTIFICATE) {
            Some(file) => file.authorities()?.0,
            None => system_authorities().map_err(|_| {
                let says = format!("this system has no CA certificates: set {CERTIFICATE}");
                FileError::Other(says)
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

    /// Connects and shakes hands, for HTTP/2 or for HTTP/1.
    ///
    /// # Errors
    /// What the system, a file or the handshake said.
    pub async fn connect(&self, url: &Url, http2: bool) -> io::Result<Stream> {
        let mut config = self.config().map_err(io::Error::other)?;
        config.alpn_protocols = vec![if http2 { H2 } else { HTTP_1_1 }.to_vec()];
        let name = url
            .server_name()
            .ok_or_else(|| io::Error::other("no certificate can be for this name"))?;
        let stream = net::connect(url).await?;
        let connecting = TlsConnector::from(Arc::new(config)).connect(name, stream);
        let stream = Box::pin(connecting).await?;
        Ok(Either::Right(Box::new(stream.into())))
    }
}
