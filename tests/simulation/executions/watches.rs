//! Watches of mirrors that are gone, and memory of those that clients have cancelled.

use std::cell::Cell;
use std::ops::Range;
use std::time::Duration;

use futures_util::future::join_all;
use prost::Message as _;
use testkit::grpc::Stream;
use testkit::kv::WATCH;
use testkit::pb::{WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse};
use tokio::time::{Instant, sleep, timeout};

use super::{SETTLED, client, commit, put, read_from_memory, roll_back, run, start, world};
use crate::cluster::MEMBERS;
use crate::members::From;
use crate::proxy::{Rangecache, Settings};

/// Revision of the next write: memory serves a watch from there on.
const NEXT_REVISION: i64 = 3;
/// Watches that are created and cancelled, one after the other.
const CANCELLED: usize = 400;
/// Length of their keys, which differ.
const KEY_BYTES: usize = 30_000;
/// `--watch-max-bytes`.
const MAX_BYTES: f64 = 1_048_576.0;
/// Bound on the time until a response arrives.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(60);
/// Length of a value for whose event a stream needs room of its own.
const LONG_VALUE_BYTES: usize = 3_000;
/// Watchers with keys of [`KEY_BYTES`] beside which [`MAX_BYTES`] have no room for an event of [`HUGE_VALUE_BYTES`].
const LARGE_WATCHERS: usize = 12;
const HUGE_VALUE_BYTES: usize = 400_000;
/// Time until a stream has returned to memory, and a feed that is late is not given up yet.
const RETURNED: Duration = Duration::from_millis(1_200);
/// Bound on the time until an event arrives that does not wait for room.
const EVENT_TIMEOUT: Duration = Duration::from_secs(1);

/// Attempts until a stream waits for room; one of ten does not.
const ATTEMPTS: usize = 20;

async fn next(stream: &mut Stream) -> WatchResponse {
    let message = timeout(RESPONSE_TIMEOUT, stream.next())
        .await
        .expect("a response");
    let message = message.unwrap_or_else(|| panic!("the stream ended: {:?}", stream.end()));
    WatchResponse::decode(message).expect("decodes")
}

async fn create(stream: &mut Stream, key: Vec<u8>) -> i64 {
    create_from(stream, key, NEXT_REVISION).await
}

async fn create_from(stream: &mut Stream, key: Vec<u8>, start_revision: i64) -> i64 {
    stream.send(&WatchRequest {
        create_request: Some(WatchCreateRequest {
            key,
            start_revision,
            ..WatchCreateRequest::default()
        }),
        ..WatchRequest::default()
    });
    let created = next(stream).await;
    assert!(created.created && !created.canceled, "{created:?}");
    created.watch_id
}

/// Events that the watcher of `stream` still gets, until the stream ends or the watcher is cancelled.
async fn rest(stream: &mut Stream) -> Vec<Vec<u8>> {
    let mut values = Vec::new();
    let ended = async {
        while let Some(message) = stream.next().await {
            let response = WatchResponse::decode(message).expect("decodes");
            if response.canceled {
                return;
            }
            let events = response.events.into_iter().filter_map(|event| event.kv);
            values.extend(events.map(|kv| kv.value));
        }
    };
    timeout(RESPONSE_TIMEOUT, ended)
        .await
        .expect("the watcher of a lost history ends");
    values
}

#[test]
fn watcher_of_a_mirror_that_is_removed_without_a_feed_does_not_continue_after_a_rollback() {
    run(async {
        let world = world([put("/sim/a/0", "zero")]).await;
        let rangecache = start(&[]).await;
        read_from_memory(&world, "/sim/a/0").await;
        let watcher = client().await;
        let mut watch = watcher.open(WATCH);
        create(&mut watch, b"/sim/a/0".to_vec()).await;
        commit(&world, [put("/sim/a/0", "lost"), put("/sim/a/0", "same")]);
        let mut received = 0;
        while received < 2 {
            received += next(&mut watch).await.events.len();
        }
        // The mirror that would show that the history is another one is gone, and the new one begins with that.
        let members = 0..MEMBERS;
        members.for_each(|member| world.members.cut_off(member, From::Rangecache));
        sleep(Duration::from_secs(1)).await;
        rangecache.reload(&["/sim/b/"]).await;
        roll_back(&world, 2, [put("/sim/a/0", "other"), put("/sim/a/0", "same")]).await;
        commit(&world, [put("/sim/a/0", "later")]);
        let rest = rest(&mut watch).await;
        assert!(rangecache.stop().await, "every task ends");
        assert!(rest.is_empty(), "{rest:?}");
    });
}

