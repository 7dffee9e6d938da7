//! Metrics of several rooms in one scrape.

use std::time::Duration;

use crate::metrics::{ProxyMetrics, ReadMetrics};
use rangecache_base::telemetry::Metrics;
use rangecache_base::telemetry::exposition::Format;
use rangecache_base::telemetry::outcome::{Kind, Outcome, Read, Reason};
use rangecache_base::telemetry::trace::TraceId;
use rangecache_edge::server::ConnectionMetrics;
use rangecache_edge::tls::TlsMetrics;
use rangecache_mirror::metrics::{MirrorsMetrics, UnreadableMetrics};

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
        "rangecache_range_total{outcome=\"failed\",reason=\"no_endpoint\"} 0",
        "rangecache_range_stream_total{outcome=\"shed\",reason=\"too_many_waiting\"} 0",
        "rangecache_watch_created_total{outcome=\"memory\",reason=\"now\"} 0",
        "rangecache_watch_created_total{outcome=\"interrupted\",reason=\"history_replaced\"} 0",
        "rangecache_watch_handovers_total{to=\"etcd\",reason=\"feed_lost\"} 0",
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
