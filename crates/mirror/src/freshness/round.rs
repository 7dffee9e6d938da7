//! Shared quorum check with the reads that wait for it, and the decision when the next one is sent.
//!
//! ```text
//!   a read ──▶ gathering ── due ──▶ in flight ──▶ done: wakes its reads
//!              (at most one)        (up to MAX_ROUNDS)
//! ```
//!
//! A round is due when none is in flight, or the last one is slow; under load it waits up to [`COALESCE_DELAY`] for the clients
//! that the round before it has served ([`Rounds::is_due`]). Periodic checks of leaves join a round, but do not make it due.

use std::{sync::Arc, time::Duration};

use etcd_store::cache::ResponseHeader;
use parking_lot::Mutex;
use rangecache_base::telemetry::{Reason, trace::SpanContext};
use tokio::{sync::Notify, time::Instant};

use crate::lineage::HistoryId;

/// Readers that are woken together when a round ends. Eight responses fill one write of a connection, and their
/// clients can send the next requests while the other responses are built.
const WAKE_BATCH: u64 = 8;
/// Rounds that may be in flight at once.
const MAX_ROUNDS: usize = 4;
/// Number of reads per round from which the next round is delayed until most of them have been repeated: for fewer
/// reads the saved checks do not pay for the delay.
const COALESCE_MIN_READS: u64 = 8;
/// Longest delay of a round: the order of one round trip to etcd, which the reads would have waited for anyway.
pub(super) const COALESCE_DELAY: Duration = Duration::from_millis(1);
/// Time after which a round is slow, and another may start in addition to it.
pub(super) const SLOW_ROUND: Duration = Duration::from_millis(50);

/// Result of a successful check: no write that was acknowledged before the check began is later than `header.revision`.
#[derive(Clone, Copy, Debug)]
pub struct Proof {
    /// etcd's header. Answers from memory carry it, with the revision of the mirror.
    pub header: ResponseHeader,
    /// Number of etcd's history that the check belongs to.
    pub history: HistoryId,
    /// Revision at which the check read, so that neither it nor any later one was compacted; 0 if it read the newest
    /// state.
    pub(super) at: i64,
    /// When the check was sent.
    pub(super) sent: Instant,
    /// When the connection was opened on which the check was made.
    pub(super) connection_opened: Instant,
}

impl Proof {
    /// When the connection was opened on which the check was made; behind a hub, that of the hub.
    #[must_use]
    pub fn connection_opened(&self) -> Instant {
        self.connection_opened
    }

    /// Whether what a connection has sent since `began` is of the history that the check has shown. The connection was
    /// opened at `opened`, and has been used until the check, or from the check on. No number of a history shows a rollback
    /// whose lost revisions were written again: one of the two connections has to reach from one event to the other.
    #[must_use]
    pub fn covers(&self, opened: Instant, began: Instant) -> bool {
        if self.sent >= began {
            self.connection_opened <= began
        } else {
            opened <= self.sent
        }
    }
}

/// Why a check proves nothing for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unproven {
    /// etcd has compacted this revision, and with it every lower one.
    Compacted(i64),
    /// No response, or one that proves nothing.
    For(Reason),
}

impl Unproven {
    /// The reason, for a read of the newest state.
    pub(super) fn without_revision(self) -> Reason {
        match self {
            Unproven::For(reason) => reason,
            // Not reached: no revision is checked for it.
            Unproven::Compacted(_) => Reason::CheckFailed,
        }
    }
}

impl From<Reason> for Unproven {
    fn from(reason: Reason) -> Self {
        Unproven::For(reason)
    }
}

/// The rounds of one [`Freshness`](super::Freshness).
#[derive(Default)]
pub(super) struct Rounds {
    /// The round that has not been sent yet; reads that arrive join it.
    pub(super) gathering: Option<Arc<Round>>,
    pub(super) in_flight: usize,
    pub(super) last_sent: Option<Instant>,
    last_done: Option<Instant>,
    /// Number of reads at the end of the last two rounds: those that the round served, and those that had joined the
    /// next one.
    last_reads: [u64; 2],
    /// A task will call `send_if_due` at the end of [`COALESCE_DELAY`].
    pub(super) is_delayed: bool,
    /// A task will call `send_if_due` when the last round that was sent is slow.
    pub(super) is_watched: bool,
}

