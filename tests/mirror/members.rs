//! Several members behind one URL, and members of several clusters.

use testkit::etcd::{Etcd, Version};
use testkit::grpc::Client;
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, recovers};
use testkit::relay::{Balancer, Relay};
use testkit::wait::{SOON, until};

const PREFIX: &str = "/members/";
const DIFFERENT: &str = "the endpoints lead to different clusters";

/// A balancer leads the feed to a member of an old version, whose progress notifications are ahead of its events, while
/// the member that reports its version to the health checks is a new one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_of_a_feed_on_an_old_member_is_not_trusted() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    direct
        .put(format!("{PREFIX}first"), "v")
        .await
        .expect("etcd writes");
    let relay = Relay::to(&etcd.url()).await;
    let rangecache = Rangecache::at(relay.url())
        .with("--cache-prefix", PREFIX)
        .start()
        .await;
    let through = rangecache.client().await;
    let before = rangecache.outcomes().await;
    // The first check on the other connection watches, too, for a moment.
    until(SOON, "only the feed watches", async || {
        (relay.open_watches() == 1).then_some(())
    })
    .await;
    relay.lead_to_old_member("3.5.12");
    relay.cut_watches();
    for n in 0..20 {
        let key = format!("{PREFIX}{n:02}");
        direct.put(&key, "v").await.expect("etcd writes");
        let list = through
            .range(&RangeRequest::prefix(PREFIX))
            .await
            .expect("answers");
        assert_eq!(list.kvs.len(), n + 2, "stale: {key} is missing");
    }
    let outcomes = rangecache.outcomes_since(&before, 20).await;
    assert_eq!(outcomes.memory_answers(), 0, "{outcomes:?}");
    relay.lead_to_the_member();
    recovers(
        "the return of the new member",
        PREFIX,
        &direct,
        &rangecache,
        &through,
        Reads::MustSucceed,
    )
    .await;
}

/// A mirror whose last event is a delete resumes on a member of `version` that has compacted this delete, so that it is
/// not delivered again. Returns rangecache's metrics and log after reads come from memory again.
async fn resumed_behind_a_compacted_delete(version: &str) -> (testkit::metrics::Metrics, String) {
    let etcd = Etcd::start(Version::V3_5).await;
    let direct = etcd.client().await;
    for key in ["kept", "deleted"] {
        direct
            .put(format!("{PREFIX}{key}"), "v")
            .await
            .expect("etcd writes");
    }
    let relay = Relay::to(&etcd.url()).await;
    let rangecache = Rangecache::at(relay.url())
        .with("--cache-prefix", PREFIX)
        .start()
        .await;
    let through = rangecache.client().await;
    let deleted = direct
        .delete(format!("{PREFIX}deleted"))
        .await
        .expect("etcd deletes");
    until(SOON, "the mirror has the delete", async || {
        let metrics = rangecache.metrics().await;
        (metrics.sum("rangecache_mirror_revision") >= deleted as f64).then_some(())
    })
    .await;
    relay.lead_to_member_without_deletes(version);
    relay.cut_watches();
    until(SOON, "the mirror is loaded again", async || {
        (rangecache.metrics().await.sum("rangecache_mirror_reloads_total") > 1.0).then_some(())
    })
    .await;
    recovers(
        "the resumption",
        PREFIX,
        &direct,
        &rangecache,
        &through,
        Reads::MustSucceed,
    )
    .await;
    (rangecache.metrics().await, rangecache.log())
}

/// An etcd before 3.5.18 may have compacted the delete: its absence does not prove another history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_delete_of_an_old_etcd_loads_one_mirror_again() {
    let (metrics, log) = resumed_behind_a_compacted_delete("3.5.17").await;
    let unproven = "rangecache_mirror_reloads_total{mirror=\"/members/\",reason=\"unproven\"}";
    assert_eq!(metrics.0.get(unproven), Some(&1.0), "{log}");
    assert!(!log.contains("etcd's history was replaced"), "{log}");
}

/// From 3.5.18 on a delete at the compaction revision is delivered, so that a missing one proves another history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_delete_of_a_fixed_etcd_is_another_history() {
    let (_, log) = resumed_behind_a_compacted_delete("3.5.18").await;
    assert!(log.contains("etcd's history was replaced"), "{log}");
}

