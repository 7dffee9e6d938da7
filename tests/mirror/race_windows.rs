//! F2: rangecache, or the member of its feed, is suspended or killed exactly between a quorum check and the response
//! that it proves. An injected fault holds etcd's response to the check until the test releases it.

use testkit::etcd::{Cluster, Etcd, Version};
use testkit::grpc::{Client, Status, UNAVAILABLE};
use testkit::pb::{RangeRequest, RangeResponse};
use testkit::proxy::Rangecache;
use testkit::recovery::{self, Reads, put_when_possible};
use testkit::wait::{SOON, until};
use tokio::task::JoinHandle;
use tokio::time::timeout;

const PREFIX: &str = "/aimed/";

fn list() -> RangeRequest {
    RangeRequest::prefix(PREFIX)
}

/// A rangecache whose only quorum checks are those of the test's reads: the probe makes none.
async fn with_fault_injection(endpoints: &str) -> Rangecache {
    let builder = Rangecache::at(endpoints).with_fault_injection();
    // A read that waits for a suspended feed must end only by the move to another feed.
    let builder = builder.with("--freshness-timeout", "20s");
    builder.with("--probe-interval", "1h").start().await
}

/// A read whose quorum check etcd has answered, but the response is still held.
struct Held(JoinHandle<Result<RangeResponse, Status>>);

impl Held {
    /// Sends a read, and returns once etcd has answered its check.
    async fn begin(rangecache: &Rangecache) -> Self {
        let so_far = held_so_far(rangecache);
        let through = rangecache.client().await;
        // The call that injects the fault may go to a suspended member: the fault is injected before it is forwarded.
        let found = || rangecache.log().matches("does not serve").count();
        let found_so_far = found();
        let planting = through.clone();
        let planted = tokio::spawn(async move { planting.inject_fault("hold").await });
        until(SOON, "the fault is injected", async || {
            (planted.is_finished() || found() > found_so_far).then_some(())
        })
        .await;
        let read = tokio::spawn(async move { through.range(&list()).await });
        until(SOON, "etcd's response to the check is held", async || {
            (held_so_far(rangecache) > so_far).then_some(())
        })
        .await;
        assert!(!read.is_finished(), "a response before its check");
        Self(read)
    }

    /// Releases the response to the check, and returns that to the read.
    async fn end(self, rangecache: &Rangecache) -> Result<RangeResponse, Status> {
        assert!(!self.0.is_finished(), "a response before its check");
        let through = rangecache.client().await;
        let releasing = tokio::spawn(async move { through.inject_fault("release").await });
        let read = timeout(SOON, self.0).await.expect("it ends").expect("no panic");
        releasing.abort();
        read
    }
}

fn held_so_far(rangecache: &Rangecache) -> usize {
    rangecache.log().matches("held by a planted fault").count()
}

/// Checks that a response equals etcd's state at the revision in its header, which is at least `not_before`.
async fn is_of_its_moment(answer: &RangeResponse, not_before: i64, etcd: &Client, what: &str) {
    let revision = answer.revision();
    assert!(
        revision >= not_before,
        "{what}: {revision} is before {not_before}"
    );
    let then = RangeRequest { revision, ..list() };
    let then = etcd.range(&then).await.expect("etcd still has the revision");
    assert_eq!(answer.kvs, then.kvs, "{what}: at {revision}");
}

