//! Servers that rangecache forwards to: an etcd below the gate of progress notifications, and one that is not etcd.
//! `make test-other-etcds` builds them.

use prost::Message as _;
use rand::SeedableRng;
use rand::rngs::StdRng;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::kine::Kine;
use testkit::kv::RANGE_STREAM;
use testkit::pb::{DeleteRangeRequest, RangeRequest, WatchCreateRequest, WatchResponse, prefix_end};
use testkit::proxy::{Rangecache, rangecache_command};
use testkit::shapes::{Revisions, at_random, by_hand, write_first_part, write_second_part};
use testkit::streams::is_refused;
use testkit::wait::{SOON, until};

/// Path of a method that Kine does not have.
const DELETE_RANGE: &str = "/etcdserverpb.KV/DeleteRange";

/// Outcome and reason of a read that is forwarded for `reason`.
fn forwarded(reason: &str) -> (String, String) {
    ("forwarded".to_owned(), reason.to_owned())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "make test-other-etcds"]
async fn linearizable_reads_of_etcd_3_5_12_are_forwarded() {
    let etcd = Etcd::start(Version::V3_5_12).await;
    let direct = etcd.client().await;
    write_first_part(&direct).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let through = rangecache.client().await;
    let loaded = direct
        .range(&RangeRequest::one("any"))
        .await
        .expect("etcd answers");
    write_second_part(&direct).await;
    let current = direct
        .range(&RangeRequest::one("any"))
        .await
        .expect("etcd answers");
    let at = Revisions {
        compacted: 0,
        loaded: loaded.revision(),
        current: current.revision(),
    };
    let mut shapes: Vec<_> = by_hand(at);
    let mut random = StdRng::seed_from_u64(1);
    shapes.extend((0..500).map(|_| at_random(&mut random, at)));
    let is_newest = |shape: &&RangeRequest| !shape.serializable && shape.revision <= 0;
    // Others are answered at a revision that needs no progress, which may lie before that of etcd.
    shapes.retain(|shape| is_newest(&shape));
    let before = rangecache.outcomes().await;
    let mut answered = 0;
    for shape in &shapes {
        let expected = direct.range_raw(shape).await.expect("etcd answers");
        answered += u64::from(expected.status().code == 0);
        assert_eq!(through.range_raw(shape).await, Ok(expected), "{shape:?}");
    }
    let outcomes = rangecache.outcomes_since(&before, shapes.len() as u64).await;
    let by_gate = outcomes.0.get(&forwarded("version_gate")).copied();
    assert!(
        answered > 200 && by_gate >= Some(answered),
        "{answered} {outcomes:?}"
    );
    assert_eq!(outcomes.of("waited"), 0, "{outcomes:?}");
    let readyz = rangecache.admin("/readyz?verbose").await;
    assert_eq!(readyz.status, 200, "{}", readyz.body);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "make test-other-etcds"]
