//! Three members of etcd, some of which fail: responses stay right, and reads that etcd would refuse are not
//! answered.

use testkit::etcd::{Cluster, Version, free_port};
use testkit::grpc::Client;
use testkit::pb::{RangeRequest, RangeResponse};
use testkit::proxy::Rangecache;
use testkit::recovery::{self, Reads, put_when_possible};

use super::EXCLUSIVE;

const PREFIX: &str = "/cluster/";

/// Reads below the test's prefix come from memory again; they may fail until the cluster has a leader.
async fn recovers(after: &str, direct: &Client, rangecache: &Rangecache, through: &Client) {
    recovery::recovers(after, PREFIX, direct, rangecache, through, Reads::MayFail).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_stay_right_while_members_are_killed_in_turn() {
    let _exclusive = EXCLUSIVE.lock().await;
    let mut cluster = Cluster::start(Version::V3_7).await;
    put_when_possible(&cluster.members[0].client().await, "first", "v").await;
    let rangecache = Rangecache::at(&cluster.endpoints()).start().await;
    let through = rangecache.client().await;
    for n in 0..3 {
        cluster.members[n].stop();
        let live = cluster.members[(n + 1) % 3].client().await;
        recovers(&format!("the stop of member {n}"), &live, &rangecache, &through).await;
        cluster.members[n].run();
        cluster.members[n].ready().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_stay_right_while_the_leader_is_paused() {
    let _exclusive = EXCLUSIVE.lock().await;
    let cluster = Cluster::start(Version::V3_6).await;
    let n = cluster.leader().await.expect("a member leads");
    put_when_possible(&cluster.members[n].client().await, "first", "v").await;
    let mut endpoints: Vec<_> = cluster.members.iter().map(|member| member.url()).collect();
    // Its sockets stay open, and it is the first endpoint.
    endpoints.swap(0, n);
    let rangecache = Rangecache::at(&endpoints.join(",")).start().await;
    let through = rangecache.client().await;
    cluster.members[n].pause();
    let live = cluster.members[(n + 1) % 3].client().await;
    recovers("the leader's suspension", &live, &rangecache, &through).await;
    cluster.members[n].resume();
    recovers("the leader's resumption", &live, &rangecache, &through).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn first_endpoint_down_at_start_does_not_matter() {
    let _exclusive = EXCLUSIVE.lock().await;
    let cluster = Cluster::start(Version::V3_7).await;
    let live = cluster.members[1].client().await;
    put_when_possible(&live, "first", "v").await;
    let endpoints = format!("http://127.0.0.1:{},{}", free_port(), cluster.endpoints());
    let rangecache = Rangecache::at(&endpoints).start().await;
    let through = rangecache.client().await;
    recovers(
        "a start with an endpoint that refuses connections",
        &live,
        &rangecache,
        &through,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_without_quorum_proves_nothing() {
    let _exclusive = EXCLUSIVE.lock().await;
    let cluster = Cluster::start(Version::V3_7).await;
    let [alone, others @ ..] = &cluster.members[..] else {
        panic!("three members")
    };
    let direct = alone.client().await;
    put_when_possible(&direct, "first", "v").await;
    let rangecache = Rangecache::before(alone).start().await;
    let through = rangecache.client().await;
    recovers("the start", &direct, &rangecache, &through).await;

    others.iter().for_each(|member| member.pause());
    let before = rangecache.outcomes().await;
    let list = RangeRequest::prefix(PREFIX);
    let (expected, got) = tokio::join!(direct.range(&list), through.range(&list));
    let (expected, got) = (
        expected.expect_err("no quorum"),
        got.expect_err("no quorum, no proof"),
    );
    println!("etcd: {expected:?}, rangecache: {got:?}");
    assert_eq!(got.code, expected.code, "etcd: {expected:?}, rangecache: {got:?}");
    let outcomes = rangecache.outcomes_since(&before, 1).await;
    assert_eq!(outcomes.memory_answers(), 0, "{outcomes:?}");
    let serializable = RangeRequest {
        serializable: true,
        ..list.clone()
    };
    let (expected, got) = tokio::join!(direct.range(&serializable), through.range(&serializable));
    let (expected, got) = (expected.expect("needs no quorum"), got.expect("needs no quorum"));
    assert_eq!(got.kvs, expected.kvs);

    others.iter().for_each(|member| member.resume());
    recovers("the quorum's return", &direct, &rangecache, &through).await;
}

/// Members' responses differ only in their ids: pages from different members make one list.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rangecaches_before_different_members_agree() {
    let _exclusive = EXCLUSIVE.lock().await;
    let cluster = Cluster::start(Version::V3_5).await;
    let mut answers: Vec<RangeResponse> = Vec::new();
    let mut sidecars = Vec::new();
    for member in &cluster.members {
        sidecars.push(Rangecache::before(member).start().await);
    }
    for turn in 0..50 {
        let written = cluster.members[turn % 3]
            .client()
            .await
            .put(format!("{PREFIX}{turn:02}"), "v")
            .await;
        let revision = written.expect("etcd writes");
        for sidecar in &sidecars {
            let list = sidecar
                .client()
                .await
                .range(&RangeRequest::prefix(PREFIX))
                .await
                .expect("answers");
            assert_eq!((list.revision(), list.count), (revision, turn as i64 + 1));
            answers.push(list);
        }
    }
    let last: Vec<_> = answers.iter().rev().take(3).map(|answer| &answer.kvs).collect();
    assert!(last.iter().all(|kvs| *kvs == last[0]));
}
