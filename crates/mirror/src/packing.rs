//! Values are packed as memory becomes scarce, those first that are not read, and unpacked once there is room.
//!
//! | memory of all mirrors, of `--cache-max-bytes` | `--cache-pack=auto` |
//! |---|---|
//! | below a half | values that are read are unpacked |
//! | above three quarters | a load packs, and of what is loaded what was neither read nor written for a while |
//! | above seven eighths | whatever can be |
//! | above the whole | the feed of the mirror waits until there is room: once all is packed, values are [left out](super::residency) |
//!
//! The work is done in small steps off the threads that serve, with pauses between them. What is packed, and what that means
//! for the history, is the matter of [`Tree::repack`](etcd_store::cache::Tree::repack).

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::flags::CachePack;
use super::residency::{leave_out, put};
use super::set::MirrorSet;
use super::view::{Epoch, Mirror, StaleEpoch};
use etcd_store::cache::{Packing, Repacking};
use rangecache_base::blocking::compute;

/// Time in which a value must be read or written so that it counts as in use. Between two looks at one mirror.
const LOOK_INTERVAL: Duration = Duration::from_secs(5);
/// Length of the entries of one step in bytes: a millisecond, which calls may wait for if every core is busy.
const STEP_BYTES: u64 = 256 << 10;
/// Length of a step while the feed waits.
const URGENT_STEP_BYTES: u64 = 2 << 20;
/// Length of the entries of a mirror up to which a step needs no thread of its own: some tenths of a millisecond.
const AT_ONCE_BYTES: u64 = 64 << 10;
/// Pause after a step, in times of its duration: a fifth of one core.
const PAUSE_STEPS: u32 = 4;

/// Key at which the next step on a mirror begins; empty at its first key.
type Hand = Box<[u8]>;

/// Packing of the next load of `mirror`.
pub(super) fn while_loading(set: &MirrorSet, mirror: &Mirror) -> Packing {
    match set.cache_pack() {
        CachePack::Never => Packing::Never,
        CachePack::Always => Packing::Always,
        CachePack::Auto => {
            let others = set.max_bytes() - set.budget_of(mirror);
            Packing::Above(scarce_from(set.max_bytes()).saturating_sub(others))
        }
    }
}

/// Packs and unpacks what is loaded, for ever.
pub(super) async fn run(set: &MirrorSet) {
    let mut hands = HashMap::new();
    loop {
        tokio::time::sleep(LOOK_INTERVAL).await;
        for (position, slot) in set.present() {
            let hand = hands.entry(position).or_default();
            let epoch = slot.mirror.epoch();
            // Contents that were dropped meanwhile are loaded again.
            let _ = go_round(set, &slot.mirror, epoch, hand).await;
        }
    }
}

/// Packs all of `mirror` that can be, then leaves out values, until its memory is within its budget; returns whether it is.
pub(super) async fn make_room(set: &MirrorSet, mirror: &Mirror, epoch: Epoch) -> Result<bool, StaleEpoch> {
    let mut hand = Hand::default();
    while !set.within_budget(mirror) {
        if set.cache_pack() == CachePack::Never {
            return Ok(false);
        }
        step(mirror, epoch, &mut hand, Repacking::PackAll, URGENT_STEP_BYTES).await?;
        if hand.is_empty() {
            return leave_out(set, mirror, epoch).await;
        }
    }
    Ok(true)
}

/// Continues where the last look ended, at most once through the mirror, as long as there is a reason.
async fn go_round(set: &MirrorSet, mirror: &Mirror, epoch: Epoch, hand: &mut Hand) -> Result<(), StaleEpoch> {
    let first = hand.clone();
    let mut is_past_the_end = false;
    while let Some(what) = due(set, mirror) {
        let began = Instant::now();
        // What is unpacked must not be packed again at once.
        let room = (set.max_bytes() / 8 * 5).saturating_sub(set.used_bytes());
        let bytes = if what == Repacking::UnpackHot {
            room.min(STEP_BYTES)
        } else {
            // A step must not pack so much that there is room to unpack it again.
            STEP_BYTES.min(set.max_bytes() / 16)
        };
        step(mirror, epoch, hand, what, bytes).await?;
        is_past_the_end |= hand.is_empty();
        if is_past_the_end && *hand >= first {
            break;
        }
        tokio::time::sleep(began.elapsed() * PAUSE_STEPS).await;
    }
    Ok(())
}

/// Change that is due to the leaves of `mirror` now.
fn due(set: &MirrorSet, mirror: &Mirror) -> Option<Repacking> {
    let (used, max) = (set.used_bytes(), set.max_bytes());
    let unpack = || (used < max / 2 && mirror.metrics.packed_bytes.get() > 0).then_some(Repacking::UnpackHot);
    match set.cache_pack() {
        CachePack::Always => Some(Repacking::PackCold),
        CachePack::Never => unpack(),
        CachePack::Auto if used > max / 8 * 7 => Some(Repacking::PackAll),
        CachePack::Auto if used > scarce_from(max) => Some(Repacking::PackCold),
        CachePack::Auto => unpack(),
    }
}

fn scarce_from(max_bytes: u64) -> u64 {
    max_bytes / 4 * 3
}

/// Makes one step from `hand` on, which is moved.
async fn step(
    mirror: &Mirror,
    epoch: Epoch,
    hand: &mut Hand,
    what: Repacking,
    bytes: u64,
) -> Result<(), StaleEpoch> {
    let from = std::mem::take(hand);
    let Some(tree) = mirror.current_tree(epoch)? else {
        return Ok(());
    };
    let is_small = tree.summary().encoded_bytes <= AT_ONCE_BYTES;
    let making = compute(is_small, move || tree.repack(&from, what, bytes));
    // An error: the process stops.
    let repacked = making.await.map_err(|_| StaleEpoch)?;
    let repacked = put(mirror, epoch, repacked)?;
    let to = if what == Repacking::UnpackHot {
        "plain"
    } else {
        "packed"
    };
    let repacked_bytes = &mirror.metrics.repacked_bytes;
    repacked_bytes.of(to).inc_by(repacked.encoded_bytes());
    *hand = repacked.next().unwrap_or_default().into();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, SOON};
    use etcd_store::cache::testing::KeyValue;
    use etcd_store::cache::{Change, HistoryLimits, Store, Tree};

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
        let mirrors =
            bench.mirrors(&[flags, &["--cache-prefix", "/a/", "--cache-max-bytes", &budget]].concat());
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
        let running = run(&mirrors.set);
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
        let stepped = step(mirror, epoch, &mut hand, Repacking::PackAll, STEP_BYTES).await;
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
        assert!(last.tree.packed_bytes().encoded > 0 && last.revision == 10);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_read_is_unpacked_once_there_is_room() {
        let (_bench, mirrors) = mirrors(400, &["--cache-pack", "auto"]).await;
        let mirror = mirrors.at(0).unwrap();
        let mut hand = Hand::default();
        step(mirror, mirror.epoch(), &mut hand, Repacking::PackAll, u64::MAX)
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
            while_loading(&mirrors.set, other),
            Packing::Above(budget / 4 * 3 - one.memory_bytes())
        );
        assert_eq!(while_loading(&mirrors.set, one), Packing::Above(budget / 4 * 3));
    }
}
