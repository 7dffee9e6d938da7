//! Metrics of the process: its build, tasks, panics and configured limits.

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;

use super::{FloatGauge, metric_group};

metric_group! {
    /// Tasks, panics and configured limits.
    pub struct ProcessMetrics {
        /// 1, with version and commit of this build; the commit ends with -dirty if the sources differed from it
        build[version, commit]: Gauge = "rangecache_build_info";
        /// Panics, each of which is a bug that cost a call or restarted a task
        pub panics: Counter = "rangecache_panics_total";
        /// Running tasks: connections, calls, mirrors
        pub tasks: Gauge = "rangecache_tasks";
        /// Configured limits, in the unit that each name ends with
        limits[limit]: FloatGauge = "rangecache_limit";
        /// Reloads of the flags by result: changed, unchanged, or refused because the flags are invalid
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
