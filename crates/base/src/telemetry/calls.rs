//! Phases of one call, and the slowest calls of the last minutes.
//!
//! Keys are not recorded: a range is named by its mirror (I10).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::outcome::{Kind, Outcome};

/// Number of calls that are kept.
pub const KEPT: usize = 32;
/// Time for which a call is kept after its end.
pub const KEPT_FOR: Duration = Duration::from_secs(300);

/// Revisions of one call; 0 if there is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Revisions {
    /// Revision in the request; 0 asks for the newest.
    pub asked: i64,
    /// Revision that the response had to reach.
    pub proven: i64,
    /// Revision in the header of the response from memory.
    pub served: i64,
}

/// A Range or RangeStream that has ended. All times except `ended_at` are measured from its arrival.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Call {
    /// Method.
    pub kind: Kind,
    /// Outcome with its reason.
    pub outcome: Outcome,
    /// When the last byte of the response was sent, or the call was cancelled.
    pub ended_at: SystemTime,
    /// Time until memory was proven fresh; `None` if it was not.
    pub proven: Option<Duration>,
    /// Whether the call waited for the mirror to catch up.
    pub waited: bool,
    /// Time until the head of the response.
    pub first_byte: Duration,
    /// Time until the last byte was sent.
    pub ended: Duration,
    /// Position of the mirror that contains the range; `None` if no mirror contains all of it.
    pub mirror: Option<usize>,
    /// Revisions in the request, proven and served.
    pub revisions: Revisions,
    /// Keys in the response from memory; 0 for responses from etcd, whose keys are not counted.
    pub keys: u64,
    /// Bytes of the response's messages.
    pub bytes: u64,
}

/// The slowest calls that have ended within [`KEPT_FOR`], at most [`KEPT`].
#[derive(Debug, Default)]
pub struct Slowest {
    /// Duration in nanoseconds from which a call is kept; 0 while there is room.
    threshold_nanos: AtomicU64,
    kept: Mutex<Vec<(Instant, Arc<Call>)>>,
}

impl Slowest {
    /// Keeps the call if it is one of the slowest. For most calls this is one atomic load. Never waits: while another
    /// task holds the lock, the call is not kept.
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

    /// Drops calls that ended more than [`KEPT_FOR`] ago, which makes room for others.
    pub fn sweep(&self) {
        let mut kept = self.kept.lock();
        kept.retain(|(ended, _)| ended.elapsed() < KEPT_FOR);
        self.set_threshold(&kept);
    }

    /// The kept calls, slowest first.
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
    async fn slowest_calls_are_kept_for_five_minutes() {
        let slowest = Slowest::default();
        for millis in (1..=50).chain(1..=50) {
            offer(&slowest, millis);
        }
        let twice: Vec<u128> = (35..=50).rev().flat_map(|millis| [millis, millis]).collect();
        assert_eq!(list(&slowest), twice);

        tokio::time::advance(KEPT_FOR / 2).await;
        offer(&slowest, 99);
        tokio::time::advance(KEPT_FOR / 2).await;
        assert_eq!(list(&slowest), [99], "the others are too old");
        offer(&slowest, 1);
        assert_eq!(list(&slowest), [99], "the others still take up room");
        slowest.sweep();
        offer(&slowest, 1);
        assert_eq!(list(&slowest), [99, 1], "now there is room");
    }

    #[test]
    fn call_is_not_kept_while_the_lock_is_held() {
        let slowest = Slowest::default();
        let reading = slowest.kept.lock();
        offer(&slowest, 5);
        drop(reading);
        assert_eq!(list(&slowest), [0_u128; 0]);
    }
}
