//! Connections of the library's exporter, made here so that there is one TLS stack and one way to resolve host names.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{
    ExporterBuildError, Protocol as OtlpProtocol, RetryPolicy, SpanExporter, WithExportConfig,
    WithHttpConfig, WithTonicConfig,
};
use parking_lot::Mutex;
use tonic::transport::Endpoint;
use tower::service_fn;

use super::settings::{OtelConfig, Protocol};
use rangecache_base::net::Stream;

/// Retries with doubling pauses: more than six seconds in all, in which a collector may restart.
const RETRIES: usize = 6;
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Error of the last attempt to connect, until it is taken: for HTTP the library does not report it.
pub(super) type ConnectFailure = Arc<Mutex<Option<String>>>;

/// The library's exporter, which connects on first use. Its connections end with it.
///
/// # Errors
/// The setting that the library refuses.
pub(super) fn exporter(
    config: &OtelConfig,
    failure: &ConnectFailure,
) -> Result<SpanExporter, ExporterBuildError> {
    let retry = RetryPolicy::recommended()
        .with_max_retries(RETRIES)
        .with_max_delay(LONGEST_PAUSE);
    let target = (config.clone(), Arc::clone(failure));
    // Whichever URI is requested: there is one collector.
    let connector = service_fn(move |_: Uri| {
        let (config, failure) = target.clone();
        Box::pin(async move {
            let connecting = config
                .tls
                .connect(&config.endpoint, config.protocol == Protocol::Grpc);
            let connected = tokio::time::timeout(config.timeout, connecting).await;
            let none = || {
                Err(io::Error::other(format!(
                    "no connection within {:?}",
                    config.timeout
                )))
            };
            let connected = connected.unwrap_or_else(|_| none());
            *failure.lock() = connected.as_ref().err().map(ToString::to_string);
            connected.map(|stream| Io(TokioIo::new(stream)))
        })
    });
    // The transport has the timeout of one attempt, the library that of all attempts.
    match config.protocol {
        Protocol::Grpc => {
            let endpoint = Endpoint::from_shared(config.endpoint.to_string())
                .map_err(|error| ExporterBuildError::InvalidConfiguration(error.to_string()))?
                .timeout(config.timeout);
            SpanExporter::builder()
                .with_tonic()
                .with_channel(endpoint.connect_with_connector_lazy(connector))
                .with_retry_policy(retry)
                .with_timeout(config.export_timeout)
                .build()
        }
        Protocol::Http => SpanExporter::builder()
            .with_http()
            .with_protocol(OtlpProtocol::HttpBinary)
            .with_endpoint(format!("{}{}", config.endpoint, config.path))
            .with_http_client(HyperClient::new(connector, config.timeout, None))
            .with_retry_policy(retry)
            .with_timeout(config.export_timeout)
            .build(),
    }
}

/// A connection for hyper's client.
struct Io(TokioIo<Stream>);

impl Connection for Io {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_read(cx, buf)
    }
}

impl Write for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().0).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().0).poll_shutdown(cx)
    }
}
