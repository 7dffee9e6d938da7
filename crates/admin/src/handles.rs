//! Handles to the rooms whose state responses report.

use std::sync::Arc;

use rangecache_base::telemetry::Telemetry;
use rangecache_config::LiveConfig;
use rangecache_mirror::Mirrors;
use rangecache_upstream::Upstream;
use tokio::time::Instant;
use tokio_util::{sync::CancellationToken, task::TaskTracker};

use super::status::samples::{ReadCounts, Recent};
use super::{metrics::ShownMetrics, prefixes::Prefixes, symptoms::Symptoms};
use rangecache_config::ReloadHandle;

/// Handles to mirrors, endpoints and telemetry, with the samples for the page.
#[derive(Debug)]
pub(super) struct Handles {
    pub(super) mirrors: Arc<Mirrors>,
    pub(super) upstream: Arc<Upstream>,
    pub(super) telemetry: Arc<Telemetry>,
    pub(super) metrics: ShownMetrics,
    /// Tasks of connections and calls.
    pub(super) tasks: TaskTracker,
    /// Cancelled once the process drains.
    pub(super) draining: CancellationToken,
    pub(super) recent: Recent,
    pub(super) symptoms: Symptoms,
    pub(super) started: Instant,
    /// Clients with metrics (`--client-metrics-top`).
    pub(super) client_metrics_top: usize,
    pub(super) prefixes: Prefixes,
    pub(super) reload: ReloadHandle,
    /// The flags.
    pub(super) live: LiveConfig,
    /// The commit of the binary.
    pub(super) commit: &'static str,
    /// Name of the host.
    pub(super) host: String,
    /// Name of the pod, if Kubernetes' downward API gives it.
    pub(super) pod: Option<String>,
}

impl Handles {
    /// Current values of the counters.
    pub(super) fn counts(&self) -> ReadCounts {
        ReadCounts::now(&self.metrics, &self.mirrors)
    }
}
