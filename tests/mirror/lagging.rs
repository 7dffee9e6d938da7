//! A feed on a member that responds, but at an old revision.

use testkit::etcd::{Etcd, Version};
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, recovers};
use testkit::relay::Relay;

const PREFIX: &str = "/lagging/";

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
    let (stale, other) = match (relays[0].watches(), relays[1].watches()) {
        (1, 0) => (&relays[0], &relays[1]),
        (0, 1) => (&relays[1], &relays[0]),
        watches => panic!("one feed was expected, not {watches:?}"),
    };
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
    assert!(other.watches() > 0, "the feed is on the other member");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feed_that_stays_at_an_old_revision_is_left_3_7() {
    stale_feed_is_left(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feed_that_stays_at_an_old_revision_is_left_3_6() {
    stale_feed_is_left(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feed_that_stays_at_an_old_revision_is_left_3_5() {
    stale_feed_is_left(Version::V3_5).await;
}
