//! Pace at which a connection's requests are read, so that one client with many requests does not keep the others'
//! waiting:
//!
//! - A connection takes turns with all others: [`FrameBudget`] bounds the frames that it may have handled in one turn of
//!   the scheduler.
//! - A connection whose calls cost too much, or for whose calls there is no room, is read later: [`Delay`].

use std::task::{Context, Poll, ready};
use std::{pin::Pin, sync::Arc, time::Duration};

use pin_project_lite::pin_project;
use tokio::time::Sleep;

use crate::limits::{Intake, Unhandled};

/// Cost of the frames that are handled in one turn: about 14 reads.
const COST_PER_TURN: u32 = 128;
/// Cost of a frame that begins a request.
const REQUEST_COST: u32 = 8;
/// Cost of any other frame.
const FRAME_COST: u32 = 1;

/// Longest time for which a connection is not read at once, short enough for its pings.
const MAX_DELAY: Duration = Duration::from_millis(200);

/// Remaining budget of a connection's turn.
#[derive(Debug)]
pub(super) struct FrameBudget(u32);

impl FrameBudget {
    /// Budget of a whole turn.
    pub(super) fn new() -> FrameBudget {
        FrameBudget(COST_PER_TURN)
    }

    /// Whether the turn is over.
    pub(super) fn is_spent(&self) -> bool {
        self.0 == 0
    }

    /// Takes the cost of a frame.
    pub(super) fn spend(&mut self, begins_request: bool) {
        let cost = if begins_request { REQUEST_COST } else { FRAME_COST };
        self.0 = self.0.saturating_sub(cost);
    }
}

/// Delay of a connection's next read, as its [`Intake`] demands.
#[derive(Debug)]
pub(super) struct Delay {
    intake: Arc<Intake>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Delay {
    pub(super) fn new(intake: Arc<Intake>) -> Delay {
        Delay { intake, sleep: None }
    }

    /// Intake of the connection.
    pub(super) fn intake(&self) -> &Intake {
        &self.intake
    }

    /// Waits until the connection may be read.
    pub(super) fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some(sleep) = &mut self.sleep {
                ready!(sleep.as_mut().poll(cx));
                self.sleep = None;
            }
            let delay = ready!(self.intake.poll_read(cx));
            if delay.is_zero() {
                return Poll::Ready(());
            }
            self.sleep = Some(Box::pin(tokio::time::sleep(delay.min(MAX_DELAY))));
        }
    }
}

pin_project! {
    /// Call of a handler, which tells the connection's intake when it first runs.
    pub(super) struct Handling<F> {
        unhandled: Option<Unhandled>,
        #[pin]
        handler: F,
    }
}

impl<F> Handling<F> {
    pub(super) fn new(unhandled: Unhandled, handler: F) -> Handling<F> {
        let unhandled = Some(unhandled);
        Handling { unhandled, handler }
    }
}

impl<F: Future> Future for Handling<F> {
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<F::Output> {
        let handling = self.project();
        *handling.unhandled = None;
        handling.handler.poll(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::Instant;

    use super::*;
    use crate::limits::{ByteKind, BytesLedger};

    #[tokio::test(start_paused = true)]
    async fn each_refused_call_delays_the_next_read_up_to_a_bound() {
        let intake = Arc::new(Intake::default());
        let account = BytesLedger::of_bytes(2).account(0, Arc::clone(&intake));
        let mut delay = Delay::new(intake);
        for (refused, expected) in [(0, 0), (1, 10), (3, 30), (0, 0), (1_000, 200)] {
            for _ in 0..refused {
                account.hold(ByteKind::Request).try_grow(2).unwrap_err();
            }
            let start = Instant::now();
            poll_fn(|cx| delay.poll_end(cx)).await;
            assert_eq!(start.elapsed(), Duration::from_millis(expected), "{refused}");
        }
    }

    #[tokio::test]
    async fn call_counts_as_handled_once_it_runs() {
        let intake = Arc::new(Intake::default());
        let is_handled = async || futures_util::poll!(poll_fn(|cx| intake.poll_handled(cx))).is_ready();
        let mut call = Box::pin(Handling::new(intake.begin(), std::future::pending::<()>()));
        assert!(!is_handled().await);
        assert!(futures_util::poll!(&mut call).is_pending());
        assert!(is_handled().await);
    }

    #[test]
    fn turn_has_room_for_some_requests_or_many_other_frames() {
        let frames = |begins_request| {
            let mut budget = FrameBudget::new();
            let mut frames = 0;
            while !budget.is_spent() {
                budget.spend(begins_request);
                frames += 1;
            }
            frames
        };
        assert_eq!((frames(true), frames(false)), (16, 128));
    }
}
