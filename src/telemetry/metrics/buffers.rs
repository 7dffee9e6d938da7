//! Metrics of buffered bytes (`--buffer-max-bytes`), by kind.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::register::{register, register_unit, start_at_zero};

/// Every kind of buffered bytes.
const KINDS: [&str; 6] = ["request", "forwarded", "sending", "converted", "shared", "series"];

/// Every reason for which a response is given up.
const GIVEN_UP: [&str; 3] = ["idle", "memory", "watch_memory"];

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct KindLabels {
    kind: &'static str,
}

/// Buffered bytes, by kind.
#[derive(Debug)]
pub struct BufferMetrics {
    used: Family<KindLabels, Gauge>,
    limit: Family<KindLabels, Gauge>,
    waiting: Family<KindLabels, Gauge>,
    refused: Family<KindLabels, Counter>,
    given_up: Family<GivenUpLabels, Counter>,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct GivenUpLabels {
    reason: &'static str,
}

/// Metrics of one kind of buffered bytes.
#[derive(Clone, Debug, Default)]
pub struct BufferKindMetrics {
    /// Bytes that are held now.
    pub used: Gauge,
    /// Calls that wait until other calls release bytes.
    pub waiting: Gauge,
    /// Calls that were refused, or served in another way, because their bytes did not fit.
    pub refused: Counter,
}

impl BufferMetrics {
    pub(super) fn new(registry: &mut Registry) -> BufferMetrics {
        let given_up = register(
            registry,
            "responses_given_up",
            "Responses that were given up, by reason: not read for a minute, or old data in memory",
        );
        start_at_zero(&given_up, GIVEN_UP.map(|reason| GivenUpLabels { reason }));
        BufferMetrics {
            used: register_unit(
                registry,
                "buffer_used",
                Unit::Bytes,
                "Bytes buffered for calls, by kind; bounded by --buffer-max-bytes",
            ),
            limit: register_unit(
                registry,
                "buffer_limit",
                Unit::Bytes,
                "Share of --buffer-max-bytes, by kind; request, forwarded and sending have one share together",
            ),
            waiting: register(
                registry,
                "buffer_waiting",
                "Calls waiting for buffered bytes to be released, by kind",
            ),
            refused: register(
                registry,
                "buffer_refused",
                "Calls whose bytes did not fit the share of their kind, by kind",
            ),
            given_up,
        }
    }

    /// The metrics of `kind`, whose share is `limit_bytes`.
    #[must_use]
    pub fn kind(&self, kind: &'static str, limit_bytes: u64) -> BufferKindMetrics {
        let labels = KindLabels { kind };
        self.limit
            .get_or_create(&labels)
            .set(i64::try_from(limit_bytes).unwrap_or(i64::MAX));
        BufferKindMetrics {
            used: self.used.get_or_create(&labels).clone(),
            waiting: self.waiting.get_or_create(&labels).clone(),
            refused: self.refused.get_or_create(&labels).clone(),
        }
    }

    /// Counts `responses` that were given up for `reason`.
    pub fn record_given_up(&self, reason: &'static str, responses: usize) {
        self.given_up
            .get_or_create(&GivenUpLabels { reason })
            .inc_by(responses as u64);
    }

    /// Bytes of all kinds that are held now.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        let used = KINDS.into_iter().filter_map(|kind| {
            let gauge = self.used.get(&KindLabels { kind })?;
            u64::try_from(gauge.get()).ok()
        });
        used.sum()
    }
}
