//! A feed on a member that responds, but at an old revision.

use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, recovers};
use testkit::relay::Relay;
use testkit::wait::{SOON, until};

const PREFIX: &str = "/lagging/";

/// The relay that has the feed, which gets the events, and then the other one.
async fn by_feed<'a>(relays: &'a [Relay; 2], direct: &Client) -> [&'a Relay; 2] {
    let counts = || [0, 1].map(|of| relays[of].event_responses());
    let before = counts();
    direct
        .put(format!("{PREFIX}feed"), "v")
        .await
        .expect("etcd writes");
    let (got, _) = until(SOON, "an event reaches the feed", async || {
        let after = counts();
        let got = [0, 1].map(|of| after[of] > before[of]);
        got.contains(&true).then_some(got)
    })
    .await;
    match got {
        [true, false] => [&relays[0], &relays[1]],
        [false, true] => [&relays[1], &relays[0]],
        both => panic!("one feed was expected, not {both:?}"),
    }
}

async fn stale_feed_is_left(version: Version) {
    let etcd = Etcd::start(version).await;
    let direct = etcd.client().await;
    direct
        .put(format!("{PREFIX}first"), "v")
        .await
        .expect("etcd writes");
    let relays = [Relay::to(&etcd.url()).await, Relay::to(&etcd.url()).await];
    let rangecache = Rangecache::at(&format!("{},{}", relays[0].url(), relays[1].url()))
        .with("--cache-prefix", PREFIX)
        .start()
        .await;
    let through = rangecache.client().await;
    recovers(
        "the start",
        PREFIX,
        &direct,
        &rangecache,
        &through,
        Reads::MustSucceed,
    )
    .await;
    let [stale, other] = by_feed(&relays, &direct).await;
    let now = direct
        .range(&RangeRequest::one("any"))
        .await
        .expect("etcd answers");
    stale.freeze_watches(now.revision());
    recovers(
        "the feed's stop at an old revision",
        PREFIX,
        &direct,
        &rangecache,
        &through,
        Reads::MustSucceed,
    )
    .await;
    let [feed, _] = by_feed(&relays, &direct).await;
    assert!(std::ptr::eq(feed, other), "the feed is on the other member");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feed_that_stays_at_an_old_revision_is_left_3_7() {
    stale_feed_is_left(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn feed_that_stays_at_an_old_revision_is_left_3_6() {
    stale_feed_is_left(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feed_that_stays_at_an_old_revision_is_left_3_5() {
    stale_feed_is_left(Version::V3_5).await;
}
