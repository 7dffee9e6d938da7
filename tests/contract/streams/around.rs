//! Reads that bypass the cache by a header.

use prost::Message;

use super::scripted::{Scripted, scripted};
use super::{fill, key, list, start};
use testkit::etcd::{Etcd, Version};
use testkit::kv::{PUT, RANGE, RANGE_STREAM};
use testkit::metrics::Outcomes;
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

const BYPASS: &str = "rangecache-bypass";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bypass_header_forwards_the_read() {
    for version in [Version::V3_7, Version::V3_6] {
        let etcd = Etcd::start(version).await;
        let direct = etcd.client().await;
        fill(&direct, 1200, 20).await;
        let rangecache = start(&etcd, &[]).await;
        let through = rangecache.client().await;
        let around = through.with_metadata(BYPASS, "true");
        let requests = [
            list(),
            RangeRequest::one(key(7)),
            RangeRequest { limit: 3, ..list() },
            RangeRequest {
                serializable: true,
                ..list()
            },
        ];
        for (client, from_memory) in [
            (&around, false),
            (&through, true),
            (&through.with_metadata(BYPASS, "false"), true),
        ] {
            for request in &requests {
                let (ranges, streams) = (rangecache.outcomes().await, rangecache.stream_outcomes().await);
                assert_eq!(client.range_raw(request).await, direct.range_raw(request).await);
                assert_eq!(client.streamed(request).await, direct.range(request).await);
                let ranges = rangecache.outcomes_since(&ranges, 1).await;
                let streams = rangecache.stream_outcomes_since(&streams, 1).await;
                let around = |outcomes: &Outcomes, way: &str| {
                    outcomes
                        .0
                        .get(&(way.to_owned(), "bypass".to_owned()))
                        .copied()
                        .unwrap_or(0)
                };
                if from_memory {
                    assert_eq!((ranges.memory_answers(), streams.memory_answers()), (1, 1));
                } else {
                    let way = if version == Version::V3_7 {
                        "forwarded"
                    } else {
                        "paged"
                    };
                    assert_eq!(
                        (around(&ranges, "forwarded"), around(&streams, way)),
                        (1, 1),
                        "{ranges:?} {streams:?}"
                    );
                }
            }
        }
    }
}

/// The bypass header is for rangecache: etcd does not receive it, on any call.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bypass_header_is_not_forwarded() {
    let (url, mut calls, _server) = scripted(|_, _| Scripted::refusal("2", "not now")).await;
    let rangecache = Rangecache::at(&url).start_cold().await;
    let client = rangecache
        .client()
        .await
        .with_metadata(BYPASS, "true")
        .with_metadata("x-mine", "kept");
    for path in [RANGE, RANGE_STREAM, PUT] {
        let reply = client.raw(path, &list().encode_to_vec()).await.expect("answers");
        assert_eq!(reply.status().code, 2, "{path}");
        let headers = until(SOON, "the call arrives", async || {
            while let Ok((seen, headers)) = calls.try_recv() {
                if seen == path && headers.contains_key("x-mine") {
                    return Some(headers);
                }
            }
            None
        })
        .await
        .0;
        assert!(!headers.contains_key(BYPASS), "{path}: {headers:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_asks_is_told_what_answered() {
    let etcd = Etcd::start(Version::V3_7).await;
    fill(&etcd.client().await, 10, 20).await;
    let rangecache = start(&etcd, &[("--no-cache-prefix", "elsewhere")]).await;
    let through = rangecache.client().await;
    let asking = through.with_metadata("rangecache-explain", "true");
    let around = asking.with_metadata(BYPASS, "true");
    let elsewhere = RangeRequest::one("elsewhere");
    for (client, request, outcome) in [
        (&asking, RangeRequest::one(key(7)), Some("; linearizable")),
        (
            &asking,
            RangeRequest {
                serializable: true,
                ..list()
            },
            Some("hit; serializable"),
        ),
        (&around, list(), Some("forwarded; bypass")),
        (&through, list(), None),
        (&through.with_metadata("rangecache-explain", "no"), list(), None),
        (&asking, elsewhere, Some("; not_mirrored")),
    ] {
        for path in [RANGE, RANGE_STREAM] {
            let reply = client.raw(path, &request.encode_to_vec()).await.expect("a reply");
            let told = reply
                .headers
                .get("rangecache-outcome")
                .map(|value| value.to_str().unwrap());
            assert!(
                match (told, outcome) {
                    (Some(told), Some(outcome)) => told.ends_with(outcome),
                    (told, outcome) => told == outcome,
                },
                "{path}: {told:?}, not {outcome:?}"
            );
        }
    }
}
