//! Traces from a client through rangecache into etcd's own spans, and collectors that fail without effect on
//! requests.

mod exporter;
mod spans;

use testkit::collector::{Collector, Span};
use testkit::etcd::{Etcd, Version};
use testkit::proxy::{Builder, Rangecache};

/// Text that must not appear in any span (I10).
const SECRET: &str = "kept-secret";
const CALLER: &str = "00f067aa0ba902b7";
const RANGE: &str = "etcdserverpb.KV/Range";
const PUT: &str = "etcdserverpb.KV/Put";

/// An etcd that sends every span to `collector`.
async fn traced_etcd(collector: &Collector) -> Etcd {
    let address = collector.address();
    let flags = [
        "--enable-distributed-tracing=true",
        "--distributed-tracing-sampling-rate=1000000",
        "--distributed-tracing-instance-id=alone",
        "--distributed-tracing-address",
        address,
    ];
    Etcd::start_with(Version::V3_7, &flags).await
}

/// Settings for a rangecache that traces only calls whose callers trace them.
fn traced(etcd: &Etcd, collector: &Collector, protocol: &str) -> Builder {
    Rangecache::before(etcd)
        .with("--cache-prefix", "/cached/")
        .with_environment("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url())
        .with_environment("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
        .with_environment("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        .with_environment("OTEL_BSP_SCHEDULE_DELAY", "20")
}

fn trace_id(n: u8) -> String {
    format!("{:032x}", 0xabcd_0000 + u32::from(n))
}

fn traceparent(n: u8, flags: &str) -> String {
    format!("00-{}-{CALLER}-{flags}", trace_id(n))
}

/// Waits for rangecache's span of that name in a trace.
async fn ours(collector: &Collector, n: u8, name: &str) -> Span {
    let what = format!("rangecache's {name} in trace {n}");
    let span = collector.span(&what, |span| {
        span.service == "rangecache" && span.trace_id == trace_id(n) && span.name == name
    });
    span.await
}

/// Waits for etcd's span of a call below `parent`.
async fn etcds(collector: &Collector, parent: &Span) -> Span {
    let what = format!("etcd's span below {}", parent.name);
    let span = collector.span(&what, |span| {
        span.service == "etcd" && span.parent == parent.span_id && span.trace_id == parent.trace_id
    });
    span.await
}

fn within(inner: &Span, outer: &Span) {
    assert_eq!(inner.parent, outer.span_id, "{inner:?} in {outer:?}");
    assert!(
        outer.started <= inner.started && inner.started <= inner.ended && inner.ended <= outer.ended,
        "{inner:?} in {outer:?}"
    );
}
