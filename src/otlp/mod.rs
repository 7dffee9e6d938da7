//! Export of spans to a collector (OTLP over gRPC or HTTP).
//!
//! OpenTelemetry's library encodes, sends and retries. This room adds what it lacks: a queue whose senders never wait,
//! counts of dropped and failed spans, one log line per outage, and connections with our own TLS. `settings`
//! are OpenTelemetry's environment variables.
//!
//! A collector that is slow, down or absent costs spans and nothing else: the queue is bounded, and spans that find it
//! full or are not delivered are counted. Uses `net`, `tls` and `telemetry`; only `serve` uses it.

mod settings;

use std::pin::{Pin, pin};
use std::task::{Context, Poll};
use std::{future::Future as _, io, sync::Arc, time::Duration};

use futures_util::stream;
use http::Uri;
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use opentelemetry::KeyValue;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{
    ExporterBuildError, Protocol as OtlpProtocol, RetryPolicy, SpanExporter, WithExportConfig,
    WithHttpConfig, WithTonicConfig,
};
use opentelemetry_sdk::resource::{EnvResourceDetector, ResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::{Resource, trace::SpanExporter as _};
use parking_lot::Mutex;
use rangecache_base::telemetry::metrics::{Counter, metric_group};
use rangecache_base::telemetry::trace::{Span, Tracer};
use rangecache_base::{instance::Instance, net::Stream, telemetry::Metrics};
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;
use tonic::transport::Endpoint;
use tower::service_fn;

use settings::Protocol;

pub use settings::{IgnoredOtel, OtelConfig};

/// Time limit for exporting the last spans when rangecache stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Exports spans to a collector.
#[derive(Debug)]
pub struct Exporter {
    config: OtelConfig,
    queue: mpsc::Receiver<Span>,
    metrics: Arc<SpanMetrics>,
}

impl Exporter {
    /// Returns the exporter and the tracer whose spans [`Exporter::run`] exports, counted in `metrics`. TLS files that
    /// are invalid now are reported, and read again for each connection.
    #[must_use]
    pub fn open(config: OtelConfig, metrics: &Metrics) -> (Exporter, Tracer) {
        if config.endpoint.tls
            && let Err(error) = config.tls.check()
        {
            tracing::warn!(%error, "traces are not exported until this file is valid");
        }
        let metrics = metrics.group::<SpanMetrics>();
        let (spans, queue) = mpsc::channel(config.max_queue_size);
        let dropped = metrics.spans.handle("dropped");
        let tracer = Tracer::new(config.sampler.clone(), config.propagates, spans, dropped);
        let exporter = Exporter {
            config,
            queue,
            metrics,
        };
        (exporter, tracer)
    }

    /// Exports batches until `stop` is cancelled, and then the rest.
    pub async fn run(self, stop: CancellationToken) {
        let Exporter {
            config,
            mut queue,
            metrics,
        } = self;
        tracing::info!(endpoint = %config.endpoint, protocol = ?config.protocol, sampler = ?config.sampler,
            "exporting traces");
        let connect_failure = ConnectFailure::default();
        let mut exporter = match exporter(&config, &connect_failure) {
            Ok(exporter) => exporter,
            Err(error) => {
                tracing::error!(%error, "traces are not exported");
                return;
            }
        };
        exporter.set_resource(&resource(config.service.as_deref()));
        let mut stopped = pin!(stop.cancelled());
        let spans = stream::poll_fn(|cx| {
            // A closed queue ends after the spans that are in it.
            if stopped.as_mut().poll(cx).is_ready() {
                queue.close();
            }
            queue.poll_recv(cx)
        });
        let mut batches = pin!(spans.chunks_timeout(config.max_batch_size, config.schedule_delay));
        let exporting = async {
            let mut is_failing = false;
            while let Some(batch) = batches.next().await {
                let spans = batch.len() as u64;
                let exported = export(&exporter, batch, config.export_timeout).await;
                let result = if exported.is_ok() { "exported" } else { "failed" };
                metrics.spans.of(result).inc_by(spans);
                let has_failed = std::mem::replace(&mut is_failing, exported.is_err());
                let connect_failure = connect_failure.lock().take();
                match exported {
                    Ok(()) if has_failed => {
                        tracing::info!(endpoint = %config.endpoint, "the collector accepts traces again");
                    }
                    Err(mut reason) if !has_failed => {
                        if let Some(failure) = connect_failure.filter(|failure| !reason.contains(failure)) {
                            reason = format!("{reason}: {failure}");
                        }
                        tracing::warn!(endpoint = %config.endpoint, reason,
                            "traces are not exported; requests are served as usual, and spans over the queue size are \
                             dropped");
                    }
                    _ => {}
                }
            }
        };
        let last_chance = async {
            stop.cancelled().await;
            tokio::time::sleep(FLUSH_TIMEOUT).await;
        };
        tokio::select! {
            () = exporting => {}
            () = last_chance => tracing::warn!("the collector did not take the last spans in time"),
        }
    }
}

/// Exports a batch; the error is the reason.
async fn export(exporter: &SpanExporter, batch: Vec<Span>, timeout: Duration) -> Result<(), String> {
    // The library starts no attempt after its timeout, but does not abort the last one.
    match tokio::time::timeout(timeout, exporter.export(batch)).await {
        Ok(exported) => exported.map_err(|error| error.to_string()),
        Err(_) => Err(format!("no response within {timeout:?}")),
    }
}

/// Variables that name the pod, which the chart sets from Kubernetes' downward API.
const POD: [(&str, &str); 3] = [
    ("k8s.pod.name", "K8S_POD_NAME"),
    ("k8s.namespace.name", "K8S_NAMESPACE_NAME"),
    ("k8s.node.name", "K8S_NODE_NAME"),
];

/// Resource attributes: service, host and pod, and what the environment adds, which takes precedence.
fn resource(service: Option<&str>) -> Resource {
    let of_pod = POD.into_iter().filter_map(|(attribute, variable)| {
        let value = std::env::var(variable).ok().filter(|value| !value.is_empty())?;
        Some(KeyValue::new(attribute, value))
    });
    let of_process = [
        ("service.version", env!("CARGO_PKG_VERSION").to_owned()),
        ("service.instance.id", Instance::of_process().id().to_owned()),
        (
            "host.name",
            rustix::system::uname().nodename().to_string_lossy().into_owned(),
        ),
    ];
    let detectors: [Box<dyn ResourceDetector>; 2] = [
        Box::new(TelemetryResourceDetector),
        Box::new(EnvResourceDetector::new()),
    ];
    let known = Resource::builder_empty()
        .with_service_name("rangecache")
        .with_attributes(of_process.map(|(attribute, value)| KeyValue::new(attribute, value)))
        .with_attributes(of_pod)
        .with_detectors(&detectors);
    match service {
        None => known.build(),
        Some(service) => known.with_service_name(service.to_owned()).build(),
    }
}

metric_group! {
    /// Spans for a collector. Without one they are not exported.
    pub(super) struct SpanMetrics {
        /// Spans by `result`: `exported`, `dropped` (no room in the queue) or `failed` (not accepted by the
        /// collector)
        ///
        /// Useful when: traces have gaps
        pub(super) spans[result]: Counter = "rangecache_trace_spans_total",
            from_zero = ["exported", "dropped", "failed"];
    }
}

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

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn stop_exports_the_queue_without_waiting_for_a_batch() {
        // A collector that refuses shows by the count that the span was sent.
        let look_up = |name: &str| match name {
            "OTEL_EXPORTER_OTLP_ENDPOINT" => Some("http://127.0.0.1:1".to_owned()),
            "OTEL_BSP_EXPORT_TIMEOUT" => Some("100".to_owned()),
            _ => None,
        };
        let config = OtelConfig::from_variables(&look_up).0.unwrap();
        assert!(config.schedule_delay > FLUSH_TIMEOUT);
        let (exporter, tracer) = Exporter::open(config, &Metrics::new());
        tracer.end(*tracer.background("load").unwrap());
        let (metrics, began) = (Arc::clone(&exporter.metrics), Instant::now());
        let stop = CancellationToken::new();
        stop.cancel();
        exporter.run(stop).await;
        assert_eq!(metrics.spans.of("failed").get(), 1);
        assert!(began.elapsed() < FLUSH_TIMEOUT);
    }
}
