//! Export of spans to a collector (OTLP over gRPC or HTTP).
//!
//! OpenTelemetry's library encodes, sends and retries. This room adds what it lacks: a queue whose senders never wait,
//! counts of dropped and failed spans, one log line per outage, and connections with our own TLS (`transport`). `settings`
//! are OpenTelemetry's environment variables.
//!
//! A collector that is slow, down or absent costs spans and nothing else: the queue is bounded, and spans that find it
//! full or are not delivered are counted. Uses `net`, `tls` and `telemetry`; only `serve` uses it.

mod metrics;
mod settings;
mod transport;

use std::future::Future as _;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use opentelemetry::KeyValue;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{EnvResourceDetector, ResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::SpanExporter as _;
use tokio::sync::mpsc;
use tokio_stream::StreamExt as _;
use tokio_util::sync::CancellationToken;

use metrics::SpanMetrics;
use rangecache_base::instance::Instance;
use rangecache_base::telemetry::Metrics;
use rangecache_base::telemetry::trace::{Span, Tracer};
pub use settings::{IgnoredOtel, OtelConfig};
use transport::ConnectFailure;

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
        let mut exporter = match transport::exporter(&config, &connect_failure) {
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
