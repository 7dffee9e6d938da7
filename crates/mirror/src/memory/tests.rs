use etcd_store::cache::{HistoryLimits, Store, testing::KeyValue};

use super::*;
use crate::lifecycle;
use crate::testing::{Bench, SOON, live};

const VALUE_BYTES: usize = 1_000;

/// A value that does not become smaller by packing.
fn noise(seed: usize) -> String {
    let mut state = seed as u64 + 1;
    let mut letter = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        char::from(b' ' + u8::try_from(state >> 58).unwrap())
    };
    (0..VALUE_BYTES).map(|_| letter()).collect()
}

/// Keys below `/r/many/`, `/r/more/` and `/r/some/`.
fn objects() -> Vec<KeyValue> {
    let of = |prefix: &'static str, count: usize| {
        (0..count).map(move |index| KeyValue::new(format!("/r/{prefix}/{index:04}"), 1, noise(index)))
    };
    of("many", 1_000)
        .chain(of("more", 1_500))
        .chain(of("some", 500))
        .collect()
}

fn tree() -> Tree {
    Tree::from_sorted(objects().iter().map(KeyValue::entry))
}

/// A mirror of the objects with a budget of this many per cent of what they take.
async fn mirrors(percent: u64) -> (Bench, Arc<crate::Mirrors>) {
    let bench = Bench::new().await;
    let budget = (tree().memory_bytes() * percent / 100).to_string();
    let mirrors = bench.mirrors(&["--cache-max-bytes", &budget]);
    let mirror = mirrors.at(0).unwrap();
    let store = Store::new(tree(), 10, HistoryLimits::default(), mirror.now());
    mirror.fill(mirror.epoch(), store).unwrap();
    mirror.put_in_service(mirror.epoch()).unwrap();
    (bench, mirrors)
}

/// Length of the values that are not held, by prefix.
fn left_out(mirror: &Mirror) -> Vec<(String, u64)> {
    let sizes = crate::prefix_sizes(std::iter::once(mirror));
    let named = sizes
        .into_iter()
        .map(|(prefix, size)| (String::from_utf8(prefix).unwrap(), size.not_held_bytes));
    named.filter(|(_, bytes)| *bytes > 0).collect()
}

fn names(mirror: &Mirror) -> Vec<String> {
    left_out(mirror).into_iter().map(|(prefix, _)| prefix).collect()
}

#[tokio::test]
async fn feed_leaves_out_the_largest_prefix_and_only_as_much_as_it_must() {
    let (_bench, mirrors) = mirrors(80).await;
    let (set, mirror) = (&mirrors.set, mirrors.at(0).unwrap());
    let before = mirror.view().unwrap();
    assert_eq!(leave_out(set, mirror, mirror.epoch()).await, Ok(true));
    assert!(set.within_budget(mirror));
    assert_eq!(names(mirror), ["/r/more/"]);
    let view = mirror.view().unwrap();
    assert_eq!(
        (view.revision, view.tree.len()),
        (before.revision, before.tree.len())
    );
    drop((before, view));
    assert!(u64::try_from(mirror.metrics.not_held_bytes.get()).unwrap() < tree().summary().encoded_bytes / 3);
}

#[tokio::test]
async fn prefix_of_which_values_are_left_out_is_left_out_first() {
    let (_bench, mirrors) = mirrors(80).await;
    let (set, mirror) = (&mirrors.set, mirrors.at(0).unwrap());
    let range = (&b"/r/some/0000"[..], &b"/r/some/0100"[..]);
    let left = mirror
        .view()
        .unwrap()
        .tree
        .repack(range, Repacking::LeaveOut, u64::MAX)
        .unwrap();
    mirror.put_repacked(mirror.epoch(), &left).unwrap();
    drop(left);
    assert_eq!(leave_out(set, mirror, mirror.epoch()).await, Ok(true));
    assert_eq!(names(mirror), ["/r/more/", "/r/some/"]);
    let whole = objects()
        .iter()
        .filter(|kv| kv.key.starts_with(b"/r/some/"))
        .map(|kv| kv.field().len())
        .sum::<usize>();
    assert_eq!(left_out(mirror)[1].1, whole as u64);
}

