//! Metrics of etcd's endpoints.

use rangecache_base::telemetry::metrics::{Gauge, metric_group};

metric_group! {
    /// State of etcd's endpoints, set when the metrics are scraped.
    pub(super) struct EndpointMetrics by endpoint;
    /// State of one endpoint.
    pub(super) struct OneEndpoint {
        /// 1 while the endpoint is connected, serves, votes and knows a leader, otherwise 0
        ///
        /// Useful when: a member needs checking
        pub(super) healthy: Gauge = "rangecache_endpoint_healthy";
        /// Established connections to the endpoint
        ///
        /// Useful when: connections are refused
        pub(super) connections: Gauge = "rangecache_endpoint_connections";
        /// Calls in flight on the endpoint's shared connections
        ///
        /// Useful when: one member gets more calls than the others
        pub(super) calls: Gauge = "rangecache_endpoint_calls";
        /// 1 if a connection to the endpoint led to another cluster in the last ten minutes and was left out
        ///
        /// Useful when: it is 1: see [RangecacheOtherCluster](../runbooks.md#rangecacheothercluster)
        pub(super) left_out: Gauge = "rangecache_endpoint_left_out";
    }
}
