//! Collectors that authenticate, are busy or fail, without effect on requests.

use testkit::collector::Collector;
use testkit::etcd::{Etcd, Version};
use testkit::proxy::Rangecache;
use testkit::tls::{Ca, Leaf, text};
use testkit::wait::{SOON, until};

use super::{RANGE, ours, trace_id, traced, traceparent};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn collector_and_rangecache_authenticate_by_tls() {
    let (ca, stranger) = (Ca::new(), Ca::new());
    let server = ca.issue("collector", &Leaf::default());
    let collector = Collector::with_tls(&ca, &server).await;
    let etcd = Etcd::start(Version::V3_7).await;
    let own = ca.issue("rangecache", &Leaf::default());
    for (n, protocol) in [(51, "grpc"), (52, "http/protobuf")] {
        let start = async |ca: &Ca| {
            traced(&etcd, &collector, protocol)
                .with_environment("OTEL_EXPORTER_OTLP_CERTIFICATE", text(&ca.cert()))
                .with_environment("OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE", text(&own.cert))
                .with_environment("OTEL_EXPORTER_OTLP_CLIENT_KEY", text(&own.key))
                .start()
                .await
        };
        for ca in [&stranger, &ca] {
            let rangecache = start(ca).await;
            let client = rangecache.client().await;
            let client = client.with_metadata("traceparent", &traceparent(n, "01"));
            client.get("/cached/k").await.expect("a response");
            if std::ptr::eq(ca, &stranger) {
                until(SOON, "the log reports the failed export", async || {
                    rangecache.log().contains("traces are not exported").then_some(())
                })
                .await;
                assert_eq!(collector.trace(&trace_id(n)).len(), 0);
            } else {
                ours(&collector, n, RANGE).await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn traces_are_compressed_if_configured() {
    let etcd = Etcd::start(Version::V3_7).await;
    for (n, protocol) in [(61, "grpc"), (62, "http/protobuf")] {
        let collector = Collector::start().await;
        let rangecache = traced(&etcd, &collector, protocol)
            .with_environment("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
            .start()
            .await;
        let client = rangecache.client().await;
        let client = client.with_metadata("traceparent", &traceparent(n, "01"));
        client.get("/cached/k").await.expect("a response");
        ours(&collector, n, RANGE).await;
        assert_eq!(collector.uncompressed(), 0, "{protocol}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn busy_collector_is_retried() {
    let etcd = Etcd::start(Version::V3_7).await;
    for (n, protocol) in [(71, "grpc"), (72, "http/protobuf")] {
        let collector = Collector::busy_at_first().await;
        let rangecache = traced(&etcd, &collector, protocol).start().await;
        let client = rangecache.client().await;
        let client = client.with_metadata("traceparent", &traceparent(n, "01"));
        client.get("/cached/k").await.expect("a response");
        ours(&collector, n, RANGE).await;
        assert_eq!(collector.busy(), 0);
        let counted = async |result: &str| {
            let name = format!("rangecache_trace_spans_total{{result=\"{result}\"}}");
            rangecache.metrics().await.0.get(&name).copied()
        };
        until(SOON, "the spans are counted", async || {
            counted("exported")
                .await
                .is_some_and(|spans| spans > 0.0)
                .then_some(())
        })
        .await;
        assert_eq!(counted("failed").await, Some(0.0), "{protocol}");
        assert!(!rangecache.log().contains("traces are not exported"));
    }
}

/// Reads from memory and from etcd, each of which must succeed.
async fn many_calls(rangecache: &Rangecache) {
    let client = rangecache.client().await;
    let client = client.with_metadata("traceparent", &traceparent(31, "01"));
    for n in 0..50 {
        client
            .put(format!("/cached/{n}"), "v")
            .await
            .expect("etcd writes");
        client.get("/cached/1").await.expect("a response");
        client.get("/elsewhere/1").await.expect("a response");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failing_collector_costs_only_spans() {
    let etcd = Etcd::start(Version::V3_7).await;
    let hanging = Collector::hanging().await;
    // No process gets this port by chance, as one could the port of a collector that was stopped.
    let gone = "http://127.0.0.1:1";
    for (url, protocol) in [
        (hanging.url(), "grpc"),
        (hanging.url(), "http/protobuf"),
        (gone, "grpc"),
        (gone, "http/protobuf"),
    ] {
        let rangecache = traced(&etcd, &hanging, protocol)
            .with_environment("OTEL_EXPORTER_OTLP_ENDPOINT", url)
            .with_environment("OTEL_BSP_MAX_QUEUE_SIZE", "16")
            .with_environment("OTEL_EXPORTER_OTLP_TIMEOUT", "100")
            .with_environment("OTEL_BSP_EXPORT_TIMEOUT", "300")
            .start()
            .await;
        many_calls(&rangecache).await;
        for result in ["dropped", "failed"] {
            let name = format!("rangecache_trace_spans_total{{result=\"{result}\"}}");
            until(SOON, &name, async || {
                let metrics = rangecache.metrics().await;
                metrics
                    .0
                    .get(&name)
                    .is_some_and(|spans| *spans > 0.0)
                    .then_some(())
            })
            .await;
        }
        let log = rangecache.log();
        assert_eq!(log.matches("traces are not exported").count(), 1, "{log}");
        assert!(url != gone || log.contains("Connection refused"), "{log}");
        assert!(rangecache.terminate().await.success());
    }
}

/// The specification of OpenTelemetry asks for a warning and the default: tracing must never keep the proxy from serving.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unusable_trace_settings_are_reported_and_rangecache_serves() {
    let etcd = Etcd::start(Version::V3_7).await;
    let collector = Collector::start().await;
    for (name, value, says) in [
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "localhost:4318", "write a URL"),
        (
            "OTEL_EXPORTER_OTLP_PROTOCOL",
            "http/json",
            "write grpc or http/protobuf",
        ),
        ("OTEL_TRACES_SAMPLER", "sometimes", "write always_on"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "zstd", "write none or gzip"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "a b=c", "write name=value"),
    ] {
        let rangecache = Rangecache::before(&etcd)
            .with_environment("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
            .with_environment("OTEL_BSP_SCHEDULE_DELAY", "20")
            .with_environment("OTEL_SERVICE_NAME", name)
            .with_environment(name, value)
            .start()
            .await;
        rangecache.client().await.get("a").await.expect("a response");
        let log = rangecache.log();
        let mut warnings = log.lines().filter(|line| line.contains("counts as not set"));
        let warning = warnings
            .next()
            .unwrap_or_else(|| panic!("{name} is not reported:\n{log}"));
        assert!(warning.contains(says) && warning.contains(name), "{warning}");
        assert_eq!(warnings.next(), None);
        if name != "OTEL_EXPORTER_OTLP_ENDPOINT" {
            let span = collector.span(name, |span| span.service == name && span.name == RANGE);
            span.await;
        }
    }
    let rangecache = Rangecache::before(&etcd)
        .with_environment("OTEL_EXPORTER_OTLP_ENDPOINT", "https://127.0.0.1:1")
        .with_environment("OTEL_EXPORTER_OTLP_CERTIFICATE", "/does/not/exist")
        .start()
        .await;
    let log = rangecache.log();
    assert!(
        log.contains("OTEL_EXPORTER_OTLP_CERTIFICATE /does/not/exist: cannot be read"),
        "{log}"
    );
}