#[tokio::test]
async fn prefix_that_is_read_keeps_its_values() {
    let (_bench, mirrors) = mirrors(80).await;
    let (set, mirror) = (&mirrors.set, mirrors.at(0).unwrap());
    let counters = &mirrors
        .telemetry
        .metrics
        .group::<crate::metrics::PrefixMetrics>()
        .counters;
    counters.replace([&b"/r/more/"[..]].into_iter());
    (0..9).for_each(|_| counters.record_read(b"/r/more/"));
    assert_eq!(leave_out(set, mirror, mirror.epoch()).await, Ok(true));
    assert_eq!(names(mirror), ["/r/many/"]);
}

#[tokio::test]
async fn mirror_whose_keys_alone_are_too_large_has_no_room() {
    let (_bench, mirrors) = mirrors(2).await;
    let (set, mirror) = (&mirrors.set, mirrors.at(0).unwrap());
    assert_eq!(leave_out(set, mirror, mirror.epoch()).await, Ok(false));
    assert_eq!(
        mirror.view().unwrap().tree.summary().not_held_bytes,
        tree().summary().encoded_bytes
    );
}

#[tokio::test]
async fn nothing_is_left_out_of_contents_that_were_dropped() {
    let (_bench, mirrors) = mirrors(80).await;
    let (set, mirror) = (&mirrors.set, mirrors.at(0).unwrap());
    let epoch = mirror.epoch();
    mirror.replace_history(20);
    assert_eq!(leave_out(set, mirror, epoch).await, Err(StaleEpoch));
}

/// Puts keys below `/r/one/` and `/r/two/`.
fn put_all(bench: &Bench) {
    let mut etcd = bench.etcd.lock();
    for (prefix, count) in [("/r/one/", 150), ("/r/two/", 50)] {
        for index in 0..count {
            etcd.put(&format!("{prefix}{index:03}"), &noise(index));
        }
    }
}

#[tokio::test]
async fn load_over_the_budget_leaves_out_values_and_they_are_held_again_once_there_is_room() {
    let bench = Bench::new().await;
    put_all(&bench);
    let live = live(&["--cache-max-bytes", "150000"]);
    let mirrors = bench.mirrors_of(&live);
    let mirror = mirrors.at(0).unwrap();
    lifecycle::start(&mirrors, 0);
    let mut changes = mirror.changes();
    let in_service = changes.wait_for(|()| mirror.revision().is_ok());
    assert!(tokio::time::timeout(SOON, in_service).await.is_ok());
    assert_eq!(names(mirror), ["/r/one/"]);
    assert_eq!(mirror.view().unwrap().tree.len(), 203);
    assert!(mirrors.set.within_budget(mirror));
    let refilling = || hold_again(&mirrors.set, &mirrors.upstream, mirror);
    let left_out_by_load = left_out(mirror);
    assert!(refilling().await.is_some());
    assert_eq!(left_out(mirror), left_out_by_load, "there is no room");

    live.store(
        crate::testing::live(&["--cache-max-bytes", "1MiB"])
            .load()
            .as_ref()
            .clone(),
    );
    // The first three keys are those of the bench.
    bench.etcd.lock().rewrite(7);
    assert!(refilling().await.is_some());
    let tree = mirror.view().unwrap().tree;
    let rest = tree.next_not_held(b"", u64::MAX).unwrap();
    let another = &b"/r/one/002"[..];
    assert_eq!(
        (&*rest.first, &*rest.last),
        (another, another),
        "another value than was left out"
    );
    let held = KeyValue::from(tree.get(b"/r/one/149").unwrap());
    assert_eq!(held.value, noise(149).into_bytes());
}
