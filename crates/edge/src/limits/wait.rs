//! The deadline of a call, and the reasons for which a call gets nothing.

use std::time::Duration;

use tokio::time::Instant;

/// Time until which the client of a call waits, set once, when the call arrives. Every wait for the call looks at it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Deadline(Option<(Instant, Duration)>);

impl Deadline {
    /// Of a call whose client has set none.
    pub const NONE: Deadline = Deadline(None);

    /// Of a call that has `arrived`, with the timeout that its client has set, if any.
    #[must_use]
    pub fn after(arrived: Instant, timeout: Option<Duration>) -> Deadline {
        Deadline(timeout.map(|timeout| (arrived, timeout)))
    }

    /// The time; `None` if the client has set none.
    #[must_use]
    pub fn at(self) -> Option<Instant> {
        self.0.map(|(arrived, timeout)| arrived + timeout)
    }

    /// The end of a wait that ends at `latest` in any case.
    #[must_use]
    pub fn at_most(self, latest: Instant) -> Instant {
        self.at().map_or(latest, |at| at.min(latest))
    }

    /// Whether it has expired.
    #[must_use]
    pub fn has_expired(self) -> bool {
        self.at().is_some_and(|at| at <= Instant::now())
    }

    /// Whether it has expired for the client, whose clock began before this one, and whose reset may be faster than the timer.
    #[must_use]
    pub fn has_expired_for_client(self) -> bool {
        self.0
            .is_some_and(|(arrived, timeout)| arrived.elapsed() >= timeout - timeout / 10)
    }
}

/// Reason for which a call got no bytes or no slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Exceeded {
    /// The bytes do not fit now, or did not until the deadline.
    #[error("the byte budget is used up")]
    Bytes,
    /// The bound on waiting calls is reached.
    #[error("too many reads wait")]
    Waiting,
    /// A call without a deadline has waited as long as it may.
    #[error("etcd is too busy")]
    Late,
    /// The caller's deadline has expired.
    #[error("the deadline has expired")]
    Deadline,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn wait_ends_at_its_bound_or_at_an_earlier_deadline_that_counts_from_the_arrival() {
        let (arrived, second) = (Instant::now(), Duration::from_secs(1));
        tokio::time::advance(second).await;
        let (deadline, none) = (Deadline::after(arrived, Some(2 * second)), Deadline::NONE);
        let latest = Instant::now() + 2 * second;
        assert_eq!((none.at(), none.at_most(latest)), (None, latest));
        assert_eq!(deadline.at_most(latest), arrived + 2 * second);
        assert_eq!(deadline.at_most(arrived), arrived);
        assert!(!deadline.has_expired() && !deadline.has_expired_for_client());
        tokio::time::advance(second * 9 / 10).await;
        assert!(!deadline.has_expired());
        assert!(deadline.has_expired_for_client(), "its clock began earlier");
        tokio::time::advance(second / 10).await;
        assert!(deadline.has_expired(), "at the deadline");
        assert!(!none.has_expired() && !none.has_expired_for_client());
    }
}
