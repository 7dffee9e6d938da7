//! Filtered and sorted reads, for which memory looks at many keys: they count, take turns, and hold up no other call.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use h2::client::SendRequest;
use prost::Message;
use testkit::etcd::{Etcd, Version};
use testkit::grpc::frame;
use testkit::kv::RANGE;
use testkit::pb::{BY_VALUE, DESCEND, RangeRequest, RequestOp};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};
use tokio::net::TcpStream;
use tokio::task::{JoinHandle, JoinSet};
use tokio::time::timeout;

use super::budgets::call;

const PREFIX: &str = "/scans/";
/// Operations of one transaction: etcd's default bound.
const BATCH: usize = 128;
/// gRPC's code ResourceExhausted.
const RESOURCE_EXHAUSTED: &str = "8";
/// Memory of one entry in the order of a sorted response, in bytes.
const ORDER_BYTES: usize = 16;

/// An etcd with `keys` keys, whose values are in another order than they are.
async fn etcd_with(keys: usize) -> Etcd {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let numbers: Vec<usize> = (0..keys).collect();
    for batch in numbers.chunks(BATCH) {
        let put = |n: &usize| {
            let value = format!("{:010}", n * 2_654_435_761 % 4_294_967_296);
            RequestOp::put(format!("{PREFIX}{n:06}"), value)
        };
        direct
            .transact(batch.iter().map(put).collect())
            .await
            .expect("etcd writes");
    }
    etcd
}

/// A connection on which nothing of a response can be sent but its head, and what drives it.
async fn connect_without_window(
    rangecache: &Rangecache,
) -> (SendRequest<Bytes>, JoinHandle<Result<(), h2::Error>>) {
    let address = rangecache.url().strip_prefix("http://").unwrap();
    let tcp = TcpStream::connect(address).await.unwrap();
    let without_window = h2::client::Builder::new()
        .initial_window_size(0)
        .handshake(tcp)
        .await;
    let (sender, connection) = without_window.unwrap();
    (sender, tokio::spawn(connection))
}

/// Keys by their values, from the last on.
fn by_value(limit: i64) -> RangeRequest {
    RangeRequest {
        sort_order: DESCEND,
        sort_target: BY_VALUE,
        keys_only: true,
        limit,
        ..RangeRequest::prefix(PREFIX)
    }
}