async fn etcd_3_5_12_stops_a_rangecache_that_refuses_old_etcds() {
    let etcd = Etcd::start(Version::V3_5_12).await;
    let mut command = tokio::process::Command::from(rangecache_command());
    command
        .args(["--endpoints", &etcd.url(), "--old-etcd", "refuse"])
        .args(["--listen-client-urls", "http://127.0.0.1:0"])
        .args(["--listen-metrics-urls", "http://127.0.0.1:0"])
        .kill_on_drop(true);
    let output = tokio::time::timeout(SOON, command.output()).await;
    let output = output.expect("rangecache stops").expect("rangecache runs");
    assert_eq!(output.status.code(), Some(1));
    let log = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(log.contains("--old-etcd=refuse is set: stopping"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "make test-other-etcds"]
async fn watches_of_etcd_3_5_12_are_forwarded() {
    let etcd = Etcd::start(Version::V3_5_12).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let (direct, through) = (etcd.client().await, rangecache.client().await);
    let revision = direct.put("/registry/a", "1").await.expect("etcd puts");
    for number in 0..9 {
        direct
            .put("/registry/a", format!("{number}"))
            .await
            .expect("etcd puts");
    }
    let expected = events(&direct, revision, 10).await;
    assert_eq!(events(&through, revision, 10).await, expected);
    assert!(watches(&rangecache, "reason=\"version_gate\"").await >= 1.0);
    assert!(watches(&rangecache, "outcome=\"memory\"").await < 1.0);
}

/// Create requests of watches that were counted with this label.
async fn watches(rangecache: &Rangecache, label: &str) -> f64 {
    rangecache
        .metrics()
        .await
        .sum_with_label("rangecache_watch_created_total", label)
}

/// Reads in the forms that kube-apiserver sends, and in forms that Kine refuses.
fn reads(revision: i64) -> Vec<RangeRequest> {
    let list = || RangeRequest::prefix("/registry/");
    vec![
        RangeRequest::one("/registry/a"),
        RangeRequest::one("/registry/none"),
        RangeRequest::everything(),
        list(),
        RangeRequest {
            revision,
            ..RangeRequest::one("/registry/a")
        },
        RangeRequest { revision, ..list() },
        RangeRequest { limit: 2, ..list() },
        RangeRequest {
            limit: 2,
            revision,
            ..RangeRequest::range("/registry/b\0", "/registry0")
        },
        RangeRequest {
            keys_only: true,
            ..list()
        },
        RangeRequest {
            count_only: true,
            ..list()
        },
        RangeRequest {
            revision: 1 << 40,
            ..list()
        },
        RangeRequest {
            serializable: true,
            ..list()
        },
        RangeRequest {
            sort_order: 2,
            ..list()
        },
        RangeRequest {
            sort_target: 3,
            ..list()
        },
        RangeRequest {
            min_mod_revision: 1,
            ..list()
        },
    ]
}

/// Keys and values of the next events of a watch, and the revision of each.
async fn events(client: &Client, start_revision: i64, count: usize) -> Vec<(i32, Vec<u8>, Vec<u8>, i64)> {
    let mut watch = client
        .watch(WatchCreateRequest {
            key: b"/registry/".to_vec(),
            range_end: prefix_end(b"/registry/"),
            start_revision,
            ..WatchCreateRequest::default()
        })
        .await;
    let mut events = Vec::new();
    while events.len() < count {
        let response: WatchResponse = watch.next_as(SOON).await.expect("the watch is open");
        assert!(!response.canceled, "{response:?}");
        for event in response.events {
            let kv = event.kv.expect("an event has a key-value");
            events.push((event.r#type, kv.key, kv.value, kv.mod_revision));
        }
    }
    events
}

/// Responses of Kine, whatever it lacks, reach the client; nothing is concluded from the version of etcd that it
/// reports.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "make test-other-etcds"]
async fn everything_is_forwarded_to_a_server_that_is_not_etcd() {
    let kine = Kine::start().await;
    let rangecache = Rangecache::at(kine.url()).start_cold().await;
    let (direct, through) = (kine.client().await, rangecache.client().await);
    until(SOON, "rangecache recognizes Kine", async || {
        rangecache
            .log()
            .contains("this server is not etcd: it has no cluster id")
            .then_some(())
    })
    .await;
    let revision = through.put("/registry/a", "1").await.expect("Kine puts");
    for key in ["b", "c", "d"] {
        through
            .put(format!("/registry/{key}"), "v")
            .await
            .expect("Kine puts");
    }
    through.put("/registry/a", "2").await.expect("Kine puts");

    let before = rangecache.outcomes().await;
    let reads = reads(revision + 1);
    for read in &reads {
        let expected = direct.range_raw(read).await.expect("Kine answers");
        assert_eq!(through.range_raw(read).await, Ok(expected), "{read:?}");
    }
    let outcomes = rangecache.outcomes_since(&before, reads.len() as u64).await;
    let by_version = outcomes.0.get(&forwarded("version_unknown")).copied();
    assert_eq!(by_version, Some(reads.len() as u64), "{outcomes:?}");

    for read in &reads {
        if is_refused(read) {
            // In etcd's words, before it is forwarded.
            assert_eq!(
                through.stream_raw(read).await.expect("answers").status().code,
                12,
                "{read:?}"
            );
            continue;
        }
        let expected = direct.raw(RANGE_STREAM, &read.encode_to_vec()).await;
        assert_eq!(
            through.raw(RANGE_STREAM, &read.encode_to_vec()).await,
            expected,
            "{read:?}"
        );
    }
    let delete = DeleteRangeRequest {
        key: b"/registry/a".to_vec(),
        range_end: Vec::new(),
    };
    let refused = direct
        .raw(DELETE_RANGE, &delete.encode_to_vec())
        .await
        .expect("Kine answers");
    assert_ne!(refused.status().code, 0);
    assert_eq!(
        through.raw(DELETE_RANGE, &delete.encode_to_vec()).await,
        Ok(refused)
    );
    let list = through
        .range(&RangeRequest::prefix("/registry/"))
        .await
        .expect("Kine answers");
    assert_eq!(list.kvs.len(), 5, "with Kine's own key /registry/health");

    let expected = events(&direct, revision, 5).await;
    assert_eq!(events(&through, revision, 5).await, expected);
    assert!(watches(&rangecache, "reason=\"version_unknown\"").await >= 1.0);
    assert!(watches(&rangecache, "outcome=\"memory\"").await < 1.0);
}
