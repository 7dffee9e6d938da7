//! Traces on their way to a collector (OTLP over gRPC or HTTP).
//!
//! | file | what it is about |
//! |---|---|
//! | `settings` | OpenTelemetry's own variables |
//! | `convert` | spans as the library has them |
//! | `transport` | what the library's exporter speaks over |
//!
//! OpenTelemetry's own library encodes, sends and tries again; here is what it is not asked for: a queue that nobody waits
//! for, the counts, one line in the log, and connections.
//!
//! A collector that is slow, down or absent costs spans and nothing else: the queue in front of this room is bounded, whoever
//! fills it never waits, and what has no room or does not arrive is counted. This room uses `net`, `tls` and `telemetry`; only `main` uses it.

mod convert;
mod settings;
mod transport;

use std::time::Duration;

use opentelemetry::{InstrumentationScope, KeyValue};
use opentelemetry_otlp::SpanExporter;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::resource::{EnvResourceDetector, ResourceDetector, TelemetryResourceDetector};
use opentelemetry_sdk::trace::SpanExporter as _;
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use settings::{Protocol, Settings, SettingsError};

use crate::telemetry::metrics::SpanCounters;
use crate::telemetry::trace::{Span, Tracer};
use crate::tls::{self, FileError};
use transport::Connector;

/// What the last spans get at a stop.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Takes spans to a collector.
#[derive(Debug)]
pub struct Exporter {
    settings: Settings,
    connector: Connector,
    scope: InstrumentationScope,
    queue: mpsc::Receiver<Span>,
    /// Gathered, and not on its way yet.
    batch: Vec<Span>,
    counters: SpanCounters,
    /// Whether the log knows that the collector does not take spans.
    is_failing: bool,
}

impl Exporter {
    /// Returns the exporter and the tracer whose spans [`Exporter::run`] exports, counted in `counters`.
    ///
    /// # Errors
    /// What is wrong with which of the files for TLS.
    pub fn open(settings: Settings, counters: SpanCounters) -> Result<(Exporter, Tracer), FileError> {
        let tls = if settings.endpoint.tls {
            Some(tls::Collector::open(
                settings.certificate.clone(),
                settings.client.clone(),
            )?)
        } else {
            None
        };
        let (spans, queue) = mpsc::channel(settings.max_queue_size);
        let tracer = Tracer::new(settings.sampler, spans, counters.dropped.clone());
        let exporter = Exporter {
            connector: Connector::new(&settings, tls),
            scope: convert::scope(),
            settings,
            queue,
            batch: Vec::new(),
            counters,
            is_failing: false,
        };
        Ok((exporter, tracer))
    }

    /// Exports batches until `stop`, and then what is left. gRPC's connections are `tasks`' to join.
    pub async fn run(mut self, tasks: TaskTracker, stop: CancellationToken) {
        let settings = &self.settings;
        tracing::info!(endpoint = %settings.endpoint, protocol = ?settings.protocol, sampler = ?settings.sampler,
            "exporting traces");
        let alive = CancellationToken::new();
        let connector = self.connector.clone();
        let mut exporter = match transport::exporter(settings, connector, tasks, alive.clone()) {
            Ok(exporter) => exporter,
            Err(error) => {
                tracing::error!(%error, "traces are not exported");
                return;
            }
        };
        let _connected = alive.drop_guard();
        exporter.set_resource(&resource(settings.service.as_deref()));
        while stop.run_until_cancelled(self.gather()).await.is_some() {
            let batch = std::mem::take(&mut self.batch);
            // At a stop an export under way has a last chance.
            let last_chance = async {
                stop.cancelled().await;
                tokio::time::sleep(FLUSH_TIMEOUT).await;
            };
            let spans = batch.len() as u64;
            tokio::select! {
                () = self.export(&exporter, batch) => {}
                () = last_chance => {
                    self.counters.failed.inc_by(spans);
                    return;
                }
            }
        }
        let flushing = async {
            loop {
                let mut batch = std::mem::take(&mut self.batch);
                while batch.len() < self.settings.max_batch_size
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

    /// Gathers spans until there are enough of them, or the first has waited long enough. Cancelled, it leaves them where
    /// they are.
    async fn gather(&mut self) {
        let size = self.settings.max_batch_size;
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
                // Nobody is left who could send any.
                std::future::pending().await
            }
            due.get_or_insert_with(|| Instant::now() + self.settings.schedule_delay);
        }
    }

    async fn export(&mut self, exporter: &SpanExporter, batch: Vec<Span>) {
        let spans = batch.len() as u64;
        let batch = batch
            .into_iter()
            .map(|span| convert::span_data(span, self.scope.clone()))
            .collect();
        // The library begins no attempt after its end, but lets one go on.
        let exporting = tokio::time::timeout(self.settings.export_timeout, exporter.export(batch));
        let reason = match exporting.await {
            Ok(Ok(())) => {
                self.counters.exported.inc_by(spans);
                if std::mem::take(&mut self.is_failing) {
                    tracing::info!(endpoint = %self.settings.endpoint, "the collector takes traces again");
                }
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {:?}", self.settings.export_timeout),
        };
        self.counters.failed.inc_by(spans);
        match self.connector.take_failure() {
            Some(failure) if !reason.contains(&failure) => self.say(&format!("{reason}: {failure}")),
            _ => self.say(&reason),
        }
    }

    /// Says once that the collector does not take spans.
    fn say(&mut self, reason: &str) {
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::warn!(endpoint = %self.settings.endpoint, reason,
                "traces are not exported; requests are served as ever, and spans that find no room are dropped");
        }
    }
}

/// Who rangecache is. The library knows all but its name.
fn resource(service: Option<&str>) -> Resource {
    let detectors: [Box<dyn ResourceDetector>; 2] = [
        Box::new(TelemetryResourceDetector),
        Box::new(EnvResourceDetector::new()),
    ];
    let known = Resource::builder_empty()
        .with_attribute(KeyValue::new("service.version", env!("CARGO_PKG_VERSION")))
        .with_service_name("rangecache")
        .with_detectors(&detectors);
    match service {
        None => known.build(),
        Some(service) => known.with_service_name(service.to_owned()).build(),
    }
}
