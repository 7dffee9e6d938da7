//! etcd with the proxies in front of it: the targets that the cases drive.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Result;
use tempfile::TempDir;

use crate::client::{Connection, Windows};
use crate::http1;
use crate::processes::{self, Binaries, Endpoint, EtcdOptions, Process};
use crate::tls::Tls;

/// Kind of a target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// etcd itself.
    Direct,
    /// etcd's grpc-proxy.
    GrpcProxy,
    /// rangecache.
    Rangecache,
    /// The replay server.
    Floor,
    /// Another build of rangecache, if `--baseline` names one.
    Baseline,
}

/// Range and RangeStream calls counted by a rangecache.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RangeOutcomes {
    /// Calls answered from memory.
    pub(crate) from_memory: f64,
    /// All calls.
    pub(crate) all: f64,
}

impl Target {
    /// Reads rangecache's counters; `None` for other targets.
    pub(crate) async fn range_outcomes(&self) -> Result<Option<RangeOutcomes>> {
        let Some(address) = self.outcomes else {
            return Ok(None);
        };
        let (_, text) = http1::get(address, "/metrics").await?;
        let count = |labels: &str| {
            let of = |name: &str| http1::metric(&text, &format!("{name}{labels}")).unwrap_or(0.0);
            of("rangecache_range_total") + of("rangecache_range_stream_total")
        };
        let from_memory = count("{outcome=\"hit\"") + count("{outcome=\"waited\"");
        Ok(Some(RangeOutcomes {
            from_memory,
            all: count(""),
        }))
    }
}

impl Kind {
    /// Order of the targets in a round, and of the table's columns; a baseline comes after them.
    pub(crate) const ALL: [Kind; 4] = [Kind::Direct, Kind::GrpcProxy, Kind::Rangecache, Kind::Floor];

    /// Name of the column.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Direct => "etcd",
            Kind::GrpcProxy => "grpc-proxy",
            Kind::Rangecache => "rangecache",
            Kind::Floor => "floor",
            Kind::Baseline => "baseline",
        }
    }
}

/// Addresses and processes of a target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Target {
    /// Kind of the target.
    pub(crate) kind: Kind,
    /// Address for clients.
    pub(crate) address: SocketAddr,
    /// TLS files, if clients use TLS.
    pub(crate) tls: Option<&'static Tls>,
    /// Process in front of etcd; `None` for etcd itself.
    pub(crate) proxy_pid: Option<u32>,
    /// etcd's process.
    pub(crate) etcd_pid: u32,
    /// Address of rangecache's metrics.
    pub(crate) outcomes: Option<SocketAddr>,
}

/// A running etcd and the proxies in front of it. Dropping it stops all of them.
pub(crate) struct Setup {
    // The processes are declared, and so dropped, before the folder that they write to.
    replay_server: Option<Process>,
    baseline: Option<Process>,
    rangecache: Option<Process>,
    grpc_proxy: Option<Process>,
    /// etcd.
    pub(crate) etcd: Process,
    folder: TempDir,
    binaries: Binaries,
    options: EtcdOptions,
    /// Watchers that are open during the second measurement of each load; 0 for no second one.
    pub(crate) watchers_beside: usize,
    /// Reason why rangecache is missing among the targets.
    pub(crate) without_rangecache: Option<String>,
}