/// Contents of the mirror prove nothing about events that its feed has not shown yet, but another member's stream has.
#[test]
fn watcher_that_is_ahead_of_its_mirror_does_not_continue_at_etcd_after_a_rollback() {
    const FOREVER: Range<u64> = 600_000..600_001;
    let (fed_by, others) = (0, 1..MEMBERS);
    run(async {
        let world = world([put("/sim/a/0", "zero")]).await;
        let cut_off = |member| world.members.cut_off(member, From::Rangecache);
        others.clone().for_each(cut_off);
        let rangecache = start(&[]).await;
        read_from_memory(&world, "/sim/a/0").await;
        let reconnect = |member| world.members.reconnect(member, From::Rangecache);
        others.for_each(reconnect);
        sleep(SETTLED).await;
        let watcher = client().await;
        let mut watches: Vec<_> = (0..2 * MEMBERS).map(|_| watcher.open(WATCH)).collect();
        for watch in &mut watches {
            // Of which memory does not have all events.
            create_from(watch, b"/sim/a/0".to_vec(), 1).await;
        }
        world
            .cluster
            .change(|state| state.members[fed_by].watch_delay = FOREVER);
        commit(&world, [put("/sim/a/0", "lost")]);
        sleep(RETURNED).await;
        // The mirror cannot follow, and is loaded again.
        let compacting = async {
            sleep(Duration::from_millis(100)).await;
            world.cluster.change(|state| {
                state.history_mut().compact(3);
                state.members[fed_by].watch_delay = 0..1;
            });
        };
        tokio::join!(roll_back(&world, 2, [put("/sim/a/0", "other")]), compacting);
        commit(&world, [put("/sim/a/0", "later")]);
        let rest = join_all(watches.iter_mut().map(rest)).await;
        assert!(rangecache.stop().await, "every task ends");
        let has = |values: &[Vec<u8>], value: &str| values.contains(&value.into());
        let is_of_both = |values: &&Vec<_>| has(values, "lost") && has(values, "later");
        assert_eq!(rest.iter().find(is_of_both), None);
    });
}

/// Rolls back under a stream with watchers of two mirrors: the keys of one, which are written to later, show no difference.
#[test]
fn stream_over_two_mirrors_gets_nothing_of_another_history() {
    const KEYS: [&str; 2] = ["/sim/a/0", "/sim/b/0"];
    for (slow, [other, same]) in (0..MEMBERS).flat_map(|slow| [(slow, KEYS), (slow, [KEYS[1], KEYS[0]])]) {
        run(async {
            let world = world(KEYS.map(|key| put(key, "zero"))).await;
            let rangecache = start(&["--cache-prefix=/sim/a/", "--cache-prefix=/sim/b/"]).await;
            for key in KEYS {
                read_from_memory(&world, key).await;
            }
            let watcher = client().await;
            let mut watch = watcher.open(WATCH);
            for key in KEYS {
                create_from(&mut watch, key.into(), NEXT_REVISION + 1).await;
            }
            commit(&world, [put(other, "lost"), put(same, "same")]);
            let mut received = 0;
            while received < 2 {
                received += next(&mut watch).await.events.len();
            }
            // A feed of this member resumes later than one of another.
            world.cluster.change(|state| state.members[slow].delay = 300..301);
            roll_back(&world, 3, [put("/sim/c", "other"), put(same, "same")]).await;
            commit(&world, [put(same, "later")]);
            let rest = rest(&mut watch).await;
            assert!(rangecache.stop().await, "every task ends");
            assert!(rest.is_empty(), "{rest:?}");
        });
    }
}

