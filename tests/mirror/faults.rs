//! Faults of etcd and rangecache: afterwards responses are right at once, and soon come from memory again.

use std::time::{Duration, Instant};

use testkit::etcd::{Etcd, Version};
use testkit::grpc::{Client, DEADLINE_EXCEEDED};
use testkit::pb::RangeRequest;
use testkit::proxy::Rangecache;
use testkit::recovery::{Reads, recovers};
use testkit::wait::{SOON, until};
use tokio::task::JoinSet;

const PREFIX: &str = "/faults/";

/// etcd with some keys, and a warm rangecache with a client that stays connected during the fault.
struct Scene {
    etcd: Etcd,
    rangecache: Rangecache,
    through: Client,
}

impl Scene {
    async fn new() -> Self {
        Self::of(Version::V3_7).await
    }

    async fn of(version: Version) -> Self {
        let etcd = Etcd::start(version).await;
        write(&etcd, "first", 50).await;
        let rangecache = Rangecache::before(&etcd).start().await;
        let through = rangecache.client().await;
        let scene = Self {
            etcd,
            rangecache,
            through,
        };
        scene.recovers("the start").await;
        scene
    }

    /// From now on every response is etcd's, a write shows at once, and responses come from memory soon.
    async fn recovers(&self, after: &str) {
        let direct = self.etcd.client().await;
        recovers(
            after,
            PREFIX,
            &direct,
            &self.rangecache,
            &self.through,
            Reads::MustSucceed,
        )
        .await;
    }
}

/// Puts that many keys, with values that contain `what`.
async fn write(etcd: &Etcd, what: &str, keys: usize) {
    let client = etcd.client().await;
    for n in 0..keys {
        client
            .put(format!("{PREFIX}{n:03}"), format!("{what} {n}"))
            .await
            .expect("etcd writes");
    }
}

