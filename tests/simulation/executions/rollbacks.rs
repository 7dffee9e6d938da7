//! Rollbacks of all members whose lost revisions are written again before rangecache reaches one, all but one of them as they
//! were: what a mirror has of the lost history may not be served.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bytes::Bytes;
use rangecache_mirror::fan_out::{Join, Reader, Signal};
use rangecache_upstream::{ReceiveWindow, header_request, range};
use testkit::grpc::Stream;
use testkit::pb::{RangeRequest, WatchCreateRequest, WatchResponse};
use tokio::time::{Instant, sleep, timeout};

use super::{
    SERVED_TIMEOUT, SETTLED, client, commit, put, put_back, read_from_memory, roll_back, run, start, stored,
    world,
};
use crate::cluster::MEMBERS;
use crate::hub::Hub;
use crate::members::From;
use crate::proxy::{Place, Rangecache, Settings};
use crate::store::Change;
use crate::world::World;

/// Keys of a load with several chunks.
const KEYS: usize = 200;
/// Of these the last ones, which are written again: more than a comparison of a whole mirror with etcd looks at.
const NEWEST: std::ops::Range<usize> = 130..KEYS;

fn key(number: usize) -> String {
    format!("/sim/a/{number:03}")
}

#[test]
fn loaded_mirror_rolled_back_below_its_load_is_not_served() {
    run(async {
        let world = world([
            put("/sim/a/0", "zero"),
            put("/sim/b/1", "one"),
            put("/sim/a/2", "two"),
            put("/sim/a/0", "lost"),
            put("/sim/b/1", "same"),
        ])
        .await;
        let rangecache = start(&[]).await;
        assert_eq!(
            read_from_memory(&world, "/sim/a/0").await.as_deref(),
            Some("lost")
        );
        sleep(SETTLED).await;
        roll_back(&world, 4, [put("/sim/a/0", "other"), put("/sim/b/1", "same")]).await;
        let served = read_from_memory(&world, "/sim/a/0").await;
        assert!(rangecache.stop().await, "every task ends");
        assert_eq!(served, stored(&world, "/sim/a/0"));
    });
}

#[test]
fn mirror_whose_feed_is_half_open_is_not_served_after_a_rollback_to_its_revision() {
    run(async {
        let world = world([put("/sim/a/0", "zero"), put("/sim/b/1", "one")]).await;
        let rangecache = start(&[]).await;
        read_from_memory(&world, "/sim/a/0").await;
        commit(&world, [put("/sim/a/0", "lost"), put("/sim/b/1", "same")]);
        sleep(SETTLED).await;
        // The feed does not learn that its member is gone, and quorum checks are made on new connections.
        let mut links = world.cluster.links(From::Rangecache);
        links.retain(|link| link.carries_watch());
        links.iter().for_each(|link| link.lose(true));
        roll_back(&world, 3, [put("/sim/a/0", "other"), put("/sim/b/1", "same")]).await;
        let served = read_from_memory(&world, "/sim/a/0").await;
        assert!(rangecache.stop().await, "every task ends");
        assert_eq!(served, stored(&world, "/sim/a/0"));
    });
}

/// A past revision is read that a rollback has lost, and that was written again. Every event but that one is the same, and so is
/// the newest state. The mirror has the lost revision from its load, or from its feed.
fn lost_past_is_not_served(is_loaded: bool) {
    run(async move {
        let lost = || [put("/sim/a/0", "lost")];
        let world = world([put("/sim/a/0", "zero"), put("/sim/b/1", "one")]).await;
        if is_loaded {
            commit(&world, lost());
        }
        let rangecache = start(&[]).await;
        read_from_memory(&world, "/sim/a/0").await;
        if !is_loaded {
            commit(&world, lost());
        }
        commit(&world, [put("/sim/a/0", "same")]);
        sleep(SETTLED).await;
        roll_back(&world, 3, [put("/sim/a/0", "other"), put("/sim/a/0", "same")]).await;
        read_from_memory(&world, "/sim/a/0").await;
        let past = RangeRequest {
            key: b"/sim/a/0".to_vec(),
            revision: 4,
            ..RangeRequest::default()
        };
        let read = client().await.range(&past).await.expect("a response");
        assert!(rangecache.stop().await, "every task ends");
        assert_eq!(read.kvs[0].value, b"other");
    });
}

