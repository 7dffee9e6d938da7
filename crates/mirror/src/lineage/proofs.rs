//! Times at which quorum checks were sent, with the revisions that they proved: how old a view may be.
//!
//! A check that was sent at some time and reported revision P proves that every write acknowledged before that time is
//! at or below P. A view at P or later therefore lacks nothing that was acknowledged before the check was **sent**. When
//! its response arrived proves nothing: etcd may have been written since. A progress notification proves nothing
//! either, not even as the response to a request: a member reports its own revision, which lags behind the cluster's
//! while the member is slow or cut off.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Bound on the checks that are kept; the oldest are dropped.
const MAX_PROOFS: usize = 128;
/// Distance within which at most two checks are kept, so that those of a second fit into [`MAX_PROOFS`] under any load.
const DISTANCE: Duration = Duration::from_millis(20);

/// Time at which a check was sent.
#[derive(Clone, Copy, Debug)]
pub struct SentAt {
    /// By the clock that stands still while the machine is suspended.
    pub instant: Instant,
    /// Total time for which the machine had been suspended since its start.
    suspended: Duration,
}

impl SentAt {
    /// A check that was sent at `instant`, a moment ago.
    pub(super) fn new(instant: Instant) -> SentAt {
        SentAt {
            instant,
            suspended: suspended(),
        }
    }

    /// Time since then, in which the machine may have been suspended.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.instant.elapsed() + suspended().saturating_sub(self.suspended)
    }
}

/// Time for which the machine has been suspended since its start: a view is as old as its clients are, not as the clock
/// that tokio uses. A virtual machine that is continued from a copy of its memory does not know how long that lay.
#[cfg(target_os = "linux")]
fn suspended() -> Duration {
    use rustix::time::{ClockId, clock_gettime};
    let read = |clock| Duration::try_from(clock_gettime(clock)).unwrap_or_default();
    // In this order: what passes between the two reads must not count as suspended.
    let boot = read(ClockId::Boottime);
    boot.saturating_sub(read(ClockId::Monotonic))
}

#[cfg(not(target_os = "linux"))]
fn suspended() -> Duration {
    Duration::ZERO
}

/// Checks of one history: each was sent later than the one before it, and proved a higher revision.
#[derive(Debug, Default)]
pub(super) struct Proofs(VecDeque<(SentAt, i64)>);

impl Proofs {
    /// Records that a check which was sent at `sent` proved `revision`.
    pub(super) fn record(&mut self, sent: SentAt, revision: i64) {
        let mut newest_first = self.0.iter().rev();
        if newest_first.any(|(later, lower)| later.instant >= sent.instant && *lower <= revision) {
            return;
        }
        self.0
            .retain(|(earlier, higher)| earlier.instant > sent.instant || *higher < revision);
        let place = self
            .0
            .partition_point(|(earlier, _)| earlier.instant < sent.instant);
        self.0.insert(place, (sent, revision));
        let count = self.0.len();
        if count > 2 && self.0[count - 1].0.instant - self.0[count - 3].0.instant < DISTANCE {
            self.0.remove(count - 2);
        }
        if self.0.len() > MAX_PROOFS {
            self.0.pop_front();
        }
    }

    /// Time of the last check that proves that a view at `revision` lacked nothing when the check was sent.
    pub(super) fn of(&self, revision: i64) -> Option<SentAt> {
        let mut newest_first = self.0.iter().rev();
        newest_first
            .find(|(_, proven)| *proven <= revision)
            .map(|(sent, _)| *sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn view_is_as_old_as_the_last_check_that_reported_its_revision_or_a_lower_one() {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let mut proofs = Proofs::default();
        assert!(proofs.of(10).is_none());
        for (sent, revision) in [(0, 10), (100, 10), (200, 12), (300, 15)] {
            proofs.record(SentAt::new(at(sent)), revision);
        }
        let expected = [
            (9, None),
            (10, Some(100)),
            (11, Some(100)),
            (12, Some(200)),
            (14, Some(200)),
            (15, Some(300)),
            (99, Some(300)),
        ];
        for (revision, sent) in expected {
            let of = proofs.of(revision).map(|sent| sent.instant);
            assert_eq!(of, sent.map(at), "{revision}");
        }
    }

    #[test]
    fn checks_that_end_out_of_order_prove_the_same() {
        let start = Instant::now();
        let at = |millis: u64| start + Duration::from_millis(millis);
        let mut proofs = Proofs::default();
        for (sent, revision) in [(300, 15), (100, 10), (200, 12), (250, 12), (50, 11)] {
            proofs.record(SentAt::new(at(sent)), revision);
        }
        let kept: Vec<_> = proofs
            .0
            .iter()
            .map(|(sent, revision)| (sent.instant, *revision))
            .collect();
        assert_eq!(kept, [(at(100), 10), (at(250), 12), (at(300), 15)]);
    }

    #[test]
    fn thousands_of_checks_take_a_bounded_place_and_the_newest_is_kept() {
        let start = Instant::now();
        let mut proofs = Proofs::default();
        for n in 0..10_000_u64 {
            proofs.record(
                SentAt::new(start + Duration::from_millis(n)),
                i64::try_from(n).unwrap(),
            );
        }
        assert_eq!(proofs.0.len(), MAX_PROOFS);
        let of = |revision| proofs.of(revision).unwrap().instant;
        assert_eq!(of(9_999), start + Duration::from_millis(9_999));
        for millis in [9_998, 8_500] {
            let sent = of(i64::try_from(millis).unwrap());
            let late = start + Duration::from_millis(millis) - sent;
            assert!(late <= DISTANCE, "{millis}: {late:?}");
        }
    }

    #[test]
    fn suspended_time_counts() {
        let sent = SentAt::new(Instant::now());
        let before_suspension = SentAt {
            suspended: sent.suspended.saturating_sub(Duration::from_secs(3600)),
            ..sent
        };
        let suspended = sent.suspended - before_suspension.suspended;
        assert!(before_suspension.elapsed() >= suspended);
        assert!(sent.elapsed() < Duration::from_secs(3600));
    }
}
