//! The boot sequence: parse, validate, read files, bind, serve, drain.

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

use std::fs::File;
use std::io::{self, BufReader, IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use clap::error::ErrorKind;
use rangecache::admin::Admin;
use rangecache::cli::{self, Serving, Task};
use rangecache::config::{
    AccessLogConfig, Config, DiffConfig, DoctorConfig, IgnoredOtel, LiveConfig, OtelConfig, RangeStream,
    ReplayConfig, ReportFormat, Setting, StaticPodAction, StaticPodConfig, bounds, given,
};
use rangecache::diff;
use rangecache::doctor::{self, Style};
use rangecache::mirror;
use rangecache::net::Url;
use rangecache::otlp::Exporter;
use rangecache::panics;
use rangecache::proxy::{self, Access, Proxy};
use rangecache::reload::{self, ReloadHandle, Reloader};
use rangecache::replay::{self, ReadError, Recording};
use rangecache::server::{
    ConnectionBudgets, ConnectionLimits, Connections, Listener, ServeConfig, connections_within_descriptors,
};
use rangecache::static_pod;
use rangecache::telemetry::access_log::{AccessLog, AccessLogWriter, Destination};
use rangecache::telemetry::clients::ClientRegistry;
use rangecache::telemetry::log::LogLevel;
use rangecache::telemetry::trace::Tracer;
use rangecache::telemetry::{self, Metrics, Telemetry};
use rangecache::tls::{Acceptor, Connector};
use rangecache::upstream::{Credentials, Upstream};
#[cfg(target_os = "linux")]
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// sysexits' EX_USAGE.
const MISUSE: u8 = 64;
/// Exit code of `diff` if the endpoints cannot be compared.
const NOT_COMPARED: u8 = 2;
/// Time for background tasks to stop, even if calls have used up all of --shutdown-timeout.
const BACKGROUND_TIMEOUT: Duration = Duration::from_millis(500);

fn main() -> ExitCode {
    match Task::from_args() {
        Ok(Task::Serve(serving)) => run(*serving),
        Ok(Task::Doctor(config)) => doctor(&config),
        Ok(Task::Replay(config)) => replay(&config),
        Ok(Task::Diff(config)) => diff(&config),
        Ok(Task::StaticPod(config)) => static_pod(&config),
        Ok(Task::Settings { config, text }) => match config.validate() {
            Ok(()) => print(|out| out.write_all(text.as_bytes())),
            Err(error) => misuse(error),
        },
        Ok(Task::Completions(shell)) => print(|out| cli::completions(shell, out)),
        Ok(Task::Man) => print(cli::man),
        Err(error) => {
            let is_help = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
            // If even this cannot be printed, there is no other place to report it.
            let _ = error.print();
            if is_help {
                ExitCode::SUCCESS
            } else {
                ExitCode::from(MISUSE)
            }
        }
    }
}

/// Prints what is wrong with the flags, the environment or a file that they name.
fn misuse(error: impl std::fmt::Display) -> ExitCode {
    let _ = cli::command().error(ErrorKind::ValueValidation, error).print();
    ExitCode::from(MISUSE)
}

/// Runs the proxy until a signal.
fn run(serving: Serving) -> ExitCode {
    let Serving { mut config, settings } = serving;
    // Before a file is read, which may take its time: from here on SIGHUP does not end the process.
    let started = start_runtime(&config);
    if let Err(error) = config.validate() {
        return misuse(error);
    }
    let log_level = telemetry::log::init(&config.log.level, config.log.is_json());
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("BUILD_COMMIT"));
    tracing::info!(version, commit, settings = given(&settings), "rangecache starts");
    if !config.process.core_dumps {
        forbid_core_dumps();
    }
    let max_connections = connections_within_descriptors(config.limits.max_connections());
    config.limits.max_connections = Some(max_connections);
    let config = &config;
    let (runtime, signals) = match started {
        Ok(started) => started,
        Err(error) => {
            tracing::error!(%error, "cannot start the runtime");
            return ExitCode::FAILURE;
        }
    };
    let files = match Files::open(config) {
        Ok(files) => files,
        Err(error) => return misuse(error),
    };
    let ended = runtime.block_on(async {
        let sockets = Sockets::bind(config, &files).await?;
        let reloads = Reloads { settings, log_level };
        Server::start(config, files, sockets, signals, reloads)?
            .run()
            .await
    });
    // A write of the access log may hang: whatever reads standard output may have stopped.
    runtime.shutdown_timeout(BACKGROUND_TIMEOUT);
    match ended {
        Ok(code) => code,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "stopping");
            ExitCode::FAILURE
        }
    }
}

