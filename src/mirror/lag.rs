//! Lag of a mirror: the age of the oldest revision that a quorum check reported and the mirror has not reached.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Bound on the recorded revisions. While it is reached no further ones are recorded; the lag is that of the oldest
/// anyway.
const MAX_REMEMBERED: usize = 1024;

/// Revisions that one mirror has not reached, with the time of the check that reported each.
#[derive(Debug, Default)]
pub(super) struct Lag(VecDeque<(Instant, i64)>);

impl Lag {
    /// Records that a check reported `proven` just now, and that the mirror is at `reached`; returns the mirror's lag.
    pub(super) fn record(&mut self, proven: i64, reached: i64) -> Duration {
        let now = Instant::now();
        while self.0.front().is_some_and(|(_, revision)| *revision <= reached) {
            self.0.pop_front();
        }
        let is_new = self.0.back().is_none_or(|(_, revision)| *revision < proven);
        if proven > reached && is_new && self.0.len() < MAX_REMEMBERED {
            self.0.push_back((now, proven));
        }
        self.0
            .front()
            .map_or(Duration::ZERO, |(when, _)| now.duration_since(*when))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn lag_is_the_age_of_the_oldest_revision_not_reached() {
        let mut lag = Lag::default();
        let mut tick = async |proven, reached| {
            tokio::time::advance(Duration::from_secs(1)).await;
            lag.record(proven, reached).as_secs()
        };
        assert_eq!(tick(10, 10).await, 0);
        assert_eq!(tick(11, 10).await, 0, "from now on");
        assert_eq!(tick(12, 10).await, 1);
        assert_eq!(tick(12, 10).await, 2);
        assert_eq!(tick(13, 11).await, 2, "since revision 12 was reported");
        assert_eq!(tick(14, 13).await, 0);
        assert_eq!(tick(14, 14).await, 0);
    }
}
