//! `rangecache serve`, the command that is meant without one: check, read files, bind, assemble, serve, stop.
//!
//! | file | subject |
//! |---|---|
//! | `files` | everything that is read from files and the environment before a port is bound |
//! | [`assembly`] | the parts, connected with each other; simulations start them, too |
//! | `stages` | the tasks of the process, and the three stages of its stop |
//!
//! Only `main` imports this room.

mod assembly;
mod files;
mod stages;

use std::{io, process::ExitCode, sync::Arc};

use rangecache_base::{
    memory,
    net::Url,
    panics,
    telemetry::{self, log::LogLevel},
};
use rangecache_config::{Config, ReloadHandle, Setting, given, reload_channel};
use rangecache_edge::server::{ListenConfig, Listener, connections_within_descriptors};
use rangecache_edge::tls::Acceptor;
use rangecache_proxy::Access;
use tokio::runtime::{Handle, Runtime};
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::cli::{self, Serving};
use crate::reload::Reloader;
use rangecache_admin::Admin;
use stages::BACKGROUND_TIMEOUT;

#[cfg(target_os = "linux")]
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

pub use assembly::Assembly;
pub use files::ProcessFiles;
pub use stages::Stages;

/// Runs the proxy until a signal.
#[must_use]
pub fn run(serving: Serving) -> ExitCode {
    let Serving { mut config, settings } = serving;
    // Before a file is read, which may take its time: from here on SIGHUP does not end the process.
    let started = start_runtimes(&config);
    if let Err(error) = config.validate() {
        return cli::misuse(error);
    }
    let log_level = telemetry::log::init(&config.log.level, config.log.is_json());
    let (version, commit) = (env!("CARGO_PKG_VERSION"), env!("BUILD_COMMIT"));
    tracing::info!(version, commit, settings = given(&settings), "rangecache starts");
    if !config.process.core_dumps {
        forbid_core_dumps();
    }
    let (cache_bytes, memory_bytes) = (config.mirror.max_bytes(), memory::limit_bytes());
    if cache_bytes > memory_bytes {
        tracing::warn!(
            cache_bytes,
            memory_bytes,
            "--cache-max-bytes is more than the memory limit: the process is ended for lack of memory before its mirrors reach their \
             bound; lower it, or raise the limit"
        );
    }
    let max_connections = connections_within_descriptors(config.limits.max_connections());
    config.limits.max_connections = Some(max_connections);
    let Started {
        runtime,
        calls,
        signals,
    } = match started {
        Ok(started) => started,
        Err(error) => {
            tracing::error!(%error, "cannot start the runtime");
            return ExitCode::FAILURE;
        }
    };
    // What DNS names may be something else at the next start: as with files, systemd and others try again.
    let discovered = match runtime.block_on(config.etcd.discover()) {
        Ok(false) => Ok(()),
        Ok(true) => config.validate().map_err(anyhow::Error::from),
        Err(error) => Err(error.into()),
    };
    if let Err(error) = discovered {
        tracing::error!(%error, "stopping");
        return ExitCode::FAILURE;
    }
    let files = match ProcessFiles::open(&config) {
        Ok(files) => files,
        Err(error) => {
            tracing::error!(error = format!("{error:#}"), "stopping");
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(serve(
        &config,
        settings,
        files,
        signals,
        log_level,
        calls.handle(),
    ));
    calls.shutdown_timeout(BACKGROUND_TIMEOUT);
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

/// Runtimes and handlers of signals.
struct Started {
    /// Runs mirrors with their feeds, the admin port and whatever else no call does, on the main thread.
    runtime: Runtime,
    /// Runs calls, on threads of its own: however busy these are, the main thread is not.
    calls: Runtime,
    signals: Signals,
}

/// Starts the runtimes, and handles signals.
fn start_runtimes(config: &Config) -> io::Result<Started> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let calls = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(config.limits.worker_threads())
        .enable_all()
        .build()?;
    let signals = {
        let _context = runtime.enter();
        Signals::listen()?
    };
    Ok(Started {
        runtime,
        calls,
        signals,
    })
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

/// Binds the sockets, starts every task, and serves until the end.
async fn serve(
    config: &Config,
    settings: Vec<Setting>,
    files: ProcessFiles,
    mut signals: Signals,
    log_level: LogLevel,
    calls: &Handle,
) -> anyhow::Result<ExitCode> {
    let sockets = tokio::select! {
        bound = Sockets::bind(&config.listen, files.acceptor.as_ref()) => bound?,
        signal = stop_signal(&mut signals.terminate, &mut signals.interrupt) => return Ok(stopped_by(signal)),
    };
    let process = &files.metrics.process;
    process.set_build(env!("CARGO_PKG_VERSION"), env!("BUILD_COMMIT"));
    let counter = process.panics.clone();
    panics::install(move || {
        counter.inc();
    });
    let assembly = Assembly::start(config, settings, files, calls)?;
    let reload = start_reloads(&assembly, log_level);
    for listener in sockets.clients {
        tracing::info!(url = %listener.url(), "serving clients");
        assembly.serve(listener, Access::Full);
    }
    for listener in sockets.readers {
        tracing::info!(url = %listener.url(), "serving clients that may only read");
        assembly.serve(listener, Access::ReadOnly);
    }
    let stages = &assembly.stages;
    let admin = Admin::new(
        Arc::clone(&assembly.mirrors),
        Arc::clone(&assembly.upstream),
        Arc::clone(&assembly.telemetry),
        stages.calls.clone(),
        stages.closing.clone(),
        reload.clone(),
        &assembly.live,
        env!("BUILD_COMMIT"),
    );
    let (background, stop) = (&stages.background, &stages.stop);
    background.spawn(Arc::clone(&admin).remember(stop.clone()));
    for listener in sockets.operators {
        tracing::info!(url = %listener.url(), "serving metrics");
        background.spawn(Arc::clone(&admin).serve(listener, background.clone(), stop.clone()));
    }
    let code = run_until_stopped(&assembly, signals, &reload).await;
    let shutdown_timeout = assembly.live.load().limits.shutdown_timeout;
    stages.end(shutdown_timeout).await;
    Ok(code)
}

/// Starts the task that reloads the flags.
fn start_reloads(assembly: &Assembly, log_level: LogLevel) -> ReloadHandle {
    let (handle, requests) = reload_channel();
    let reloader = Reloader {
        live: assembly.live.clone(),
        upstream: Arc::clone(&assembly.upstream),
        mirrors: Arc::clone(&assembly.mirrors),
        proxy: Arc::clone(&assembly.proxy),
        telemetry: Arc::clone(&assembly.telemetry),
        log_level,
    };
    let Stages { background, stop, .. } = &assembly.stages;
    background.spawn(stop.clone().run_until_cancelled_owned(reloader.run(requests)));
    handle
}

/// Waits for a signal that ends the process, and returns its name.
async fn stop_signal(terminate: &mut Signal, interrupt: &mut Signal) -> &'static str {
    tokio::select! {
        _ = terminate.recv() => "SIGTERM",
        _ = interrupt.recv() => "SIGINT",
    }
}

fn stopped_by(signal: &'static str) -> ExitCode {
    tracing::info!(signal, "a signal ends rangecache");
    ExitCode::SUCCESS
}

/// Handles signals until one ends the process, or until a task refuses to continue. Returns the exit code.
async fn run_until_stopped(assembly: &Assembly, mut signals: Signals, reload: &ReloadHandle) -> ExitCode {
    loop {
        tokio::select! {
            signal = stop_signal(&mut signals.terminate, &mut signals.interrupt) => return stopped_by(signal),
            Some(()) = signals.hangup.recv() => {
                assembly.look_again();
                reload.request();
            }
            // A task found an etcd that it must not serve, and has logged the reason.
            () = assembly.stages.stop.cancelled() => return ExitCode::FAILURE,
        }
    }
}

/// The sockets of every `--listen-…` flag.
pub(super) struct Sockets {
    pub(super) clients: Vec<Listener>,
    /// Listeners that permit reads only.
    pub(super) readers: Vec<Listener>,
    pub(super) operators: Vec<Listener>,
}

impl Sockets {
    /// Binds all of them.
    ///
    /// # Errors
    /// The first URL that cannot be bound, with its flag.
    pub(super) async fn bind(
        listen: &ListenConfig,
        acceptor: Option<&Arc<Acceptor>>,
    ) -> anyhow::Result<Sockets> {
        let bind = async |flag, urls: &[Url]| {
            let mut listeners = Vec::new();
            for url in urls {
                let bound = Listener::bind(url, acceptor, listen.unix_socket_mode, listen.reuse_port).await;
                let explained = |error: io::Error| {
                    let what = format!("cannot listen on {url}; {}", remedy(&error));
                    anyhow::Error::new(error).context(what).context(flag)
                };
                listeners.push(bound.map_err(explained)?);
            }
            anyhow::Ok(listeners)
        };
        Ok(Sockets {
            clients: bind("--listen-client-urls", &listen.client_urls).await?,
            readers: bind("--read-only-listen-client-urls", &listen.read_only_client_urls).await?,
            operators: bind("--listen-metrics-urls", &listen.metrics_urls).await?,
        })
    }
}

/// Likely cause of a socket that cannot be bound, and what to do.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => "another process is there; port 0 takes a free one",
        io::ErrorKind::AddrNotAvailable => "no interface of this host has that address",
        io::ErrorKind::NotFound => "create the folder of the socket",
        io::ErrorKind::PermissionDenied => {
            "this user may not; choose a port from 1024 on, or a folder that it may write"
        }
        _ => "choose another address",
    }
}
