//! Metrics of the process: its build, tasks, panics and configured limits.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::labels::ResultLabels;
use super::register::{register, start_at_zero};

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct LimitLabels {
    limit: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
    commit: &'static str,
}

/// Tasks, panics and configured limits.
#[derive(Debug)]
pub struct ProcessMetrics {
    /// Panics of any task.
    pub panics: Counter,
    /// Running tasks: connections, calls, mirrors. Set when the metrics are scraped.
    pub tasks: Gauge,
    limits: Family<LimitLabels, Gauge<f64, AtomicU64>>,
    reloads: Family<ResultLabels, Counter>,
}

impl ProcessMetrics {
    pub(super) fn new(registry: &mut Registry) -> ProcessMetrics {
        let build: Family<BuildLabels, Gauge> = register(
            registry,
            "build_info",
            "1, with version and commit of this build; the commit ends with -dirty if the sources differed from it",
        );
        let labels = BuildLabels {
            version: env!("CARGO_PKG_VERSION"),
            commit: env!("BUILD_COMMIT"),
        };
        build.get_or_create(&labels).set(1);
        let reloads = register(
            registry,
            "flag_reloads",
            "Reloads of the flags by result: changed, unchanged, or refused because the flags are invalid",
        );
        let results = ["changed", "unchanged", "refused"];
        start_at_zero(&reloads, results.map(|result| ResultLabels { result }));
        ProcessMetrics {
            panics: register(
                registry,
                "panics",
                "Panics, each of which is a bug that cost a call or restarted a task",
            ),
            tasks: register(registry, "tasks", "Running tasks: connections, calls, mirrors"),
            limits: register(
                registry,
                "limit",
                "Configured limits, in the unit that each name ends with",
            ),
            reloads,
        }
    }

    /// Counts a reload of the flags.
    pub fn record_reload(&self, result: &'static str) {
        self.reloads.get_or_create(&ResultLabels { result }).inc();
    }

    /// Exports a configured limit; `name` ends with the unit.
    pub fn set_limit(&self, name: &'static str, value: f64) {
        self.limits.get_or_create(&LimitLabels { limit: name }).set(value);
    }

    /// The limit that was exported as `name`.
    #[must_use]
    pub fn limit(&self, name: &'static str) -> Option<f64> {
        self.limits
            .get(&LimitLabels { limit: name })
            .map(|value| value.get())
    }
}
