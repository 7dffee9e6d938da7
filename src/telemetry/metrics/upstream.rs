//! Metrics of etcd's endpoints.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use super::register::register;
use crate::net::Url;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct EndpointLabels {
    endpoint: String,
}

/// State of etcd's endpoints, set when the metrics are scraped.
#[derive(Debug)]
pub struct UpstreamMetrics {
    healthy: Family<EndpointLabels, Gauge>,
    connections: Family<EndpointLabels, Gauge>,
    calls: Family<EndpointLabels, Gauge>,
    left_out: Family<EndpointLabels, Gauge>,
}

/// State of one endpoint.
#[derive(Clone, Copy, Debug)]
pub struct EndpointState {
    /// Connected, serves, votes and knows a leader.
    pub is_healthy: bool,
    /// Established connections.
    pub connections: usize,
    /// Calls in flight on its shared connections.
    pub calls: usize,
    /// Leads to another cluster than the one that is used.
    pub is_left_out: bool,
}

impl UpstreamMetrics {
    pub(super) fn new(registry: &mut Registry) -> UpstreamMetrics {
        UpstreamMetrics {
            healthy: register(
                registry,
                "endpoint_healthy",
                "1 while the endpoint is connected, serves, votes and knows a leader",
            ),
            connections: register(
                registry,
                "endpoint_connections",
                "Open connections to the endpoint",
            ),
            calls: register(
                registry,
                "endpoint_calls",
                "Calls in flight on the endpoint's shared connections",
            ),
            left_out: register(
                registry,
                "endpoint_left_out",
                "1 if a connection to the endpoint led to another cluster in the last ten minutes and was left out",
            ),
        }
    }

    /// Sets the state of one endpoint.
    pub fn set_endpoint(&self, url: &Url, state: EndpointState) {
        let labels = EndpointLabels {
            endpoint: url.to_string(),
        };
        let set = |family: &Family<EndpointLabels, Gauge>, value: usize| {
            let value = i64::try_from(value).unwrap_or(i64::MAX);
            family.get_or_create(&labels).set(value);
        };
        set(&self.healthy, usize::from(state.is_healthy));
        set(&self.connections, state.connections);
        set(&self.calls, state.calls);
        set(&self.left_out, usize::from(state.is_left_out));
    }
}
