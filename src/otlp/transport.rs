//! Connections of the library's exporter, made here so that there is one TLS stack and one way to resolve host names.

use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper::rt::{Executor, Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{
    ExporterBuildError, Protocol as OtlpProtocol, RetryPolicy, SpanExporter, WithExportConfig,
    WithHttpConfig, WithTonicConfig,
};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Endpoint;
use tower_service::Service;

use super::settings::{OtelConfig, Protocol};
use rangecache_base::net::{self, Stream, Url};
use rangecache_edge::tls;

/// Retries with doubling pauses: more than six seconds in all, in which a collector may restart.
const RETRIES: usize = 6;
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The library's exporter, which connects on first use. Tasks of gRPC are spawned on `tasks` and end with `alive`;
/// those of HTTP end with the exporter.
///
/// # Errors
/// The setting that the library refuses.
pub(super) fn exporter(
    config: &OtelConfig,
    connector: CollectorConnector,
    tasks: TaskTracker,
    alive: CancellationToken,
) -> Result<SpanExporter, ExporterBuildError> {
    let retry = RetryPolicy::recommended()
        .with_max_retries(RETRIES)
        .with_max_delay(LONGEST_PAUSE);
    // The transport has the timeout of one attempt, the library that of all attempts.
    match config.protocol {
        Protocol::Grpc => {
            let endpoint = Endpoint::from_shared(config.endpoint.to_string())
                .map_err(|error| ExporterBuildError::InvalidConfiguration(error.to_string()))?
                .timeout(config.timeout)
                .executor(ExportExecutor { tasks, alive });
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

/// Connects to the collector, whichever URI is requested: there is one.
#[derive(Clone, Debug)]
pub(super) struct CollectorConnector {
    target: Arc<CollectorTarget>,
}

#[derive(Debug)]
struct CollectorTarget {
    url: Url,
    tls: Option<tls::Collector>,
    http2: bool,
    timeout: Duration,
    /// Error of the last attempt to connect, until it is taken: for HTTP the library does not report it.
    failure: Mutex<Option<String>>,
}

impl CollectorConnector {
    /// A connector to the collector of `config`, with TLS if `tls` is given.
    pub(super) fn new(config: &OtelConfig, tls: Option<tls::Collector>) -> CollectorConnector {
        let target = CollectorTarget {
            url: config.endpoint.clone(),
            tls,
            http2: config.protocol == Protocol::Grpc,
            timeout: config.timeout,
            failure: Mutex::new(None),
        };
        CollectorConnector {
            target: Arc::new(target),
        }
    }

    /// Takes the error of the last attempt to connect.
    pub(super) fn take_failure(&self) -> Option<String> {
        self.target.failure.lock().take()
    }
}

impl CollectorTarget {
    async fn connect(&self) -> io::Result<Io> {
        let connecting = async {
            match &self.tls {
                Some(tls) => tls.connect(&self.url, self.http2).await,
                None => net::connect(&self.url, net::SILENCE_TIMEOUT)
                    .await
                    .map(tokio_util::either::Either::Left),
            }
        };
        let connected = match tokio::time::timeout(self.timeout, connecting).await {
            Ok(connected) => connected,
            Err(_) => Err(io::Error::other(format!(
                "no connection within {:?}",
                self.timeout
            ))),
        };
        *self.failure.lock() = connected.as_ref().err().map(ToString::to_string);
        Ok(Io(TokioIo::new(connected?)))
    }
}

impl Service<Uri> for CollectorConnector {
    type Response = Io;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Io>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let target = Arc::clone(&self.target);
        Box::pin(async move { target.connect().await })
    }
}

/// A connection for hyper's client.
pub(super) struct Io(TokioIo<Stream>);

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

/// Spawns tasks on a tracker that the caller joins.
struct ExportExecutor {
    tasks: TaskTracker,
    alive: CancellationToken,
}

impl<F> Executor<F> for ExportExecutor
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        let alive = self.alive.clone();
        self.tasks
            .spawn(async move { alive.run_until_cancelled(task).await });
    }
}
