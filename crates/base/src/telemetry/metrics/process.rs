//! Metrics of the process: its build, tasks, panics and configured limits.

use super::instruments::{Counter, Gauge};

use super::{FloatGauge, metric_group};

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
