//! An etcd that is newer than rangecache: its headers have more fields.

use prost::Message as _;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::kv::{RANGE, RANGE_STREAM, WATCH};
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchRequest, WatchResponse, prefix_end};
use testkit::proxy::Rangecache;
use testkit::relay::Relay;
use testkit::wait::{SOON, until};

const PREFIX: &str = "/newer/";
/// `leader_id`, the fifth field since etcd 3.8: the highest number.
const LEADER_ID: [u8; 11] = [0x28, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01];
/// Fields that no version has yet: a number, bytes, 64 and 32 bits.
const UNKNOWN: [u8; 25] = [
    0x80, 0x08, 0x01, // field 128
    0x32, 3, b'a', b'b', b'c', // field 6
    0x39, 1, 2, 3, 4, 5, 6, 7, 8, // field 7
    0x45, 1, 2, 3, 4, // field 8
    0x48, 0x80, 0x01, // field 9
];

async fn relayed(etcd: &Etcd, fields: &[u8]) -> (Relay, Rangecache) {
    let relay = Relay::to(&etcd.url()).await;
    relay.add_to_headers(fields);
    let rangecache = Rangecache::at(relay.url())
        .with("--cache-prefix", PREFIX)
        .start()
        .await;
    (relay, rangecache)
}

/// A read of one key that needs no proof.
fn serializable(key: &str) -> RangeRequest {
    RangeRequest {
        serializable: true,
        ..RangeRequest::one(key)
    }
}

/// Writes through rangecache while its mirror gets no events: what the responses show is not to be hidden by later reads.
async fn serializable_reads_see_own_writes(fields: &[u8]) {
    let etcd = Etcd::start(Version::V3_7).await;
    let key = format!("{PREFIX}a");
    let direct = etcd.client().await;
    let revision = direct.put(&key, "0").await.expect("etcd writes");
    let (relay, rangecache) = relayed(&etcd, fields).await;
    let through = rangecache.client().await;
    assert_eq!(through.get(&key).await, Ok(Some(b"0".to_vec())));
    relay.freeze_watches(revision);
    for n in 1..20 {
        let value = n.to_string();
        through.put(&key, &value).await.expect("etcd writes");
        let answer = through.range(&serializable(&key)).await.expect("a response");
        let read = answer.kvs.first().map(|kv| kv.value.clone());
        assert_eq!(read, Some(value.into_bytes()), "older than the write before it");
    }
    let unreadable = rangecache
        .metrics()
        .await
        .sum("rangecache_unreadable_responses_total");
    assert!(unreadable < 1.0, "{unreadable}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leader_id_in_headers_hides_no_revision() {
    serializable_reads_see_own_writes(&LEADER_ID).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_fields_in_headers_hide_no_revision() {
    serializable_reads_see_own_writes(&[&LEADER_ID[..], &UNKNOWN[..]].concat()).await;
}

/// A header that is longer than any known one may show any revision: serializable reads need a proof until a check.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn header_that_cannot_be_read_is_counted_and_serializable_reads_are_proven() {
    let etcd = Etcd::start(Version::V3_7).await;
    let key = format!("{PREFIX}a");
    let direct = etcd.client().await;
    let revision = direct.put(&key, "0").await.expect("etcd writes");
    let long = [&[0x32, 200, 1][..], &[b'x'; 200]].concat();
    let (relay, rangecache) = relayed(&etcd, &long).await;
    let through = rangecache.client().await;
    relay.freeze_watches(revision);
    for n in 1..10 {
        let value = n.to_string();
        through.put(&key, &value).await.expect("etcd writes");
        let answer = through.range(&serializable(&key)).await.expect("a response");
        let read = answer.kvs.first().map(|kv| kv.value.clone());
        assert_eq!(read, Some(value.into_bytes()), "older than the write before it");
    }
    let metrics = rangecache.metrics().await;
    let of_header = metrics.sum_with_label("rangecache_unreadable_responses_total", "cause=\"header\"");
    assert!(of_header >= 9.0, "{of_header}");
}

/// The first header of a watch.
async fn created(client: &Client) -> testkit::pb::ResponseHeader {
    let mut watch = client.open(WATCH);
    watch.send(&WatchRequest {
        create_request: Some(WatchCreateRequest {
            key: PREFIX.into(),
            range_end: prefix_end(PREFIX.as_bytes()),
            ..WatchCreateRequest::default()
        }),
        ..WatchRequest::default()
    });
    let created: Option<WatchResponse> = watch.next_as(SOON).await;
    created.and_then(|response| response.header).expect("is created")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn headers_from_memory_have_the_leader_id_that_etcd_sends() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    for n in 0..30 {
        direct
            .put(format!("{PREFIX}{n:02}"), "v")
            .await
            .expect("etcd writes");
    }
    let (relay, rangecache) = relayed(&etcd, &LEADER_ID).await;
    let (newer, through) = (Client::connect(relay.url()).await, rangecache.client().await);
    let revision = direct.put(format!("{PREFIX}a"), "v").await.expect("etcd writes");
    direct.put(format!("{PREFIX}b"), "v").await.expect("etcd writes");
    let list = RangeRequest::prefix(PREFIX);
    let requests = [
        list.clone(),
        RangeRequest {
            limit: 3,
            ..list.clone()
        },
        RangeRequest {
            revision,
            ..list.clone()
        },
        serializable(&format!("{PREFIX}07")),
    ];
    for (path, requests) in [(RANGE, &requests[..]), (RANGE_STREAM, &requests[..])] {
        for request in requests {
            let request = request.encode_to_vec();
            let expected = newer.raw(path, &request).await.expect("etcd answers");
            let got = through.raw(path, &request).await.expect("rangecache answers");
            assert_eq!(got, expected, "{path}");
        }
    }
    let expected = created(&newer).await;
    assert_eq!(expected.leader_id, u64::MAX);
    assert_eq!(created(&through).await, expected);
    let outcomes = rangecache.outcomes().await;
    let streams = rangecache.stream_outcomes().await;
    assert_eq!((outcomes.memory_answers(), streams.memory_answers()), (4, 4));

    // Another leader.
    relay.add_to_headers(&[0x28, 7]);
    until(SOON, "the next check shows it", async || {
        let answer = through.range(&list).await.ok()?;
        (answer.header?.leader_id == 7).then_some(())
    })
    .await;
    relay.add_to_headers(&[]);
    until(SOON, "no leader is known", async || {
        let answer = through.range(&list).await.ok()?;
        (answer.header?.leader_id == 0).then_some(())
    })
    .await;
}
