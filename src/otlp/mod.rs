//! Traces on their way to a collector (OTLP over gRPC or HTTP).
//!
//! | file | what it is about |
//! |---|---|
//! | `settings` | OpenTelemetry's own variables |
//! | `encode` | spans as OTLP has them |
//! | `client` | a connection to a collector |
//!
//! A collector that is slow, down or absent costs spans and nothing else: the queue in front of this room is bounded, whoever
//! fills it never waits, and what has no room or does not arrive is counted. This room uses `net`, `tls` and `telemetry`; only `main` uses it.

mod client;
mod encode;
mod settings;

use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use settings::{Protocol, Settings, SettingsError};

use crate::telemetry::Metrics;
use crate::telemetry::metrics::SpanMetrics;
use crate::telemetry::trace::{Span, Tracer};
use crate::tls::{self, FileError};
use client::{Client, NotSent};

/// Pause before another attempt; it doubles up to [`LAST_PAUSE`].
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(5);
/// What the last spans get at a stop.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(3);

/// Takes spans to a collector.
#[derive(Debug)]
pub struct Exporter {
    settings: Settings,
    tls: Option<tls::Collector>,
    queue: mpsc::Receiver<Span>,
    /// Gathered, and not on its way yet.
    batch: Vec<Span>,
    metrics: SpanMetrics,
    /// Whether the log knows that the collector does not take spans.
    is_failing: bool,
}

impl Exporter {
    /// Has `metrics`' tracer begin spans; [`Exporter::run`] takes them away.
    ///
    /// # Errors
    /// What is wrong with which of the files for TLS.
    pub fn open(settings: Settings, metrics: &mut Metrics) -> Result<Exporter, FileError> {
        let tls = if settings.endpoint.tls {
            Some(tls::Collector::open(
                settings.certificate.clone(),
                settings.client.clone(),
            )?)
        } else {
            None
        };
        let (spans, queue) = mpsc::channel(settings.max_queue_size);
        let span_metrics = metrics.spans();
        metrics.tracer = Tracer::new(settings.sampler, spans, span_metrics.dropped.clone());
        Ok(Exporter {
            settings,
            tls,
            queue,
            batch: Vec::new(),
            metrics: span_metrics,
            is_failing: false,
        })
    }

    /// Exports batches until `stop`, and then what is left. Connections are `tasks`' to join.
    pub async fn run(mut self, tasks: TaskTracker, stop: CancellationToken) {
        let settings = &self.settings;
        tracing::info!(endpoint = %settings.endpoint, protocol = ?settings.protocol, sampler = ?settings.sampler,
            "exporting traces");
        if settings.wants_compression {
            tracing::warn!("OTEL_EXPORTER_OTLP_COMPRESSION=gzip is not spoken: traces are sent uncompressed");
        }
        let mut client = Client::new(settings.clone(), self.tls.clone(), tasks);
        while stop.run_until_cancelled(self.gather()).await.is_some() {
            let batch = std::mem::take(&mut self.batch);
            // At a stop an export under way has a last chance.
            let last_chance = async {
                stop.cancelled().await;
                tokio::time::sleep(FLUSH_TIMEOUT).await;
            };
            let spans = batch.len() as u64;
            tokio::select! {
                () = self.export(&mut client, batch) => {}
                () = last_chance => {
                    self.metrics.failed.inc_by(spans);
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
                self.export(&mut client, batch).await;
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

    async fn export(&mut self, client: &mut Client, batch: Vec<Span>) {
        let spans = batch.len() as u64;
        let request = encode::request(&self.settings.resource, batch);
        let deadline = Instant::now() + self.settings.export_timeout;
        let mut pause = FIRST_PAUSE;
        let refusal = loop {
            let sending = client.send(request.clone());
            match tokio::time::timeout_at(deadline, sending).await {
                Ok(Ok((rejected, why))) => {
                    let rejected = rejected.min(spans);
                    self.metrics.exported.inc_by(spans - rejected);
                    self.metrics.failed.inc_by(rejected);
                    if rejected > 0 {
                        break format!("the collector rejected {rejected} of {spans} spans: {why}");
                    }
                    if std::mem::take(&mut self.is_failing) {
                        tracing::info!(endpoint = %self.settings.endpoint, "the collector takes traces again");
                    }
                    return;
                }
                Ok(Err(NotSent::Again(why))) if Instant::now() + pause < deadline => {
                    self.say(&why);
                    tokio::time::sleep(pause).await;
                    pause = (pause * 2).min(LAST_PAUSE);
                }
                Ok(Err(error)) => {
                    self.metrics.failed.inc_by(spans);
                    break error.to_string();
                }
                Err(_) => {
                    self.metrics.failed.inc_by(spans);
                    break "no answer in time".to_owned();
                }
            }
        };
        self.say(&refusal);
    }

    /// Says once that the collector does not take spans.
    fn say(&mut self, why: &str) {
        if !std::mem::replace(&mut self.is_failing, true) {
            tracing::warn!(endpoint = %self.settings.endpoint, why,
                "traces are not exported; requests are served as ever, and spans that find no room are dropped");
        }
    }
}
