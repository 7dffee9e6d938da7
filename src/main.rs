//! The boot sequence: parse, validate, bind, serve, drain.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::error::ErrorKind;
use rangecache::admin::Admin;
use rangecache::cli::{self, Task};
use rangecache::config::{Config, RangeStream};
use rangecache::doctor::{self, Options, Output, Style};
use rangecache::mirror;
use rangecache::net::Url;
use rangecache::otlp::{self, Exporter};
use rangecache::panics;
use rangecache::proxy::{self, Proxy};
use rangecache::server::{Listener, ServeConfig};
use rangecache::telemetry::trace::Tracer;
use rangecache::telemetry::{self, Metrics, Telemetry};
use rangecache::tls::{Acceptor, Connector, FileError};
use rangecache::upstream::{Credentials, Upstream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// sysexits' EX_USAGE.
const MISUSE: u8 = 64;
/// What background tasks get at a stop even when calls have taken all of --shutdown-timeout.
const LAST_WAIT: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    let config = match Task::from_args() {
        Ok(Task::Serve(config)) => config,
        Ok(Task::Completions(shell)) => return print(|out| cli::completions(shell, out)),
        Ok(Task::Man) => return print(cli::man),
        Ok(Task::Doctor(options)) => return doctor(&options),
        Err(error) => {
            let asked = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            // Nothing is left to do if even this cannot be printed.
            let _ = error.print();
            return if asked {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(MISUSE)
            };
        }
    };
    if let Err(error) = config.validate() {
        let _ = cli::command().error(ErrorKind::ValueValidation, error).print();
        return ExitCode::from(MISUSE);
    }
    telemetry::log::init(&config);
    let metrics = Arc::new(Metrics::new());
    let (exporter, tracer) = match open_exporter(&metrics) {
        Ok(opened) => opened,
        Err(error) => {
            let _ = cli::command().error(ErrorKind::ValueValidation, error).print();
            return ExitCode::from(MISUSE);
        }
    };
    let tls = match Tls::open(&config, &metrics) {
        Ok(tls) => tls,
        Err(error) => {
            let _ = cli::command().error(ErrorKind::ValueValidation, error).print();
            return ExitCode::from(MISUSE);
        }
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.worker_threads())
        .enable_all()
        .build()
    {
        Ok(runtime) => runtime,
        Err(error) => {
            tracing::error!(%error, "cannot start the runtime");
            return ExitCode::FAILURE;
        }
    };
    match runtime.block_on(serve(&config, Telemetry::new(metrics, tracer), tls, exporter)) {
        Ok(code) => code,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "stopping");
            ExitCode::FAILURE
        }
    }
}

/// Looks, prints what was found, and ends with its exit code. Nothing is logged: what goes wrong is in the report.
fn doctor(options: &Options) -> ExitCode {
    if let Err(error) = options.config.validate() {
        let _ = cli::command().error(ErrorKind::ValueValidation, error).print();
        return ExitCode::from(MISUSE);
    }
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    let report = runtime.block_on(doctor::examine(options));
    let printed = print(|out| match options.output {
        Output::Text => write!(out, "{}", report.to_text(Style::of(io::stdout().is_terminal()))),
        Output::Json => writeln!(out, "{:#}", report.to_json()),
    });
    if printed == ExitCode::SUCCESS {
        ExitCode::from(report.exit_code())
    } else {
        printed
    }
}

