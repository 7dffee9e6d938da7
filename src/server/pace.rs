//! Pace at which a connection's requests are read, so that one client with many requests does not keep the others'
//! waiting:
//!
//! - A connection takes turns with all others: [`Budget`] bounds the frames that it may have handled in one turn of
//!   the scheduler.
//! - A connection whose calls cost too much, or for whose calls there is no room, is read later: [`Delay`].

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::time::Sleep;

use crate::limits::Intake;

/// Cost of the frames that are handled in one turn: about 14 reads.
const COST_PER_TURN: u32 = 128;
/// Cost of a frame that begins a request.
const REQUEST_COST: u32 = 8;
/// Cost of any other frame.
const FRAME_COST: u32 = 1;

/// Longest time for which a connection is not read at once, short enough for its pings.
const MAX_DELAY: Duration = Duration::from_millis(200);

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

#[cfg(test)]
mod tests {
    use super::*;

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
