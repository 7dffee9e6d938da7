use etcd_store::cache::{Change, HistoryLimits, Store, Tree, testing::KeyValue};

use super::*;
use crate::testing::{Bench, SOON};

const KEYS: usize = 8_000;

fn object(index: usize, revision: i64) -> KeyValue {
    KeyValue::new(format!("/a/{index:05}"), revision, vec![b'v'; 500])
}

fn tree() -> Tree {
    Tree::from_sorted((0..KEYS).map(|index| object(index, 1).entry()))
}

/// Memory of the mirror, unpacked.
fn plain_bytes() -> u64 {
    tree().memory_bytes()
}

fn fill(mirror: &Mirror) {
    let limits = HistoryLimits::default();
    let store = Store::new(tree(), 10, limits, mirror.now());
    mirror.fill(mirror.epoch(), store).unwrap();
    mirror.put_in_service(mirror.epoch()).unwrap();
}

/// Mirrors with a budget of this many per cent of what one of them takes unpacked.
async fn mirrors(percent: u64, flags: &[&str]) -> (Bench, std::sync::Arc<crate::Mirrors>) {
    let bench = Bench::new().await;
    let budget = (plain_bytes() * percent / 100).to_string();
    let mirrors = bench.mirrors(&[flags, &["--cache-prefix", "/a/", "--cache-max-bytes", &budget]].concat());
    fill(mirrors.at(0).unwrap());
    (bench, mirrors)
}

fn packed_percent(mirror: &Mirror) -> i64 {
    let all = mirror.view().unwrap().tree.summary().encoded_bytes;
    mirror.metrics.packed_encoded_bytes.get() * 100 / i64::try_from(all).unwrap()
}