#[test]
fn past_of_a_mirror_that_was_loaded_before_a_rollback_is_not_served() {
    lost_past_is_not_served(true);
}

#[test]
fn past_that_a_feed_has_brought_before_a_rollback_is_not_served() {
    lost_past_is_not_served(false);
}

#[test]
fn page_after_a_rollback_does_not_continue_a_list_of_before() {
    run(async {
        let world = world((0..KEYS).map(|number| put(&key(number), "first"))).await;
        // The list is of no mirror, and the one that there is has nothing that would show the rollback.
        let rangecache = start(&["--cache-prefix=/sim/b/"]).await;
        sleep(SETTLED).await;
        let first = RangeRequest {
            limit: 1,
            ..RangeRequest::prefix("/sim/a/")
        };
        let client = client().await;
        let page = client.range(&first).await.expect("a response");
        assert_eq!(usize::try_from(page.count), Ok(KEYS));
        // Behind the revision that the list has, so that only its count shows that there are fewer keys.
        let again = (0..KEYS).map(|_| put(&key(0), "again"));
        roll_back(&world, 100, again).await;
        sleep(SETTLED).await;
        let next = RangeRequest {
            key: format!("{}\0", key(0)).into_bytes(),
            revision: page.revision(),
            ..first
        };
        let got = client.range(&next).await.expect("a response");
        let expected = world
            .cluster
            .look(|state| state.history().range(&next, next.revision));
        assert!(rangecache.stop().await, "every task ends");
        assert_eq!(
            (got.kvs, got.count, got.more),
            (expected.kvs, expected.count, expected.more)
        );
    });
}

/// Key that is watched behind a hub.
const WATCHED: &str = "/sim/a/0";