async fn current(client: &Client) -> i64 {
    client
        .range(&RangeRequest::one("any"))
        .await
        .expect("etcd answers")
        .revision()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_stay_right_after_an_etcd_restart() {
    let mut scene = Scene::new().await;
    for _ in 0..3 {
        scene.etcd.restart().await;
        scene.recovers("a restart of etcd").await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_wait_while_etcd_is_down() {
    let mut scene = Scene::new().await;
    scene.etcd.stop();
    let down = Instant::now();
    while down.elapsed() < Duration::from_secs(10) {
        let answer = scene.through.range(&RangeRequest::prefix(PREFIX)).await;
        assert_eq!(answer.expect_err("no quorum check").code, 14);
    }
    scene.etcd.run();
    scene.etcd.ready().await;
    scene.recovers("a stop of etcd").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_wait_while_etcd_is_paused() {
    let scene = Scene::new().await;
    scene.etcd.pause();
    let list = RangeRequest::prefix(PREFIX);
    // The caller's deadline bounds the wait for a quorum check.
    let hurried = scene.through.with_metadata("grpc-timeout", "300m");
    let asked = Instant::now();
    let answer = hurried.range(&list).await;
    assert_eq!(
        answer.expect_err("etcd responds to no quorum check").code,
        DEADLINE_EXCEEDED
    );
    println!("a deadline of 300 ms ended after {:?}", asked.elapsed());
    assert!(asked.elapsed() >= Duration::from_millis(250));
    scene.etcd.resume();
    scene.recovers("a suspension of etcd").await;
}

/// Other readers keep quorum checks in flight when etcd is suspended: their results prove nothing to reads that
/// arrive later.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_in_flight_proves_nothing_to_later_reads() {
    let scene = Scene::new().await;
    let list = RangeRequest::prefix(PREFIX);
    let mut readers = JoinSet::new();
    for _ in 0..8 {
        let (client, list) = (scene.rangecache.client().await, list.clone());
        readers.spawn(async move {
            loop {
                // Fails while etcd is suspended.
                let _ = client.range(&list).await;
            }
        });
    }
    let hurried = scene.through.with_metadata("grpc-timeout", "100m");
    for turn in 0..20 {
        scene.etcd.pause();
        let answer = hurried.range(&list).await;
        scene.etcd.resume();
        assert_eq!(
            answer.expect_err("no quorum check").code,
            DEADLINE_EXCEEDED,
            "turn {turn}"
        );
        until(SOON, "reads succeed again", async || {
            scene.through.range(&list).await.ok()
        })
        .await;
    }
    drop(readers);
    scene.recovers("repeated suspensions of etcd").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_stay_right_after_a_compaction_during_a_pause() {
    let scene = Scene::new().await;
    scene.rangecache.pause();
    write(&scene.etcd, "during the suspension", 200).await;
    let client = scene.etcd.client().await;
    client
        .compact(current(&client).await)
        .await
        .expect("etcd compacts");
    scene.rangecache.resume();
    scene.recovers("a compaction").await;
}

/// A feed that is lost until etcd has compacted what it has not had: the mirror is loaded again, without what it has.
async fn lost_feed_behind_a_compaction(version: Version) {
    let mut scene = Scene::of(version).await;
    let client = scene.etcd.client().await;
    for n in 0..500 {
        let key = format!("{PREFIX}kept/{n:03}");
        client.put(key, "v".repeat(1_000)).await.expect("etcd writes");
    }
    scene.recovers("many keys").await;
    scene.rangecache.pause();
    scene.etcd.restart().await;
    write(&scene.etcd, "while the feed is down", 200).await;
    let client = scene.etcd.client().await;
    for gone in ["007", "kept/123"] {
        client
            .delete(format!("{PREFIX}{gone}"))
            .await
            .expect("etcd deletes");
    }
    client
        .compact(current(&client).await)
        .await
        .expect("etcd compacts");
    scene.rangecache.resume();
    scene.recovers("a compaction past the feed's revision").await;
    let metrics = scene.rangecache.metrics().await;
    assert_eq!(metrics.sum("rangecache_mirror_adopted_total"), 1.0);
    let (kept, read) = (
        metrics.sum("rangecache_mirror_adopted_bytes_total"),
        metrics.sum("rangecache_mirror_load_bytes"),
    );
    assert!(
        kept > 499.0 * 1_000.0 && read < 200_000.0,
        "{kept} kept, {read} read"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_feed_reads_what_has_changed_after_a_compaction_past_it_3_7() {
    lost_feed_behind_a_compaction(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_feed_reads_what_has_changed_after_a_compaction_past_it_3_5() {
    lost_feed_behind_a_compaction(Version::V3_5).await;
}

/// A feed that resumes far behind receives its events in batches, whose headers are ahead of them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_feed_catches_up_on_thousands_of_revisions() {
    let mut scene = Scene::new().await;
    scene.rangecache.pause();
    scene.etcd.restart().await;
    let mut writers = JoinSet::new();
    for part in 0..4 {
        let client = scene.etcd.client().await;
        writers.spawn(async move {
            for n in 0..1_500 {
                client
                    .put(format!("{PREFIX}many/{part}/{n}"), "v")
                    .await
                    .expect("etcd writes");
            }
        });
    }
    writers.join_all().await;
    scene.rangecache.resume();
    scene.recovers("thousands of missed revisions").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_by_others_is_noticed() {
    let scene = Scene::new().await;
    let direct = scene.etcd.client().await;
    let old = RangeRequest {
        revision: current(&direct).await,
        ..RangeRequest::prefix(PREFIX)
    };
    write(&scene.etcd, "second", 20).await;
    // A pinned read proves nothing: its header shows writes of others only after a linearizable read.
    scene
        .through
        .range(&RangeRequest::prefix(PREFIX))
        .await
        .expect("a linearizable read");
    let before = scene.rangecache.outcomes().await;
    assert_eq!(scene.through.range_raw(&old).await, direct.range_raw(&old).await);
    assert_eq!(
        scene.rangecache.outcomes_since(&before, 1).await.memory_answers(),
        1
    );

    direct.compact(old.revision + 1).await.expect("etcd compacts");
    let expected = direct.range_raw(&old).await;
    let (_, took) = until(SOON, "rangecache notices the compaction", async || {
        (scene.through.range_raw(&old).await == expected).then_some(())
    })
    .await;
    println!("noticed the compaction after {took:?}");
    scene.recovers("a compaction by others").await;
}

/// Course of a restore.
struct Restore {
    token: &'static str,
    flags: &'static [&'static str],
    /// Revisions written after the restore, before rangecache sees them.
    written: usize,
    /// The last change of the lost history.
    last: Last,
}

/// The last change that the restore loses, which a mirror might confuse with the new history.
#[derive(Clone, Copy, PartialEq)]
enum Last {
    Put,
    /// A key is created and deleted: neither the old history nor the new one has it.
    Delete,
    /// A key gets the same value as in the new history, at the same revision.
    Same,
}

fn same_key() -> String {
    format!("{PREFIX}same")
}

async fn etcd_is_restored(how: Restore) {
    let mut scene = Scene::new().await;
    let snapshot = scene.etcd.save_snapshot().await;
    write(&scene.etcd, "lost by the restore", 60).await;
    scene
        .etcd
        .client()
        .await
        .delete_prefix(format!("{PREFIX}03"))
        .await
        .expect("etcd deletes");
    scene.recovers("the writes after the snapshot").await;
    let client = scene.etcd.client().await;
    if how.last == Last::Delete {
        client
            .put(format!("{PREFIX}brief"), "created and deleted")
            .await
            .expect("etcd puts");
        client
            .delete(format!("{PREFIX}brief"))
            .await
            .expect("etcd deletes");
    }
    if how.last == Last::Same {
        client.put(same_key(), "same").await.expect("etcd puts");
    }
    let forgotten = current(&client).await;
    // The mirror must have seen all of the lost history: otherwise it cannot serve it by mistake.
    let seen = scene
        .through
        .range(&RangeRequest::prefix(PREFIX))
        .await
        .expect("answers");
    assert_eq!(seen.revision(), forgotten);

    scene.rangecache.pause();
    scene.etcd.restore(&snapshot, how.token, how.flags);
    scene.etcd.run();
    scene.etcd.ready().await;
    if how.last == Last::Same {
        // Up to the revision before the last lost one, and then the same change as that one.
        let client = scene.etcd.client().await;
        while current(&client).await < forgotten - 1 {
            client
                .put(format!("{PREFIX}040"), "in the new history")
                .await
                .expect("etcd puts");
        }
        client.put(same_key(), "same").await.expect("etcd puts");
    }
    write(&scene.etcd, "after the restore", how.written).await;
    let now = current(&scene.etcd.client().await).await;
    println!("revision {forgotten} before the restore, {now} when rangecache resumes");
    scene.rangecache.resume();
    scene.recovers("a restore").await;

    // Nor may reads at a lost revision be answered.
    let direct = scene.etcd.client().await;
    for revision in [forgotten - 1, now] {
        let pinned = RangeRequest {
            revision,
            serializable: true,
            ..RangeRequest::prefix(PREFIX)
        };
        assert_eq!(
            scene.through.range_raw(&pinned).await,
            direct.range_raw(&pinned).await,
            "at {revision}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_restored_as_a_new_cluster() {
    etcd_is_restored(Restore {
        token: "another",
        flags: &[],
        written: 0,
        last: Last::Put,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_restored_as_the_same_cluster() {
    etcd_is_restored(Restore {
        token: "rangecache",
        flags: &[],
        written: 0,
        last: Last::Put,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_restored_as_a_new_cluster_and_overtakes_itself() {
    etcd_is_restored(Restore {
        token: "another",
        flags: &[],
        written: 150,
        last: Last::Put,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_restored_as_the_same_cluster_and_overtakes_itself() {
    etcd_is_restored(Restore {
        token: "rangecache",
        flags: &[],
        written: 150,
        last: Last::Put,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_restored_and_the_forgotten_history_ends_with_a_delete() {
    etcd_is_restored(Restore {
        token: "rangecache",
        flags: &[],
        written: 150,
        last: Last::Delete,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_restored_and_the_new_history_passes_through_the_same_change() {
    etcd_is_restored(Restore {
        token: "rangecache",
        flags: &[],
        written: 5,
        last: Last::Same,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_restored_with_its_revision_bumped() {
    let flags = &["--bump-revision", "1000", "--mark-compacted"];
    etcd_is_restored(Restore {
        token: "rangecache",
        flags,
        written: 5,
        last: Last::Put,
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_is_restored_while_rangecache_is_connected() {
    let mut scene = Scene::new().await;
    let snapshot = scene.etcd.save_snapshot().await;
    write(&scene.etcd, "lost by the restore", 60).await;
    scene.recovers("the writes after the snapshot").await;
    scene.etcd.restore(&snapshot, "rangecache", &[]);
    scene.etcd.run();
    scene.etcd.ready().await;
    scene.recovers("a restore").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_stay_right_after_a_rangecache_restart() {
    let Scene { etcd, rangecache, .. } = Scene::new().await;
    let status = rangecache.terminate().await;
    assert!(status.success(), "{status}");
    // Cold: responses are right at once, although no mirror is loaded yet.
    let rangecache = Rangecache::before(&etcd).start_cold().await;
    let through = rangecache.client().await;
    recovers(
        "a restart of rangecache",
        PREFIX,
        &etcd.client().await,
        &rangecache,
        &through,
        Reads::MustSucceed,
    )
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn responses_respect_auth_switched_on_and_off_3_7() {
    responses_respect_auth_switched_on_and_off(Version::V3_7).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn responses_respect_auth_switched_on_and_off_3_6() {
    responses_respect_auth_switched_on_and_off(Version::V3_6).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "nightly"]
async fn responses_respect_auth_switched_on_and_off_3_5() {
    responses_respect_auth_switched_on_and_off(Version::V3_5).await;
}

async fn responses_respect_auth_switched_on_and_off(version: Version) {
    let scene = Scene::of(version).await;
    let (list, anonymous) = (RangeRequest::prefix(PREFIX), scene.etcd.client().await);
    let root = anonymous
        .enable_auth("secret")
        .await
        .expect("etcd enables authentication");
    let refused = anonymous.range_raw(&list).await;
    assert_eq!(
        scene.through.range_raw(&list).await,
        refused,
        "the first linearizable read afterwards"
    );

    // A serializable read needs no quorum check: it is refused once rangecache has noticed the change.
    let serializable = RangeRequest {
        serializable: true,
        ..list.clone()
    };
    let pinned = RangeRequest {
        revision: current(&root).await,
        ..serializable.clone()
    };
    let (_, took) = until(SOON, "rangecache notices that authentication is on", async || {
        (scene.through.range_raw(&serializable).await == refused).then_some(())
    })
    .await;
    println!("noticed that authentication is on after {took:?}");

    let rooted = scene
        .through
        .authenticate("root", "secret")
        .await
        .expect("rangecache forwards it");
    let before = scene.rangecache.outcomes().await;
    for request in [
        &list,
        &serializable,
        &pinned,
        &RangeRequest::one(format!("{PREFIX}001")),
    ] {
        assert_eq!(
            scene.through.range_raw(request).await,
            anonymous.range_raw(request).await,
            "without credentials: {request:?}"
        );
        assert_eq!(
            rooted.range_raw(request).await,
            root.range_raw(request).await,
            "as root: {request:?}"
        );
    }
    let outcomes = scene.rangecache.outcomes_since(&before, 8).await;
    assert_eq!(
        outcomes.memory_answers(),
        0,
        "nothing comes from memory: {outcomes:?}"
    );

    root.disable_auth().await.expect("etcd disables authentication");
    scene.recovers("switching authentication off").await;
}
