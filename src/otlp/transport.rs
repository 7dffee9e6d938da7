//! What the library's exporter speaks over: connections of our own making, so that there is one TLS stack, and one way to
//! find a host.

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
    ExporterBuildError, Protocol as Spoken, RetryPolicy, SpanExporter, WithExportConfig, WithHttpConfig,
    WithTonicConfig,
};
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tonic::transport::Endpoint;
use tower_service::Service;

use super::settings::{Protocol, Settings};
use crate::net::{self, Stream, Url};
use crate::tls;

/// Attempts after the first, each twice as long after the last: more than six seconds in all, in which a collector may restart.
const RETRIES: usize = 6;
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// The library's exporter, connected when it is first used. gRPC's tasks are `tasks`' to join, and end with `alive`; the ones
/// of HTTP end with the exporter.
///
/// # Errors
/// What the library does not take.
pub(super) fn exporter(
    settings: &Settings,
    connector: Connector,
    tasks: TaskTracker,
    alive: CancellationToken,
) -> Result<SpanExporter, ExporterBuildError> {
    let retry = RetryPolicy::recommended()
        .with_max_retries(RETRIES)
        .with_max_delay(LONGEST_PAUSE);
    // The transport ends an attempt; what the library is told is the end of all attempts.
    match settings.protocol {
        Protocol::Grpc => {
            let endpoint = Endpoint::from_shared(settings.endpoint.to_string())
                .map_err(|error| ExporterBuildError::InvalidConfiguration(error.to_string()))?
                .timeout(settings.timeout)
                .executor(Tracked { tasks, alive });
            SpanExporter::builder()
                .with_tonic()
                .with_channel(endpoint.connect_with_connector_lazy(connector))
                .with_retry_policy(retry)
                .with_timeout(settings.export_timeout)
                .build()
        }
        Protocol::Http => SpanExporter::builder()
            .with_http()
            .with_protocol(Spoken::HttpBinary)
            .with_endpoint(format!("{}{}", settings.endpoint, settings.path))
            .with_http_client(HyperClient::new(connector, settings.timeout, None))
            .with_retry_policy(retry)
            .with_timeout(settings.export_timeout)
            .build(),
    }
}

/// Connects to the collector, whatever it is asked for: there is one.
#[derive(Clone, Debug)]
pub(super) struct Connector {
    to: Arc<To>,
}

#[derive(Debug)]
struct To {
    url: Url,
    tls: Option<tls::Collector>,
    http2: bool,
    timeout: Duration,
    /// What the last attempt died of, until it is asked for: the library keeps that to itself for HTTP.
    failure: Mutex<Option<String>>,
}

impl Connector {
    /// One to the collector of `settings`, by TLS if there is `tls`.
    pub(super) fn new(settings: &Settings, tls: Option<tls::Collector>) -> Connector {
        let to = To {
            url: settings.endpoint.clone(),
            tls,
            http2: settings.protocol == Protocol::Grpc,
            timeout: settings.timeout,
            failure: Mutex::new(None),
        };
        Connector { to: Arc::new(to) }
    }

    /// Why no connection was made, once.
    pub(super) fn take_failure(&self) -> Option<String> {
        self.to.failure.lock().take()
    }
}

impl To {
    async fn connect(&self) -> io::Result<Io> {
        let connecting = async {
            match &self.tls {
                Some(tls) => tls.connect(&self.url, self.http2).await,
                None => net::connect(&self.url)
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

impl Service<Uri> for Connector {
    type Response = Io;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Io>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Uri) -> Self::Future {
        let to = Arc::clone(&self.to);
        Box::pin(async move { to.connect().await })
    }
}

/// A connection as hyper's client wants it.
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

/// Runs tasks where they are joined.
struct Tracked {
    tasks: TaskTracker,
    alive: CancellationToken,
}

impl<F> Executor<F> for Tracked
where
    F: Future<Output = ()> + Send + 'static,
{
    fn execute(&self, task: F) {
        let alive = self.alive.clone();
        self.tasks
            .spawn(async move { alive.run_until_cancelled(task).await });
    }
}
