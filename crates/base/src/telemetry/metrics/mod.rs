//! Declarations of metrics by rooms, and the metrics of calls, clients and the process.
//!
//! | file | contents |
//! |---|---|
//! | `mod` | [`Metrics`]: all of them; those of the process |
//! | `group` | [`metric_group!`]: declarations; [`By`], metrics by labels; [`Counted`]; [`Counter`] and [`Gauge`], for all rooms |
//! | `latency` | [`Latency`]: histograms without locks, and their quantiles |
//! | `calls`, `methods` | calls by method, status and source |
//! | `resources` | resources of the process |
//!
//! All other metrics are in the `metrics.rs` of the room that counts them.

mod calls;
mod group;
mod latency;
mod methods;
#[cfg(target_os = "linux")]
mod resources;

use std::sync::Arc;

use parking_lot::Mutex;

use super::exposition::{self, Format};
use group::Groups;

pub use super::clients::ClientMetrics;
pub use crate::metric_group;
pub use calls::{CallMetrics, Code, CodeCounts, Source};
pub use group::{
    By, Counted, Counter, Declared, FloatCounter, FloatGauge, Gauge, MetricGroup, Registrar, Within, gauge,
    unsigned,
};
pub use latency::{Latency, LatencyCounts, TracedLatency};
pub use methods::CallMethod;

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

metric_group! {
    /// Tasks, panics and configured limits.
    pub struct ProcessMetrics {
        /// 1, with `version` and `commit` of this build; the commit ends with `-dirty` if the sources
        /// differed from it
        ///
        /// It is `unknown` if neither a git tree nor `RANGECACHE_BUILD_COMMIT` told the build
        ///
        /// Useful when: versions differ between replicas
        build[version, commit]: Gauge = "rangecache_build_info";
        /// Panics, each of which is a bug that cost a call or restarted a task
        ///
        /// Useful when: **any increase is a bug**
        pub panics: Counter = "rangecache_panics_total";
        /// Running tasks: connections, calls, mirrors
        ///
        /// Useful when: it grows while the number of clients does not
        pub tasks: Gauge = "rangecache_tasks";
        /// Configured bounds by `limit`, in the unit that the name ends with
        ///
        /// Useful when: next to the metric that the bound limits
        limits[limit]: FloatGauge = "rangecache_limit";
        /// Memory limit of the container, or the memory of the machine
        ///
        /// Useful when: next to `rangecache_limit{limit="cache_max_bytes"}`
        pub memory_limit: Gauge = "rangecache_memory_limit_bytes";
        /// Reloads of the flags by `result`: `changed`, `unchanged`, or `refused` because the flags are
        /// invalid
        ///
        /// See [changes without a restart](flags.md#changes-without-a-restart)
        ///
        /// Useful when: `refused`: the log has the error
        reloads[result]: Counter = "rangecache_flag_reloads_total", from_zero = ["changed", "unchanged", "refused"];
    }
}

impl ProcessMetrics {
    /// Exports the version and commit of this build.
    pub fn set_build(&self, version: &'static str, commit: &'static str) {
        self.build.of((version, commit)).set(1);
    }

    /// Counts a reload of the flags.
    pub fn record_reload(&self, result: &'static str) {
        self.reloads.of(result).inc();
    }

    /// Exports a configured limit; `name` ends with the unit.
    pub fn set_limit(&self, name: &'static str, value: f64) {
        self.limits.of(name).set(value);
    }

    /// The limit that was exported as `name`.
    #[must_use]
    pub fn limit(&self, name: &'static str) -> Option<f64> {
        self.limits.get(name).map(|value| value.get())
    }
}