#[tokio::test(start_paused = true)]
async fn what_is_not_read_is_packed_until_memory_is_no_longer_scarce() {
    let (_bench, mirrors) = mirrors(120, &[]).await;
    let mirror = mirrors.at(0).unwrap();
    let hot = format!("/a/{:05}", KEYS / 2);
    let running = repack_all(&mirrors.set);
    let reading = async {
        while due(&mirrors.set, mirror) == Some(Repacking::PackCold) {
            assert!(mirror.view().unwrap().tree.get(hot.as_bytes()).is_some());
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::select! {
        () = running => {}
        done = tokio::time::timeout(SOON, reading) => done.unwrap(),
    }
    let packed = packed_percent(mirror);
    assert!((5..90).contains(&packed), "{packed} %: as much as is necessary");
    let view = mirror.view().unwrap();
    assert!(!view.tree.get(hot.as_bytes()).unwrap().is_packed());
    assert_eq!((view.revision, view.tree.len()), (10, KEYS as u64));
    let counted = mirror.metrics.repacked_bytes.of("packed").get();
    assert_eq!(
        i64::try_from(counted),
        Ok(mirror.metrics.packed_encoded_bytes.get())
    );
}

#[tokio::test]
async fn feed_makes_room_at_once_and_only_with_what_can_be_packed() {
    let (_bench, one) = mirrors(70, &[]).await;
    let mirror = one.at(0).unwrap();
    assert!(!one.set.within_budget(mirror));
    assert_eq!(make_room(&one.set, mirror, mirror.epoch()).await, Ok(true));
    assert!(one.set.within_budget(mirror) && packed_percent(mirror) < 90);

    let (_bench, one) = mirrors(5, &[]).await;
    let mirror = one.at(0).unwrap();
    assert_eq!(make_room(&one.set, mirror, mirror.epoch()).await, Ok(false));
    let held = mirror.view().unwrap().tree.summary();
    assert_eq!(
        held.not_held_bytes, held.encoded_bytes,
        "its keys alone are too large"
    );

    let (_bench, one) = mirrors(20, &[]).await;
    let mirror = one.at(0).unwrap();
    assert_eq!(make_room(&one.set, mirror, mirror.epoch()).await, Ok(true));
    assert_eq!(mirror.metrics.not_held_bytes.get(), 0, "packing is enough");

    let (_bench, one) = mirrors(70, &["--cache-pack", "never"]).await;
    let mirror = one.at(0).unwrap();
    assert_eq!(make_room(&one.set, mirror, mirror.epoch()).await, Ok(false));
    assert_eq!(packed_percent(mirror), 0);
}

#[tokio::test]
async fn packing_that_began_before_a_drop_changes_nothing() {
    let (_bench, mirrors) = mirrors(70, &[]).await;
    let mirror = mirrors.at(0).unwrap();
    let (epoch, mut hand) = (mirror.epoch(), Hand::default());
    mirror.replace_history(20);
    let stepped = step(
        mirror,
        epoch,
        (&mut hand, &Bytes::new()),
        Repacking::PackAll,
        STEP_BYTES,
    )
    .await;
    assert_eq!(stepped, Err(StaleEpoch));
}

#[tokio::test]
async fn view_of_a_mirror_without_its_feed_is_packed_too_and_it_stays_out_of_service() {
    let (_bench, mirrors) = mirrors(70, &[]).await;
    let mirror = mirrors.at(0).unwrap();
    mirror.lose_feed(mirror.epoch(), false).unwrap();
    assert_eq!(make_room(&mirrors.set, mirror, mirror.epoch()).await, Ok(true));
    assert!(mirror.view().is_err());
    let last = mirror.last_view().unwrap();
    assert!(last.tree.memory().packed_encoded > 0 && last.revision == 10);
}

#[tokio::test(start_paused = true)]
async fn what_is_read_is_unpacked_once_there_is_room() {
    let (_bench, mirrors) = mirrors(400, &["--cache-pack", "auto"]).await;
    let mirror = mirrors.at(0).unwrap();
    let mut hand = Hand::default();
    step(
        mirror,
        mirror.epoch(),
        (&mut hand, &Bytes::new()),
        Repacking::PackAll,
        u64::MAX,
    )
    .await
    .unwrap();
    assert_eq!(packed_percent(mirror), 100);
    let read = |index| {
        mirror
            .view()
            .unwrap()
            .tree
            .get(object(index, 1).key.as_slice())
            .cloned()
            .unwrap()
    };
    read(0);
    go_round(&mirrors.set, mirror, mirror.epoch(), &mut hand)
        .await
        .unwrap();
    assert!(!read(0).is_packed() && read(KEYS - 1).is_packed());
}

#[tokio::test(start_paused = true)]
async fn always_packs_what_was_written_when_it_is_written_no_longer() {
    let (_bench, mirrors) = mirrors(400, &["--cache-pack", "always"]).await;
    let mirror = mirrors.at(0).unwrap();
    let mut hand = Hand::default();
    let put = vec![Change::put(object(0, 11).entry())];
    mirror.apply(mirror.epoch(), put, 11).unwrap();
    go_round(&mirrors.set, mirror, mirror.epoch(), &mut hand)
        .await
        .unwrap();
    let packed = packed_percent(mirror);
    assert_eq!(packed, 99, "all but the leaf whose event is in the window");
    assert!(
        !mirror
            .view()
            .unwrap()
            .tree
            .get(&object(0, 1).key)
            .unwrap()
            .is_packed()
    );
}

#[tokio::test]
async fn load_packs_above_three_quarters_of_what_the_other_mirrors_leave() {
    let bench = Bench::new().await;
    let budget = 100_000_000_u64;
    let flags = ["--cache-prefix", "/a/,/b/", "--cache-max-bytes", "100000000"];
    let mirrors = bench.mirrors(&flags);
    let (one, other) = (mirrors.at(0).unwrap(), mirrors.at(1).unwrap());
    fill(one);
    assert_eq!(
        packing(&mirrors.set, other),
        Packing::Above(budget / 4 * 3 - one.memory_bytes())
    );
    assert_eq!(packing(&mirrors.set, one), Packing::Above(budget / 4 * 3));
}
