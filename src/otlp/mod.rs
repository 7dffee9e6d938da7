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

use std::sync::Arc;
use std::time::Duration;

use opentelemetry::KeyValue;
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{EnvResourceDetector, ResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::SpanExporter as _;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use metrics::SpanMetrics;
use rangecache_base::instance::Instance;
use rangecache_base::telemetry::Metrics;
use rangecache_base::telemetry::trace::{Span, Tracer};
use rangecache_edge::tls;
pub use settings::{IgnoredOtel, OtelConfig};
use transport::CollectorConnector;

/// Time limit for exporting the last spans when rangecache stops.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Exports spans to a collector.
#[derive(Debug)]
pub struct Exporter {
    config: OtelConfig,
    connector: CollectorConnector,
    queue: mpsc::Receiver<Span>,
    /// Spans received and not exported yet.
    batch: Vec<Span>,
    metrics: Arc<SpanMetrics>,
    /// Whether the current outage of the collector has been logged.
    is_failing: bool,
}

impl Exporter {
    /// Returns the exporter and the tracer whose spans [`Exporter::run`] exports, counted in `metrics`. TLS files that
    /// are invalid now are reported, and read again for each connection.
    #[must_use]
    pub fn open(config: OtelConfig, metrics: &Metrics) -> (Exporter, Tracer) {
        let tls = config.endpoint.tls.then(|| {
            let tls = tls::Collector::new(config.certificate.clone(), config.client.clone());
            if let Err(error) = tls.check() {
                tracing::warn!(%error, "traces are not exported until this file is valid");
            }
            tls
        });
        let metrics = metrics.group::<SpanMetrics>();
        let (spans, queue) = mpsc::channel(config.max_queue_size);
        let tracer = Tracer::new(
            config.sampler.clone(),
            config.propagates,
            spans,
            metrics.spans.handle("dropped"),
        );
        let exporter = Exporter {
            connector: CollectorConnector::new(&config, tls),
            config,
            queue,
            batch: Vec::new(),
            metrics,
            is_failing: false,
        };
        (exporter, tracer)
    }

    /// Exports batches until `stop` is cancelled, and then the rest. Tasks of gRPC connections are spawned on `tasks`.
    pub async fn run(mut self, tasks: TaskTracker, stop: CancellationToken) {
        let config = &self.config;
        tracing::info!(endpoint = %config.endpoint, protocol = ?config.protocol, sampler = ?config.sampler,
            "exporting traces");
        let alive = CancellationToken::new();
        let connector = self.connector.clone();
        let mut exporter = match transport::exporter(config, connector, tasks, alive.clone()) {
            Ok(exporter) => exporter,
            Err(error) => {
                tracing::error!(%error, "traces are not exported");
                return;
            }
        };
        let _connected = alive.drop_guard();
        exporter.set_resource(&resource(config.service.as_deref()));
        while stop.run_until_cancelled(self.receive_batch()).await.is_some() {
            let batch = std::mem::take(&mut self.batch);
            // After `stop`, an export in flight gets FLUSH_TIMEOUT to complete.
            let last_chance = async {
                stop.cancelled().await;
                tokio::time::sleep(FLUSH_TIMEOUT).await;
            };
            let spans = batch.len() as u64;
            tokio::select! {
                () = self.export(&exporter, batch) => {}
                () = last_chance => {
                    self.metrics.spans.of("failed").inc_by(spans);
                    return;
                }
            }
        }
        let flushing = async {
            loop {
                let mut batch = std::mem::take(&mut self.batch);
                while batch.len() < self.config.max_batch_size
                    && let Ok(span) = self.queue.try_recv()
                {
                    batch.push(span);
                }
                if batch.is_empty() {
                    return;
                }
                self.export(&exporter, batch).await;
            }
        };
        if tokio::time::timeout(FLUSH_TIMEOUT, flushing).await.is_err() {
            tracing::warn!("the collector did not take the last spans in time");
        }
    }

    /// Receives spans until a batch is full, or its first span has waited long enough. Cancel safe: received spans stay
    /// in the batch.
    async fn receive_batch(&mut self) {
        let size = self.config.max_batch_size;
        let mut due = None;
        while self.batch.len() < size {
            let room = size - self.batch.len();
            let more = self.queue.recv_many(&mut self.batch, room);
            let received = match due {
                None => more.await,
                Some(due) => match tokio::time::timeout_at(due, more).await {
                    Ok(received) => received,
                    Err(_) => return,
                },
            };
            if received == 0 {
                // All senders are dropped: no span can arrive any more.
                std::future::pending().await
            }
            due.get_or_insert_with(|| Instant::now() + self.config.schedule_delay);
        }
    }

    async fn export(&mut self, exporter: &SpanExporter, batch: Vec<Span>) {
        let spans = batch.len() as u64;
        // The library starts no attempt after its timeout, but does not abort the last one.
        let exporting = tokio::time::timeout(self.config.export_timeout, exporter.export(batch));
        let reason = match exporting.await {
            Ok(Ok(())) => {
                self.metrics.spans.of("exported").inc_by(spans);
                if std::mem::take(&mut self.is_failing) {
                    tracing::info!(endpoint = %self.config.endpoint, "the collector accepts traces again");
                }
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no response within {:?}", self.config.export_timeout),
        };
        self.metrics.spans.of("failed").inc_by(spans);
        match self.connector.take_failure() {
            Some(failure) if !reason.contains(&failure) => self.log_failure(&format!("{reason}: {failure}")),
            _ => self.log_failure(&reason),
        }
    }

    /// Logs the first failure of an outage.
    fn log_failure(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::warn!(endpoint = %self.config.endpoint, reason,
                "traces are not exported; requests are served as usual, and spans over the queue size are dropped");
        }
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
    let host = rustix::system::uname();
    let detectors: [Box<dyn ResourceDetector>; 2] = [
        Box::new(TelemetryResourceDetector),
        Box::new(EnvResourceDetector::new()),
    ];
    let known = Resource::builder_empty()
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_service_name("rangecache")
        .with_attribute(KeyValue::new(
            "service.instance.id",
            Instance::of_process().id().to_owned(),
        ))
        .with_attribute(KeyValue::new(
            "host.name",
            host.nodename().to_string_lossy().into_owned(),
        ))
        .with_attributes(of_pod)
        .with_detectors(&detectors);
    match service {
        None => known.build(),
        Some(service) => known.with_service_name(service.to_owned()).build(),
    }
}
