//! [`Proxy`]: handles to the other rooms, and the state that requests share.

use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::fallback::Fallback;
use super::forward::Forward;
use super::idle::ResponseRegistry;
use crate::config::Config;
use crate::limits::Admission;
use crate::mirror::Mirrors;
use crate::panics::restarting;
use crate::telemetry::Telemetry;
use crate::upstream::Upstream;

/// Interval at which calls are dropped from the list of slowest calls when they are too old.
const SLOW_CALLS_INTERVAL: Duration = Duration::from_secs(5);

/// State that serves the requests of all clients; see [`handle`](super::handle).
#[derive(Debug)]
pub struct Proxy {
    pub(super) mirrors: Arc<Mirrors>,
    pub(super) telemetry: Arc<Telemetry>,
    pub(super) forward: Arc<Forward>,
    pub(super) fallback: Arc<Fallback>,
    /// Longest wait of a read for a proof that its mirror is fresh (`--freshness-timeout`).
    pub(super) freshness_timeout: Duration,
    pub(super) responses: Arc<ResponseRegistry>,
    pub(super) admission: Admission,
}

impl Proxy {
    /// Creates a proxy that answers from `mirrors` and forwards to `upstream`. `tasks` joins the tasks of connections
    /// and calls; calls without an end, such as watches, are ended when `drain` is cancelled.
    #[must_use]
    pub fn new(
        config: &Config,
        upstream: &Arc<Upstream>,
        mirrors: &Arc<Mirrors>,
        telemetry: &Arc<Telemetry>,
        tasks: &TaskTracker,
        drain: &CancellationToken,
    ) -> Arc<Proxy> {
        let metrics = &telemetry.metrics;
        let forward = Arc::new(Forward {
            upstream: Arc::clone(upstream),
            cluster_state: Arc::clone(&mirrors.cluster_state),
            connect_timeout: config.etcd.connect_timeout,
            tasks: tasks.clone(),
            drain: drain.clone(),
        });
        let responses = Arc::new(ResponseRegistry::default());
        Arc::new(Proxy {
            mirrors: Arc::clone(mirrors),
            telemetry: Arc::clone(telemetry),
            fallback: Fallback::new(config, &forward, mirrors, &responses, metrics, tasks),
            forward,
            freshness_timeout: config.mirror.freshness_timeout,
            responses,
            admission: Admission::new(config.limits.max_calls as usize, tasks, &metrics.connections.open),
        })
    }

    /// Runs periodic work until `stop`: aborts responses whose clients stopped reading, drops expired page series and
    /// old entries of the slowest calls.
    pub async fn sweep(self: Arc<Self>, stop: CancellationToken) {
        let sweeping = async {
            tokio::join!(
                restarting("sweep", || self.responses.run()),
                restarting("series", || self.fallback.run()),
                restarting("slow calls", async || {
                    let mut ticks = tokio::time::interval(SLOW_CALLS_INTERVAL);
                    loop {
                        ticks.tick().await;
                        self.telemetry.slowest.sweep();
                    }
                })
            )
        };
        stop.run_until_cancelled(sweeping).await;
    }
}
