//! Metrics of several rooms in one scrape.

use std::collections::HashMap;

use rangecache_base::telemetry::exposition::Format;
use rangecache_edge::{server::ConnectionMetrics, tls::TlsMetrics};
use rangecache_mirror::metrics::{MirrorsMetrics, UnreadableMetrics};

use super::*;

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

#[test]
fn every_recorded_outcome_is_read_back() {
    let metrics = ReadMetrics::default();
    let took = Duration::from_millis(1);
    for outcome in Outcome::all() {
        metrics.record(Kind::Unary, outcome, Duration::ZERO, took);
        metrics.record(Kind::Stream, outcome, Duration::ZERO, took);
    }
    assert_eq!(metrics.by_outcome().len(), Outcome::all().count());
    assert!(metrics.by_outcome().iter().all(|(_, count)| *count == 2));
}

#[test]
fn outcomes_without_calls_are_left_out() {
    let metrics = ReadMetrics::default();
    let forwarded = Outcome::Forwarded(Reason::Loading);
    for _ in 0..3 {
        metrics.record(Kind::Unary, forwarded, Duration::ZERO, Duration::ZERO);
    }
    metrics.record(Kind::Unary, MOST_FREQUENT, Duration::ZERO, Duration::ZERO);
    let counts: HashMap<_, _> = metrics
        .by_outcome()
        .into_iter()
        .map(|(outcome, count)| (outcome.labels(), count))
        .collect();
    assert_eq!(
        counts,
        HashMap::from([(forwarded.labels(), 3), (MOST_FREQUENT.labels(), 1)])
    );
}

#[test]
fn stream_is_counted_where_it_is_served_until_it_ends() {
    let metrics = WatchMetrics::default();
    let memory = metrics.open_memory();
    let streams: Vec<_> = [Reason::NotMirrored, Reason::NotMirrored, Reason::Loading]
        .map(|reason| metrics.open_etcd(reason.as_str()))
        .into();
    assert_eq!(metrics.memory_streams(), 1);
    let mut at_etcd: Vec<_> = metrics.etcd_streams().collect();
    at_etcd.sort_by_key(|(_, count)| *count);
    assert_eq!(at_etcd, [(Reason::Loading, 1), (Reason::NotMirrored, 2)]);
    drop((memory, streams));
    assert_eq!((metrics.memory_streams(), metrics.etcd_streams().count()), (0, 0));
}

#[test]
fn bytes_of_events_are_what_streams_and_topics_leave() {
    let metrics = WatchMetrics::default();
    let bytes = |kind: &'static str| metrics.bytes.of(kind).get();
    metrics.set_bytes(30, 50, 100);
    assert_eq!((bytes("topics"), bytes("events")), (30, 20));
    // The three are not read at the same time.
    metrics.set_bytes(30, 90, 100);
    assert_eq!(bytes("events"), 0);
}

#[test]
fn response_with_events_counts_as_one() {
    let metrics = WatchMetrics::default();
    metrics.record_response();
    metrics.record_events(3);
    assert_eq!((metrics.responses.get(), metrics.events_sent()), (2, 3));
}
