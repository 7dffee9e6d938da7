//! Everything that is read from files and the environment before a port is bound.

use std::sync::Arc;

use rangecache_base::telemetry::access_log::{AccessLog, AccessLogWriter, Destination};
use rangecache_base::telemetry::trace::Tracer;
use rangecache_base::telemetry::{AccessLogConfig, Metrics};
use rangecache_config::Config;
use rangecache_edge::tls::{Acceptor, Connector};

use crate::otlp::{Exporter, IgnoredOtel, OtelConfig};

/// TLS of both sides, the access log and the exporter of traces, with the metrics that count for them.
#[derive(Debug)]
pub struct ProcessFiles {
    /// Every metric.
    pub metrics: Arc<Metrics>,
    /// TLS towards clients; `None` if no listener has it.
    pub acceptor: Option<Arc<Acceptor>>,
    pub(super) connector: Arc<Connector>,
    pub(super) tracer: Tracer,
    pub(super) exporter: Option<Exporter>,
    pub(super) access_log: AccessLog,
    pub(super) access_log_writer: Option<AccessLogWriter>,
}

impl ProcessFiles {
    /// Reads the files that `config` names, and the variables of OpenTelemetry.
    ///
    /// # Errors
    /// A file that cannot be used, with its flag.
    pub fn open(config: &Config) -> anyhow::Result<ProcessFiles> {
        config.check_files()?;
        let metrics = Arc::new(Metrics::new());
        let (exporter, tracer) = open_exporter(&metrics).unzip();
        let (access_log_writer, access_log) = open_access_log(&config.access_log, &metrics)?.unzip();
        let tracer = tracer.unwrap_or_default();
        tracer.set_share(config.trace.trace_sample);
        Ok(ProcessFiles {
            connector: config.connector(&metrics)?,
            acceptor: config.acceptor(&metrics)?,
            metrics,
            tracer,
            exporter,
            access_log: access_log.unwrap_or_default(),
            access_log_writer,
        })
    }
}

/// The exporter of traces, if OpenTelemetry's variables ask for one. Nothing in them keeps rangecache from serving.
fn open_exporter(metrics: &Metrics) -> Option<(Exporter, Tracer)> {
    let (settings, ignored) = OtelConfig::from_env();
    for IgnoredOtel { name, value, remedy } in ignored {
        tracing::warn!(
            variable = name,
            value,
            remedy,
            "a variable of OpenTelemetry cannot be used and counts as not set"
        );
    }
    Some(Exporter::open(settings?, metrics))
}

/// Opens the access log, if there is one.
fn open_access_log(
    config: &AccessLogConfig,
    metrics: &Metrics,
) -> anyhow::Result<Option<(AccessLogWriter, AccessLog)>> {
    let Some(file) = &config.file else {
        return Ok(None);
    };
    let destination = config
        .path()
        .map_or(Destination::Stdout, |path| Destination::File(path.to_owned()));
    let opened = AccessLogWriter::open(destination, config.sample, config.keys, metrics);
    let opened = opened.map_err(|error| {
        anyhow::anyhow!(
            "--access-log {} cannot be opened for appending: {error}; name a file in a directory that exists and is \
             writable, or - for standard output",
            file.display()
        )
    })?;
    Ok(Some(opened))
}