/// Two etcds of different clusters, which hold different keys.
async fn two_clusters() -> [(Etcd, Client); 2] {
    let start = async |key: &str| {
        let etcd = Etcd::start(Version::V3_7).await;
        let client = etcd.client().await;
        client
            .put(format!("{PREFIX}{key}"), key)
            .await
            .expect("etcd writes");
        (etcd, client)
    };
    [start("right").await, start("wrong").await]
}

/// Reads get what `right` has, without end; the problem is named on the log (once), the page and `/readyz`, and shown
/// for the endpoint `named`.
async fn minority_is_left_out(rangecache: &Rangecache, right: &Client, named: &str) {
    until(SOON, "the clusters are named", async || {
        rangecache.log().contains(DIFFERENT).then_some(())
    })
    .await;
    let through = rangecache.client().await;
    let list = RangeRequest::prefix(PREFIX);
    let expected = right.range(&list).await.expect("etcd answers").kvs;
    until(SOON, "reads come from memory", async || {
        let before = rangecache.outcomes().await;
        let got = through.range(&list).await.ok()?;
        (got.kvs == expected && rangecache.outcomes_since(&before, 1).await.memory_answers() == 1)
            .then_some(())
    })
    .await;
    let reloads = async || rangecache.metrics().await.sum("rangecache_mirror_reloads_total");
    let loaded = reloads().await;
    for n in 0..100 {
        let key = format!("{PREFIX}{n:02}");
        right.put(&key, "v").await.expect("etcd writes");
        let got = through.get(&key).await.expect("is answered");
        assert_eq!(got.as_deref(), Some(&b"v"[..]), "{key}");
        // Left to etcd.
        let forwarded = through.with_metadata("rangecache-bypass", "true");
        assert_eq!(
            forwarded.get(&key).await.expect("is answered").as_deref(),
            Some(&b"v"[..]),
            "{key}, forwarded"
        );
        tokio::time::sleep(std::time::Duration::from_millis(30)).await;
    }
    assert_eq!(reloads().await, loaded, "the mirror was loaded again");
    assert_eq!(
        rangecache.log().matches(DIFFERENT).count(),
        1,
        "it is logged once"
    );
    let ready = rangecache.admin("/readyz").await;
    assert!(ready.body.contains(DIFFERENT), "{}", ready.body);
    for path in ["/status", "/"] {
        let shown = rangecache.admin(path).await;
        assert!(shown.body.contains(DIFFERENT), "{path}: {}", shown.body);
    }
    let metrics = rangecache.metrics().await;
    let left_out = format!("rangecache_endpoint_left_out{{endpoint=\"{named}\"}}");
    assert_eq!(metrics.0.get(&left_out), Some(&1.0), "{left_out}");
    assert_eq!(metrics.sum("rangecache_endpoint_left_out"), 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn endpoint_of_another_cluster_is_left_out() {
    let [(right, client), (wrong, _)] = two_clusters().await;
    let relay = Relay::to(&right.url()).await;
    let endpoints = format!("{},{},{}", right.url(), wrong.url(), relay.url());
    let rangecache = Rangecache::at(&endpoints).start_cold().await;
    minority_is_left_out(&rangecache, &client, &wrong.url()).await;
}

/// The mirror is loaded, and its feed created, while only the wrong endpoint is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mirror_of_a_cluster_that_is_left_out_later_is_dropped() {
    let [(mut right, _), (wrong, _)] = two_clusters().await;
    let relay = Relay::to(&right.url()).await;
    let endpoints = format!("{},{},{}", right.url(), wrong.url(), relay.url());
    right.stop();
    let rangecache = Rangecache::at(&endpoints).start_cold().await;
    until(SOON, "the wrong cluster is mirrored", async || {
        let metrics = rangecache.metrics().await;
        (metrics.sum("rangecache_mirror_in_service") == 1.0).then_some(())
    })
    .await;
    right.restart().await;
    minority_is_left_out(&rangecache, &right.client().await, &wrong.url()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_of_another_cluster_behind_the_same_name_is_left_out() {
    let [(right, client), (wrong, _)] = two_clusters().await;
    let balancer = Balancer::over(&[&right.url(), &right.url(), &right.url(), &wrong.url()]).await;
    let rangecache = Rangecache::at(balancer.url()).start_cold().await;
    minority_is_left_out(&rangecache, &client, balancer.url()).await;
}
