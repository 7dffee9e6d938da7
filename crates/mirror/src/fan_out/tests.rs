//! A fan-out on a mirror without etcd: joins, wake-ups, trimming, and how watchers end.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::{future::poll_fn, sync::Arc, time::Duration};

use bytes::Bytes;
use etcd_store::cache::{Change, HistoryLimits, Store, Tree};
use etcd_store::{cache::testing::KeyValue, keyspace::scope::Scope};
use rangecache_base::telemetry::{Reason, Telemetry};
use tokio::{task::JoinHandle, time::Instant};

use super::*;
use crate::lineage::{ClusterState, HistoryId};
use crate::view::{Mirror, ReaderEnd};

/// Bound on what must happen.
const SOON: Duration = Duration::from_secs(60);

/// A mirror, loaded at revision 10 without keys, and its fan-out.
pub(super) struct Bench {
    pub(super) mirror: Arc<Mirror>,
    pub(super) fan_out: Arc<FanOut>,
    pub(super) cluster_state: Arc<ClusterState>,
    task: JoinHandle<()>,
}

impl Bench {
    pub(super) fn new(limits: HistoryLimits) -> Bench {
        let cluster_state = Arc::<ClusterState>::default();
        let mirror = Mirror::new(
            Scope::prefix(b""),
            Arc::clone(&cluster_state),
            &Telemetry::default(),
        );
        let mirror = Arc::new(mirror);
        let fan_out = Arc::<FanOut>::default();
        fan_out.set_bounds(FanOutBounds {
            max_unused_bytes: 1 << 20,
            max_list_bytes: 16 << 20,
        });
        let (of_task, followed) = (Arc::clone(&fan_out), Arc::clone(&mirror));
        let task = tokio::spawn(async move { follow(&followed, &of_task).await });
        let bench = Bench {
            mirror,
            fan_out,
            cluster_state,
            task,
        };
        bench.load(Tree::default(), 10, limits);
        bench
    }

    pub(super) fn load(&self, tree: Tree, revision: i64, limits: HistoryLimits) {
        let (epoch, now) = (self.mirror.epoch(), self.mirror.now());
        self.mirror
            .fill(epoch, Store::new(tree, revision, limits, now))
            .unwrap();
        self.mirror.put_in_service(epoch).unwrap();
    }

    /// Applies puts of one revision.
    pub(super) fn put(&self, keys: &[&str], revision: i64) {
        let changes = keys
            .iter()
            .map(|key| Change::put(KeyValue::new(*key, revision, "v").entry()));
        let epoch = self.mirror.epoch();
        self.mirror.apply(epoch, changes.collect(), revision).unwrap();
    }

    async fn join(&self, key: &str, range_end: &str, first_revision: i64) -> Result<Watch, JoinRefused> {
        self.join_as(join(key, range_end, first_revision)).await
    }