/// A hub of everything, and a leaf with the mirrors that `prefixes` name, whose memory answers.
async fn hub_and_leaf(world: &World, prefixes: &[&'static str]) -> (Hub, Rangecache) {
    let settings = |flags: &[&'static str]| Settings::with_flags(&[&["--watch-cache=auto"], flags].concat());
    let hub = Hub::start(0, settings(&[])).await;
    let leaf = Rangecache::start_at(Place::before_hubs(0..1, false), settings(prefixes)).await;
    while leaf.memory_answers() == 0 {
        read_from_memory(world, WATCHED).await;
    }
    (hub, leaf)
}

/// Revisions that are lost. The last one of the leaf is a delete, which leaves nothing to compare once it is compacted. The hub has a
/// later one.
fn lost() -> [Change; 3] {
    let delete = Change::Delete(WATCHED.into());
    [put(WATCHED, "lost"), delete, put("/sim/b/0", "lost")]
}

/// Puts every member back behind the revisions that are [`lost`], and compacts those that are committed in their place, before
/// rangecache reaches one.
async fn roll_back_lost(world: &World) {
    let before = world.cluster.look(|state| state.history().newest().revision);
    put_back(world, before - 3, (0..6).map(|_| put(WATCHED, "again"))).await;
    world.cluster.change(|state| state.history_mut().compact(before));
    (0..MEMBERS).for_each(|member| world.members.reconnect(member, From::Rangecache));
}

#[test]
fn watch_behind_a_hub_does_not_continue_over_a_rollback_that_nothing_shows_any_more() {
    run(async {
        let world = world((0..6).map(|number| put(&key(number), "first"))).await;
        let (hub, leaf) = hub_and_leaf(&world, &["--cache-prefix=/sim/a/"]).await;
        let create = WatchCreateRequest {
            key: WATCHED.into(),
            ..WatchCreateRequest::default()
        };
        let mut watch = client().await.watch(create).await;
        let next = async |watch: &mut Stream| watch.next_as::<WatchResponse>(SETTLED * 5).await;
        commit(&world, lost());
        let mut events = Vec::new();
        while events.len() < 2 {
            events.extend(next(&mut watch).await.expect("both events").events);
        }
        sleep(SETTLED).await;
        roll_back_lost(&world).await;
        let mut after = Vec::new();
        while let Some(response) = next(&mut watch).await {
            after.extend(response.events);
        }
        assert!(
            leaf.stop().await && hub.rangecache.stop().await,
            "every task ends"
        );
        assert_eq!(after, [], "events of the other history");
    });
}

#[test]
fn load_of_before_a_rollback_is_not_continued_behind_a_hub_and_the_next_one_is() {
    run(async {
        let world = world([put(WATCHED, "first"), put("/sim/c/0", "first")]).await;
        let prefixes = ["--cache-prefix=/sim/a/", "--cache-prefix=/sim/c/"];
        let (hub, leaf) = hub_and_leaf(&world, &prefixes).await;
        let (mirrors, upstream) = leaf.parts();
        let history = mirrors.cluster_state.history();
        let join = async || {
            let fan_out = mirrors.fan_out(mirrors.at(0)?)?;
            let join = Join {
                key: WATCHED.into(),
                range_end: Bytes::new(),
                first_revision: i64::MAX,
                known_revision: 0,
            };
            fan_out
                .join(&Arc::new(Signal::new(0)), None, vec![join])
                .await
                .ok()
        };
        let may_continue = async |readers: &[Reader]| {
            let deadline = Instant::now() + SETTLED;
            let connection = upstream.dedicated(ReceiveWindow::DEDICATED, None, deadline).await;
            let watched = mirrors.watched(readers.iter().map(|reader| (0, reader)));
            let connection = connection.expect("connects");
            let responded = range(&connection, header_request(Bytes::from_static(b"any"))).await;
            responded.expect("the hub responds");
            mirrors.may_continue(&connection, history, &watched).await
        };
        let before = join().await.expect("the mirror is in service");
        assert!(may_continue(&before).await);
        // Not of the other mirror, which is the same in both histories.
        commit(&world, lost());
        sleep(SETTLED).await;
        roll_back_lost(&world).await;
        let loaded_again = async {
            loop {
                sleep(SETTLED).await;
                match join().await {
                    Some(after) if after[0].generation() != before[0].generation() => return after,
                    _ => {}
                }
            }
        };
        let after = timeout(SERVED_TIMEOUT, loaded_again).await;
        let after = after.expect("the mirror is in service again");
        assert_eq!(
            mirrors.cluster_state.history(),
            history,
            "nothing has shown the rollback"
        );
        let continued = (may_continue(&before).await, may_continue(&after).await);
        drop((mirrors, upstream, before, after));
        assert!(
            leaf.stop().await && hub.rangecache.stop().await,
            "every task ends"
        );
        assert_eq!(continued, (false, true));
    });
}

#[test]
fn load_interrupted_by_a_rollback_has_keys_of_one_history() {
    run(async {
        let first = (0..KEYS).map(|number| put(&key(number), "first"));
        // In both histories, so that only what was read before the interruption shows which one it is.
        let newest = || NEWEST.map(|number| put(&key(number), "again"));
        let world = world(first.chain([put(&key(5), "lost")]).chain(newest())).await;
        // Each chunk takes a while.
        world.cluster.change(|state| {
            state.members.iter_mut().for_each(|member| member.delay = 40..41);
        });
        let rangecache = start(&[]).await;
        while world.cluster.reads.load(Ordering::Relaxed) == 0 {
            sleep(Duration::from_millis(5)).await;
        }
        sleep(Duration::from_millis(700)).await;
        let loaded = rangecache.metrics().sum("rangecache_mirror_load_keys");
        assert!((10.0..90.0).contains(&loaded), "{loaded} keys are loaded");
        let last = i64::try_from(KEYS).expect("is small") + 1;
        let again = [put(&key(100), "other")].into_iter().chain(newest());
        roll_back(&world, last, again).await;
        let served = read_from_memory(&world, &key(5)).await;
        assert!(rangecache.stop().await, "every task ends");
        assert_eq!(served, stored(&world, &key(5)));
    });
}
