//! Metrics of the admin pages, and those of other rooms that the pages show.

use std::sync::Arc;

use rangecache_base::telemetry::Metrics;
use rangecache_base::telemetry::metrics::{Gauge, metric_group};
use rangecache_edge::limits::{BufferMetrics, OpenConnections};
use rangecache_edge::tls::TlsMetrics;
use rangecache_mirror::{FreshnessMetrics, PrefixMetrics};
use rangecache_proxy::metrics::ProxyMetrics;

metric_group! {
    /// Responses of the metrics listener.
    pub(super) struct AdminMetrics {
        /// Bytes of responses of the metrics listener that their clients have not read yet
        ///
        /// Useful when: near 8 MiB: a client reads nothing of what it requests
        pub(super) unread_bytes: Gauge = "rangecache_admin_unread_bytes";
    }
}

/// Metrics of other rooms that the pages show.
#[derive(Debug)]
pub(super) struct ShownMetrics {
    pub(super) proxy: ProxyMetrics,
    pub(super) buffers: Arc<BufferMetrics>,
    pub(super) connections: Arc<OpenConnections>,
    pub(super) freshness: Arc<FreshnessMetrics>,
    pub(super) prefixes: Arc<PrefixMetrics>,
    pub(super) tls: Arc<TlsMetrics>,
    /// Metrics of calls and of the process.
    pub(super) process: Arc<Metrics>,
}

impl ShownMetrics {
    pub(super) fn new(metrics: &Arc<Metrics>) -> ShownMetrics {
        ShownMetrics {
            proxy: ProxyMetrics::new(metrics),
            buffers: metrics.group(),
            connections: metrics.group(),
            freshness: metrics.group(),
            prefixes: metrics.group(),
            tls: metrics.group(),
            process: Arc::clone(metrics),
        }
    }
}
