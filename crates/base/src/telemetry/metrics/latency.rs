//! [`Latency`]: a histogram that is recorded without a lock, for what every call records, and quantiles of what it has
//! counted.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};
use std::{fmt, time::Duration};

use opentelemetry::trace::TraceId;
use prometheus_client::encoding::{EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::{MetricType, TypedMetric};

use crate::telemetry::exposition::{BOUNDS, Exemplars, FIRST_BOUND_SECONDS};

/// Bound of the first bucket, in nanoseconds: [`FIRST_BOUND_SECONDS`].
const FIRST_BOUND_NANOS: u64 = 50_000;

/// Histogram of seconds with the bounds of every latency, from 50 µs to about 13 s. Cloning counts references.
#[derive(Clone, Debug, Default)]
pub struct Latency(Arc<Buckets>);

#[derive(Debug, Default)]
struct Buckets {
    /// Counts by bucket; the last one has no bound.
    counts: [AtomicU64; BOUNDS as usize + 1],
    sum_nanos: AtomicU64,
}

impl Latency {
    /// Counts a duration: two atomic additions.
    pub fn observe(&self, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        if let Some(count) = self.0.counts.get(bucket_of(nanos)) {
            count.fetch_add(1, Relaxed);
        }
        self.0.sum_nanos.fetch_add(nanos, Relaxed);
    }

    /// Returns the counts so far, by bucket.
    #[must_use]
    pub fn counts(&self) -> LatencyCounts {
        LatencyCounts(std::array::from_fn(|bucket| self.0.counts[bucket].load(Relaxed)))
    }
}

/// [`Latency`] with the last traced call in each bucket. Cloning counts references.
#[derive(Clone, Debug)]
pub struct TracedLatency {
    pub(super) latency: Latency,
    pub(super) exemplars: Arc<Exemplars>,
}

impl TracedLatency {
    /// Counts a duration.
    pub fn observe(&self, took: Duration) {
        self.latency.observe(took);
    }

    /// Returns the counts so far, by bucket.
    #[must_use]
    pub fn counts(&self) -> LatencyCounts {
        self.latency.counts()
    }

    /// Adds a traced call, which [`TracedLatency::observe`] counts, as the exemplar of its bucket.
    pub fn record_exemplar(&self, took: Duration, trace_id: TraceId) {
        self.exemplars.record(took.as_secs_f64(), trace_id);
    }
}

/// Counts of a [`Latency`], by bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencyCounts([u64; BOUNDS as usize + 1]);

impl LatencyCounts {
    /// Counts that were added since `before`.
    #[must_use]
    pub fn since(&self, before: &LatencyCounts) -> LatencyCounts {
        let mut counts = *self;
        for (count, before) in counts.0.iter_mut().zip(before.0) {
            *count = count.saturating_sub(before);
        }
        counts
    }

    /// Adds what `other` has counted.
    pub fn add(&mut self, other: &LatencyCounts) {
        for (count, other) in self.0.iter_mut().zip(other.0) {
            *count += other;
        }
    }

    /// Seconds within which this share of the durations lies, estimated as Prometheus' `histogram_quantile` does: evenly
    /// spread within a bucket, and the last bound for those above it. `None` without any.
    #[must_use]
    #[allow(clippy::cast_precision_loss, reason = "an estimate")]
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let all: u64 = self.0.iter().sum();
        let rank = share * all as f64;
        let (mut lower, mut upper, mut below) = (0.0, FIRST_BOUND_SECONDS, 0);
        for count in self.0.into_iter().take(usize::from(BOUNDS)) {
            let reached = below + count;
            if count > 0 && reached as f64 >= rank {
                return Some(lower + (upper - lower) * (rank - below as f64) / count as f64);
            }
            below = reached;
            (lower, upper) = (upper, upper * 2.0);
        }
        (all > 0).then_some(lower)
    }
}

/// Index of the bucket of a duration.
fn bucket_of(nanos: u64) -> usize {
    let multiples = nanos.saturating_sub(1) / FIRST_BOUND_NANOS;
    let doublings = u64::BITS - multiples.leading_zeros();
    usize::from(BOUNDS).min(doublings as usize)
}

impl TypedMetric for Latency {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Latency {
    /// Writes nothing before the first duration: most histograms of an idle process would be twenty zeros.
    fn encode(&self, mut encoder: MetricEncoder<'_>) -> fmt::Result {
        let bounds = std::iter::successors(Some(FIRST_BOUND_SECONDS), |bound| Some(bound * 2.0));
        let bounds = bounds.take(usize::from(BOUNDS)).chain([f64::INFINITY]);
        let counts = self.counts().0.into_iter();
        let buckets: Vec<_> = bounds.zip(counts).collect();
        let count = buckets.iter().map(|(_, count)| count).sum();
        if count == 0 {
            return Ok(());
        }
        let sum = Duration::from_nanos(self.0.sum_nanos.load(Relaxed)).as_secs_f64();
        encoder.encode_histogram::<NoLabelSet>(sum, count, &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Latency::TYPE
    }
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
    use prometheus_client::registry::Registry;

    use super::*;

    fn encoded(metric: impl prometheus_client::registry::Metric) -> String {
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register("latency", "Latency", metric);
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        text
    }

    #[test]
    fn buckets_are_those_of_the_librarys_histogram() {
        let (ours, theirs) = (
            Latency::default(),
            Histogram::new(exponential_buckets(FIRST_BOUND_SECONDS, 2.0, BOUNDS)),
        );
        for micros in [
            0, 1, 49, 50, 51, 99, 100, 101, 200, 300, 6_400, 13_000_000, 13_107_300, 99_000_000,
        ] {
            let took = Duration::from_micros(micros);
            ours.observe(took);
            theirs.observe(took.as_secs_f64());
        }
        let without_sum = |text: String| -> Vec<String> {
            let lines = text.lines().filter(|line| !line.starts_with("latency_sum"));
            lines.map(str::to_owned).collect()
        };
        let (ours, theirs) = (encoded(ours), encoded(theirs));
        assert!(ours.contains("latency_sum 125.11"), "{ours}");
        assert_eq!(without_sum(ours), without_sum(theirs));
    }

    #[test]
    fn quantiles_are_those_of_histogram_quantile() {
        let latency = Latency::default();
        assert_eq!(latency.counts().quantile(0.5), None);
        // 90 in the bucket from 100 to 200 µs, 10 in that from 6.4 to 12.8 ms.
        for n in 0..100 {
            latency.observe(Duration::from_micros(if n < 90 { 150 } else { 10_000 }));
        }
        let quantile = |share| latency.counts().quantile(share).unwrap();
        for (share, seconds) in [(0.45, 0.000_15), (0.9, 0.000_2), (0.95, 0.009_6), (1.0, 0.012_8)] {
            assert!(
                (quantile(share) - seconds).abs() < 1e-9,
                "{share}: {}",
                quantile(share)
            );
        }
        let before = latency.counts();
        latency.observe(Duration::from_secs(99));
        let mut added = latency.counts().since(&before);
        assert_eq!(
            added.quantile(0.5),
            Some(FIRST_BOUND_SECONDS * f64::from(1 << (BOUNDS - 1)))
        );
        added.add(&before);
        assert_eq!(added, latency.counts());
    }
}
