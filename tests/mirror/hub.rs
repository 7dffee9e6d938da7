//! Rangecaches whose endpoint is another rangecache, their hub: memory answers with a proof of the hub, and what a hub cannot
//! prove is never accepted.

use hyper::Method;
use serde_json::Value;
use testkit::etcd::{Cluster, Etcd, Version};
use testkit::fault_link::{Condition, FaultLink};
use testkit::grpc::Client;
use testkit::http;
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchResponse, prefix_end};
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, recovers};
use testkit::relay::Balancer;
use testkit::roles::{MIRROR, create_users, password, token};
use testkit::wait::{SOON, until};

use super::EXCLUSIVE;

const PREFIX: &str = "/hub/";
/// Bursts of reads through each leaf.
const TURNS: u64 = 20;
/// Reads of a burst.
const BURST: u64 = 20;

/// Waits until a leaf answers a list from memory; each list until then is right.
async fn serves(leaf: &Rangecache, direct: &Client, through: &Client, after: &str) {
    recovers(after, PREFIX, direct, leaf, through, Reads::MustSucceed).await;
}

/// An etcd, a hub in front of it, and a leaf of the hub.
struct Scene {
    direct: Client,
    through: Client,
    leaf: Rangecache,
    hub: Rangecache,
    etcd: Etcd,
}

impl Scene {
    /// Starts all of them, and waits until the leaf answers from memory.
    async fn start() -> Scene {
        let etcd = Etcd::start(Version::V3_7).await;
        let direct = etcd.client().await;
        let hub = Rangecache::before(&etcd).start().await;
        let leaf = Rangecache::at(hub.url()).start().await;
        let through = leaf.client().await;
        serves(&leaf, &direct, &through, "the start").await;
        Scene {
            direct,
            through,
            leaf,
            hub,
            etcd,
        }
    }
}

/// The endpoint of a leaf, as `/status` describes it.
async fn endpoint_of(leaf: &Rangecache) -> Value {
    let status: Value = serde_json::from_str(&leaf.admin("/status").await.body).expect("is JSON");
    status["endpoints"][0].clone()
}

