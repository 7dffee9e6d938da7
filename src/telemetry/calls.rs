//! One call's phases, and the slowest calls of the last minutes, for whoever asks why an answer took so long.
//!
//! No key comes here: a range is named by its mirror's name, which is made of the operator's own prefixes (I10).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::outcome::{Kind, Outcome};

/// How many of the slowest calls are kept.
pub const KEPT: usize = 32;
/// For how long after its end a call is kept.
pub const KEPT_FOR: Duration = Duration::from_secs(300);

/// The revisions of one call; 0 where there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Revisions {
    /// In the request; 0 is the newest.
    pub asked: i64,
    /// That the answer had to be as new as.
    pub proven: i64,
    /// In the header of the answer from memory.
    pub served: i64,
}

/// A Range or RangeStream that has ended. All times but `ended_at` count from its arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Which method.
    pub kind: Kind,
    /// How it ended, and why.
    pub outcome: Outcome,
    /// When the last byte of its answer had gone, or its caller.
    pub ended_at: SystemTime,
    /// When memory was known to be fresh enough; `None` where it was not.
    pub proven: Option<Duration>,
    /// Whether the mirror had to catch up first, for which etcd was asked for its progress.
    pub waited: bool,
    /// When the head of the answer was there.
    pub first_byte: Duration,
    /// When its last byte had gone.
    pub ended: Duration,
    /// The mirror that holds the range, by its name; `None` if none holds all of it.
    pub mirror: Option<String>,
    /// Asked for, proven, served.
    pub revisions: Revisions,
    /// Keys in the answer; 0 where it was etcd's, which nobody has counted.
    pub keys: u64,
    /// Bytes of the answer's messages.
    pub bytes: u64,
}

/// The slowest calls that have ended within [`KEPT_FOR`], at most [`KEPT`].
#[derive(Debug, Default)]
pub struct Slowest {
    /// What a call must have taken longer than to be kept, in nanoseconds; 0 while there is room.
    threshold_nanos: AtomicU64,
    kept: Mutex<Vec<(Instant, Arc<Call>)>>,
}

impl Slowest {
    /// Keeps the call if it is one of the slowest. Most calls are told by one load that they are not; a call that meets another
    /// here is not kept, for nothing waits.
    pub fn offer(&self, took: Duration, call: impl FnOnce() -> Call) {
        if nanos(took) < self.threshold_nanos.load(Ordering::Relaxed) {
            return;
        }
        let Some(mut kept) = self.kept.try_lock() else {
            return;
        };
        if kept.len() == KEPT {
            let fastest = kept
                .iter()
                .enumerate()
                .min_by_key(|(_, (_, call))| call.ended)
                .map(|(index, (_, call))| (index, call.ended));
            match fastest {
                Some((index, ended)) if ended < took => drop(kept.swap_remove(index)),
                _ => return,
            }
        }
        kept.push((Instant::now(), Arc::new(call())));
        self.set_threshold(&kept);
    }

    /// Lets go of calls that ended too long ago; others have their turn then.
    pub fn sweep(&self) {
        let mut kept = self.kept.lock();
        kept.retain(|(ended, _)| ended.elapsed() < KEPT_FOR);
        self.set_threshold(&kept);
    }

    /// The calls, the slowest first.
    #[must_use]
    pub fn list(&self) -> Vec<Arc<Call>> {
        let mut calls: Vec<_> = self
            .kept
            .lock()
            .iter()
            .filter(|(ended, _)| ended.elapsed() < KEPT_FOR)
            .map(|(_, call)| Arc::clone(call))
            .collect();
        calls.sort_by_key(|call| std::cmp::Reverse(call.ended));
        calls
    }

    fn set_threshold(&self, kept: &[(Instant, Arc<Call>)]) {
        let fastest = kept.iter().map(|(_, call)| nanos(call.ended)).min();
        let threshold = fastest.filter(|_| kept.len() == KEPT).unwrap_or(0);
        self.threshold_nanos.store(threshold, Ordering::Relaxed);
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::telemetry::outcome::Read;

    fn offer(slowest: &Slowest, millis: u64) {
        let took = Duration::from_millis(millis);
        slowest.offer(took, || Call {
            kind: Kind::Unary,
            outcome: Outcome::Hit(Read::Linearizable),
            ended_at: SystemTime::UNIX_EPOCH,
            proven: None,
            waited: false,
            first_byte: took,
            ended: took,
            mirror: None,
            revisions: Revisions::default(),
            keys: 0,
            bytes: 0,
        });
    }

    fn list(slowest: &Slowest) -> Vec<u128> {
        let calls = slowest.list();
        calls.iter().map(|call| call.ended.as_millis()).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_slowest_are_kept_for_a_while() {
        let slowest = Slowest::default();
        for millis in (1..=50).chain(1..=50) {
            offer(&slowest, millis);
        }
        let twice: Vec<u128> = (35..=50).rev().flat_map(|millis| [millis, millis]).collect();
        assert_eq!(list(&slowest), twice);

        tokio::time::advance(KEPT_FOR / 2).await;
        offer(&slowest, 99);
        tokio::time::advance(KEPT_FOR / 2).await;
        assert_eq!(list(&slowest), [99], "the others are too old to be told");
        offer(&slowest, 1);
        assert_eq!(list(&slowest), [99], "but nobody has swept them away");
        slowest.sweep();
        offer(&slowest, 1);
        assert_eq!(list(&slowest), [99, 1], "now there is room");
    }

    #[test]
    fn who_meets_another_does_not_wait() {
        let slowest = Slowest::default();
        let reading = slowest.kept.lock();
        offer(&slowest, 5);
        drop(reading);
        assert_eq!(list(&slowest), [0_u128; 0]);
    }
}
