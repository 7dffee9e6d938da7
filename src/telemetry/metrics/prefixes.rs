//! Metrics of the prefixes that cost most.

use parking_lot::Mutex;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::register::{register, register_unit};
use crate::telemetry::prefixes::PrefixCounts;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct PrefixLabels {
    prefix: String,
}

/// Metrics of the prefixes that cost most at the last scrape.
#[derive(Debug)]
pub struct PrefixMetrics {
    keys: Family<PrefixLabels, Gauge>,
    bytes: Family<PrefixLabels, Gauge>,
    reads: Family<PrefixLabels, Counter>,
    writes: Family<PrefixLabels, Counter>,
    watches: Family<PrefixLabels, Counter>,
    /// Excludes other scrapes while series are replaced.
    exporting: Mutex<()>,
}

impl PrefixMetrics {
    pub(super) fn new(registry: &mut Registry) -> PrefixMetrics {
        PrefixMetrics {
            keys: register(
                registry,
                "prefix_keys",
                "Mirrored keys below the prefixes that cost most",
            ),
            bytes: register_unit(
                registry,
                "prefix",
                Unit::Bytes,
                "Bytes of the mirrored keys and values below these prefixes",
            ),
            reads: register(
                registry,
                "prefix_reads",
                "Ranges and RangeStreams below these prefixes since they were found",
            ),
            writes: register(
                registry,
                "prefix_writes",
                "Events below these prefixes since they were found",
            ),
            watches: register(
                registry,
                "prefix_watches",
                "Watchers created below these prefixes since they were found",
            ),
            exporting: Mutex::default(),
        }
    }

    /// Replaces the exported prefixes by these: name, keys, bytes and counts.
    pub fn export<'a>(&self, prefixes: impl Iterator<Item = (&'a str, u64, u64, PrefixCounts)>) {
        let _exporting = self.exporting.lock();
        self.keys.clear();
        self.bytes.clear();
        self.reads.clear();
        self.writes.clear();
        self.watches.clear();
        let gauge = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        for (prefix, keys, bytes, counts) in prefixes {
            let labels = PrefixLabels {
                prefix: prefix.to_owned(),
            };
            self.keys.get_or_create(&labels).set(gauge(keys));
            self.bytes.get_or_create(&labels).set(gauge(bytes));
            self.reads.get_or_create(&labels).inc_by(counts.reads);
            self.writes.get_or_create(&labels).inc_by(counts.writes);
            self.watches.get_or_create(&labels).inc_by(counts.watches);
        }
    }
}
