//! Writers, joins, cancels and slow readers on several threads: no event is missed, repeated or out of order (W1, W2,
//! W3), and none waits for a further input (W17).

use std::{future::poll_fn, sync::Arc, task::Poll, time::Duration};

use etcd_store::cache::HistoryLimits;
use rand::{Rng, SeedableRng, rngs::StdRng};

use super::tests::{Bench, join};
use super::{FanOut, Join, Reader, Signal, Taken};
use crate::lineage::HistoryId;

/// Revisions that are written, after the load at revision 10.
const REVISIONS: i64 = 3000;
const LAST: i64 = 10 + REVISIONS;
const STREAMS: u64 = 64;
/// Bound on what must happen.
const SOON: Duration = Duration::from_secs(60);

const INTERVALS: [(&str, &str); 6] = [
    ("k03", ""),
    ("k07", ""),
    ("k0", "k1"),
    ("k02", "k08"),
    ("k05", "\0"),
    ("\0", "\0"),
];

/// Keys that `revision` writes: one to three of twelve.
fn keys(revision: i64) -> impl Iterator<Item = String> {
    (0..=revision % 3).map(move |at| format!("k{:02}", (revision * 7 + at * 5) % 12))
}

fn contains(join: &Join, key: &str) -> bool {
    match &*join.range_end {
        [] => join.key == key.as_bytes(),
        [0] => &*join.key <= key.as_bytes(),
        end => &*join.key <= key.as_bytes() && key.as_bytes() < end,
    }
}

/// Events of `join` above `after` and up to `through`, as revision and key.
fn expected(join: &Join, after: i64, through: i64) -> Vec<(i64, String)> {
    let events = (after + 1..=through).flat_map(|revision| keys(revision).map(move |key| (revision, key)));
    events.filter(|(_, key)| contains(join, key)).collect()
}

/// Takes until the reader is at `until`, at least; compares with what was written, and returns the position.
async fn read(
    fan_out: &FanOut,
    random: &mut StdRng,
    signal: &Arc<Signal>,
    reader: &mut Reader,
    join: &Join,
    until: i64,
    is_slow: bool,
) -> i64 {
    let mut through = join.first_revision - 1;
    while through < until {
        let max_events = random.random_range(1..50);
        let taken = poll_fn(|context| {
            signal.look(context, |_| match reader.take(max_events, 1 << 20) {
                Taken::Nothing { reached } if reached <= through => {
                    // Only events wake a stream by themselves.
                    fan_out.signal_at(through + 1, signal);
                    if reader.reached() > through {
                        signal.set();
                    }
                    Poll::Pending
                }
                taken => Poll::Ready(taken),
            })
        });
        through = match tokio::time::timeout(SOON, taken).await.expect("a wake-up") {
            Taken::Events(picked) => {
                let got = picked.iter().map(|event| {
                    let key = String::from_utf8(event.key().to_vec()).unwrap();
                    (event.revision(), key)
                });
                let got: Vec<_> = got.collect();
                assert_eq!(got, expected(join, through, picked.last_revision()));
                picked.last_revision()
            }
            Taken::Nothing { reached } => {
                assert_eq!(expected(join, through, reached), [], "progress ahead of events");
                reached
            }
            taken => panic!("{taken:?}"),
        };
        if is_slow {
            for _ in 0..random.random_range(0..20) {
                tokio::task::yield_now().await;
            }
        }
    }
    through
}

/// A stream that joins again and again, each time behind what it got, until it has every event.
async fn stream(bench: Arc<Bench>, seed: u64) {
    let mut random = StdRng::seed_from_u64(seed);
    let (key, range_end) = INTERVALS[random.random_range(0..INTERVALS.len())];
    let mut first_revision = 11;
    while first_revision <= LAST {
        let mut join = join(key, range_end, first_revision);
        let signal = Arc::new(Signal::default());
        let joined = bench
            .fan_out
            .join(&signal, Some(HistoryId::FIRST), vec![join.clone()])
            .await;
        let mut reader = joined.unwrap().pop().unwrap();
        let until = LAST.min(first_revision + random.random_range(0..REVISIONS / 3));
        let is_slow = random.random_bool(0.3);
        let through = read(
            &bench.fan_out,
            &mut random,
            &signal,
            &mut reader,
            &join,
            until,
            is_slow,
        )
        .await;
        assert!(reader.covered() >= through);
        join.first_revision = through + 1;
        first_revision = join.first_revision;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn streams_on_several_threads_get_every_event_once() {
    let bench = Arc::new(Bench::new(HistoryLimits::default()));
    let streams: Vec<_> = (0..STREAMS)
        .map(|seed| tokio::spawn(stream(Arc::clone(&bench), seed)))
        .collect();
    let writer = Arc::clone(&bench);
    let writing = tokio::spawn(async move {
        for revision in 11..=LAST {
            let keys: Vec<_> = keys(revision).collect();
            let keys: Vec<_> = keys.iter().map(String::as_str).collect();
            writer.put(&keys, revision);
            if revision % 5 == 0 {
                tokio::task::yield_now().await;
            }
        }
    });
    writing.await.unwrap();
    for stream in streams {
        tokio::time::timeout(SOON, stream)
            .await
            .expect("every event")
            .unwrap();
    }
}
