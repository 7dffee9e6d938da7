//! Lag of a mirror: the age of the oldest revision that a quorum check reported and the mirror has not reached. A feed
//! that stays behind is replaced ([`Lateness`]).

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::mirrors::Mirrors;
use crate::upstream::Connection;

/// Bound on the recorded revisions. While it is reached no further ones are recorded; the lag is that of the oldest
/// anyway.
const MAX_REMEMBERED: usize = 1024;

/// Time without an event or a later revision after which a feed is replaced while a reader waits for it.
const STALL_TIMEOUT: Duration = Duration::from_secs(3);
/// The same, if its member is unhealthy and another one is healthy.
const STALL_TIMEOUT_UNHEALTHY: Duration = Duration::from_millis(200);
/// Time after which a feed that advances, but has not reached a proven revision, is replaced if another member is
/// healthy.
const LAG_TIMEOUT: Duration = Duration::from_secs(5);

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

/// How late a feed is that is asked for progress.
#[derive(Debug)]
pub(super) struct Lateness {
    /// When the last event or later revision arrived, or the feed fell behind.
    advanced: Instant,
    /// A proven revision that the feed has not reached, and since when it is asked for it.
    target: Option<(i64, Instant)>,
}

impl Lateness {
    pub(super) fn new() -> Lateness {
        Lateness {
            advanced: Instant::now(),
            target: None,
        }
    }

    /// Records an event or a later revision.
    pub(super) fn record_advance(&mut self) {
        self.advanced = Instant::now();
    }

    /// Records that readers want the revision `wanted` and the feed is at `reached`; returns whether it is behind.
    pub(super) fn is_behind(&mut self, wanted: i64, reached: i64) -> bool {
        if self.target.is_none() {
            self.advanced = Instant::now();
        }
        if wanted <= reached {
            self.target = None;
        } else if self.target.is_none_or(|(target, _)| target <= reached) {
            self.target = Some((wanted, Instant::now()));
        }
        self.target.is_some()
    }

    /// Why the feed has to be replaced, if it has.
    pub(super) fn is_too_late(&self, mirrors: &Mirrors, connection: &Connection) -> Option<&'static str> {
        let stalled = self.advanced.elapsed();
        if stalled > STALL_TIMEOUT {
            return Some("the watch stays behind etcd's revision");
        }
        if stalled > STALL_TIMEOUT_UNHEALTHY && mirrors.upstream.has_better_than(connection.url()) {
            return Some("the watch stays behind etcd's revision and its member is unhealthy");
        }
        let lags = self
            .target
            .is_some_and(|(_, since)| since.elapsed() > LAG_TIMEOUT);
        (lags && mirrors.upstream.has_another_than(connection.url())).then_some("the watch lags behind etcd")
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