/// Keeps the process's memory out of core dumps, and from other processes of its user.
#[cfg(target_os = "linux")]
fn forbid_core_dumps() {
    if let Err(error) = set_dumpable_behavior(DumpableBehavior::NotDumpable) {
        tracing::warn!(
            %error,
            "core dumps cannot be forbidden, and other processes of the same user can read this one's memory"
        );
    }
}

#[cfg(not(target_os = "linux"))]
fn forbid_core_dumps() {}

/// The runtime, and the handlers of signals.
fn start_runtime(config: &Config) -> io::Result<(Runtime, Signals)> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.limits.worker_threads())
        .enable_all()
        .build()?;
    let signals = {
        let _context = runtime.enter();
        Signals::listen()?
    };
    Ok((runtime, signals))
}

/// Examines etcd, prints the report, and exits with the report's code. Nothing is logged: failures are in the report.
fn doctor(options: &DoctorConfig) -> ExitCode {
    if let Err(error) = options.config.validate() {
        return misuse(error);
    }
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    let report = runtime.block_on(doctor::examine(options));
    let printed = print(|out| match options.output {
        ReportFormat::Text => write!(
            out,
            "{}",
            report.to_text(Style::detect(io::stdout().is_terminal()))
        ),
        ReportFormat::Json => writeln!(out, "{:#}", report.to_json()),
    });
    if printed == ExitCode::SUCCESS {
        ExitCode::from(report.exit_code())
    } else {
        printed
    }
}

/// Plays an access log, and prints the report. Progress goes to standard error.
fn replay(options: &ReplayConfig) -> ExitCode {
    if let Err(error) = options.config.validate() {
        return misuse(error);
    }
    let file = &options.recording;
    let recording = if file == Path::new("-") {
        Recording::read(io::stdin().lock())
    } else {
        let opened = File::open(file).map_err(ReadError::from);
        opened.and_then(|file| Recording::read(BufReader::new(file)))
    };
    let fail = |error: &dyn std::fmt::Display| {
        let _ = writeln!(io::stderr(), "error: {error}");
        ExitCode::FAILURE
    };
    let recording = match recording {
        Ok(recording) => recording,
        Err(error) => return fail(&format_args!("{}: {error}", file.display())),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let tell = |line: &str| drop(writeln!(io::stderr(), "{line}"));
    let report = match runtime.block_on(replay::play(options, recording, tell)) {
        Ok(report) => report,
        Err(error) => return fail(&error),
    };
    let printed = print(|out| match options.output {
        ReportFormat::Text => write!(out, "{}", report.to_text()),
        ReportFormat::Json => writeln!(out, "{:#}", report.to_json()),
    });
    if printed == ExitCode::SUCCESS && !report.is_clean() {
        return ExitCode::FAILURE;
    }
    printed
}

/// Compares two endpoints, and prints the keys that differ as they are found.
fn diff(options: &DiffConfig) -> ExitCode {
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::from(NOT_COMPARED);
    };
    // A reader that closes the pipe early is not an error.
    let compared = runtime.block_on(diff::compare(options, |difference| {
        let _ = writeln!(io::stdout(), "{difference}");
    }));
    match compared {
        Ok(summary) => {
            let _ = writeln!(io::stdout(), "{summary}");
            ExitCode::from(u8::from(!summary.is_equal()))
        }
        Err(error) => {
            let _ = writeln!(io::stderr(), "rangecache diff: {error}");
            ExitCode::from(NOT_COMPARED)
        }
    }
}

