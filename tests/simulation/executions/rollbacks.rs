//! Rollbacks of all members whose lost revisions are written again before rangecache reaches one, all but one of them as they
//! were: what a mirror has of the lost history may not be served.

use std::sync::atomic::Ordering;
use std::time::Duration;

use tokio::time::sleep;

use super::{SETTLED, put, read_from_memory, roll_back, run, start, stored, world};

/// Keys of a load with several chunks.
const KEYS: usize = 100;

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
fn load_interrupted_by_a_rollback_has_keys_of_one_history() {
    run(async {
        let keys = (0..KEYS).map(|number| put(&key(number), "first"));
        let world = world(keys.chain([put(&key(5), "lost")])).await;
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
        roll_back(&world, last, [put(&key(90), "other")]).await;
        let served = read_from_memory(&world, &key(5)).await;
        assert!(rangecache.stop().await, "every task ends");
        assert_eq!(served, stored(&world, &key(5)));
    });
}