impl Rounds {
    /// Whether the gathering round is to be sent now.
    ///
    /// With nothing in flight a read waits for one round trip. Under load, the clients that the last round served are
    /// about to send their next reads: waiting for most of them takes little time and saves etcd most of the checks.
    /// A round in flight is slow after `slow_round`.
    pub(super) fn is_due(&self, slow_round: Duration) -> bool {
        let Some(round) = &self.gathering else {
            return false;
        };
        let state = round.state.lock();
        if state.required.is_none() {
            return false;
        }
        if self.in_flight > 0 {
            let slow = self.last_sent.is_some_and(|sent| sent.elapsed() >= slow_round);
            return slow && self.in_flight < MAX_ROUNDS;
        }
        let expected = self.last_reads[0].max(self.last_reads[1]);
        expected < COALESCE_MIN_READS
            || state.reads * 8 >= expected * 7
            || self.last_done.is_none_or(|done| done.elapsed() >= COALESCE_DELAY)
    }

    /// Whether the gathering round, which is not due, waits for the delay alone, and nothing will send it then.
    pub(super) fn is_to_be_delayed(&self) -> bool {
        let is_required = |round: &Arc<Round>| round.state.lock().required.is_some();
        self.in_flight == 0 && !self.is_delayed && self.gathering.as_ref().is_some_and(is_required)
    }

    /// Records the end of a round that served `reads`.
    pub(super) fn record_done(&mut self, reads: u64) {
        self.in_flight -= 1;
        self.last_done = Some(Instant::now());
        let gathered = self
            .gathering
            .as_ref()
            .map_or(0, |round| round.state.lock().reads);
        self.last_reads = [self.last_reads[1], reads + gathered];
    }
}

/// Shared quorum check and the reads that it serves.
pub(super) struct Round {
    pub(super) state: Mutex<RoundState>,
    /// Notified when `state.result` is set.
    done: Notify,
}

#[derive(Default)]
pub(super) struct RoundState {
    pub(super) reads: u64,
    /// When the first read joined that needs the check at once. The timeout of all reads of the round starts here; without it the
    /// round is not sent.
    required: Option<Instant>,
    /// Lowest past revision that a read of the round needs, which is the revision of the check: its success proves for
    /// all of them that etcd has not compacted their revisions. 0 if every read wants the newest state.
    pub(super) at: i64,
    /// The check's span, once a traced read has joined.
    pub(super) span: Option<SpanContext>,
    pub(super) result: Option<Result<Proof, Unproven>>,
}

impl RoundState {
    /// Requires the check now, if nothing did before.
    pub(super) fn require(&mut self) {
        self.required.get_or_insert_with(Instant::now);
    }

    /// Adds a read of the past revision `at`, or of the newest state if that is 0.
    pub(super) fn add_read(&mut self, at: i64) {
        self.reads += 1;
        self.at = match (self.at, at) {
            (0, one) | (one, 0) => one,
            (one, other) => one.min(other),
        };
    }
}

impl Default for Round {
    fn default() -> Self {
        Round {
            state: Mutex::default(),
            done: Notify::new(),
        }
    }
}

impl Round {
    /// When the check was required first.
    pub(super) fn required_since(&self) -> Instant {
        self.state.lock().required.unwrap_or_else(Instant::now)
    }

    /// Waits for the round's result.
    pub(super) async fn wait(&self) -> Result<Proof, Unproven> {
        loop {
            // Registered before the result is read, so that the end of the round is not missed.
            let done = self.done.notified();
            if let Some(result) = self.state.lock().result {
                return result;
            }
            done.await;
        }
    }

