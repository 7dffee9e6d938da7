//! I9: each feed has an upstream connection of its own, which carries nothing else.

use testkit::etcd::{Etcd, Version};
use testkit::fault_link::FaultLink;
use testkit::kv::collect_watch;
use testkit::pb::{RangeRequest, WatchCreateRequest, prefix_end};
use testkit::proxy::Rangecache;
use testkit::wait::{SOON, until};

/// More mirrors than rangecache has shared connections to an endpoint (two for unary calls, two for streams, one for
/// checks): two feeds on one connection could not be avoided if they used these.
const PREFIXES: [&str; 6] = ["/a/", "/b/", "/c/", "/d/", "/e/", "/f/"];
const VALUE_BYTES: usize = 100_000;
const VALUES: usize = 20;
const ALL_BYTES: u64 = (VALUES * VALUE_BYTES) as u64;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feeds_have_connections_that_carry_nothing_else() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    for number in 0..VALUES {
        let value = vec![b'v'; VALUE_BYTES];
        direct
            .put(format!("/other/{number}"), &value)
            .await
            .expect("etcd writes");
    }
    let link = FaultLink::to(&etcd.url(), 0).await;
    let rangecache = Rangecache::at(link.url())
        .with("--cache-prefix", &PREFIXES.join(","))
        .start()
        .await;
    let through = rangecache.client().await;
    assert_eq!(
        link.feeds(),
        PREFIXES.len(),
        "connections whose first message opened a feed"
    );

    // Reads, writes and a watch of clients: 2 MB each way, of which the feeds' connections carry nothing.
    let before = link.feed_bytes();
    let mut watch = through
        .watch(WatchCreateRequest {
            key: b"/other/".to_vec(),
            range_end: prefix_end(b"/other/"),
            ..WatchCreateRequest::default()
        })
        .await;
    let list = through
        .range(&RangeRequest::prefix("/other/"))
        .await
        .expect("is forwarded");
    assert_eq!(list.kvs.len(), VALUES);
    for number in 0..VALUES {
        let value = vec![b'w'; VALUE_BYTES];
        through
            .put(format!("/other/{number}"), &value)
            .await
            .expect("is forwarded");
    }
    collect_watch(&mut watch, SOON, |responses| {
        responses
            .iter()
            .map(|response| response.events.len())
            .sum::<usize>()
            == VALUES
    })
    .await;
    let by_clients = link.feed_bytes() - before;
    assert!(
        by_clients < ALL_BYTES / 10,
        "the feeds' connections carried {by_clients} bytes of other calls"
    );

    // What the mirrors are fed arrives over these connections.
    for prefix in PREFIXES {
        direct
            .put(format!("{prefix}key"), vec![b'v'; VALUE_BYTES])
            .await
            .expect("etcd writes");
    }
    let fed = (PREFIXES.len() * VALUE_BYTES) as u64;
    until(SOON, "events arrive on the feeds' connections", async || {
        (link.feed_bytes() - before >= fed).then_some(())
    })
    .await;
    assert_eq!(link.feeds(), PREFIXES.len(), "no feed was replaced");
}