impl Setup {
    /// Starts an empty etcd.
    pub(crate) async fn start(binaries: &Binaries, options: EtcdOptions) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("rangecache-bench-").tempdir()?;
        Self::start_in(folder, binaries, options).await
    }

    /// Starts an empty etcd to which proxies and clients connect with TLS.
    pub(crate) async fn start_with_tls(binaries: &Binaries, options: EtcdOptions) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("rangecache-bench-").tempdir()?;
        // Created once, and needed until the end of the run.
        let tls: &'static Tls = Box::leak(Box::new(Tls::new(folder.path())?));
        let options = EtcdOptions {
            tls: Some(tls),
            ..options
        };
        Self::start_in(folder, binaries, options).await
    }

    async fn start_in(folder: TempDir, binaries: &Binaries, options: EtcdOptions) -> Result<Self> {
        let etcd =
            processes::start_etcd(binaries, folder.path(), &folder.path().join("data"), options).await?;
        Ok(Setup {
            replay_server: None,
            baseline: None,
            rangecache: None,
            grpc_proxy: None,
            etcd,
            folder,
            binaries: binaries.clone(),
            options,
            watchers_beside: 0,
            without_rangecache: None,
        })
    }

    /// Starts the proxies in place of earlier ones, and waits until the mirrors are warm.
    pub(crate) async fn start_targets(&mut self) -> Result<()> {
        self.stop_proxies();
        let etcd = self.endpoint();
        self.grpc_proxy = Some(processes::start_grpc_proxy(&self.binaries, self.folder.path(), etcd).await?);
        // The replay server does not support TLS.
        if etcd.tls.is_none() {
            let replay_server =
                processes::start_replay_server(&self.binaries, self.folder.path(), etcd.address);
            self.replay_server = Some(replay_server.await?);
        }
        match self.start_rangecache(&[]).await {
            Ok(process) => self.rangecache = Some(process),
            // The other figures are still useful; the table gives the reason.
            Err(error) => self.without_rangecache = Some(format!("{error:#}")),
        }
        if let Some(baseline) = self.binaries.baseline.clone() {
            let binaries = Binaries {
                rangecache: baseline,
                ..self.binaries.clone()
            };
            let mut process =
                processes::start_rangecache(&binaries, self.folder.path(), &[etcd], &[], &[]).await?;
            process.wait_ready().await?;
            self.baseline = Some(process);
        }
        Ok(())
    }

    fn stop_proxies(&mut self) {
        (self.replay_server, self.baseline) = (None, None);
        (self.rangecache, self.grpc_proxy) = (None, None);
    }

    /// Starts another rangecache, and waits until it is ready.
    pub(crate) async fn start_rangecache(&self, flags: &[&str]) -> Result<Process> {
        let mut process = self.launch_rangecache(flags).await?;
        process.wait_ready().await?;
        Ok(process)
    }

    /// Starts a rangecache whose endpoint is another one, and waits until it is ready.
    pub(crate) async fn start_leaf(&self, hub: &Process) -> Result<Process> {
        let hub = [Endpoint {
            address: hub.address,
            tls: self.options.tls,
        }];
        let mut process =
            processes::start_rangecache(&self.binaries, self.folder.path(), &hub, &[], &[]).await?;
        process.wait_ready().await?;
        Ok(process)
    }

    /// Starts another rangecache, without waiting for its mirror.
    pub(crate) async fn launch_rangecache(&self, flags: &[&str]) -> Result<Process> {
        self.launch_rangecache_with(flags, &[]).await
    }

    /// Starts another rangecache with these environment variables, and waits until it is ready.
    pub(crate) async fn start_rangecache_with(
        &self,
        flags: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Process> {
        let mut process = self.launch_rangecache_with(flags, environment).await?;
        process.wait_ready().await?;
        Ok(process)
    }

    async fn launch_rangecache_with(&self, flags: &[&str], environment: &[(&str, &str)]) -> Result<Process> {
        let (folder, etcd) = (self.folder.path(), self.endpoint());
        processes::start_rangecache(&self.binaries, folder, &[etcd], flags, environment).await
    }

    /// Stops all processes, and starts etcd again on the same data, with an empty heap.
    pub(crate) async fn restart_etcd(&mut self) -> Result<()> {
        self.stop_proxies();
        // The old process must have released its data before the new one opens it.
        self.etcd.stop();
        let (folder, data) = (self.folder.path(), self.folder.path().join("data"));
        self.etcd = processes::start_etcd(&self.binaries, folder, &data, self.options).await?;
        Ok(())
    }

    /// Starts only one of the targets; `flags` are rangecache's.
    pub(crate) async fn start_only(&mut self, kind: Kind, flags: &[&str]) -> Result<()> {
        let etcd = self.endpoint();
        match kind {
            // A baseline is measured beside the others only.
            Kind::Direct | Kind::Baseline => {}
            Kind::GrpcProxy => {
                let process = processes::start_grpc_proxy(&self.binaries, self.folder.path(), etcd).await?;
                self.grpc_proxy = Some(process);
            }
            Kind::Rangecache => self.rangecache = Some(self.start_rangecache(flags).await?),
            Kind::Floor => {
                let process =
                    processes::start_replay_server(&self.binaries, self.folder.path(), etcd.address).await?;
                self.replay_server = Some(process);
            }
        }
        Ok(())
    }

    /// Starts every later rangecache by this program and its arguments; none without any.
    pub(crate) fn run_rangecache_under(&mut self, program: Vec<String>) {
        self.binaries.rangecache_under = program;
    }

    /// etcd's address for proxies.
    pub(crate) fn endpoint(&self) -> Endpoint {
        Endpoint {
            address: self.etcd.tls_address.unwrap_or(self.etcd.address),
            tls: self.options.tls,
        }
    }

    /// The running targets, in the order of a round.
    pub(crate) fn targets(&self) -> Vec<Target> {
        let process = |kind| match kind {
            Kind::Direct => None,
            Kind::GrpcProxy => self.grpc_proxy.as_ref(),
            Kind::Rangecache => self.rangecache.as_ref(),
            Kind::Floor => self.replay_server.as_ref(),
            Kind::Baseline => self.baseline.as_ref(),
        };
        let etcd_pid = self.etcd.pid();
        let direct = Target {
            kind: Kind::Direct,
            address: self.endpoint().address,
            tls: self.options.tls,
            proxy_pid: None,
            etcd_pid,
            outcomes: None,
        };
        let kinds = Kind::ALL.into_iter().chain([Kind::Baseline]);
        let proxied = kinds.filter_map(|kind| {
            let process = process(kind)?;
            let is_rangecache = matches!(kind, Kind::Rangecache | Kind::Baseline);
            let outcomes = is_rangecache.then_some(process.metrics_address);
            Some(Target {
                kind,
                address: process.address,
                tls: self.options.tls,
                proxy_pid: Some(process.pid()),
                etcd_pid,
                outcomes,
            })
        });
        std::iter::once(direct).chain(proxied).collect()
    }

    /// The running rangecache, if any.
    pub(crate) fn rangecache(&self) -> Option<&Process> {
        self.rangecache.as_ref()
    }

    /// A connection to etcd itself.
    pub(crate) async fn connect(&self) -> Result<Arc<Connection>> {
        Ok(Arc::new(
            Connection::open(self.etcd.address, Windows::LARGE).await?,
        ))
    }

    /// Reads one of etcd's metrics.
    pub(crate) async fn etcd_metric(&self, series: &str) -> Result<f64> {
        http1::read_metric(self.etcd.address, series).await
    }

    /// Makes etcd collect garbage, so that growth of its heap is measured from its minimum.
    pub(crate) async fn collect_etcd_garbage(&self) -> Result<()> {
        let (status, _) = http1::get(self.etcd.address, "/debug/pprof/heap?gc=1&debug=1").await?;
        anyhow::ensure!(status == 200, "etcd's heap profile returned {status}");
        Ok(())
    }
}

/// Connections to one target.
pub(crate) async fn connections(target: &Target, count: usize) -> Result<Vec<Arc<Connection>>> {
    let mut connections = Vec::new();
    for _ in 0..count {
        connections.push(Arc::new(
            Connection::open_with(target.address, target.tls, Windows::LARGE).await?,
        ));
    }
    Ok(connections)
}
