//! Declarations of metrics by rooms, and the metrics of calls, clients and the process.
//!
//! | file | contents |
//! |---|---|
//! | `group` | [`metric_group!`]: declarations; [`By`], metrics by labels; [`Counted`] |
//! | `latency` | [`Latency`]: histograms without locks, and their quantiles |
//! | `calls`, `methods`, `clients` | calls by method, status and source; clients that cost most |
//! | `process`, `resources` | the process |
//!
//! All other metrics are in the `metrics.rs` of the room that counts them.

mod calls;
mod clients;
mod group;
mod latency;
mod methods;
mod process;
#[cfg(target_os = "linux")]
mod resources;

use std::sync::Arc;

use group::Groups;
use parking_lot::Mutex;

use super::exposition::{self, Format};
pub use calls::{CallMetrics, Code, CodeCounts, Source};
pub use clients::ClientMetrics;
pub(crate) use group::metric_group;
pub use group::{By, Counted, Declared, FloatGauge, MetricGroup, Registrar, Within, gauge};
pub use latency::{Latency, LatencyCounts, TracedLatency};
pub use methods::CallMethod;
pub use process::ProcessMetrics;

/// Registry of all metrics of the process, which begin with `rangecache_`; its resources begin with `process_`. Shared behind an
/// `Arc`.
#[derive(Debug)]
pub struct Metrics {
    /// Every call of clients.
    pub calls: Arc<CallMetrics>,
    /// Clients that cost most.
    pub clients: ClientMetrics,
    /// Tasks, panics and configured limits.
    pub process: ProcessMetrics,
    groups: Mutex<(Groups, Registrar)>,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    /// Registers the metrics of this room.
    #[must_use]
    pub fn new() -> Metrics {
        let mut registrar = Registrar::default();
        #[cfg(target_os = "linux")]
        resources::register_resources(&mut registrar.registry);
        let process = ProcessMetrics::register(&mut registrar);
        process.set_build();
        let calls = Arc::new(CallMetrics::register(&mut registrar));
        let clients = ClientMetrics::register(&mut registrar);
        Metrics {
            calls,
            clients,
            process,
            groups: Mutex::new((Groups::default(), registrar)),
        }
    }

    /// The metrics of a room, registered at the first use. Takes a lock: rooms keep them.
    #[must_use]
    pub fn group<T: MetricGroup>(&self) -> Arc<T> {
        let (groups, registrar) = &mut *self.groups.lock();
        groups.get(registrar)
    }

