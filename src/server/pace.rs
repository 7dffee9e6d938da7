//! Pace at which a connection's requests are read, so that one client with many requests does not keep the others'
//! waiting:
//!
//! - A connection takes turns with all others: [`Budget`] bounds the frames that it may have handled in one turn of
//!   the scheduler.
//! - A connection whose calls were refused at a bound is read later, [`PAUSE`] for each refused call. Refusing a call
//!   costs this process more than it costs the client to repeat it.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::Sleep;

/// Cost of the frames that are handled in one turn: about 14 reads.
const COST_PER_TURN: u32 = 128;
/// Cost of a frame that begins a request.
const REQUEST_COST: u32 = 8;
/// Cost of any other frame.
const FRAME_COST: u32 = 1;

/// Time for which a connection is not read after a refused call.
const PAUSE: Duration = Duration::from_millis(10);
/// Longest time for which a connection is not read, short enough for its pings.
const MAX_PAUSE: Duration = Duration::from_millis(200);

/// What is left of a connection's turn.
#[derive(Debug)]
pub(super) struct Budget(u32);

impl Budget {
    /// Budget of a whole turn.
    pub(super) fn new() -> Budget {
        Budget(COST_PER_TURN)
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

/// Calls of one connection that were refused at a bound since it was last read.
#[derive(Clone, Debug, Default)]
pub(super) struct Refusals(Arc<AtomicU32>);

impl Refusals {
    /// Counts a refused call.
    pub(super) fn record(&self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn take(&self) -> u32 {
        // A load first: most reads of most connections find none.
        match self.0.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.0.swap(0, Ordering::Relaxed),
        }
    }
}

/// Pause of a connection after refused calls.
#[derive(Debug, Default)]
pub(super) struct Pause {
    refusals: Refusals,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Pause {
    /// Counter of the refused calls after which the connection pauses.
    pub(super) fn refusals(&self) -> Refusals {
        self.refusals.clone()
    }

    /// Waits for the end of the pause.
    pub(super) fn poll_end(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            if let Some(sleep) = &mut self.sleep {
                std::task::ready!(sleep.as_mut().poll(cx));
                self.sleep = None;
            }
            match self.refusals.take() {
                0 => return Poll::Ready(()),
                refused => {
                    let pause = PAUSE.saturating_mul(refused).min(MAX_PAUSE);
                    self.sleep = Some(Box::pin(tokio::time::sleep(pause)));
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use tokio::time::Instant;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn each_refused_call_delays_the_next_read_up_to_a_bound() {
        let mut pause = Pause::default();
        let refusals = pause.refusals();
        for (refused, expected) in [(0, 0), (1, 10), (3, 30), (0, 0), (1_000, 200)] {
            (0..refused).for_each(|_| refusals.record());
            let start = Instant::now();
            poll_fn(|cx| pause.poll_end(cx)).await;
            assert_eq!(start.elapsed(), Duration::from_millis(expected), "{refused}");
        }
    }

    #[test]
    fn turn_has_room_for_some_requests_or_many_other_frames() {
        let frames = |begins_request| {
            let mut budget = Budget::new();
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
