//! The parts of a rangecache, connected with each other.

use std::sync::Arc;

use rangecache_base::telemetry::{Metrics, Telemetry, clients::ClientRegistry};
use rangecache_config::{Config, LiveConfig, Setting, bounds};
use rangecache_edge::limits::OpenConnections;
use rangecache_edge::server::{ConnectionBudgets, ConnectionLimits, Connections, Listener, ServeConfig};
use rangecache_mirror::Mirrors;
use rangecache_proxy::{self as proxy, Access, Proxy, ProxyFlags};
use rangecache_upstream::{Credentials, RangeStream, Upstream, follow_members, follow_srv};
use tokio::{runtime::Handle, sync::watch};

use super::{files::ProcessFiles, stages::Stages};

/// A rangecache that runs: its parts, and their tasks. Nothing listens before [`Assembly::serve`].
pub struct Assembly {
    /// Flags.
    pub live: LiveConfig,
    /// Metrics, traces, the access log and clients.
    pub telemetry: Arc<Telemetry>,
    /// Connections to etcd.
    pub upstream: Arc<Upstream>,
    /// Mirrors.
    pub mirrors: Arc<Mirrors>,
    /// Path of a request.
    pub proxy: Arc<Proxy>,
    /// Tasks.
    pub stages: Stages,
    /// Tells the owners of files to look at them again.
    look: watch::Sender<()>,
    credentials: Arc<Credentials>,
    /// Bounds that all listeners of clients share.
    serving: ServeConfig,
    /// Runtime of calls, and of connections to clients and etcd.
    calls: Handle,
}

impl Assembly {
    /// Starts every part with its tasks. `settings` are all flags with their values. Calls, and connections to clients and etcd, run
    /// on the runtime `calls`, everything else on the current one: mirrors with their feeds do not wait for calls.
    ///
    /// # Errors
    /// A file with credentials that cannot be used.
    pub fn start(
        config: &Config,
        settings: Vec<Setting>,
        files: ProcessFiles,
        calls_on: &Handle,
    ) -> anyhow::Result<Assembly> {
        let live = LiveConfig::new(config.clone(), settings);
        let credentials = Credentials::open(&config.etcd, &files.connector)?;
        let stages = Stages::default();
        let Stages {
            drain,
            calls,
            stop,
            background,
            ..
        } = &stages;
        let look = watch::Sender::new(());
        let clients = ClientRegistry::with_max(bounds::MAX_CLIENTS, Arc::clone(&files.metrics.calls));
        let telemetry = Arc::new(Telemetry::new(
            files.metrics,
            files.tracer,
            files.access_log,
            clients,
        ));
        for bound in bounds::ALL {
            telemetry
                .metrics
                .process
                .set_limit(bound.name, bound.value(config));
        }
        if let Some(exporter) = files.exporter {
            background.spawn(exporter.run(stop.clone()));
        }
        if let Some(writer) = files.access_log_writer {
            background.spawn(writer.run(look.subscribe(), stop.clone()));
        }
        files.connector.keep_fresh(background, &look, stop);
        if let Some(acceptor) = &files.acceptor {
            acceptor.keep_fresh(background, &look, stop);
        }
        let upstream = {
            let _entered = calls_on.enter();
            Upstream::start(
                &config.etcd.endpoints,
                &files.connector,
                config.etcd.range_stream == RangeStream::Auto,
                Arc::clone(&credentials),
                background,
                stop,
            )
        };
        upstream.set_fallback(&config.etcd.fallback_endpoints);
        follow_srv(&upstream, &config.etcd);
        follow_members(&upstream, config.etcd.endpoints_auto_sync_interval);
        let mirrors = rangecache_mirror::start(
            &live.mirror,
            &config.etcd,
            &upstream,
            &telemetry,
            background,
            stop,
        );
        let flags = ProxyFlags {
            forward: &live.forward,
            watch: &config.watch,
            limits: &config.limits,
            listen: &config.listen,
            writes_to: config.etcd.writes_to,
            connect_timeout: config.etcd.connect_timeout,
            buffer_max_bytes: config.buffer_max_bytes(),
        };
        let proxy = Proxy::new(flags, &upstream, &mirrors, &telemetry, calls, drain);
        background.spawn(Arc::clone(&proxy).sweep(stop.clone()));
        let serving = ServeConfig {
            name: "clients",
            connections: client_connections(config, &telemetry.metrics),
            max_concurrent_streams: config.limits.max_concurrent_streams,
            max_age: None,
            metrics: telemetry.metrics.group(),
            tasks: calls.clone(),
            closing: stages.closing.clone(),
            drain: drain.clone(),
        };
        Ok(Assembly {
            live,
            telemetry,
            upstream,
            mirrors,
            proxy,
            stages,
            look,
            credentials,
            serving,
            calls: calls_on.clone(),
        })
    }

    /// Serves clients on `listener`.
    pub fn serve(&self, listener: Listener, access: Access) {
        let proxy = Arc::clone(&self.proxy);
        let handler = move |intake: &_, name: &_, peer| {
            let client = proxy.client(access, intake, name, peer);
            let unsent = client.unsent();
            let handle = move |request, transport| proxy::handle(Arc::clone(&client), request, transport);
            (handle, Some(unsent))
        };
        let serving = self.serving.clone();
        let serving = listener.serve(handler, serving);
        self.stages.listeners.spawn_on(serving, &self.calls);
    }

    /// Looks at certificates, the access log and credentials again: their files may have been replaced.
    pub(super) fn look_again(&self) {
        self.look.send_replace(());
        self.credentials.look_again();
    }
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
    Connections::with_budgets(limits, budgets, metrics.group::<OpenConnections>().open.clone())
}