    /// All metrics as text.
    #[must_use]
    pub fn encode(&self, format: Format) -> String {
        let mut text = String::new();
        let (_, registrar) = &*self.groups.lock();
        // Writing into a String cannot fail.
        let _ = prometheus_client::encoding::text::encode(&mut text, &registrar.registry);
        match format {
            Format::OpenMetrics => exposition::with_exemplars(&text, &registrar.exemplars),
            Format::Text => exposition::plain(&text),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::mirror::metrics::{MirrorsMetrics, UnreadableMetrics};
    use crate::proxy::metrics::{ProxyMetrics, ReadMetrics};
    use crate::server::ConnectionMetrics;
    use crate::telemetry::outcome::{Kind, Outcome, Read, Reason};
    use crate::telemetry::trace::TraceId;
    use crate::tls::TlsMetrics;

    /// Prometheus' `increase()` does not see the first event of a series that begins with it.
    #[test]
    fn counters_of_rare_failures_begin_at_zero() {
        let metrics = Metrics::new();
        drop(ProxyMetrics::new(&metrics));
        drop((
            metrics.group::<TlsMetrics>(),
            metrics.group::<ConnectionMetrics>(),
            metrics.group::<UnreadableMetrics>(),
        ));
        let text = metrics.encode(Format::Text);
        for series in [
            "rangecache_tls_reloads_total{side=\"clients\",result=\"failed\"} 0",
            "rangecache_tls_reloads_total{side=\"etcd\",result=\"failed\"} 0",
            "rangecache_responses_given_up_total{reason=\"idle\"} 0",
            "rangecache_responses_given_up_total{reason=\"watch_memory\"} 0",
            "rangecache_client_connections_closed_total{listener=\"clients\",reason=\"flood\"} 0",
            "rangecache_panics_total 0",
            "rangecache_watch_created_total{outcome=\"etcd\",reason=\"feed_lost\"} 0",
            "rangecache_watch_created_total{outcome=\"memory\",reason=\"now\"} 0",
            "rangecache_watch_created_total{outcome=\"interrupted\",reason=\"history_replaced\"} 0",
            "rangecache_watch_handovers_total{to=\"etcd\",reason=\"over_budget\"} 0",
            "rangecache_watch_handovers_total{to=\"memory\",reason=\"mirrored\"} 0",
            "rangecache_range_stream_fallback_total{reason=\"broken\"} 0",
            "rangecache_flag_reloads_total{result=\"refused\"} 0",
            "rangecache_unreadable_responses_total{cause=\"header\"} 0",
        ] {
            assert!(text.contains(series), "{series} not in\n{text}");
        }
    }

    #[test]
    fn exemplar_of_a_traced_call_follows_its_bucket() {
        let metrics = Metrics::new();
        let reads = metrics.group::<ReadMetrics>();
        let (outcome, took) = (Outcome::Hit(Read::Linearizable), Duration::from_millis(3));
        reads.record(Kind::Unary, outcome, Duration::ZERO, took);
        reads.record_exemplar(TraceId::from(0xabc_u128), outcome, Duration::ZERO, took);
        reads.record_exemplar(
            TraceId::from(7_u128),
            outcome,
            Duration::ZERO,
            Duration::from_secs(99),
        );
        let text = metrics.encode(Format::OpenMetrics);
        let exemplar = |bucket: &str, trace_id: u128, seconds: &str| {
            let line = text.lines().find(|line| line.starts_with(bucket));
            let shown = format!(" # {{trace_id=\"{trace_id:032x}\"}} {seconds} ");
            assert!(
                line.is_some_and(|line| line.contains(&shown)),
                "{shown} not in\n{text}"
            );
        };
        exemplar(
            "rangecache_range_duration_seconds_bucket{le=\"0.0032\"} 1",
            0xabc,
            "0.003",
        );
        exemplar(
            "rangecache_range_duration_seconds_bucket{le=\"+Inf\"} 1",
            7,
            "99.0",
        );
        exemplar("rangecache_range_wait_seconds_bucket{le=\"0.00005\"} 1", 7, "0.0");
        assert_eq!(text.matches("trace_id").count(), 3);
        assert!(text.ends_with("# EOF\n"));
        assert!(!metrics.encode(Format::Text).contains("trace_id"));
    }

    #[test]
    fn range_is_counted_once_under_its_outcome() {
        let metrics = Metrics::new();
        let reads = metrics.group::<ReadMetrics>();
        reads.record(
            Kind::Unary,
            Outcome::Hit(Read::Linearizable),
            Duration::ZERO,
            Duration::from_millis(1),
        );
        reads.record(
            Kind::Unary,
            Outcome::Forwarded(Reason::Loading),
            Duration::ZERO,
            Duration::from_millis(1),
        );
        MirrorsMetrics::of(&metrics.group(), "/").revision.set(7);
        let text = metrics.encode(Format::OpenMetrics);
        for line in [
            "rangecache_range_total{outcome=\"hit\",reason=\"linearizable\"} 1",
            "rangecache_range_total{outcome=\"forwarded\",reason=\"loading\"} 1",
            "rangecache_mirror_revision{mirror=\"/\"} 7",
            "rangecache_range_wait_seconds_count 1",
        ] {
            assert!(text.contains(line), "{line} not in\n{text}");
        }
    }
}
