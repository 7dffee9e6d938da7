//! Metrics of the mirrors: contents, memory, lag, loads and verification.

use std::sync::atomic::AtomicU64;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use super::labels::MirrorLabels;
use super::latency::Latency;
use super::register::{register, register_unit, start_at_zero};
use crate::telemetry::outcome::Reason;
use crate::telemetry::prefixes::PrefixCounters;

type SecondsGauge = Gauge<f64, AtomicU64>;

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ReloadLabels {
    mirror: String,
    reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct VerificationLabels {
    mirror: String,
    result: &'static str,
}

/// Gauges and counters of one mirror.
#[derive(Clone, Debug)]
pub struct MirrorMetrics {
    /// 1 while reads may be answered from the mirror, otherwise 0.
    pub in_service: Gauge,
    /// Revision up to which the mirror has every event.
    pub revision: Gauge,
    /// Revisions that the mirror was behind at the last quorum check.
    pub lag_revisions: Gauge,
    /// Seconds that the mirror had been behind at the last quorum check.
    pub lag_seconds: SecondsGauge,
    /// Number of keys.
    pub keys: Gauge,
    /// Memory of keys, values and nodes, history included.
    pub memory_bytes: Gauge,
    /// Memory of past revisions.
    pub history_bytes: Gauge,
    /// Memory that only readers' old views keep.
    pub held_bytes: Gauge,
    /// Oldest revision that can be read.
    pub oldest_revision: Gauge,
    /// Keys fetched by the load in progress or the last one.
    pub load_keys: Gauge,
    /// Bytes fetched by the load in progress or the last one.
    pub load_bytes: Gauge,
    /// Events applied.
    pub events: Counter,
    /// Events dropped because they were at or below the mirror's revision (fenced).
    pub events_fenced: Counter,
    /// Progress requests sent.
    pub progress_requests: Counter,
    /// Time that reads answered from the mirror waited for their proof.
    pub read_wait: Latency,
    /// Events by prefix.
    pub prefixes: PrefixCounters,
}

/// Metrics of all mirrors, each labelled with its mirror's name.
#[derive(Debug)]
pub struct MirrorsMetrics {
    /// Bytes that verification has read from etcd.
    pub verify_bytes: Counter,
    /// Reads, events and watches by prefix.
    pub prefixes: PrefixCounters,
    reloads: Family<ReloadLabels, Counter>,
    verifications: Family<VerificationLabels, Counter>,
    mismatches: Family<MirrorLabels, Counter>,
    in_service: Family<MirrorLabels, Gauge>,
    revision: Family<MirrorLabels, Gauge>,
    lag_revisions: Family<MirrorLabels, Gauge>,
    lag_seconds: Family<MirrorLabels, SecondsGauge>,
    keys: Family<MirrorLabels, Gauge>,
    memory_bytes: Family<MirrorLabels, Gauge>,
    history_bytes: Family<MirrorLabels, Gauge>,
    held_bytes: Family<MirrorLabels, Gauge>,
    oldest_revision: Family<MirrorLabels, Gauge>,
    load_keys: Family<MirrorLabels, Gauge>,
    load_bytes: Family<MirrorLabels, Gauge>,
    events: Family<MirrorLabels, Counter>,
    events_fenced: Family<MirrorLabels, Counter>,
    progress_requests: Family<MirrorLabels, Counter>,
    read_wait: Family<MirrorLabels, Latency>,
}

impl MirrorsMetrics {
    pub(super) fn new(r: &mut Registry) -> MirrorsMetrics {
        MirrorsMetrics {
            prefixes: PrefixCounters::default(),
            read_wait: register_unit(
                r,
                "mirror_read_wait",
                Unit::Seconds,
                "Time that reads answered from the mirror waited for their proof",
            ),
            reloads: register(r, "mirror_reloads", "Loads of a mirror by reason"),
            in_service: register(
                r,
                "mirror_in_service",
                "1 while reads may be answered from the mirror",
            ),
            revision: register(
                r,
                "mirror_revision",
                "Revision up to which the mirror has every event",
            ),
            lag_revisions: register(
                r,
                "mirror_lag_revisions",
                "Revisions that the mirror was behind at the last quorum check",
            ),
            lag_seconds: register_unit(
                r,
                "mirror_lag",
                Unit::Seconds,
                "Age of the oldest revision reported by a quorum check that the mirror had not reached at the last one",
            ),
            keys: register(r, "mirror_keys", "Keys in the mirror"),
            memory_bytes: register_unit(
                r,
                "mirror_memory",
                Unit::Bytes,
                "Memory of the mirror, history included",
            ),
            history_bytes: register_unit(
                r,
                "mirror_history",
                Unit::Bytes,
                "Memory of the mirror's past revisions",
            ),
            held_bytes: register_unit(
                r,
                "mirror_held",
                Unit::Bytes,
                "Memory of replaced entries that only responses in flight keep",
            ),
            oldest_revision: register(
                r,
                "mirror_oldest_revision",
                "Oldest revision that can be read from the mirror",
            ),
            load_keys: register(
                r,
                "mirror_load_keys",
                "Keys fetched by the load in progress or the last one",
            ),
            load_bytes: register_unit(
                r,
                "mirror_load",
                Unit::Bytes,
                "Bytes fetched by the load in progress or the last one",
            ),
            events: register(r, "mirror_events", "Events applied"),
            events_fenced: register(
                r,
                "mirror_events_fenced",
                "Events dropped for being at or below the mirror's revision",
            ),
            progress_requests: register(r, "mirror_progress_requests", "Watch progress requests sent"),
            mismatches: register(
                r,
                "verify_mismatch",
                "Verifications that found the mirror to differ from etcd: alert on any",
            ),
            verifications: register(r, "verify_rounds", "Verifications of the mirror by result"),
            verify_bytes: register_unit(
                r,
                "verify",
                Unit::Bytes,
                "Bytes that verification has read from etcd",
            ),
        }
    }

    /// The metrics of the mirror called `name`.
    #[must_use]
    pub fn mirror(&self, name: &str) -> MirrorMetrics {
        let labels = MirrorLabels::new(name);
        // The alert on mismatches needs the counter to exist at 0.
        drop(self.mismatches.get_or_create(&labels));
        let gauge = |family: &Family<MirrorLabels, Gauge>| family.get_or_create_owned(&labels);
        let counter = |family: &Family<MirrorLabels, Counter>| family.get_or_create_owned(&labels);
        drop(counter(&self.mismatches));
        let verification = |result| VerificationLabels {
            mirror: name.to_owned(),
            result,
        };
        start_at_zero(
            &self.verifications,
            ["same", "out_of_service", "different", "failed"].map(verification),
        );
        let reload = |reason| ReloadLabels {
            mirror: name.to_owned(),
            reason,
        };
        let reasons = [
            "start",
            "load_failed",
            "may_fit",
            "compacted",
            "unproven",
            "malformed",
        ];
        start_at_zero(
            &self.reloads,
            reasons
                .into_iter()
                .chain(
                    Reason::ALL
                        .iter()
                        .filter(|reason| reason.is_behind())
                        .map(|reason| reason.as_str()),
                )
                .map(reload),
        );
        let read_wait = self.read_wait.get_or_create_owned(&labels);
        MirrorMetrics {
            prefixes: self.prefixes.clone(),
            in_service: gauge(&self.in_service),
            revision: gauge(&self.revision),
            lag_revisions: gauge(&self.lag_revisions),
            lag_seconds: self.lag_seconds.get_or_create_owned(&labels),
            keys: gauge(&self.keys),
            memory_bytes: gauge(&self.memory_bytes),
            history_bytes: gauge(&self.history_bytes),
            held_bytes: gauge(&self.held_bytes),
            oldest_revision: gauge(&self.oldest_revision),
            load_keys: gauge(&self.load_keys),
            load_bytes: gauge(&self.load_bytes),
            events: counter(&self.events),
            events_fenced: counter(&self.events_fenced),
            progress_requests: counter(&self.progress_requests),
            read_wait,
        }
    }

    /// Exports the gauges of the mirror called `name` no longer.
    pub fn forget(&self, name: &str) {
        let labels = MirrorLabels::new(name);
        for gauges in [
            &self.in_service,
            &self.revision,
            &self.lag_revisions,
            &self.keys,
            &self.memory_bytes,
            &self.history_bytes,
            &self.held_bytes,
            &self.oldest_revision,
            &self.load_keys,
            &self.load_bytes,
        ] {
            gauges.remove(&labels);
        }
        self.lag_seconds.remove(&labels);
    }

    /// Counts a load of the mirror called `name`.
    pub fn record_reload(&self, name: &str, reason: &'static str) {
        let mirror = name.to_owned();
        self.reloads.get_or_create(&ReloadLabels { mirror, reason }).inc();
    }

    /// Counts a verification of the mirror called `name`.
    pub fn record_verification(&self, name: &str, result: &'static str) {
        let mirror = name.to_owned();
        self.verifications
            .get_or_create(&VerificationLabels { mirror, result })
            .inc();
    }

    /// Counts a verification that found the mirror called `name` to differ from etcd.
    pub fn record_mismatch(&self, name: &str) {
        self.mismatches.get_or_create(&MirrorLabels::new(name)).inc();
    }

    /// Verifications that found the mirror called `name` to differ from etcd, since the start.
    #[must_use]
    pub fn mismatches(&self, name: &str) -> u64 {
        self.mismatches
            .get(&MirrorLabels::new(name))
            .map_or(0, |counter| counter.get())
    }
}