/// Responses are etcd's, and come from memory again.
async fn recovers(direct: &Client, rangecache: &Rangecache, after: &str) {
    let through = rangecache.client().await;
    recovery::recovers(after, PREFIX, direct, rangecache, &through, Reads::MayFail).await;
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Meanwhile {
    Writes,
    Compaction,
    Restart,
    Restore,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rangecache_paused_between_check_and_response_is_not_stale() {
    let mut etcd = Etcd::start(Version::V3_7).await;
    put_when_possible(&etcd.client().await, &format!("{PREFIX}first"), "v").await;
    let snapshot = etcd.save_snapshot().await;
    let rangecache = with_fault_injection(&etcd.url()).await;
    for (n, meanwhile) in [
        Meanwhile::Writes,
        Meanwhile::Compaction,
        Meanwhile::Restart,
        Meanwhile::Writes,
        Meanwhile::Restore,
        Meanwhile::Writes,
    ]
    .into_iter()
    .enumerate()
    {
        let what = format!("{n}: {meanwhile:?}");
        recovers(&etcd.client().await, &rangecache, &what).await;
        let asked = newest(&etcd.client().await).await;
        let held = Held::begin(&rangecache).await;
        rangecache.pause();
        for key in 0..20 {
            put_when_possible(&etcd.client().await, &format!("{PREFIX}{n}/{key}"), "v").await;
        }
        match meanwhile {
            Meanwhile::Writes => {}
            Meanwhile::Compaction => {
                let client = etcd.client().await;
                let compacted = client.compact(newest(&client).await).await;
                compacted.expect("etcd compacts");
            }
            Meanwhile::Restart => etcd.restart().await,
            Meanwhile::Restore => {
                etcd.restore(&snapshot, "rangecache", &[]);
                etcd.run();
                etcd.ready().await;
            }
        }
        rangecache.resume();

        // A read sent now must not use the held check.
        let direct = etcd.client().await;
        let now = direct.range(&list()).await.expect("etcd answers");
        let late = async || rangecache.client().await.range(&list()).await.ok();
        // A restarted etcd may be down for another moment.
        let (late, _) = until(SOON, "a later read succeeds", late).await;
        assert_eq!((late.revision(), late.kvs), (now.revision(), now.kvs), "{what}");

        let answer = held.end(&rangecache).await;
        let answer = answer.unwrap_or_else(|status| panic!("{what}: {status:?}"));
        let not_before = if meanwhile == Meanwhile::Restore { 0 } else { asked };
        is_of_its_moment(&answer, not_before, &direct, &what).await;
        recovers(&direct, &rangecache, &what).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rangecache_killed_between_check_and_response_is_not_stale() {
    let etcd = Etcd::start(Version::V3_7).await;
    let direct = etcd.client().await;
    put_when_possible(&direct, &format!("{PREFIX}first"), "v").await;
    let rangecache = with_fault_injection(&etcd.url()).await;
    let held = Held::begin(&rangecache).await;
    let url = rangecache.url().to_owned();
    drop(rangecache);
    let lost = held.0.await.expect("no panic").expect_err("rangecache is dead");
    assert_eq!(lost.code, UNAVAILABLE, "{lost:?}");
    put_when_possible(&direct, &format!("{PREFIX}second"), "v").await;
    let next = Rangecache::before(&etcd).listening_on(&url).start_cold().await;
    let answer = next.client().await.range(&list()).await.expect("it answers");
    assert_eq!(answer.kvs.len(), 2);
}

/// Index of the member that serves the mirror's feed.
async fn feeding(cluster: &Cluster) -> usize {
    let feeds = async || {
        for (n, member) in cluster.members.iter().enumerate() {
            if member.metrics().await.sum("etcd_debugging_mvcc_watcher_total") > 0.0 {
                return Some(n);
            }
        }
        None
    };
    until(SOON, "a member serves the feed", feeds).await.0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn feed_member_paused_between_check_and_response_is_not_stale() {
    let cluster = Cluster::start(Version::V3_7).await;
    put_when_possible(&cluster.members[0].client().await, &format!("{PREFIX}first"), "v").await;
    let rangecache = with_fault_injection(&cluster.endpoints()).await;
    for turn in 0..4 {
        let n = feeding(&cluster).await;
        let (feed, live) = (&cluster.members[n], &cluster.members[(n + 1) % 3]);
        let direct = live.client().await;
        let what = format!("turn {turn}, member {n}");
        recovers(&direct, &rangecache, &what).await;
        let asked = newest(&direct).await;
        let key = format!("{PREFIX}{turn}");
        let held = if turn % 2 == 0 {
            // The mirror has received the write that the check proves.
            let held = Held::begin(&rangecache).await;
            feed.pause();
            put_when_possible(&direct, &key, "v").await;
            held
        } else {
            // The mirror will not receive the write that the check proves.
            feed.pause();
            put_when_possible(&direct, &key, "v").await;
            Held::begin(&rangecache).await
        };
        let through = rangecache.client().await;
        let (late, took) = until(SOON, "a later read succeeds", async || {
            through.range(&list()).await.ok()
        })
        .await;
        println!("{what}: a later read was answered after {took:?}");
        let has = |answer: &RangeResponse| answer.kvs.iter().any(|kv| kv.key == key.as_bytes());
        assert!(has(&late), "{what}: a later read is stale");
        let answer = held.end(&rangecache).await.expect("a response");
        is_of_its_moment(&answer, asked, &direct, &what).await;
        assert!(
            turn % 2 == 0 || has(&answer),
            "{what}: its check was sent after the write"
        );
        feed.resume();
        recovers(&direct, &rangecache, &what).await;
    }
    let left = rangecache.log().matches("and its member is unhealthy").count();
    assert!(left > 0, "no feed was moved because its member was unhealthy");
}

async fn newest(client: &Client) -> i64 {
    let answer = client.range(&RangeRequest::one("any")).await;
    answer.expect("etcd answers").revision()
}