/// The stream waits for room for an event of a mirror that is removed then: nothing of that mirror ends its watcher.
#[test]
fn stream_that_waits_for_room_ends_watchers_of_a_lost_history_before_it_shows_the_next() {
    // A stream that got room in time is handed over to etcd instead, whose history is not its watchers' any longer: it ends
    // before it has shown anything, and the client begins again.
    let waits = (0..ATTEMPTS).any(|_| {
        let waits = Cell::new(false);
        run(async { waits.set(waits_for_room_while_history_is_lost().await) });
        waits.get()
    });
    assert!(waits, "no stream waited for room");
}

/// Returns whether the stream waited for room.
async fn waits_for_room_while_history_is_lost() -> bool {
    let world = world([put("/sim/a/0", "zero"), put("/sim/b/0", "zero")]).await;
    let settings = Settings {
        prefixes: vec!["/sim/a/", "/sim/b/"],
        ..Settings::with_flags(&["--watch-cache=auto", "--watch-max-bytes=1MiB"])
    };
    let rangecache = Rangecache::start(settings).await;
    for key in ["/sim/a/0", "/sim/b/0"] {
        read_from_memory(&world, key).await;
    }
    let other = client().await;
    let mut large = other.open(WATCH);
    for number in 0..LARGE_WATCHERS {
        let key = format!("/sim/b/{}{number}", "k".repeat(KEY_BYTES));
        create_from(&mut large, key.into(), NEXT_REVISION + 1).await;
    }
    let watcher = client().await;
    let mut watch = watcher.open(WATCH);
    let lost = create_from(&mut watch, b"/sim/a/0".to_vec(), NEXT_REVISION + 1).await;
    commit(&world, [put("/sim/a/0", &"v".repeat(HUGE_VALUE_BYTES))]);
    sleep(Duration::from_millis(100)).await;
    rangecache.reload(&["/sim/b/"]).await;
    roll_back(&world, NEXT_REVISION, []).await;
    read_from_memory(&world, "/sim/b/0").await;
    watch.send(&WatchRequest {
        create_request: Some(WatchCreateRequest {
            key: b"/sim/b/0".to_vec(),
            ..WatchCreateRequest::default()
        }),
        ..WatchRequest::default()
    });
    let shown = timeout(RESPONSE_TIMEOUT, watch.next())
        .await
        .expect("a response, or the end");
    let Some(first) = shown else {
        assert!(rangecache.stop().await, "every task ends");
        return false;
    };
    let first = WatchResponse::decode(first).expect("decodes");
    let second = next(&mut watch).await;
    assert!(rangecache.stop().await, "every task ends");
    let is_cancelled = first.canceled && first.watch_id == lost && first.compact_revision > 0;
    assert!(is_cancelled, "{first:?}");
    assert!(second.created && !second.canceled, "{second:?}");
    true
}

#[test]
fn topics_of_cancelled_watchers_delay_no_other_watch() {
    run(async {
        let world = world([put("/sim/a/0", "zero")]).await;
        let rangecache = start(&["--watch-max-bytes=1MiB"]).await;
        read_from_memory(&world, "/sim/a/0").await;
        let watcher = client().await;
        let mut watch = watcher.open(WATCH);
        create(&mut watch, b"/sim/a/1".to_vec()).await;

        let other = client().await;
        let mut stream = other.open(WATCH);
        for number in 0..CANCELLED {
            let mut key = vec![b'k'; KEY_BYTES];
            key.extend_from_slice(number.to_string().as_bytes());
            let watch_id = create(&mut stream, key).await;
            stream.send(&WatchRequest {
                cancel_request: Some(WatchCancelRequest { watch_id }),
                ..WatchRequest::default()
            });
            assert!(next(&mut stream).await.canceled);
        }
        // The memory of hubs is determined once a second.
        sleep(SETTLED).await;
        let held = rangecache.metrics().sum("rangecache_watch_bytes");
        let written = Instant::now();
        commit(&world, [put("/sim/a/1", &"v".repeat(LONG_VALUE_BYTES))]);
        let response = next(&mut watch).await;
        let took = written.elapsed();
        assert!(rangecache.stop().await, "every task ends");
        assert_eq!(response.events.len(), 1, "{response:?}");
        assert!(
            held <= MAX_BYTES,
            "{held} bytes are held, and the event took {took:?}"
        );
        assert!(took < EVENT_TIMEOUT, "an event of another client took {took:?}");
    });
}
