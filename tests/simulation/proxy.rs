//! rangecache as a part of this process: what `main` assembles, without signals, reloads and the listener for metrics.

use std::sync::Arc;
use std::time::Duration;

use clap::Parser as _;
use rangecache::config::{Config, LiveConfig, RangeStream, bounds};
use rangecache::mirror;
use rangecache::proxy::{self, Access, Proxy};
use rangecache::server::{ConnectionLimits, Connections, Listener, ServeConfig};
use rangecache::telemetry::clients::ClientRegistry;
use rangecache::telemetry::exposition::Format;
use rangecache::telemetry::{Metrics, Telemetry};
use rangecache::tls::Connector;
use rangecache::upstream::{Credentials, Upstream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::chance::Chance;
use crate::cluster::MEMBERS;
use crate::members::From;

/// Address of the rangecache.
pub const AUTHORITY: &str = "rangecache:2379";

/// What a seed chooses about the rangecache.
#[derive(Clone, Debug)]
pub struct Settings {
    pub flags: Vec<&'static str>,
    /// `--serve-stale`.
    pub serve_stale: Duration,
    /// Whether watches have little memory: clients write long values then.
    pub is_watch_memory_small: bool,
}

impl Settings {
    /// Random settings: each is in some simulations as users have it, and in others such that rare cases come often.
    pub fn random(chance: &Chance) -> Self {
        let mut flags = vec!["--watch-cache=auto"];
        if chance.one_in(3) {
            flags.extend(["--cache-prefix=/sim/a/", "--cache-prefix=/sim/b/"]);
        }
        if chance.one_in(4) {
            // Watches come too late for the log, and past revisions go to etcd.
            flags.push("--history-max-bytes=1");
        }
        if chance.one_in(4) {
            flags.push("--verify-interval=2s");
        }
        if chance.one_in(6) {
            flags.push("--shadow=0.5");
        }
        if chance.one_in(8) {
            flags.push("--when-behind=fail");
        }
        let is_watch_memory_small = chance.one_in(4);
        if is_watch_memory_small {
            flags.push("--watch-max-bytes=24KiB");
        }
        let serves_stale = chance.one_in(3);
        if serves_stale {
            flags.push("--serve-stale=3s");
        }
        Self {
            flags,
            serve_stale: Duration::from_secs(if serves_stale { 3 } else { 0 }),
            is_watch_memory_small,
        }
    }
}

/// A running rangecache.
pub struct Rangecache {
    metrics: Arc<Metrics>,
    stop: CancellationToken,
    tasks: TaskTracker,
}

impl Rangecache {
    /// Starts it in front of all members, with these flags in addition.
    pub async fn start(flags: &[&str]) -> Self {
        let listen = format!("--listen-client-urls=http://{AUTHORITY}");
        let members = (0..MEMBERS).map(|member| format!("http://{}", From::Rangecache.authority(member)));
        let endpoints = format!("--endpoints={}", members.collect::<Vec<_>>().join(","));
        let own = ["rangecache", &listen, &endpoints, "--allow-plaintext-listener"];
        let config = Config::try_parse_from(own.iter().chain(flags)).expect("valid flags");
        config.validate().expect("valid flags");
        let live = LiveConfig::new(config.clone(), Vec::new());
        let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
        let metrics = Arc::new(Metrics::new());
        let connector = Connector::open(&config, &metrics).expect("no files");
        let credentials = Credentials::open(&config.etcd, &connector).expect("no files");
        let clients = ClientRegistry::with_max(bounds::MAX_CLIENTS, Arc::clone(&metrics.calls));
        let telemetry = Telemetry::new(
            Arc::clone(&metrics),
            Default::default(),
            Default::default(),
            clients,
        );
        let telemetry = Arc::new(telemetry);
        let upstream = Upstream::start(
            &config.etcd.endpoints,
            &connector,
            config.etcd.range_stream == RangeStream::Auto,
            credentials,
            &tasks,
            &stop,
        );
        let mirrors = mirror::start(&live, &upstream, &telemetry, &tasks, &stop);
        let proxy = Proxy::new(&live, &upstream, &mirrors, &telemetry, &tasks, &stop);
        tasks.spawn(Arc::clone(&proxy).sweep(stop.clone()));
        let limits = ConnectionLimits {
            all: config.limits.max_connections,
            per_address: config.limits.connections_per_address(),
            on_loopback: false,
            replace_oldest: false,
        };
        let serving = ServeConfig {
            name: "clients",
            connections: Connections::new(limits, metrics.connections.open.clone()),
            max_concurrent_streams: config.limits.max_concurrent_streams,
            max_age: None,
            metrics: Arc::clone(&metrics),
            tasks: tasks.clone(),
            closing: stop.clone(),
            drain: stop.clone(),
        };
        let listen = &config.listen;
        let listener = Listener::bind(&listen.client_urls[0], None, listen.unix_socket_mode, false)
            .await
            .expect("the address is free");
        let handler = move |intake: &_, name: &_, peer| {
            let client = proxy.client(Access::Full, intake, name, peer);
            move |request, transport| proxy::handle(Arc::clone(&client), request, transport)
        };
        tasks.spawn(listener.serve(handler, serving));
        Self { metrics, stop, tasks }
    }

    /// Its metrics page.
    pub fn metrics(&self) -> testkit::metrics::Metrics {
        testkit::metrics::Metrics::parse(&self.metrics.encode(Format::Text))
    }

    /// Stops it, and waits for all of its tasks.
    pub async fn stop(self) {
        self.stop.cancel();
        self.tasks.close();
        self.tasks.wait().await;
    }
}
