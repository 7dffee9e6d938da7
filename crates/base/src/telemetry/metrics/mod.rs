//! Declarations of metrics by rooms, and the metrics of calls, clients and the process.
//!
//! | file | contents |
//! |---|---|
//! | `group` | [`metric_group!`]: declarations; [`By`], metrics by labels; [`Counted`] |
//! | `instruments` | [`Counter`] and [`Gauge`], for all rooms |
//! | `latency` | [`Latency`]: histograms without locks, and their quantiles |
//! | `calls`, `methods`, `clients` | calls by method, status and source; clients that cost most |
//! | `process`, `resources` | the process |
//!
//! All other metrics are in the `metrics.rs` of the room that counts them.

mod calls;
mod clients;
mod group;
mod instruments;
mod latency;
mod methods;
mod process;
#[cfg(target_os = "linux")]
mod resources;

use std::sync::Arc;

use group::Groups;
use parking_lot::Mutex;

use super::exposition::{self, Format};
pub use crate::metric_group;
pub use calls::{CallMetrics, Code, CodeCounts, Source};
pub use clients::ClientMetrics;
pub use group::{By, Counted, Declared, FloatCounter, FloatGauge, MetricGroup, Registrar, Within, gauge};
pub use instruments::{Counter, Gauge};
pub use latency::{Latency, LatencyCounts, TracedLatency};
pub use methods::CallMethod;
pub use process::ProcessMetrics;

/// Registry of all metrics of the process, which begin with `rangecache_`; its resources begin with `process_`. Shared behind an
/// `Arc`.
#[derive(Debug)]
pub struct Metrics {
    /// Every call of clients.
    pub calls: Arc<CallMetrics>,
    /// Clients that cost most.
    pub clients: ClientMetrics,
    /// Tasks, panics and configured limits.
    pub process: ProcessMetrics,
    groups: Mutex<(Groups, Registrar)>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers the metrics of this room.
    #[must_use]
    pub fn new() -> Metrics {
        let mut registrar = Registrar::default();
        #[cfg(target_os = "linux")]
        resources::register_resources(&mut registrar.registry);
        let process = ProcessMetrics::register(&mut registrar);
        let calls = Arc::new(CallMetrics::register(&mut registrar));
        let clients = ClientMetrics::register(&mut registrar);
        Metrics {
            calls,
            clients,
            process,
            groups: Mutex::new((Groups::default(), registrar)),
        }
    }

    /// The metrics of a room, registered at the first use. Takes a lock: rooms keep them.
    #[must_use]
    pub fn group<T: MetricGroup>(&self) -> Arc<T> {
        let (groups, registrar) = &mut *self.groups.lock();
        groups.get(registrar)
    }

    /// All metrics as text.
    #[must_use]
    pub fn encode(&self, format: Format) -> String {
        let mut text = String::new();
        let (_, registrar) = &*self.groups.lock();
        // Writing into a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &registrar.registry);
        match format {
            Format::OpenMetrics => exposition::with_exemplars(&text, &registrar.exemplars),
            Format::Text => exposition::plain(&text),
        }
    }
}
