//! Spans of calls and of background work, and exemplars that lead to them.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use testkit::collector::{Collector, Span};
use testkit::etcd::{Etcd, Version};
use testkit::http;
use testkit::kv::WATCH;
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchRequest};
use testkit::proxy::Rangecache;
use testkit::tls::text;
use testkit::wait::{SOON, until};

use super::{CALLER, PUT, RANGE, SECRET, etcds, ours, trace_id, traced, traced_etcd, traceparent, within};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_trace_spans_client_rangecache_and_etcd() {
    let collector = Collector::start().await;
    let etcd = traced_etcd(&collector).await;
    let rangecache = traced(&etcd, &collector, "grpc").start().await;
    let client = rangecache.client().await;
    let in_trace = |n| {
        let client = client.with_metadata("traceparent", &traceparent(n, "01"));
        client.with_metadata("tracestate", "vendor=kept")
    };

    // A write, which etcd executes as part of the trace.
    let key = format!("/cached/{SECRET}");
    in_trace(1).put(&key, SECRET).await.expect("etcd writes");
    let server = ours(&collector, 1, PUT).await;
    assert_eq!((server.parent.as_str(), server.kind), (CALLER, 2));
    assert_eq!(server.trace_state, "vendor=kept");
    assert_eq!(server.attributes["rpc.system.name"], "grpc");
    assert_eq!(server.attributes["rpc.method"], PUT);
    assert_eq!(server.attributes["rpc.response.status_code"], "OK");
    let forward = ours(&collector, 1, "forward").await;
    within(&forward, &server);
    assert_eq!(forward.kind, 3);
    assert_eq!(forward.attributes["server.address"], "127.0.0.1");
    let of_etcd = etcds(&collector, &forward).await;
    assert_eq!((of_etcd.name.as_str(), of_etcd.kind), (PUT, 2));

    // A read answered from memory once the mirror has caught up with a write to another key.
    client.put("/elsewhere/1", "v").await.expect("etcd writes");
    let list = RangeRequest::prefix("/cached/");
    let listed = in_trace(2).range(&list).await.expect("a response");
    let server = ours(&collector, 2, RANGE).await;
    let revision = listed.header.unwrap().revision.to_string();
    for (name, value) in [
        ("rangecache.outcome", "waited"),
        ("rangecache.reason", "linearizable"),
        ("rangecache.mirror", "/cached/"),
        ("rangecache.prefix", "/cached/"),
        ("rangecache.client", "address 127.0.0.1"),
        ("rangecache.revision.proven", revision.as_str()),
        ("rangecache.revision.served", revision.as_str()),
        ("rangecache.keys", "1"),
        ("rangecache.chunks", "1"),
        ("rpc.response.status_code", "OK"),
    ] {
        assert_eq!(
            server.attributes.get(name).map(String::as_str),
            Some(value),
            "{name}: {server:?}"
        );
    }
    let (prove, wait) = (
        ours(&collector, 2, "prove").await,
        ours(&collector, 2, "wait").await,
    );
    let (progress, answer) = (
        ours(&collector, 2, "progress").await,
        ours(&collector, 2, "answer").await,
    );
    within(&prove, &server);
    within(&wait, &prove);
    within(&progress, &wait);
    within(&answer, &server);
    assert!(prove.ended <= answer.started);
    let (check_trace, check_span) = prove.links[0].clone();
    let check = collector.span("the check that it shared", |span| span.span_id == check_span);
    let check = check.await;
    assert_eq!((check.name.as_str(), check.kind), ("quorum check", 3));
    assert!(check.trace_id == check_trace && check_trace != trace_id(2) && check.parent.is_empty());
    assert_eq!(check.attributes["rangecache.revision.proven"], revision);
    assert_eq!(check.attributes["rangecache.reads"], "1");
    assert_eq!(check.attributes["rpc.method"], "etcdserverpb.KV/Range");
    etcds(&collector, &check).await;

    // A list outside the mirror, which is sent to etcd as a RangeStream.
    let elsewhere = RangeRequest {
        limit: 1_000_000,
        keys_only: true,
        ..RangeRequest::prefix("/elsewhere/")
    };
    in_trace(3).range(&elsewhere).await.expect("a response");
    let server = ours(&collector, 3, RANGE).await;
    assert_eq!(server.attributes["rangecache.outcome"], "streamed");
    assert_eq!(server.attributes["rangecache.reason"], "not_mirrored");
    for (name, value) in [
        ("rangecache.prefix", "/elsewhere/"),
        ("rangecache.limit", "1000000"),
        ("rangecache.keys_only", "true"),
    ] {
        assert_eq!(server.attributes[name], value, "{name}");
    }
    for name in [
        "rangecache.mirror",
        "rangecache.keys",
        "rangecache.revision.served",
        "rangecache.count_only",
    ] {
        assert!(!server.attributes.contains_key(name), "{name}");
    }
    let stream = ours(&collector, 3, "stream").await;
    within(&stream, &server);
    assert_eq!(stream.attributes["server.address"], "127.0.0.1");
    assert_eq!(stream.attributes["rpc.method"], "etcdserverpb.KV/RangeStream");
    let of_etcd = etcds(&collector, &stream).await;
    assert_eq!(of_etcd.name, "etcdserverpb.KV/RangeStream");

    // A RangeStream from memory, in chunks.
    for n in 0..30 {
        client
            .put(format!("/cached/{n}"), "v")
            .await
            .expect("etcd writes");
    }
    in_trace(4).range_stream(&list).await.expect("a response");
    let server = ours(&collector, 4, "etcdserverpb.KV/RangeStream").await;
    assert_eq!(server.attributes["rangecache.keys"], "31");
    assert!(
        server.attributes["rangecache.chunks"].parse::<u32>().unwrap() > 1,
        "{server:?}"
    );

    // A refusal by etcd is an error of the caller's span and of the span of the call to etcd.
    let compacted = RangeRequest {
        revision: 1 << 40,
        ..RangeRequest::prefix("/elsewhere/")
    };
    in_trace(5).range(&compacted).await.expect_err("a refusal");
    let server = ours(&collector, 5, RANGE).await;
    assert_eq!(server.attributes["rpc.response.status_code"], "OUT_OF_RANGE");
    assert_eq!(server.error, None);

    // A call cancelled by its caller.
    let all = WatchCreateRequest {
        key: list.key.clone(),
        range_end: list.range_end.clone(),
        ..WatchCreateRequest::default()
    };
    drop(in_trace(6).watch(all).await);
    let server = ours(&collector, 6, "etcdserverpb.Watch/Watch").await;
    assert_eq!(server.attributes["rpc.response.status_code"], "CANCELLED");

    println!(
        "{}\n{}",
        collector.tree(&trace_id(2)),
        collector.tree(&check_trace)
    );
    println!("{}", collector.tree(&trace_id(3)));
    for (_, _, body) in collector.requests() {
        let shown = String::from_utf8_lossy(&body).into_owned();
        // etcd's own spans contain keys, which rangecache cannot prevent.
        assert!(shown.contains("etcd\u{12}") || !shown.contains(SECRET), "{shown}");
    }
    for span in collector.spans() {
        assert!(
            span.service != "rangecache" || !format!("{span:?}").contains(SECRET),
            "{span:?}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn untraced_calls_are_forwarded_unchanged() {
    let collector = Collector::start().await;
    let etcd = traced_etcd(&collector).await;
    let off = Rangecache::before(&etcd).start().await;
    let unsampled = traced(&etcd, &collector, "http/protobuf")
        .with_environment("OTEL_TRACES_SAMPLER", "always_off")
        .start()
        .await;
    let parent_based = traced(&etcd, &collector, "http/protobuf").start().await;
    for (n, rangecache) in [(11, &off), (12, &unsampled)] {
        let client = rangecache.client().await;
        let client = client.with_metadata("traceparent", &traceparent(n, "01"));
        client.put("/k", "v").await.expect("etcd writes");
        // The client's own span is the parent of etcd's.
        let of_etcd = collector.span("etcd's span", |span| {
            span.trace_id == trace_id(n) && span.service == "etcd" && span.parent == CALLER
        });
        of_etcd.await;
    }
    let client = parent_based.client().await;
    let unsampled = client.with_metadata("traceparent", &traceparent(13, "00"));
    unsampled.put("/k", "v").await.expect("etcd writes");
    unsampled.get("/cached/k").await.expect("a response");
    client.get("/cached/k").await.expect("a response");
    // Spans are exported in order: an earlier one would have arrived before this one.
    let sampled = client.with_metadata("traceparent", &traceparent(14, "01"));
    sampled.get("/cached/k").await.expect("a response");
    ours(&collector, 14, RANGE).await;
    for span in collector.spans() {
        let is_expected =
            span.service == "etcd" || span.trace_id == trace_id(14) || span.name == "quorum check";
        assert!(is_expected, "{span:?}");
    }
    assert_eq!(collector.trace(&trace_id(13)).len(), 0);
    let by_http = collector.requests().into_iter().any(|(path, headers, _)| {
        path == "/v1/traces" && headers["content-type"] == "application/x-protobuf"
    });
    assert!(by_http, "OTLP over HTTP");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_call_has_a_span_with_its_reason() {
    let collector = Collector::start().await;
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = traced(&etcd, &collector, "grpc")
        .with("--max-calls", "1")
        .start()
        .await;
    let client = rangecache.client().await;
    let mut watch = client.open(WATCH);
    watch.send(&WatchRequest {
        create_request: Some(WatchCreateRequest {
            key: b"/cached/watched".to_vec(),
            ..WatchCreateRequest::default()
        }),
        ..WatchRequest::default()
    });
    assert!(watch.next().await.is_some(), "the one call that may be in flight");
    let traced = client.with_metadata("traceparent", &traceparent(71, "01"));
    let refused = traced.range(&RangeRequest::prefix("/cached/")).await;
    let refused = refused.expect_err("a second call");
    let span = ours(&collector, 71, RANGE).await;
    for (name, value) in [
        ("rangecache.outcome", "shed"),
        ("rangecache.reason", "too_many_calls"),
        ("rpc.response.status_code", "UNAVAILABLE"),
    ] {
        assert_eq!(span.attributes[name], value, "{name}: {refused:?}, {span:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_calls_have_a_server_span_and_a_client_span() {
    let collector = Collector::start().await;
    let etcd = traced_etcd(&collector).await;
    let rangecache = traced(&etcd, &collector, "http/protobuf").start().await;
    rangecache.warm().await;
    let post = async |n: u8, flags: &str, path: &str, body: &str| {
        let url = format!("{}{path}", rangecache.url());
        let header = traceparent(n, flags);
        let response = http::post_with(&url, &[("traceparent", &header)], body).await;
        response.expect("a response").status
    };
    let key = STANDARD.encode(format!("/cached/{SECRET}"));
    let (put, range) = (
        format!(r#"{{"key":"{key}","value":"dg=="}}"#),
        format!(r#"{{"key":"{key}"}}"#),
    );

    // A write, which etcd's gateway executes as part of the trace.
    assert_eq!(post(81, "01", "/v3/kv/put", &put).await, 200);
    let server = ours(&collector, 81, "POST /v3/kv/put").await;
    assert_eq!((server.parent.as_str(), server.kind), (CALLER, 2));
    for (name, value) in [
        ("http.request.method", "POST"),
        ("http.route", "/v3/kv/put"),
        ("url.scheme", "http"),
        ("url.path", "/v3/kv/put"),
        ("http.response.status_code", "200"),
        ("client.address", "127.0.0.1"),
    ] {
        assert_eq!(server.attributes[name], value, "{name}: {server:?}");
    }
    let forward = ours(&collector, 81, "forward").await;
    within(&forward, &server);
    assert_eq!((forward.kind, &forward.error), (3, &None));
    assert_eq!(forward.attributes["server.address"], "127.0.0.1");
    assert_eq!(forward.attributes["http.response.status_code"], "200");
    assert_eq!(etcds(&collector, &forward).await.name, PUT);

    // What etcd refuses is an error of the call to etcd alone.
    assert_eq!(post(82, "01", "/v3/kv/put", "}").await, 400);
    let server = ours(&collector, 82, "POST /v3/kv/put").await;
    assert_eq!(
        (&server.attributes["http.response.status_code"], server.error),
        (&"400".to_owned(), None)
    );
    let forward = ours(&collector, 82, "forward").await;
    assert_eq!(
        (
            forward.error.as_deref(),
            forward.attributes["error.type"].as_str()
        ),
        (Some("400"), "400")
    );

    // A path that is not etcd's own may be anything.
    assert_eq!(post(83, "01", &format!("/{SECRET}"), "").await, 404);
    let server = ours(&collector, 83, "POST").await;
    assert!(!server.attributes.contains_key("http.route"), "{server:?}");
    assert_eq!(server.attributes["url.path"], "REDACTED");

    // A Range that memory does not understand, and one that it answers.
    assert_eq!(
        post(
            84,
            "01",
            "/v3/kv/range",
            &format!("{range} ").replace('{', "{\"limit\":null,")
        )
        .await,
        200
    );
    let server = ours(&collector, 84, "POST /v3/kv/range").await;
    assert_eq!(server.attributes["rangecache.reason"], "undecodable");
    let forward = ours(&collector, 84, "forward").await;
    assert_eq!(etcds(&collector, &forward).await.name, RANGE);
    assert_eq!(post(85, "01", "/v3/kv/range", &range).await, 200);
    let server = ours(&collector, 85, "POST /v3/kv/range").await;
    assert_eq!(server.attributes["rangecache.mirror"], "/cached/");
    assert_eq!(server.attributes["http.response.status_code"], "200");
    within(&ours(&collector, 85, "answer").await, &server);

    // A call whose caller does not trace it. Spans are exported in order.
    assert_eq!(post(86, "00", "/v3/kv/put", &put).await, 200);
    assert_eq!(post(87, "01", "/v3/kv/put", &put).await, 200);
    ours(&collector, 87, "forward").await;
    assert_eq!(collector.trace(&trace_id(86)).len(), 0);
    println!(
        "{}\n{}",
        collector.tree(&trace_id(81)),
        collector.tree(&trace_id(85))
    );
    for span in collector.spans() {
        assert!(
            span.service != "rangecache" || !format!("{span:?}").contains(SECRET),
            "{span:?}"
        );
    }
}

/// While no member answers, a JSON call has the error of rangecache's own.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn json_call_that_etcd_does_not_answer_is_an_error_of_its_span() {
    let collector = Collector::start().await;
    let mut etcd = Etcd::start(Version::V3_7).await;
    let rangecache = traced(&etcd, &collector, "grpc")
        .with("--connect-timeout", "100ms")
        .start()
        .await;
    etcd.stop();
    let url = format!("{}/v3/kv/put", rangecache.url());
    let header = traceparent(91, "01");
    let response = http::post_with(&url, &[("traceparent", &header)], "{}").await;
    assert_eq!(response.expect("a response").status, 502);
    for name in ["POST /v3/kv/put", "forward"] {
        let span = ours(&collector, 91, name).await;
        assert_eq!(span.error.as_deref(), Some("502"), "{span:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reload_changes_the_share_of_traces() {
    let collector = Collector::start().await;
    let etcd = Etcd::start(Version::V3_7).await;
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("flags");
    std::fs::write(&file, "").unwrap();
    // Without the flag, no trace begins here.
    let rangecache = traced(&etcd, &collector, "http/protobuf")
        .with("--flags-file", text(&file))
        .start()
        .await;
    let client = rangecache.client().await;
    let reload = async |flags: &str| {
        std::fs::write(&file, flags).unwrap();
        let response = http::post(&format!("{}/reload", rangecache.metrics_url()), "").await;
        response.expect("a response").body
    };
    client.put("/k", "not sampled").await.expect("etcd writes");
    let changed = reload("RANGECACHE_TRACE_SAMPLE=1\n").await;
    assert!(changed.contains("trace-sample: none → 1"), "{changed}");
    client.put("/k", "sampled").await.expect("etcd writes");
    let is_put = |span: &Span| span.service == "rangecache" && span.name == PUT;
    let sampled = collector.span("a trace that begins here", is_put).await;
    assert_eq!(sampled.parent, "");
    for flags in ["RANGECACHE_TRACE_SAMPLE=0\n", ""] {
        let changed = reload(flags).await;
        assert!(changed.contains("trace-sample"), "{changed}");
        client.put("/k", "not sampled").await.expect("etcd writes");
    }
    // Spans are exported in order.
    let last = client.with_metadata("traceparent", &traceparent(43, "01"));
    last.put("/k", "v").await.expect("etcd writes");
    ours(&collector, 43, PUT).await;
    let puts = collector.spans().into_iter().filter(|span| is_put(span)).count();
    assert_eq!(puts, 2);
}

/// Attributes of `OTEL_RESOURCE_ATTRIBUTES` take precedence over detected ones.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_name_the_instance_its_pod_and_the_client() {
    let collector = Collector::start().await;
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = traced(&etcd, &collector, "http/protobuf")
        .with_environment("K8S_POD_NAME", "rangecache-7")
        .with_environment("K8S_NAMESPACE_NAME", "etcd")
        .with_environment("K8S_NODE_NAME", "found")
        .with_environment(
            "OTEL_RESOURCE_ATTRIBUTES",
            "k8s.node.name=given,deployment.environment.name=test",
        )
        .start()
        .await;
    let client = rangecache.client().await;
    let client = client.with_metadata("traceparent", &traceparent(41, "01"));
    client.get("/cached/k").await.expect("a response");
    client.put("/k", "v").await.expect("etcd writes");
    for name in [RANGE, "etcdserverpb.KV/Put"] {
        let span = ours(&collector, 41, name).await;
        for (attribute, value) in [
            ("k8s.pod.name", "rangecache-7"),
            ("k8s.namespace.name", "etcd"),
            ("k8s.node.name", "given"),
            ("deployment.environment.name", "test"),
        ] {
            assert_eq!(span.resource[attribute], value, "{:?}", span.resource);
        }
        assert_eq!(span.resource["service.instance.id"].len(), 32);
        assert!(!span.resource["host.name"].is_empty());
        for attribute in ["client.address", "network.peer.address"] {
            assert_eq!(span.attributes[attribute], "127.0.0.1", "{:?}", span.attributes);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_propagators_a_trace_is_neither_continued_nor_passed_on() {
    let collector = Collector::start().await;
    let etcd = traced_etcd(&collector).await;
    let rangecache = traced(&etcd, &collector, "http/protobuf")
        .with_environment("OTEL_TRACES_SAMPLER", "always_on")
        .with_environment("OTEL_PROPAGATORS", "none")
        .start()
        .await;
    let client = rangecache.client().await;
    let client = client.with_metadata("traceparent", &traceparent(42, "01"));
    client.put("/k", "v").await.expect("etcd writes");
    let put = collector.span("rangecache's span", |span| {
        span.service == "rangecache" && span.name == "etcdserverpb.KV/Put"
    });
    let put = put.await;
    assert_ne!(put.trace_id, trace_id(42));
    assert_eq!(put.parent, "");
    // The client's header reaches etcd as the client has sent it.
    let of_etcd = collector.span("etcd's span", |span| {
        span.trace_id == trace_id(42) && span.service == "etcd" && span.parent == CALLER
    });
    of_etcd.await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn background_work_is_traced() {
    let collector = Collector::start().await;
    let mut etcd = Etcd::start(Version::V3_7).await;
    let rangecache = traced(&etcd, &collector, "http/protobuf")
        .with_environment("OTEL_TRACES_SAMPLER", "parentbased_always_on")
        .with_environment("OTEL_EXPORTER_OTLP_HEADERS", "api-key=a%3Db")
        .with_environment("OTEL_SERVICE_NAME", "mine")
        .with("--verify-interval", "50ms")
        .start()
        .await;
    let background = async |name: &str, key: &str, value: &str| {
        let span = collector
            .span(name, |span| {
                let at = |attribute: &str| span.attributes.get(attribute).map(String::as_str);
                span.name == name && span.service == "mine" && (key.is_empty() || at(key) == Some(value))
            })
            .await;
        assert_eq!(span.attributes["rangecache.mirror"], "/cached/");
        assert_eq!((span.parent.as_str(), span.error.clone()), ("", None));
    };
    background("load", "rangecache.reason", "start").await;
    background("follow", "", "").await;
    // The first round can meet a mirror that is still loading: `out_of_service`.
    background("verify", "rangecache.outcome", "same").await;
    etcd.stop();
    etcd.run();
    let resumed = collector.span("it has resumed", |span| {
        span.name == "resume" && span.error.is_none()
    });
    assert_eq!(resumed.await.attributes["server.address"], "127.0.0.1");
    let requests = collector.requests();
    assert!(requests.iter().all(|(_, headers, _)| headers["api-key"] == "a=b"));

    // Spans recorded last are exported before the end.
    rangecache.warm().await;
    let client = rangecache.client().await;
    let last = client.with_metadata("traceparent", &traceparent(21, "01"));
    last.get("/cached/k").await.expect("a response");
    assert!(rangecache.terminate().await.success());
    let of_last = collector.trace(&trace_id(21));
    assert!(of_last.iter().any(|span| span.name == RANGE), "{of_last:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn buckets_have_exemplars_in_the_scrapers_format() {
    let collector = Collector::start().await;
    let etcd = Etcd::start(Version::V3_7).await;
    let rangecache = traced(&etcd, &collector, "grpc").start().await;
    let client = rangecache.client().await;
    let client = client.with_metadata("traceparent", &traceparent(41, "01"));
    client.get("/cached/k").await.expect("a response");
    let url = rangecache.metrics_url().to_owned() + "/metrics";
    let accept = "application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.3";
    let exemplar = format!("# {{trace_id=\"{}\"}}", trace_id(41));
    let (page, _) = until(SOON, "the call is counted", async || {
        let page = http::get_accepting(&url, accept).await.unwrap();
        (page.body.matches(&exemplar).count() == 2).then_some(page)
    })
    .await;
    assert_eq!(
        page.headers["content-type"],
        "application/openmetrics-text; version=1.0.0; charset=utf-8"
    );
    assert!(page.body.ends_with("# EOF\n"));
    for histogram in ["range_wait", "range_duration"] {
        let bucket = format!("rangecache_{histogram}_seconds_bucket");
        let with_exemplar = |line: &str| line.starts_with(&bucket) && line.contains(&exemplar);
        assert!(page.body.lines().any(with_exemplar), "{}", page.body);
    }
    for metric in [
        format!("rangecache_endpoint_healthy{{endpoint=\"{}\"}} 1", etcd.url()),
        "rangecache_mirror_lag_seconds{mirror=\"/cached/\"} 0".to_owned(),
    ] {
        assert!(page.body.contains(&metric), "{metric} not in\n{}", page.body);
    }
    let plain = http::get_accepting(&url, "text/plain;version=0.0.4")
        .await
        .unwrap();
    assert_eq!(
        plain.headers["content-type"],
        "text/plain; version=0.0.4; charset=utf-8"
    );
    assert!(plain.body.contains("# TYPE rangecache_range_total counter"));
    assert!(!plain.body.contains("trace_id") && !plain.body.contains("# EOF"));
}