/// Quorum reads of all members that have begun.
async fn reads_of(members: &[Etcd]) -> f64 {
    let mut reads = 0.0;
    for member in members {
        reads += member.started_calls("Range").await;
    }
    reads
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaf_of_a_hub_before_three_members_answers_from_memory_and_is_not_seen_by_etcd() {
    let _exclusive = EXCLUSIVE.lock().await;
    let cluster = Cluster::start(Version::V3_7).await;
    let direct = cluster.members[0].client().await;
    let hub = Rangecache::at(&cluster.endpoints()).start().await;
    let leaves = [
        Rangecache::at(hub.url()).start().await,
        Rangecache::at(hub.url()).start().await,
    ];
    let mut clients = Vec::new();
    for leaf in &leaves {
        let client = leaf.client().await;
        serves(leaf, &direct, &client, leaf.url()).await;
        clients.push(client);
    }
    let before = [leaves[0].outcomes().await, leaves[1].outcomes().await];
    let of_etcd = reads_of(&cluster.members).await;
    for turn in 0..TURNS {
        let key = format!("{PREFIX}{turn}");
        direct.put(&key, "v").await.expect("etcd writes");
        let read = RangeRequest::one(&key);
        let reads = (0..BURST)
            .flat_map(|_| &clients)
            .map(|client| client.range(&read));
        for got in futures_util::future::join_all(reads).await {
            assert_eq!(got.expect("is read").kvs.len(), 1, "stale: {key} is missing");
        }
    }
    let of_etcd = reads_of(&cluster.members).await - of_etcd;
    for (leaf, before) in leaves.iter().zip(&before) {
        let outcomes = leaf.outcomes_since(before, TURNS * BURST).await;
        assert_eq!(outcomes.memory_answers(), TURNS * BURST, "{outcomes:?}");
    }
    // Reads that arrive together share a check of their leaf, and leaves share those of the hub.
    let all = 2 * TURNS * BURST;
    assert!(
        of_etcd < all as f64 / 4.0,
        "etcd has had {of_etcd} reads for {all} through leaves"
    );
    let reply = clients[0]
        .range_raw(&RangeRequest::one(PREFIX))
        .await
        .expect("is read");
    assert!(
        !reply.headers.contains_key("rangecache-history"),
        "{:?}",
        reply.headers
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaf_answers_from_memory_behind_a_balancer_that_sends_each_call_to_another_hub() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let hubs = [
        Rangecache::before(&etcd).start().await,
        Rangecache::before(&etcd).start().await,
    ];
    let balancer = Balancer::of_calls(&[hubs[0].url(), hubs[1].url()]).await;
    let leaf = Rangecache::at(balancer.url()).start().await;
    let through = leaf.client().await;
    serves(&leaf, &direct, &through, "the start").await;
    let before = leaf.outcomes().await;
    for turn in 0..TURNS {
        let key = format!("{PREFIX}{turn}");
        direct.put(&key, "v").await.expect("etcd writes");
        for _ in 0..2 {
            let read = through.range(&RangeRequest::one(&key)).await.expect("is read");
            assert_eq!(read.kvs.len(), 1, "stale: {key} is missing");
        }
    }
    let outcomes = leaf.outcomes_since(&before, 2 * TURNS).await;
    // The first ones may come before the memory was compared with what both hubs have.
    assert!(
        outcomes.memory_answers() >= TURNS * 3 / 2,
        "{outcomes:?} of {} reads",
        2 * TURNS
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_hub_cannot_prove_is_not_answered_by_its_leaf() {
    let Scene {
        direct,
        leaf,
        hub,
        through,
        ..
    } = &Scene::start().await;
    hub.forward_all(Method::POST).await;
    let before = leaf.outcomes().await;
    for turn in 0..20 {
        let key = format!("{PREFIX}forwarded/{turn}");
        direct.put(&key, "v").await.expect("etcd writes");
        let read = through.range(&RangeRequest::one(&key)).await.expect("is read");
        assert_eq!(read.kvs.len(), 1, "stale: {key} is missing");
    }
    let outcomes = leaf.outcomes_since(&before, 20).await;
    assert_eq!(outcomes.memory_answers(), 0, "{outcomes:?}");
    hub.forward_all(Method::DELETE).await;
    serves(leaf, direct, through, "memory of the hub is on again").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn key_that_checks_read_is_answered_to_clients_of_a_leaf_as_by_etcd() {
    const KEY: &str = "rangecache/quorum-check";
    const JSON: &str = r#"{"key": "cmFuZ2VjYWNoZS9xdW9ydW0tY2hlY2s="}"#;
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let before = direct.put("another", "v").await.expect("etcd writes");
    let first = direct.put(KEY, "first").await.expect("etcd writes");
    direct.put(KEY, "second").await.expect("etcd writes");
    let read = RangeRequest::one(KEY);
    let at = |revision| RangeRequest {
        revision,
        ..read.clone()
    };
    let reads = [
        read.clone(),
        at(before),
        at(first),
        RangeRequest {
            count_only: true,
            ..read.clone()
        },
        // The check itself.
        RangeRequest {
            limit: 1,
            keys_only: true,
            ..read.clone()
        },
    ];
    // One that holds the key, and one that asks etcd for it.
    let hubs = [
        Rangecache::before(&etcd),
        Rangecache::before(&etcd).with("--cache-prefix", "/b/"),
    ];
    for hub in hubs {
        let hub = hub.start().await;
        let leaf = Rangecache::at(hub.url())
            .with("--cache-prefix", "/a/")
            .start()
            .await;
        let through = leaf.client().await;
        for of_checks in ["rangecache-explain", "rangecache-check", "rangecache-probe"] {
            let through = through.with_metadata(of_checks, "true");
            for read in &reads {
                let (expected, got) = (direct.range(read).await, through.range(read).await);
                assert_eq!(got, expected, "{read:?} with {of_checks}");
            }
            let headers = [(of_checks, "true")];
            let json = async |url: &str| {
                let path = format!("{url}/v3/kv/range");
                let answer = http::post_with(&path, &headers, JSON).await;
                answer.expect("an answer").compact().body
            };
            assert_eq!(json(leaf.url()).await, json(&etcd.url()).await, "{of_checks}");
        }
        let memory = leaf.outcomes().await.memory_answers();
        assert_eq!(memory, 0, "the leaf does not hold the key");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_around_the_cache_reaches_etcd_through_a_hub() {
    let Scene { hub, through, .. } = &Scene::start().await;
    let around = through.with_metadata("rangecache-bypass", "true");
    around.range(&RangeRequest::one(PREFIX)).await.expect("is read");
    let bypassed = until(SOON, "the hub counts the read", async || {
        let metrics = hub.metrics().await;
        let sum = metrics.sum_with_label("rangecache_range_total", "reason=\"bypass\"");
        (sum > 0.0).then_some(sum)
    });
    assert_eq!(bypassed.await.0, 1.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_checks_of_leaves_are_answered_by_the_hub_and_those_of_clients_by_etcd() {
    let Scene {
        hub,
        leaf,
        through,
        etcd,
        ..
    } = &Scene::start().await;
    let checks = async |from: &str| {
        let metrics = hub.metrics().await;
        let of_checks = metrics.0.iter().filter(|(sample, _)| {
            sample.starts_with("rangecache_calls_total{")
                && sample.contains(r#"grpc_method="Check""#)
                && sample.contains(from)
        });
        of_checks.map(|(_, calls)| calls).sum::<f64>()
    };
    let before = checks(r#"from="memory""#).await;
    until(SOON, "the hub answers ten checks of its leaf", async || {
        (checks(r#"from="memory""#).await >= before + 10.0).then_some(())
    })
    .await;
    assert_eq!(
        checks(r#"from="etcd""#).await,
        0.0,
        "the leaf's checks reach etcd"
    );
    let reply = through.reply("/grpc.health.v1.Health/Check", &()).await;
    assert_eq!(reply.expect("a response").status().code, 0, "etcd is healthy");
    until(SOON, "etcd answers the check of a client", async || {
        (checks(r#"from="etcd""#).await == 1.0).then_some(())
    })
    .await;
    let endpoint = endpoint_of(leaf).await;
    assert_eq!(
        (&endpoint["is_hub"], endpoint["behind_hub"].as_str()),
        (&true.into(), Some(etcd.url().as_str())),
        "{endpoint}"
    );
    etcd.pause();
    until(SOON, "the leaf has seen that etcd does not respond", async || {
        let endpoint = endpoint_of(leaf).await;
        (endpoint["is_healthy"] == false && endpoint["behind_hub"].is_null()).then_some(())
    })
    .await;
    etcd.resume();
    until(SOON, "the leaf has seen that etcd responds", async || {
        (endpoint_of(leaf).await["is_healthy"] == true).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn periodic_checks_of_leaves_share_those_of_their_hub() {
    let scene = Scene::start().await;
    let more = [(); 2].map(|()| Rangecache::at(scene.hub.url()).start());
    let _more = futures_util::future::join_all(more).await;
    // Those of the starts are over once each has made its first.
    let counted = async || {
        let metrics = scene.hub.metrics().await;
        let reads = metrics.sum("rangecache_quorum_check_reads_total");
        (metrics.sum("rangecache_quorum_checks_total"), reads)
    };
    let before = counted().await;
    let (after, _) = until(SOON, "the hub has served forty periodic checks", async || {
        let now = counted().await;
        (now.1 >= before.1 + 40.0).then_some(now)
    })
    .await;
    let (checks, reads) = (after.0 - before.0, after.1 - before.1);
    // One check of the hub serves its own probe and three leaves; some come late.
    assert!(checks <= reads * 0.75, "{checks} checks for {reads} reads");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaf_follows_its_hub_to_a_cluster_that_was_restored_under_another_id() {
    let Scene {
        direct,
        leaf,
        through,
        mut etcd,
        hub: _hub,
    } = Scene::start().await;
    let snapshot = etcd.save_snapshot().await;
    for turn in 0..20 {
        let lost = format!("{PREFIX}lost/{turn}");
        direct.put(&lost, "v").await.expect("etcd writes");
    }
    serves(&leaf, &direct, &through, "the writes that will be lost").await;
    etcd.restore(&snapshot, "another", &[]);
    etcd.run();
    etcd.ready().await;
    let direct = etcd.client().await;
    recovers("a restore", PREFIX, &direct, &leaf, &through, Reads::MayFail).await;
    let (expected, got) = (direct.get(PREFIX).await, through.get(PREFIX).await);
    assert_eq!(got, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hub_has_etcd_authorize_the_callers_of_its_leaf() {
    let etcd = Etcd::start(Version::V3_7).await;
    let root = create_users(&etcd).await;
    root.put("/a/007", "here").await.expect("etcd writes");
    let user = format!("{MIRROR}:{}", password(MIRROR));
    let hub = Rangecache::before(&etcd).with("--user", &user).start().await;
    let leaf = Rangecache::at(hub.url()).with("--user", &user).start().await;
    let (direct, through) = (etcd.client().await, leaf.client().await);
    let before = [hub.outcomes().await, leaf.outcomes().await];
    for name in ["alice", "carol"] {
        let token = token(&direct, name).await;
        let read = RangeRequest::one("/a/007");
        let expected = direct.with_metadata("token", &token).range(&read).await;
        let got = through.with_metadata("token", &token).range(&read).await;
        assert_eq!(got.is_ok(), name == "alice", "{got:?}");
        assert_eq!(got, expected, "{name}");
    }
    let of_leaf = leaf.outcomes_since(&before[1], 2).await;
    assert_eq!(of_leaf.memory_answers(), 0, "{of_leaf:?}");
    assert_eq!(
        leaf.metrics()
            .await
            .sum_with_label("rangecache_range_total", "reason=\"behind_hub\""),
        2.0
    );
    assert!(
        hub.outcomes().await.since(&before[0]).memory_answers() > 0,
        "the hub's memory has answered alice"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leaf_that_its_hub_proves_nothing_to_refuses_no_read_as_behind() {
    let etcd = Etcd::start(Version::V3_7).await;
    let root = create_users(&etcd).await;
    root.put("/a/007", "here").await.expect("etcd writes");
    let user = format!("{MIRROR}:{}", password(MIRROR));
    let hub = Rangecache::before(&etcd).with("--user", &user);
    // The leaf wants more than that.
    let hub = hub.with("--cache-prefix", "/a/").start().await;
    let leaf = Rangecache::at(hub.url()).with("--user", &user);
    let leaf = leaf.with("--when-behind", "fail").start_cold().await;
    until(SOON, "the leaf has tried to load", async || {
        leaf.log().contains("proves nothing").then_some(())
    })
    .await;
    let direct = etcd.client().await;
    let token = token(&direct, "alice").await;
    let through = leaf.client().await.with_metadata("token", &token);
    let read = through.range(&RangeRequest::one("/a/007")).await;
    assert_eq!(read.expect("is read").kvs.len(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_hub_is_replaced_by_the_fallback_until_it_is_back() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    let hub = Rangecache::before(&etcd).start().await;
    let to_hub = FaultLink::to(hub.url(), 1).await;
    let to_etcd = FaultLink::to(&etcd.url(), 2).await;
    let leaf = Rangecache::at(to_hub.url())
        .with("--fallback-endpoints", to_etcd.url())
        .start()
        .await;
    let through = leaf.client().await;
    let create = WatchCreateRequest {
        key: PREFIX.into(),
        range_end: prefix_end(PREFIX.as_bytes()),
        ..WatchCreateRequest::default()
    };
    let mut watch = through.watch(create).await;
    serves(&leaf, &direct, &through, "the start").await;
    assert_eq!((to_hub.feeds(), to_etcd.feeds()), (1, 0));
    to_hub.set(Condition::Cut);
    until(SOON, "the fallback feeds the leaf", async || {
        (to_etcd.feeds() == 1).then_some(())
    })
    .await;
    recovers(
        "the loss of the hub",
        PREFIX,
        &direct,
        &leaf,
        &through,
        Reads::MayFail,
    )
    .await;
    to_hub.set(Condition::Normal);
    let is_back = async || (to_hub.feeds() == 2).then_some(());
    until(SOON * 2, "the hub feeds the leaf", is_back).await;
    serves(&leaf, &direct, &through, "the return of the hub").await;
    let loads = leaf.metrics().await.sum("rangecache_mirror_reloads_total");
    assert_eq!(loads, 1.0, "the keys were loaded again: {}", leaf.log());
    let last = format!("{PREFIX}last");
    let written = direct.put(&last, "v").await.expect("etcd writes");
    let mut revision = 0;
    while revision < written {
        let events = watch
            .next_as::<WatchResponse>(SOON)
            .await
            .expect("the watch continues")
            .events;
        for event in events {
            let next = event.kv.expect("has a key").mod_revision;
            assert!(
                next > revision,
                "the event of revision {next} came after that of {revision}"
            );
            revision = next;
        }
    }
}