    async fn join_as(&self, join: Join) -> Result<Watch, JoinRefused> {
        let signal = Arc::new(Signal::default());
        let readers = self.fan_out.join(&signal, None, vec![join]).await?;
        let reader = readers.into_iter().next().unwrap();
        Ok(Watch { signal, reader })
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub(super) fn join(key: &str, range_end: &str, first_revision: i64) -> Join {
    Join {
        key: Bytes::copy_from_slice(key.as_bytes()),
        range_end: Bytes::copy_from_slice(range_end.as_bytes()),
        first_revision,
        known_revision: i64::MAX,
    }
}

/// A stream with one watcher.
struct Watch {
    signal: Arc<Signal>,
    reader: Reader,
}

impl Watch {
    /// Waits for the signal until `look` returns a value.
    async fn until<T>(&mut self, mut look: impl FnMut(&mut Reader) -> Option<T>) -> T {
        let Watch { signal, reader } = self;
        let looking =
            poll_fn(|context| signal.look(context, |_| look(reader).map_or(Poll::Pending, Poll::Ready)));
        // Without the clock's help: a fan-out that has to be swept to wake its watchers is broken. The clock first, because
        // its wake-up would make the stream look again.
        tokio::select! {
            biased;
            () = tokio::time::sleep(Duration::from_millis(500)) => panic!("a lost wake-up"),
            value = looking => value,
        }
    }

    /// The next `count` events, as key and revision.
    async fn events(&mut self, count: usize) -> Vec<(String, i64)> {
        let mut events = Vec::new();
        while events.len() < count {
            let picked = self
                .until(|reader| match reader.take(1000, 1 << 20) {
                    Taken::Events(picked) => Some(picked),
                    Taken::Nothing { .. } | Taken::Refused => None,
                    Taken::Ended(ended) => panic!("{ended:?}"),
                })
                .await;
            events.extend(picked.iter().map(|event| {
                let key = String::from_utf8(event.key().to_vec()).unwrap();
                (key, event.revision())
            }));
        }
        events
    }

    async fn end(&mut self) -> ReaderEnd {
        self.until(|reader| match reader.take(1000, 1 << 20) {
            Taken::Ended(ended) => Some(ended),
            _ => None,
        })
        .await
    }
}

fn event(key: &str, revision: i64) -> (String, i64) {
    (key.to_owned(), revision)
}

#[tokio::test(start_paused = true)]
async fn watcher_gets_the_events_of_its_interval_from_its_first_revision() {
    let bench = Bench::new(HistoryLimits::default());
    for revision in 11..20 {
        bench.put(&["/a/x", "/b/x"], revision);
    }
    let mut past = bench.join("/a/", "/a0", 17).await.unwrap();
    let mut now = bench.join("/b/x", "", 20).await.unwrap();
    let mut future = bench.join("/a/", "\0", 22).await.unwrap();
    for revision in 20..24 {
        bench.put(&["/a/x", "/b/x"], revision);
    }
    let expected: Vec<_> = (17..24).map(|revision| event("/a/x", revision)).collect();
    assert_eq!(past.events(7).await, expected);
    let expected: Vec<_> = (20..24).map(|revision| event("/b/x", revision)).collect();
    assert_eq!(now.events(4).await, expected);
    let expected = [("/a/x", 22), ("/b/x", 22), ("/a/x", 23), ("/b/x", 23)];
    assert_eq!(future.events(4).await, expected.map(|(key, at)| event(key, at)));
    let mut longer = bench.join("/a/", "/a0", 12).await.unwrap();
    let expected: Vec<_> = (12..24).map(|revision| event("/a/x", revision)).collect();
    assert_eq!(longer.events(12).await, expected, "a topic that is extended");
}

#[tokio::test(start_paused = true)]
async fn bounds_divide_responses_but_no_revision() {
    let bench = Bench::new(HistoryLimits::default());
    bench.put(&["a", "b", "c"], 11);
    bench.put(&["d"], 12);
    bench.put(&["e", "f"], 13);
    let mut watch = bench.join("a", "z", 11).await.unwrap();
    let mut lengths = Vec::new();
    while let Taken::Events(picked) = watch.reader.take(2, 1 << 20) {
        lengths.push((picked.events(), picked.last_revision()));
    }
    assert_eq!(lengths, [(3, 11), (3, 13)]);
    let mut watch = bench.join("a", "z", 11).await.unwrap();
    let mut lengths = Vec::new();
    while let Taken::Events(picked) = watch.reader.take(100, 1) {
        lengths.push((picked.events(), picked.last_revision()));
    }
    assert_eq!(lengths, [(3, 11), (1, 12), (2, 13)]);
}

#[tokio::test(start_paused = true)]
async fn refused_events_are_taken_later() {
    let bench = Bench::new(HistoryLimits::default());
    let mut watch = bench.join("a", "", 11).await.unwrap();
    bench.put(&["a"], 11);
    bench.put(&["b"], 12);
    watch.until(|reader| (reader.reached() == 12).then_some(())).await;
    let mut asked = None;
    let taken = watch.reader.take_if(1000, 1 << 20, |picked| {
        asked = Some((picked.events(), picked.bytes() > 0));
        false
    });
    assert!(matches!(taken, Taken::Refused));
    assert_eq!(asked, Some((1, true)));
    assert_eq!(watch.reader.covered(), 10, "progress ahead of refused events");
    assert_eq!(watch.events(1).await, [event("a", 11)]);
}

/// W5: a batch of several thousand events, in the midst of which other tasks run.
#[tokio::test(start_paused = true)]
async fn revision_is_not_reached_before_all_of_its_events_are_there() {
    let bench = Bench::new(HistoryLimits::default());
    let mut watch = bench.join("k", "l", 11).await.unwrap();
    let keys: Vec<_> = (0..5000).map(|key| format!("k{key:04}")).collect();
    let keys: Vec<_> = keys.iter().map(String::as_str).collect();
    bench.put(&["k"], 11);
    bench.put(&keys, 12);
    let mut polls = 0;
    let picked = loop {
        match watch.reader.take(9000, 1 << 20) {
            Taken::Nothing { reached } => assert!(reached < 11, "progress ahead of its events"),
            Taken::Events(picked) => break picked,
            taken => panic!("{taken:?}"),
        }
        assert_eq!(watch.reader.covered(), 10);
        polls += 1;
        assert!(polls < 1000);
        tokio::task::yield_now().await;
    };
    assert!(
        picked.last_revision() <= watch.reader.reached(),
        "events ahead of the fan-out"
    );
    assert!(polls > 3, "the fan-out lets other tasks run: {polls}");
    assert_eq!((picked.events(), watch.reader.covered()), (5001, 12));
}

/// W17: woken streams that look at once must find what they were woken for.
#[tokio::test(start_paused = true)]
async fn every_stream_of_many_is_woken_for_events_that_it_finds() {
    let bench = Bench::new(HistoryLimits::default());
    let mut streams = Vec::new();
    for _ in 0..1000 {
        let mut watch = bench.join("a", "", 11).await.unwrap();
        streams.push(tokio::spawn(async move { watch.events(3).await }));
    }
    for revision in 11..14 {
        tokio::time::sleep(Duration::from_millis(1)).await;
        bench.put(&["a"], revision);
    }
    for stream in streams {
        let got = tokio::time::timeout(SOON, stream).await.unwrap().unwrap();
        assert_eq!(got.len(), 3);
    }
}

#[derive(Default)]
struct Wakes(AtomicUsize);

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn signal_during_a_look_wakes_again() {
    let wakes = Arc::new(Wakes::default());
    let (waker, signal) = (Waker::from(Arc::clone(&wakes)), Signal::default());
    let mut context = Context::from_waker(&waker);
    let count = || wakes.0.load(Ordering::Relaxed);
    signal.look(&mut context, |_| ());
    signal.set();
    signal.set();
    assert_eq!(count(), 1, "one wake-up until the stream looks");
    signal.look(&mut context, |_| signal.set());
    assert_eq!(count(), 2, "a lost wake-up");
    signal.look(&mut context, |_| ());
    signal.set();
    assert_eq!(count(), 3);
}

#[tokio::test(start_paused = true)]
async fn join_is_refused_as_a_whole() {
    let bench = Bench::new(HistoryLimits::default());
    let signal = Arc::new(Signal::default());
    let both = |first| vec![join("a", "", 11), join("b", "", first)];
    let refused = bench.fan_out.join(&signal, None, both(10)).await.unwrap_err();
    assert_eq!(refused, JoinRefused::Trimmed, "the load is not an event");
    let refused = bench
        .fan_out
        .join(&signal, Some(HistoryId::of(1)), both(11))
        .await
        .unwrap_err();
    assert_eq!(refused, JoinRefused::Replaced);
    assert_eq!(
        bench
            .fan_out
            .join(&signal, Some(HistoryId::of(0)), both(11))
            .await
            .unwrap()
            .len(),
        2
    );
    bench.mirror.lose_feed(bench.mirror.epoch(), false).unwrap();
    let refused = bench.fan_out.join(&signal, None, both(11)).await.unwrap_err();
    assert_eq!(refused, JoinRefused::OutOfService(Reason::FeedLost));
}

#[tokio::test(start_paused = true)]
async fn slow_watcher_ends_when_the_log_is_trimmed_past_it_and_others_do_not() {
    let limits = HistoryLimits {
        max_age: Duration::from_secs(8),
        checkpoint_every_events: 1,
        ..HistoryLimits::default()
    };
    let bench = Bench::new(limits);
    let mut slow = bench.join("a", "", 11).await.unwrap();
    let mut quiet = bench.join("b", "", 11).await.unwrap();
    bench.put(&["a"], 11);
    for revision in 12..40 {
        bench.put(&["c"], revision);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(slow.end().await, ReaderEnd::Trimmed);
    assert_eq!(
        slow.reader.covered(),
        10,
        "it continues elsewhere, behind what it got"
    );
    bench.put(&["b"], 40);
    assert_eq!(quiet.events(1).await, [event("b", 40)]);
}

/// The log is too short for a fan-out that had no time in between.
#[tokio::test(start_paused = true)]
async fn events_that_the_hub_missed_end_the_watchers_that_need_them_and_no_others() {
    let limits = HistoryLimits {
        max_bytes: 4 << 10,
        checkpoint_every_events: 1,
        ..HistoryLimits::default()
    };
    let bench = Bench::new(limits);
    let mut watches = Vec::new();
    for (key, range_end, first) in [("a", "b", 11), ("b", "", 11), ("", "", 2000), ("c", "", 11)] {
        let key = if key.is_empty() { "\0" } else { key };
        let range_end = if first == 2000 { "\0" } else { range_end };
        watches.push(bench.join(key, range_end, first).await.unwrap());
    }
    let [mut missing, mut behind, mut future, mut other] = watches.try_into().ok().expect("four");
    bench.put(&["b"], 11);
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert!(matches!(
        missing.reader.take(1, 1),
        Taken::Nothing { reached: 11 }
    ));
    // The fan-out does not run meanwhile.
    bench.put(&["a/1"], 12);
    bench.put(&["b"], 13);
    for revision in 14..1000 {
        bench.put(&["d"], revision);
    }
    bench.put(&["a/2"], 1000);
    assert_eq!(missing.end().await, ReaderEnd::Trimmed);
    assert_eq!(missing.reader.covered(), 11, "nothing was missed up to there");
    assert_eq!(behind.end().await, ReaderEnd::Trimmed);
    assert_eq!(behind.reader.covered(), 10, "the event of 11 was not taken");
    bench.put(&["c"], 1001);
    assert_eq!(other.events(1).await, [event("c", 1001)]);
    bench.put(&["d"], 2000);
    assert_eq!(future.events(1).await, [event("d", 2000)]);
    let mut again = bench.join("a", "b", 1000).await.unwrap();
    assert_eq!(again.events(1).await, [event("a/2", 1000)]);
}

/// Without knowing which events were missed, every watcher may need one.
#[tokio::test(start_paused = true)]
async fn too_many_missed_events_end_every_watcher() {
    let limits = HistoryLimits {
        max_bytes: 4 << 10,
        checkpoint_every_events: 1,
        ..HistoryLimits::default()
    };
    let bench = Bench::new(limits);
    let mut watch = bench.join("a", "", 11).await.unwrap();
    bench.put(&["d"], 11);
    tokio::time::sleep(Duration::from_millis(1)).await;
    for revision in 12..20_000 {
        bench.put(&["d"], revision);
    }
    assert_eq!(watch.end().await, ReaderEnd::Trimmed);
    assert_eq!(watch.reader.covered(), 11, "nothing was missed up to there");
}

#[tokio::test(start_paused = true)]
async fn lists_of_events_stay_within_their_bound_and_are_built_again_for_those_that_join() {
    let bench = Bench::new(HistoryLimits::default());
    let max_list_bytes = 2000;
    bench.fan_out.set_bounds(FanOutBounds {
        max_unused_bytes: 0,
        max_list_bytes,
    });
    let mut taking = bench.join("a", "", 11).await.unwrap();
    let mut slow = bench.join("b", "", 11).await.unwrap();
    for revision in 11..111 {
        bench.put(&["a", "b"], revision);
        assert_eq!(taking.events(1).await, [event("a", revision)]);
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let held = bench.fan_out.held().bytes;
    assert!(held <= max_list_bytes + 100, "{held}");
    assert_eq!(
        slow.end().await,
        ReaderEnd::Trimmed,
        "the list was longer than the bound"
    );
    let refused = bench.join("a", "", 11).await.map(|_| ()).unwrap_err();
    assert_eq!(refused, JoinRefused::Trimmed, "its events would exceed the bound");
    let mut late = bench.join("a", "", 101).await.unwrap();
    let expected: Vec<_> = (101..111).map(|revision| event("a", revision)).collect();
    assert_eq!(late.events(10).await, expected);
    bench.put(&["a"], 111);
    for watch in [&mut taking, &mut late] {
        assert_eq!(watch.events(1).await, [event("a", 111)]);
    }
}

#[tokio::test(start_paused = true)]
async fn mirror_of_an_empty_etcd_has_every_event() {
    let bench = Bench::new(HistoryLimits::default());
    let refused = bench.join("a", "", 10).await.map(|_| ()).unwrap_err();
    assert_eq!(
        refused,
        JoinRefused::Trimmed,
        "there may be an event of revision 10"
    );
    bench.load(Tree::default(), 1, HistoryLimits::default());
    bench.put(&["a"], 2);
    for first_revision in [1, 2] {
        let mut watch = bench.join("a", "", first_revision).await.unwrap();
        assert_eq!(watch.events(1).await, [event("a", 2)]);
    }
}

#[tokio::test(start_paused = true)]
async fn watchers_that_are_ahead_of_a_mirror_end_when_another_feed_continues() {
    let bench = Bench::new(HistoryLimits::default());
    let mut at = bench.join("a", "", 11).await.unwrap();
    let mut ahead = bench.join("a", "", 13).await.unwrap();
    let epoch = bench.mirror.epoch();
    bench.mirror.lose_feed(epoch, false).unwrap();
    bench.mirror.put_in_service(epoch).unwrap();
    for revision in 11..14 {
        bench.put(&["a"], revision);
    }
    assert_eq!(
        ahead.end().await,
        ReaderEnd::FeedLost,
        "its events up to 12 are of another feed"
    );
    let expected: Vec<_> = (11..14).map(|revision| event("a", revision)).collect();
    assert_eq!(at.events(3).await, expected);
    assert!(ahead.reader.is_unproven(12), "nor has this feed shown these");
    assert!(!ahead.reader.is_unproven(0) && !at.reader.is_unproven(10));
    let mut later = bench.join("a", "", 15).await.unwrap();
    assert!(later.reader.is_unproven(14));
    bench.put(&["a"], 14);
    bench.put(&["a"], 15);
    assert_eq!(later.events(1).await, [event("a", 15)]);
    assert!(!later.reader.is_unproven(14));
}

#[tokio::test(start_paused = true)]
async fn watchers_from_a_revision_in_the_future_continue_when_another_feed_continues() {
    let bench = Bench::new(HistoryLimits::default());
    let future = |known_revision| Join {
        known_revision,
        ..join("a", "", 13)
    };
    let mut watch = bench.join_as(future(10)).await.unwrap();
    let mut ahead = bench.join_as(future(11)).await.unwrap();
    let epoch = bench.mirror.epoch();
    bench.mirror.lose_feed(epoch, false).unwrap();
    bench.mirror.put_in_service(epoch).unwrap();
    for revision in 11..14 {
        bench.put(&["a"], revision);
    }
    assert_eq!(
        ahead.end().await,
        ReaderEnd::FeedLost,
        "etcd had reached revision 11"
    );
    assert_eq!(watch.events(1).await, [event("a", 13)]);
}

#[tokio::test(start_paused = true)]
async fn watchers_are_parked_while_the_feed_resumes_and_end_after_ten_seconds() {
    let bench = Bench::new(HistoryLimits::default());
    let mut watch = bench.join("a", "", 11).await.unwrap();
    let epoch = bench.mirror.epoch();
    bench.mirror.lose_feed(epoch, false).unwrap();
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert!(!watch.reader.is_pending());
    bench.mirror.put_in_service(epoch).unwrap();
    bench.put(&["a"], 11);
    assert_eq!(watch.events(1).await, [event("a", 11)]);
    bench.mirror.lose_feed(epoch, false).unwrap();
    let began = Instant::now();
    while !watch.reader.is_pending() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(watch.end().await, ReaderEnd::FeedLost);
    let parked = began.elapsed();
    assert!((10..=12).contains(&parked.as_secs()), "{parked:?}");
}

#[tokio::test(start_paused = true)]
async fn lack_of_a_leader_shows_after_three_seconds_and_ends_with_the_next_feed() {
    let bench = Bench::new(HistoryLimits::default());
    let mut watch = bench.join("a", "", 11).await.unwrap();
    let epoch = bench.mirror.epoch();
    bench.mirror.lose_feed(epoch, true).unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    bench.mirror.lose_feed(epoch, false).unwrap();
    assert!(!watch.reader.has_no_leader());
    tokio::time::sleep(Duration::from_millis(1400)).await;
    watch.until(|reader| reader.has_no_leader().then_some(())).await;
    bench.mirror.put_in_service(epoch).unwrap();
    tokio::time::sleep(Duration::from_millis(1400)).await;
    assert!(!watch.reader.has_no_leader());
    assert!(!watch.reader.is_pending());
}

#[tokio::test(start_paused = true)]
async fn watchers_end_by_the_cause_that_dropped_the_mirror() {
    let compacted = ReaderEnd::Compacted { compact_revision: 30 };
    for (ended, gets_pending) in [
        (compacted, true),
        (ReaderEnd::Dropped(Reason::OverBudget), true),
        (ReaderEnd::Dropped(Reason::Panicked), true),
        (ReaderEnd::Replaced { revision: 11 }, false),
    ] {
        let bench = Bench::new(HistoryLimits::default());
        let mut watch = bench.join("a", "", 11).await.unwrap();
        bench.put(&["a"], 11);
        tokio::time::sleep(Duration::from_millis(1)).await;
        let epoch = bench.mirror.epoch();
        match ended {
            ReaderEnd::Replaced { .. } => bench.mirror.end_epoch(epoch, Reason::Mismatch).unwrap(),
            ReaderEnd::Dropped(Reason::Panicked) => bench.mirror.end_epoch(epoch, Reason::Panicked).unwrap(),
            _ => bench.mirror.drop_contents(epoch, Reason::Loading, ended).unwrap(),
        }
        bench.load(Tree::default(), 40, HistoryLimits::default());
        tokio::time::sleep(Duration::from_millis(1)).await;
        if gets_pending {
            assert_eq!(watch.events(1).await, [event("a", 11)], "{ended:?}");
        }
        assert_eq!(watch.end().await, ended);
        let mut again = bench.join("a", "", 41).await.unwrap();
        bench.put(&["a"], 41);
        assert_eq!(again.events(1).await, [event("a", 41)]);
    }
}

/// A cancel with `compact_revision` 0 would be one without an error (W10).
#[tokio::test(start_paused = true)]
async fn replaced_history_ends_watchers_with_its_revision_if_that_is_known() {
    for (known, expected) in [(0, 1), (7, 7)] {
        let bench = Bench::new(HistoryLimits::default());
        let mut watch = bench.join("a", "", 11).await.unwrap();
        bench
            .cluster_state
            .contradict(&bench.cluster_state.before_check());
        bench.mirror.replace_history(known);
        assert_eq!(watch.end().await, ReaderEnd::Replaced { revision: expected });
    }
}

#[tokio::test(start_paused = true)]
async fn unread_events_of_a_dropped_mirror_are_kept_for_seconds() {
    let bench = Bench::new(HistoryLimits::default());
    let [mut slow, mut stalled] =
        [bench.join("a", "", 11).await, bench.join("a", "", 11).await].map(Result::unwrap);
    bench.put(&["a"], 11);
    tokio::time::sleep(Duration::from_millis(1)).await;
    let (ended, epoch) = (ReaderEnd::Dropped(Reason::OverBudget), bench.mirror.epoch());
    bench
        .mirror
        .drop_contents(epoch, Reason::OverBudget, ended)
        .unwrap();
    tokio::time::sleep(Duration::from_secs(8)).await;
    assert_eq!(slow.events(1).await, [event("a", 11)]);
    assert_eq!(slow.end().await, ended);
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert_eq!(stalled.end().await, ReaderEnd::Trimmed);
    assert_eq!(
        stalled.reader.covered(),
        10,
        "it continues elsewhere, behind what it got"
    );
}

/// W13: the feed and the readers of the mirror do no work for watchers; the fan-out does it later, in its own task.
#[tokio::test(start_paused = true)]
async fn event_is_applied_without_touching_a_watcher() {
    let bench = Bench::new(HistoryLimits::default());
    let wakes = Arc::new(Wakes::default());
    let waker = Waker::from(Arc::clone(&wakes));
    let mut watches = Vec::new();
    for _ in 0..1000 {
        let watch = bench.join("a", "", 11).await.unwrap();
        watch.signal.look(&mut Context::from_waker(&waker), |_| ());
        watches.push(watch);
    }
    bench.put(&["a"], 11);
    assert_eq!(wakes.0.load(Ordering::Relaxed), 0, "woken by the feed");
    assert!(!watches.iter().any(|watch| watch.reader.is_pending()));
    assert_eq!(bench.mirror.revision(), Ok(11), "visible to reads");
    tokio::time::sleep(Duration::from_millis(1)).await;
    assert_eq!(wakes.0.load(Ordering::Relaxed), 1000);
    for watch in &mut watches {
        assert_eq!(watch.events(1).await, [event("a", 11)]);
    }
}

#[tokio::test(start_paused = true)]
async fn signal_is_set_at_a_revision_without_an_event() {
    let bench = Bench::new(HistoryLimits::default());
    let mut watch = bench.join("a", "", 11).await.unwrap();
    bench.fan_out.signal_at(15, &watch.signal);
    bench.mirror.advance(bench.mirror.epoch(), 14).unwrap();
    tokio::time::sleep(Duration::from_millis(1)).await;
    bench.mirror.advance(bench.mirror.epoch(), 15).unwrap();
    let reached = watch
        .until(|reader| (reader.reached() >= 15).then_some(reader.covered()))
        .await;
    assert_eq!(reached, 15);
}

#[tokio::test(start_paused = true)]
async fn gone_watchers_and_unused_topics_are_dropped() {
    let bench = Bench::new(HistoryLimits::default());
    let mut watchers = Vec::new();
    for number in 0..300 {
        watchers.push(bench.join(&format!("k{number:03}"), "", 11).await.unwrap());
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(bench.fan_out.held().watchers, 300);
    watchers.truncate(5);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(bench.fan_out.held().watchers, 5);
    assert_eq!(
        bench.fan_out.held().topics,
        300,
        "kept for clients that connect again"
    );
    tokio::time::sleep(Duration::from_secs(70)).await;
    assert_eq!(bench.fan_out.held().topics, 5);
    watchers.clear();
    tokio::time::sleep(Duration::from_secs(70)).await;
    assert_eq!(bench.fan_out.held(), Held::default());
}
