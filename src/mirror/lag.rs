//! How long a mirror has been behind: the age of the oldest revision that a quorum check has told and the mirror has not reached.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

/// Revisions that are remembered; a mirror that is further behind is told to be as far behind as the oldest of them.
const MAX_REMEMBERED: usize = 1024;

/// What one mirror has not reached.
#[derive(Debug, Default)]
pub(super) struct Lag(VecDeque<(Instant, i64)>);

impl Lag {
    /// etcd was at `told` just now, and the mirror is at `reached`; returns how long it has been behind.
    pub(super) fn note(&mut self, told: i64, reached: i64) -> Duration {
        let now = Instant::now();
        while self.0.front().is_some_and(|(_, revision)| *revision <= reached) {
            self.0.pop_front();
        }
        let is_news = self.0.back().is_none_or(|(_, revision)| *revision < told);
        if told > reached && is_news && self.0.len() < MAX_REMEMBERED {
            self.0.push_back((now, told));
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
    async fn a_mirror_is_behind_for_as_long_as_a_revision_is_not_reached() {
        let mut lag = Lag::default();
        let mut beat = async |told, reached| {
            tokio::time::advance(Duration::from_secs(1)).await;
            lag.note(told, reached).as_secs()
        };
        assert_eq!(beat(10, 10).await, 0);
        assert_eq!(beat(11, 10).await, 0, "from now on");
        assert_eq!(beat(12, 10).await, 1);
        assert_eq!(beat(12, 10).await, 2);
        assert_eq!(beat(13, 11).await, 2, "since it was told of 12");
        assert_eq!(beat(14, 13).await, 0);
        assert_eq!(beat(14, 14).await, 0);
    }
}