/// Keys that no revision of this etcd has written.
fn filtered_by_nothing() -> RangeRequest {
    RangeRequest {
        min_mod_revision: i64::MAX,
        ..RangeRequest::prefix(PREFIX)
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unread_sorted_lists_count_and_are_refused_beyond_the_buffers() {
    const KEYS: usize = 10_000;
    const LISTS: usize = 60;
    let etcd = etcd_with(KEYS).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--buffer-max-bytes", "16MiB")
        .start()
        .await;
    let buffered = async || rangecache.metrics().await.buffered("request");
    let (mut sender, connection) = connect_without_window(&rangecache).await;
    let mut heads = Vec::new();
    for _ in 0..LISTS {
        sender = sender.ready().await.unwrap();
        let (head, mut body) = sender.send_request(call(&rangecache, RANGE), false).unwrap();
        body.send_data(frame(&by_value(0).encode_to_vec()), true).unwrap();
        heads.push(head);
    }
    let mut unread = Vec::new();
    let mut codes = HashMap::<String, usize>::new();
    for head in heads {
        let head = timeout(SOON, head).await.expect("a head").expect("a response");
        match head.headers().get("grpc-status") {
            None => unread.push(head),
            Some(code) => *codes.entry(code.to_str().unwrap().to_owned()).or_default() += 1,
        }
    }
    assert!(!unread.is_empty(), "{codes:?}");
    assert_eq!(
        codes.keys().collect::<Vec<_>>(),
        [RESOURCE_EXHAUSTED],
        "{codes:?}"
    );
    let least = (unread.len() * KEYS * ORDER_BYTES) as f64;
    let most = f64::from(8 << 20);
    let used = buffered().await;
    assert!(used >= least && used <= most, "{used}: {} lists", unread.len());
    let honest = rangecache.client().await;
    assert!(honest.get(format!("{PREFIX}000000")).await.unwrap().is_some());
    drop((unread, sender));
    connection.abort();
    until(SOON, "the lists are given back", async || {
        (buffered().await < least / 2.0).then_some(())
    })
    .await;
    let list = honest.range(&by_value(0)).await.expect("there is room again");
    assert_eq!(list.kvs.len(), KEYS);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filtered_list_that_has_every_key_takes_no_memory_while_it_is_unread() {
    const KEYS: usize = 10_000;
    const LISTS: usize = 300;
    let etcd = etcd_with(KEYS).await;
    let rangecache = Rangecache::before(&etcd).start().await;
    let (mut sender, connection) = connect_without_window(&rangecache).await;
    let list = RangeRequest {
        min_mod_revision: 1,
        ..RangeRequest::prefix(PREFIX)
    };
    let resident = rangecache.resident_bytes();
    let mut unread = Vec::new();
    for _ in 0..LISTS {
        sender = sender.ready().await.unwrap();
        let (head, mut body) = sender.send_request(call(&rangecache, RANGE), false).unwrap();
        body.send_data(frame(&list.encode_to_vec()), true).unwrap();
        let head = timeout(SOON, head).await.expect("a head").expect("a response");
        assert!(head.headers().get("grpc-status").is_none(), "{head:?}");
        unread.push(head);
    }
    // A call counts as 8 KiB, and its head.
    let used = rangecache.metrics().await.buffered("request");
    assert!(used < (LISTS * (10 << 10)) as f64, "{used}");
    // A reference to each of the entries would take 72 MB.
    let grown = rangecache.resident_bytes().saturating_sub(resident);
    assert!(grown < 24 << 20, "{grown}");
    drop((unread, sender));
    connection.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn honest_client_is_answered_between_the_steps_of_many_scans_on_one_thread() {
    const KEYS: usize = 50_000;
    const CONNECTIONS: usize = 4;
    const SCANS: usize = 15;
    let etcd = etcd_with(KEYS).await;
    let rangecache = Rangecache::before(&etcd)
        .with("--worker-threads", "1")
        .start()
        .await;
    let expected = etcd.client().await.range(&by_value(5_000)).await.unwrap();
    let before = rangecache.outcomes().await;
    let (honest, writer) = (rangecache.client().await, etcd.client().await);
    let left = Arc::new(AtomicUsize::new(CONNECTIONS * SCANS));
    let mut scans = JoinSet::new();
    for _ in 0..CONNECTIONS {
        let client = Arc::new(rangecache.client().await);
        for n in 0..SCANS {
            let (client, left) = (Arc::clone(&client), Arc::clone(&left));
            let list = if n % 3 == 0 {
                filtered_by_nothing()
            } else {
                by_value(5_000)
            };
            scans.spawn(async move {
                let list = client.range(&list).await;
                left.fetch_sub(1, Ordering::SeqCst);
                list
            });
        }
    }
    let mut gets = 0;
    while left.load(Ordering::SeqCst) > 0 {
        // Each write is seen by the next read: the feed is not behind either.
        let value = gets.to_string();
        writer.put("/honest", &value).await.expect("etcd writes");
        assert_eq!(honest.get("/honest").await.unwrap(), Some(value.into_bytes()));
        gets += 1;
    }
    assert!(
        gets >= CONNECTIONS * SCANS,
        "{gets} reads beside {} scans",
        CONNECTIONS * SCANS
    );
    for list in scans.join_all().await {
        let list = list.expect("answered");
        assert!(list.kvs.is_empty() || list.kvs == expected.kvs);
        assert_eq!(list.count, expected.count);
    }
    let ranges = (CONNECTIONS * SCANS + gets) as u64;
    let outcomes = rangecache.outcomes_since(&before, ranges).await;
    assert_eq!(outcomes.memory_answers(), ranges, "{outcomes:?}");
    let metrics = rangecache.metrics().await;
    assert_eq!(
        metrics.sum("rangecache_scans") + metrics.sum("rangecache_scans_waiting"),
        0.0
    );
}
