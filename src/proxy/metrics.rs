//! Metrics of the path of a request.
//!
//! | file | metrics |
//! |---|---|
//! | `reads` | Range and RangeStream by outcome, and their latencies |
//! | `watches` | Watch streams and watchers |
//! | `mod` | forwarded and refused calls, aborted responses; all of them together |

mod reads;
mod watches;

use std::ops::Deref;
use std::sync::Arc;

use rangecache_base::instance::Instance;
use rangecache_base::telemetry::metrics::{Counter, Gauge, metric_group};
use rangecache_base::telemetry::prefixes::PrefixCounters;
use rangecache_base::telemetry::{Metrics, Telemetry};
use rangecache_edge::limits::SlotsMetrics;
use rangecache_mirror::{PrefixMetrics, StreamFallbacks};
pub use reads::ReadMetrics;
pub use watches::WatchMetrics;

metric_group! {
    /// Calls forwarded to etcd.
    pub struct ForwardingMetrics {
        /// Calls other than Range and RangeStream that were forwarded to etcd
        ///
        /// Useful when: estimating etcd's load
        pub calls: Counter = "rangecache_forwarded_calls_total";
        /// Large reads that shared another call's response
        ///
        /// Useful when: clients list the same range
        pub joined: Counter = "rangecache_forward_joined_total";
        /// Page series, which are lists read in pages, whose next page is expected
        ///
        /// Useful when: clients list in pages
        pub series: Gauge = "rangecache_series";
        /// Pages cut from a page series: from a RangeStream that an earlier page began
        ///
        /// Useful when: clients list in pages
        pub series_pages: Counter = "rangecache_series_pages_total";
    }
}

metric_group! {
    /// Calls that were refused, whatever they ask.
    pub struct RefusalMetrics {
        /// Calls of all kinds refused because `--max-calls` were in flight
        ///
        /// Useful when: any increase
        pub shed_calls: Counter = "rangecache_shed_calls_total";
        /// Requests of this rangecache that came back to it, because `--endpoints` leads to itself
        ///
        /// Useful when: any increase: see [RangecacheLoops](../runbooks.md#rangecacheloops)
        pub looped_calls: Counter = "rangecache_looped_calls_total";
        /// Requests that may write, refused because they came to `--read-only-listen-client-urls`
        ///
        /// Useful when: any increase: a client was given the wrong URL
        pub read_only_refused: Counter = "rangecache_read_only_refused_total";
    }
}

metric_group! {
    /// Responses that were aborted.
    pub struct AbortedResponses {
        /// Responses that were given up, by `reason`: `idle` (nothing read for a minute), `memory` (a slow
        /// reader kept more old data than `--cache-max-bytes` allows) or `watch_memory` (a watch was not read
        /// while others waited for room in `--watch-max-bytes`)
        ///
        /// Useful when: any increase
        aborted[reason]: Counter = "rangecache_responses_given_up_total",
            from_zero = ["idle", "memory", "watch_memory"];
    }
}

impl AbortedResponses {
    /// Counts `responses` that were given up for `reason`.
    pub fn record_given_up(&self, reason: &'static str, responses: usize) {
        self.aborted.of(reason).inc_by(responses as u64);
    }
}

/// Metrics of calls. Cloning counts references.
#[derive(Clone, Debug)]
pub struct ProxyMetrics {
    /// Range and RangeStream.
    pub reads: Arc<ReadMetrics>,
    /// Watches.
    pub watches: Arc<WatchMetrics>,
    /// Calls to etcd.
    pub forwarding: Arc<ForwardingMetrics>,
    /// Calls to etcd that take turns.
    pub slots: Arc<SlotsMetrics>,
    /// Reads that could not use RangeStream.
    pub stream_fallbacks: Arc<StreamFallbacks>,
    /// Refused calls.
    pub refusals: Arc<RefusalMetrics>,
    /// Aborted responses.
    pub responses: Arc<AbortedResponses>,
    /// Reads and watches by prefix.
    pub prefixes: PrefixCounters,
}

impl ProxyMetrics {
    /// The groups in `metrics`.
    #[must_use]
    pub fn new(metrics: &Metrics) -> ProxyMetrics {
        ProxyMetrics {
            reads: metrics.group(),
            watches: metrics.group(),
            forwarding: metrics.group(),
            slots: metrics.group(),
            stream_fallbacks: metrics.group(),
            refusals: metrics.group(),
            responses: metrics.group(),
            prefixes: metrics.group::<PrefixMetrics>().counters.clone(),
        }
    }
}

/// Telemetry of the process with the metrics of this room.
#[derive(Debug)]
pub(super) struct ProxyTelemetry {
    pub(super) metrics: ProxyMetrics,
    /// The identity that other rangecaches are told.
    pub(super) instance: Instance,
    process: Arc<Telemetry>,
}

impl ProxyTelemetry {
    pub(super) fn new(process: &Arc<Telemetry>) -> ProxyTelemetry {
        ProxyTelemetry {
            metrics: ProxyMetrics::new(&process.metrics),
            instance: Instance::unrelated(),
            process: Arc::clone(process),
        }
    }
}

impl Default for ProxyTelemetry {
    fn default() -> ProxyTelemetry {
        ProxyTelemetry::new(&Arc::default())
    }
}

impl Deref for ProxyTelemetry {
    type Target = Telemetry;

    fn deref(&self) -> &Telemetry {
        &self.process
    }
}

#[cfg(test)]
mod tests;