    /// Wakes all `reads`, in batches of [`WAKE_BATCH`]: the first responses are sent, and their clients continue,
    /// while the others are built.
    pub(super) async fn wake(&self, reads: u64) {
        for _ in 1..reads.div_ceil(WAKE_BATCH) {
            for _ in 0..WAKE_BATCH {
                self.done.notify_one();
            }
            tokio::task::yield_now().await;
        }
        // The last batch, and readers that had not registered yet.
        self.done.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    const MILLISECOND: Duration = Duration::from_millis(1);

    /// Rounds that gather `reads`.
    fn gathering(rounds: &mut Rounds, reads: u64) {
        let round = Round::default();
        round.state.lock().reads = reads;
        round.state.lock().require();
        rounds.gathering = Some(Arc::new(round));
    }

    #[tokio::test(start_paused = true)]
    async fn round_is_due_at_once_while_none_is_in_flight() {
        let mut rounds = Rounds::default();
        assert!(!rounds.is_due(SLOW_ROUND), "no read waits");
        gathering(&mut rounds, 1);
        assert!(rounds.is_due(SLOW_ROUND));
    }

    #[tokio::test(start_paused = true)]
    async fn round_starts_next_to_a_slow_one_up_to_the_bound() {
        let mut rounds = Rounds::default();
        gathering(&mut rounds, 1);
        (rounds.in_flight, rounds.last_sent) = (1, Some(Instant::now()));
        tokio::time::advance(SLOW_ROUND - MILLISECOND).await;
        assert!(!rounds.is_due(SLOW_ROUND));
        tokio::time::advance(MILLISECOND).await;
        assert!(rounds.is_due(SLOW_ROUND));
        rounds.in_flight = MAX_ROUNDS;
        assert!(!rounds.is_due(SLOW_ROUND));
    }

    #[tokio::test(start_paused = true)]
    async fn round_after_a_large_one_waits_for_most_of_its_reads_or_the_delay() {
        let mut rounds = Rounds {
            in_flight: 1,
            ..Rounds::default()
        };
        rounds.record_done(16);
        gathering(&mut rounds, 13);
        assert!(!rounds.is_due(SLOW_ROUND));
        gathering(&mut rounds, 14);
        assert!(rounds.is_due(SLOW_ROUND));
        gathering(&mut rounds, 1);
        assert!(!rounds.is_due(SLOW_ROUND));
        tokio::time::advance(COALESCE_DELAY).await;
        assert!(rounds.is_due(SLOW_ROUND));
    }

    #[tokio::test(start_paused = true)]
    async fn round_that_no_read_needs_is_neither_due_nor_delayed() {
        let mut rounds = Rounds {
            in_flight: 1,
            ..Rounds::default()
        };
        rounds.record_done(16);
        let round = Arc::clone(rounds.gathering.get_or_insert_default());
        round.state.lock().add_read(0);
        assert!(!rounds.is_due(SLOW_ROUND) && !rounds.is_to_be_delayed());
        round.state.lock().require();
        assert!(!rounds.is_due(SLOW_ROUND) && rounds.is_to_be_delayed());
        tokio::time::advance(COALESCE_DELAY).await;
        assert!(rounds.is_due(SLOW_ROUND));
    }

    #[tokio::test(start_paused = true)]
    async fn large_round_is_expected_again_after_one_small_round_and_not_after_two() {
        let mut rounds = Rounds::default();
        // The reads that have joined the next round meanwhile count as well.
        gathering(&mut rounds, 4);
        rounds.in_flight = 3;
        rounds.record_done(4);
        gathering(&mut rounds, 1);
        rounds.in_flight = 1;
        rounds.record_done(0);
        assert!(!rounds.is_due(SLOW_ROUND));
        rounds.in_flight = 1;
        rounds.record_done(0);
        assert!(rounds.is_due(SLOW_ROUND));
    }

    #[test]
    fn check_reads_at_the_lowest_past_revision_of_its_reads() {
        let mut state = RoundState::default();
        let at = [0, 9, 5, 7, 0].map(|at| {
            state.add_read(at);
            state.at
        });
        assert_eq!(at, [0, 9, 5, 5, 5]);
        assert_eq!(state.reads, 5);
    }

    #[tokio::test(start_paused = true)]
    async fn one_of_two_connections_has_to_reach_from_the_check_to_what_it_covers() {
        let start = Instant::now();
        let at = |second| start + Duration::from_secs(second);
        let proof = Proof {
            header: ResponseHeader::default(),
            history: HistoryId::FIRST,
            at: 0,
            sent: at(10),
            connection_opened: at(5),
        };
        // Sent before the check: by the check's connection.
        assert!(proof.covers(at(20), at(5)));
        assert!(!proof.covers(at(1), at(4)));
        // Sent after it: by the other connection.
        assert!(proof.covers(at(10), at(15)));
        assert!(!proof.covers(at(11), at(15)));
    }

    #[tokio::test(start_paused = true)]
    async fn end_of_a_round_wakes_all_of_its_reads_a_batch_at_a_time() {
        const READS: u64 = 3 * WAKE_BATCH + 1;
        let (round, woken) = (Arc::new(Round::default()), Arc::new(AtomicUsize::new(0)));
        for _ in 0..READS {
            let (round, woken) = (Arc::clone(&round), Arc::clone(&woken));
            tokio::spawn(async move {
                round.wait().await.unwrap_err();
                woken.fetch_add(1, Ordering::Relaxed);
            });
        }
        tokio::task::yield_now().await;
        round.state.lock().result = Some(Err(Unproven::Compacted(3)));
        let batch = usize::try_from(WAKE_BATCH).unwrap();
        let mut waking = Box::pin(round.wake(READS));
        let mut context = std::task::Context::from_waker(std::task::Waker::noop());
        for turn in 1..=3 {
            assert!(waking.as_mut().poll(&mut context).is_pending());
            tokio::task::yield_now().await;
            assert_eq!(woken.load(Ordering::Relaxed), turn * batch);
        }
        waking.await;
        tokio::task::yield_now().await;
        assert_eq!(woken.load(Ordering::Relaxed), 3 * batch + 1);
        // A read that looks after the end does not wait.
        assert_eq!(round.wait().await.unwrap_err(), Unproven::Compacted(3));
    }
}
