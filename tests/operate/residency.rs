//! A keyspace that does not fit `--cache-max-bytes` even packed: the values of one prefix are only in etcd, everything else is
//! in memory, and every answer is etcd's.

use ::http::Method;
use tempfile::TempDir;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, Stream};
use testkit::http;
use testkit::kv::collect_watch;
use testkit::pb::{Event, RangeRequest, WatchCreateRequest, prefix_end};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

const VALUE_BYTES: usize = 50_000;
const COLD_KEYS: usize = 120;
const WARM_KEYS: usize = 40;

/// A value that does not become smaller by packing.
fn noise(seed: usize) -> Vec<u8> {
    let mut state = seed as u64 + 1;
    let mut byte = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        state.to_be_bytes()[0]
    };
    (0..VALUE_BYTES).map(|_| byte()).collect()
}

fn cold(index: usize) -> String {
    format!("/registry/cold/{index:03}")
}

fn warm(index: usize) -> String {
    format!("/registry/warm/{index:03}")
}

/// Ranges that need no value of the prefix whose values are not held, and such that do.
fn ranges(revision: i64) -> [Vec<RangeRequest>; 2] {
    let everything = || RangeRequest::prefix("/registry/");
    let all_cold = || RangeRequest::prefix("/registry/cold/");
    let from_memory = vec![
        RangeRequest::one(warm(3)),
        RangeRequest::prefix("/registry/warm/"),
        RangeRequest::one("/registry/cold/absent"),
        RangeRequest {
            count_only: true,
            ..everything()
        },
        RangeRequest {
            keys_only: true,
            ..everything()
        },
        RangeRequest {
            keys_only: true,
            sort_order: 2,
            limit: 7,
            ..all_cold()
        },
        RangeRequest {
            min_mod_revision: i64::MAX,
            ..all_cold()
        },
        RangeRequest {
            limit: 9,
            serializable: true,
            ..RangeRequest::prefix("/registry/warm/")
        },
    ];
    let from_etcd = vec![
        RangeRequest::one(cold(5)),
        RangeRequest {
            serializable: true,
            ..RangeRequest::one(cold(5))
        },
        RangeRequest {
            limit: 10,
            revision,
            ..all_cold()
        },
        RangeRequest {
            sort_order: 2,
            sort_target: 2,
            limit: 3,
            ..all_cold()
        },
        all_cold(),
        everything(),
    ];
    [from_memory, from_etcd]
}

/// Checks that answers equal etcd's, and where they came from.
async fn check_ranges(rangecache: &Rangecache, [direct, through]: &[Client; 2], revision: i64) {
    for (ranges, is_from_memory) in ranges(revision).iter().zip([true, false]) {
        for range in ranges {
            let before = rangecache.outcomes().await;
            assert_eq!(through.range(range).await, direct.range(range).await, "{range:?}");
            let outcomes = rangecache.outcomes_since(&before, 1).await;
            let by_memory = outcomes.memory_answers() == 1;
            assert_eq!(by_memory, is_from_memory, "{range:?}: {:?}", outcomes.0);
            let is_told = outcomes.0.keys().any(|(_, reason)| reason == "values_not_held");
            assert_eq!(is_told, !is_from_memory, "{range:?}: {:?}", outcomes.0);
        }
    }
}

async fn watched(client: &Client) -> Stream {
    let create = WatchCreateRequest {
        key: "/registry/".into(),
        range_end: prefix_end(b"/registry/"),
        prev_kv: true,
        ..WatchCreateRequest::default()
    };
    client.watch(create).await
}

async fn events(watch: &mut Stream, count: usize) -> Vec<Event> {
    let mut all = Vec::new();
    while all.len() < count {
        let responses = collect_watch(watch, SOON, |responses| !responses.is_empty()).await;
        all.extend(responses.into_iter().flat_map(|response| response.events));
    }
    all
}

