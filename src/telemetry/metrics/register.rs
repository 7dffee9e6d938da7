//! Registration of one metric: name, unit and help text in one call that returns the metric.

use std::hash::Hash;

use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::{Metric, Registry, Unit};

use crate::telemetry::exposition::{BOUNDS, FIRST_BOUND_SECONDS};

/// Registers a metric without a unit, at its initial value.
pub(super) fn register<M>(registry: &mut Registry, name: &str, help: &str) -> M
where
    M: Metric + Clone + Default,
{
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// Registers a metric whose name ends with `unit`, at its initial value.
pub(super) fn register_unit<M>(registry: &mut Registry, name: &str, unit: Unit, help: &str) -> M
where
    M: Metric + Clone + Default,
{
    let metric = M::default();
    registry.register_with_unit(name, help, unit, metric.clone());
    metric
}

/// Creates the counters of `labels`. `increase()` does not see the first event of a series that begins with it, so that an
/// alert would miss it.
pub(super) fn start_at_zero<S>(family: &Family<S, Counter>, labels: impl IntoIterator<Item = S>)
where
    S: Clone + Hash + Eq,
{
    for labels in labels {
        drop(family.get_or_create(&labels));
    }
}

/// Registers a histogram of seconds with bounds from 50 µs to about 13 s.
pub(super) fn register_latency(registry: &mut Registry, name: &str, help: &str) -> Histogram {
    let histogram = Histogram::new(exponential_buckets(FIRST_BOUND_SECONDS, 2.0, BOUNDS));
    registry.register_with_unit(name, help, Unit::Seconds, histogram.clone());
    histogram
}