/// Installs or removes the manifest of a static pod. The flags are those of the pod: its files must be readable here, too.
fn static_pod(options: &StaticPodConfig) -> ExitCode {
    if options.action == StaticPodAction::Install
        && let Err(error) = options.config.validate()
    {
        return misuse(error);
    }
    let Ok(runtime) = tokio::runtime::Builder::new_current_thread().enable_all().build() else {
        return ExitCode::FAILURE;
    };
    let tell = |line: &str| drop(writeln!(io::stdout(), "{line}"));
    let done = match options.action {
        StaticPodAction::Install => {
            let check = async || {
                let examined = DoctorConfig {
                    config: options.config.clone(),
                    output: ReportFormat::Text,
                    deep: false,
                };
                let report = doctor::examine(&examined).await;
                match report.exit_code() {
                    0 => Ok(()),
                    _ => Err(report.to_text(Style::detect(false)).to_string()),
                }
            };
            let installed = runtime.block_on(static_pod::install(options, check, tell));
            installed.map_err(|error| error.to_string())
        }
        StaticPodAction::Remove => static_pod::remove(options).map_err(|error| error.to_string()),
        StaticPodAction::Hold => runtime
            .block_on(static_pod::hold())
            .map_err(|error| error.to_string()),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let _ = writeln!(io::stderr(), "rangecache static-pod: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints to standard output. A reader that closes the pipe early is not an error.
fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> ExitCode {
    let mut text = Vec::new();
    match write(&mut text).and_then(|()| io::stdout().write_all(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Everything that is read from files and the environment before a port is bound.
struct Files {
    connector: Arc<Connector>,
    acceptor: Option<Arc<Acceptor>>,
    metrics: Arc<Metrics>,
    tracer: Tracer,
    exporter: Option<Exporter>,
    access_log: AccessLog,
    access_log_writer: Option<AccessLogWriter>,
}

impl Files {
    fn open(config: &Config) -> anyhow::Result<Files> {
        let metrics = Arc::new(Metrics::new());
        let (exporter, tracer) = open_exporter(&metrics).unzip();
        let (access_log_writer, access_log) = open_access_log(&config.access_log, &metrics)?.unzip();
        let tracer = tracer.unwrap_or_default();
        tracer.set_share(config.trace.trace_sample);
        Ok(Files {
            connector: Connector::open(config, &metrics)?,
            acceptor: Acceptor::open(config, &metrics)?,
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
    Some(Exporter::open(settings?, metrics.traces.counters()))
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
    let counters = metrics.access_log.counters();
    let opened = AccessLogWriter::open(destination, config.sample, config.keys, counters);
    let opened = opened.map_err(|error| {
        anyhow::anyhow!(
            "--access-log {} cannot be opened for appending: {error}; name a file in a directory that exists and is \
             writable, or - for standard output",
            file.display()
        )
    })?;
    Ok(Some(opened))
}

/// Handlers of signals.
struct Signals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl Signals {
    fn listen() -> io::Result<Signals> {
        Ok(Signals {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }
}

/// Bound sockets.
struct Sockets {
    clients: Vec<Listener>,
    /// Those that permit reads only.
    readers: Vec<Listener>,
    operators: Vec<Listener>,
}

impl Sockets {
    async fn bind(config: &Config, files: &Files) -> anyhow::Result<Sockets> {
        let listen = &config.listen;
        Ok(Sockets {
            clients: bind(&listen.client_urls, config, files)
                .await
                .context("--listen-client-urls")?,
            readers: bind(&listen.read_only_client_urls, config, files)
                .await
                .context("--read-only-listen-client-urls")?,
            operators: bind(&listen.metrics_urls, config, files)
                .await
                .context("--listen-metrics-urls")?,
        })
    }
}

async fn bind(urls: &[Url], config: &Config, files: &Files) -> anyhow::Result<Vec<Listener>> {
    let mut listeners = Vec::new();
    for url in urls {
        let (mode, reuse_port) = (config.listen.unix_socket_mode, config.listen.reuse_port);
        let listener = Listener::bind(url, files.acceptor.as_ref(), mode, reuse_port)
            .await
            .with_context(|| {
                format!("cannot listen on {url}; is another process there? Port 0 takes a free one")
            })?;
        listeners.push(listener);
    }
    Ok(listeners)
}

/// Bounds on the connections of all listeners for clients together.
fn client_connections(config: &Config, metrics: &Metrics) -> Arc<Connections> {
    let limits = ConnectionLimits {
        all: config.limits.max_connections(),
        per_address: config.limits.connections_per_address(),
        on_loopback: config.limits.max_connections_per_address.is_some(),
        replace_oldest: false,
    };
    let budgets = ConnectionBudgets {
        window_bytes: config.limits.window_bytes(),
        handshakes: config.limits.handshakes(),
        handshake_timeout: config.tls.tls_handshake_timeout,
    };
    Connections::with_budgets(limits, budgets, metrics.connections.open.clone())
}

/// What reloads need of the start.
struct Reloads {
    /// Every flag with its value.
    settings: Vec<Setting>,
    log_level: LogLevel,
}

/// The running proxy: its tasks, and the three stages of its stop.
struct Server {
    signals: Signals,
    /// Tells the owners of files to look at them again.
    look: watch::Sender<()>,
    /// Requests reloads of the flags.
    reload: ReloadHandle,
    live: LiveConfig,
    credentials: Arc<Credentials>,
    /// Accept no more connections.
    closing: CancellationToken,
    listeners: TaskTracker,
    /// Accept no more calls, and end those that never end by themselves.
    drain: CancellationToken,
    calls: TaskTracker,
    /// Stop the mirrors and every other background task.
    stop: CancellationToken,
    background: TaskTracker,
}

impl Server {
    /// Starts every task.
    fn start(
        config: &Config,
        files: Files,
        sockets: Sockets,
        signals: Signals,
        reloads: Reloads,
    ) -> anyhow::Result<Server> {
        let (reload, reload_requests) = reload::channel();
        let server = Server {
            signals,
            look: watch::Sender::new(()),
            reload,
            live: LiveConfig::new(config.clone(), reloads.settings),
            credentials: Credentials::open(&config.etcd, &files.connector)?,
            closing: CancellationToken::new(),
            listeners: TaskTracker::new(),
            drain: CancellationToken::new(),
            calls: TaskTracker::new(),
            stop: CancellationToken::new(),
            background: TaskTracker::new(),
        };
        let Server {
            calls,
            background,
            stop,
            look,
            live,
            ..
        } = &server;
        let clients = ClientRegistry::with_max(bounds::MAX_CLIENTS, Arc::clone(&files.metrics.calls));
        let telemetry = Arc::new(Telemetry::new(
            files.metrics,
            files.tracer,
            files.access_log,
            clients,
        ));
        panics::install(telemetry.metrics.process.panics.clone());
        for bound in bounds::ALL {
            telemetry
                .metrics
                .process
                .set_limit(bound.name, bound.value(config));
        }
        if let Some(exporter) = files.exporter {
            background.spawn(exporter.run(background.clone(), stop.clone()));
        }
        if let Some(writer) = files.access_log_writer {
            background.spawn(writer.run(look.subscribe(), stop.clone()));
        }
        files.connector.keep_fresh(background, look, stop);
        if let Some(acceptor) = &files.acceptor {
            acceptor.keep_fresh(background, look, stop);
        }
        let upstream = Upstream::start(
            &config.etcd.endpoints,
            &files.connector,
            config.etcd.range_stream == RangeStream::Auto,
            Arc::clone(&server.credentials),
            background,
            stop,
        );
        let mirrors = mirror::start(live, &upstream, &telemetry, background, stop);
        let proxy = Proxy::new(live, &upstream, &mirrors, &telemetry, calls, &server.drain);
        background.spawn(Arc::clone(&proxy).sweep(stop.clone()));
        let reloader = Reloader {
            live: live.clone(),
            mirrors: Arc::clone(&mirrors),
            proxy: Arc::clone(&proxy),
            telemetry: Arc::clone(&telemetry),
            log_level: reloads.log_level,
        };
        background.spawn(
            stop.clone()
                .run_until_cancelled_owned(reloader.run(reload_requests)),
        );
        let serving = ServeConfig {
            name: "clients",
            connections: client_connections(config, &telemetry.metrics),
            max_concurrent_streams: config.limits.max_concurrent_streams,
            max_age: None,
            metrics: Arc::clone(&telemetry.metrics),
            tasks: calls.clone(),
            closing: server.closing.clone(),
            drain: server.drain.clone(),
        };
        let serve = |listener: Listener, access| {
            let proxy = Arc::clone(&proxy);
            let handler = move |intake: &_, name: &_, peer| {
                let client = proxy.client(access, intake, name, peer);
                move |request, transport| proxy::handle(Arc::clone(&client), request, transport)
            };
            server.listeners.spawn(listener.serve(handler, serving.clone()));
        };
        for listener in sockets.clients {
            tracing::info!(url = %listener.url(), "serving clients");
            serve(listener, Access::Full);
        }
        for listener in sockets.readers {
            tracing::info!(url = %listener.url(), "serving clients that may only read");
            serve(listener, Access::ReadOnly);
        }
        let admin = Admin::new(
            mirrors,
            upstream,
            telemetry,
            calls.clone(),
            server.closing.clone(),
            server.reload.clone(),
            live,
        );
        background.spawn(Arc::clone(&admin).remember(stop.clone()));
        for listener in sockets.operators {
            tracing::info!(url = %listener.url(), "serving metrics");
            background.spawn(Arc::clone(&admin).serve(listener, background.clone(), stop.clone()));
        }
        Ok(server)
    }

    /// Serves until a signal, or until a task refuses to continue, and drains.
    async fn run(mut self) -> anyhow::Result<ExitCode> {
        let code = loop {
            tokio::select! {
                _ = self.signals.terminate.recv() => break ExitCode::SUCCESS,
                _ = self.signals.interrupt.recv() => break ExitCode::SUCCESS,
                Some(()) = self.signals.hangup.recv() => {
                    self.look.send_replace(());
                    self.credentials.look_again();
                    self.reload.request();
                }
                // A task found an etcd that it must not serve, and has logged the reason.
                () = self.stop.cancelled() => break ExitCode::FAILURE,
            }
        };
        let shutdown_timeout = self.live.load().limits.shutdown_timeout;
        self.drain(shutdown_timeout).await;
        Ok(code)
    }

    /// Stops in three stages: connections, calls, background tasks.
    async fn drain(self, timeout: Duration) {
        tracing::info!(?timeout, "stopping: no new calls; calls in flight may complete");
        let deadline = Instant::now() + timeout;
        // The port is closed before clients are told to leave, so that a client that connects again reaches the next
        // process on that port.
        self.closing.cancel();
        self.listeners.close();
        self.listeners.wait().await;
        self.drain.cancel();
        self.calls.close();
        if tokio::time::timeout_at(deadline, self.calls.wait())
            .await
            .is_err()
        {
            tracing::warn!(
                tasks = self.calls.len(),
                "calls were still in flight at the end of --shutdown-timeout and are aborted"
            );
        }
        self.stop.cancel();
        self.background.close();
        let deadline = deadline.max(Instant::now() + BACKGROUND_TIMEOUT);
        let _ = tokio::time::timeout_at(deadline, self.background.wait()).await;
        tracing::info!("stopped");
    }
}