async fn values_that_do_not_fit_are_etcds(version: Version) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    for (key, index) in (0..COLD_KEYS)
        .map(|index| (cold(index), index))
        .chain((0..WARM_KEYS).map(|index| (warm(index), index)))
    {
        direct.put(key, noise(index)).await.expect("etcd puts");
    }
    let dir = TempDir::with_prefix("flags-").unwrap();
    let file = dir.path().join("flags");
    std::fs::write(&file, "RANGECACHE_CACHE_MAX_BYTES=4MiB\n").unwrap();
    let rangecache = Rangecache::before(&etcd)
        .with("--flags-file", file.to_str().unwrap())
        .with("--history-max-bytes", "512KiB")
        .start()
        .await;
    let clients = [direct, rangecache.client().await];
    let revision = clients[0]
        .range(&RangeRequest::one("a"))
        .await
        .unwrap()
        .revision();
    check_ranges(&rangecache, &clients, revision).await;
    assert!(
        rangecache.log().contains("/registry/cold/"),
        "the log says which values are left out"
    );
    let metrics = rangecache.metrics().await;
    let not_held = metrics.sum("rangecache_mirror_not_held_bytes");
    assert!(not_held >= (COLD_KEYS * VALUE_BYTES) as f64 * 0.9, "{not_held}");
    let of_prefix = metrics.sum_with_label("rangecache_prefix_not_held_bytes", "prefix=\"/registry/cold/\"");
    assert_eq!(of_prefix, not_held);
    assert_eq!(metrics.sum("rangecache_mirror_in_service"), 1.0);

    // Events have the values that they replace.
    let [direct, through] = &clients;
    let (mut expected, mut got) = (watched(direct).await, watched(through).await);
    for index in 0..10 {
        direct.put(cold(index), b"new").await.expect("etcd puts");
        direct.put(cold(index), b"newer").await.expect("etcd puts");
        direct.delete(cold(20 + index)).await.expect("etcd deletes");
        direct.put(warm(index), b"new").await.expect("etcd puts");
    }
    direct.put("/registry/cold/new", b"new").await.expect("etcd puts");
    let expected = events(&mut expected, 41).await;
    assert_eq!(events(&mut got, 41).await, expected);
    assert!(
        expected[2]
            .prev_kv
            .as_ref()
            .is_some_and(|old| old.value == noise(20))
    );
    let metrics = rangecache.metrics().await;
    assert_eq!(
        metrics.sum_with_label("rangecache_watch_created_total", "outcome=\"memory\""),
        1.0,
        "{:?}",
        metrics.0
    );
    let before = rangecache.outcomes().await;
    let written = RangeRequest::one(cold(3));
    assert_eq!(through.range(&written).await, direct.range(&written).await);
    assert_eq!(
        rangecache.outcomes_since(&before, 1).await.memory_answers(),
        1,
        "what was written is held"
    );

    // With more memory, all are held again.
    std::fs::write(&file, "RANGECACHE_CACHE_MAX_BYTES=64MiB\n").unwrap();
    let reload = http::send(Method::POST, &format!("{}/reload", rangecache.metrics_url())).await;
    assert_eq!(reload.unwrap().status, 200);
    until(SOON, "all values are held again", async || {
        rangecache
            .log()
            .contains("all values are held again")
            .then_some(())
    })
    .await;
    let metrics = rangecache.metrics().await;
    assert_eq!(metrics.sum("rangecache_mirror_not_held_bytes"), 0.0);
    for range in ranges(0).concat() {
        let before = rangecache.outcomes().await;
        assert_eq!(
            through.range(&range).await,
            direct.range(&range).await,
            "{range:?}"
        );
        let outcomes = rangecache.outcomes_since(&before, 1).await;
        assert_eq!(outcomes.memory_answers(), 1, "{range:?}: {:?}", outcomes.0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn values_that_do_not_fit_are_only_in_etcd_3_7() {
    values_that_do_not_fit_are_etcds(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn values_that_do_not_fit_are_only_in_etcd_3_5() {
    values_that_do_not_fit_are_etcds(Version::V3_5).await;
}