/// Prints to standard output; whoever reads it may stop early.
fn print(what: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> ExitCode {
    let mut text = Vec::new();
    match what(&mut text).and_then(|()| io::stdout().write_all(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// TLS of both sides, its files read.
struct Tls {
    connector: Arc<Connector>,
    acceptor: Option<Arc<Acceptor>>,
}

impl Tls {
    fn open(config: &Config, metrics: &Arc<Metrics>) -> Result<Tls, FileError> {
        Ok(Tls {
            connector: Connector::open(config, metrics)?,
            acceptor: Acceptor::open(config, metrics)?,
        })
    }
}

/// What takes traces to a collector, if OpenTelemetry's variables ask for it.
fn open_exporter(metrics: &Metrics) -> anyhow::Result<(Option<Exporter>, Tracer)> {
    let Some(settings) = otlp::Settings::from_env()? else {
        return Ok((None, Tracer::default()));
    };
    let (exporter, tracer) = Exporter::open(settings, metrics.traces.counters())?;
    Ok((Some(exporter), tracer))
}

async fn serve(
    config: &Config,
    telemetry: Telemetry,
    tls: Tls,
    exporter: Option<Exporter>,
) -> anyhow::Result<ExitCode> {
    let bind = |urls| bind(urls, &tls, config);
    let clients = bind(&config.listen_client_urls)
        .await
        .context("--listen-client-urls")?;
    let operators = bind(&config.listen_metrics_urls)
        .await
        .context("--listen-metrics-urls")?;
    let mut terminate = signal(SignalKind::terminate())?;
    let mut interrupt = signal(SignalKind::interrupt())?;

    // Three stops: first no new connections are taken, then no new calls, then what keeps the mirrors ends.
    let (closing, drain, stop) = (
        CancellationToken::new(),
        CancellationToken::new(),
        CancellationToken::new(),
    );
    let (listeners, calls, background) = (TaskTracker::new(), TaskTracker::new(), TaskTracker::new());
    let telemetry = Arc::new(telemetry);
    panics::install(telemetry.metrics.process.panics.clone());
    export_limits(config, &telemetry.metrics);
    if let Some(exporter) = exporter {
        background.spawn(exporter.run(background.clone(), stop.clone()));
    }
    tls.connector.keep_fresh(&background, &stop);
    if let Some(acceptor) = &tls.acceptor {
        acceptor.keep_fresh(&background, &stop);
    }
    let credentials = Credentials::new(config.account()?);
    let upstream = Upstream::start(
        &config.endpoints,
        &tls.connector,
        config.range_stream == RangeStream::Auto,
        credentials,
        &background,
        &stop,
    );
    let mirrors = mirror::start(config, &upstream, &telemetry, &background, &stop);
    let open_connections = telemetry.metrics.connections.open.clone();
    let proxy = Proxy::new(config, &upstream, &mirrors, &telemetry, &calls, &drain);
    background.spawn(Arc::clone(&proxy).sweep(stop.clone()));
    let admin = Admin::new(mirrors, upstream, telemetry, calls.clone(), closing.clone());
    background.spawn(Arc::clone(&admin).remember(stop.clone()));
    let serving = ServeConfig {
        connections: Arc::new(Semaphore::new(config.max_connections as usize)),
        open: open_connections,
        max_concurrent_streams: config.max_concurrent_streams,
        tasks: calls.clone(),
        closing: closing.clone(),
        drain: drain.clone(),
    };
    for listener in clients {
        tracing::info!(url = %listener.url(), "serving clients");
        let proxy = Arc::clone(&proxy);
        let handler = move |request, over_tls| proxy::handle(Arc::clone(&proxy), request, over_tls);
        listeners.spawn(listener.serve(handler, serving.clone()));
    }
    for listener in operators {
        tracing::info!(url = %listener.url(), "serving metrics");
        background.spawn(Arc::clone(&admin).serve(listener, background.clone(), stop.clone()));
    }

    let refused = tokio::select! {
        _ = terminate.recv() => false,
        _ = interrupt.recv() => false,
        // Something found that it must not serve, and has said why.
        () = stop.cancelled() => true,
    };
    tracing::info!(timeout = ?config.shutdown_timeout, "stopping: no new calls; those under way may finish");
    let deadline = Instant::now() + config.shutdown_timeout;
    // The port is closed before clients are told to leave: who connects again finds whoever listens next.
    closing.cancel();
    listeners.close();
    listeners.wait().await;
    drain.cancel();
    calls.close();
    if tokio::time::timeout_at(deadline, calls.wait()).await.is_err() {
        tracing::warn!(
            tasks = calls.len(),
            "calls were still under way at the end of --shutdown-timeout and are cut"
        );
    }
    stop.cancel();
    background.close();
    // They only have to be told.
    let _ = tokio::time::timeout_at(deadline.max(Instant::now() + LAST_WAIT), background.wait()).await;
    tracing::info!("stopped");
    Ok(if refused {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

async fn bind(urls: &[Url], tls: &Tls, config: &Config) -> anyhow::Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    for url in urls {
        let listener = Listener::bind(
            url,
            tls.acceptor.as_ref(),
            config.tls.unix_socket_mode,
            config.socket_reuse_port,
        )
        .await
        .with_context(|| {
            format!("cannot listen on {url}; is another process there? Port 0 takes a free one")
        })?;
        listeners.push(listener);
    }
    Ok(listeners)
}

/// Every bound that a flag sets, beside what is used of it.
fn export_limits(config: &Config, metrics: &Metrics) {
    #[allow(clippy::cast_precision_loss, reason = "a gauge shows magnitudes")]
    let bytes = |value: u64| value as f64;
    metrics
        .process
        .set_limit("cache_max_bytes", bytes(config.cache_max_bytes()));
    metrics
        .process
        .set_limit("history_max_bytes", bytes(config.history_max_bytes));
    metrics
        .process
        .set_limit("history_max_age_seconds", config.history_max_age.as_secs_f64());
    metrics.process.set_limit(
        "freshness_timeout_seconds",
        config.freshness_timeout.as_secs_f64(),
    );
    metrics
        .process
        .set_limit("connect_timeout_seconds", config.connect_timeout.as_secs_f64());
    metrics
        .process
        .set_limit("probe_interval_seconds", config.probe_interval.as_secs_f64());
    metrics
        .process
        .set_limit("forward_max_large", f64::from(config.forward_max_large));
    metrics
        .process
        .set_limit("forward_max_waiting", f64::from(config.forward_max_waiting));
    metrics
        .process
        .set_limit("forward_shared_max_bytes", bytes(config.forward_shared_max_bytes));
    metrics
        .process
        .set_limit("max_concurrent_streams", f64::from(config.max_concurrent_streams));
    metrics
        .process
        .set_limit("max_calls", f64::from(config.max_calls));
    metrics
        .process
        .set_limit("verify_interval_seconds", config.verify_interval.as_secs_f64());
    metrics
        .process
        .set_limit("stream_max_bytes", bytes(config.stream_max_bytes));
    metrics
        .process
        .set_limit("stream_max_wait_seconds", config.stream_max_wait.as_secs_f64());
    metrics
        .process
        .set_limit("series_ttl_seconds", config.series_ttl.as_secs_f64());
    metrics.process.set_limit(
        "tls_handshake_timeout_seconds",
        config.tls.tls_handshake_timeout.as_secs_f64(),
    );
    metrics
        .process
        .set_limit("tls_max_handshakes", f64::from(config.tls.tls_max_handshakes));
    metrics
        .process
        .set_limit("max_connections", f64::from(config.max_connections));
    metrics.process.set_limit(
        "worker_threads",
        f64::from(u32::try_from(config.worker_threads()).unwrap_or(u32::MAX)),
    );
    metrics
        .process
        .set_limit("shutdown_timeout_seconds", config.shutdown_timeout.as_secs_f64());
}
