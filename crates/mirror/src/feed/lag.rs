//! Lag of a mirror: the age of the oldest revision that a quorum check reported and the mirror has not reached. A feed
//! that stays behind is replaced ([`Lateness`]).

use std::{collections::VecDeque, time::Duration};

use rangecache_upstream::{Connection, Upstream};
use tokio::time::Instant;

/// Bound on the recorded revisions. While it is reached no further ones are recorded; the lag is that of the oldest
/// anyway.
const MAX_REMEMBERED: usize = 1024;

/// Time without an event or a later revision after which a feed is replaced while a reader waits for it.
const STALL_TIMEOUT: Duration = Duration::from_secs(3);
/// Stall timeout of a feed whose member is unhealthy while another one is healthy.
const STALL_TIMEOUT_UNHEALTHY: Duration = Duration::from_millis(200);
/// Time after which a feed that advances, but has not reached a proven revision, is replaced if another member is
/// healthy.
const LAG_TIMEOUT: Duration = Duration::from_secs(5);

/// Revisions that one mirror has not reached, with the time of the check that reported each.
#[derive(Debug, Default)]
pub(crate) struct Lag(VecDeque<(Instant, i64)>);

impl Lag {
    /// Records that a check reported `proven` just now, and that the mirror is at `reached`; returns the mirror's lag.
    pub(crate) fn record(&mut self, proven: i64, reached: i64) -> Duration {
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

/// Delay of a feed that is asked for progress.
#[derive(Debug)]
pub(crate) struct Lateness {
    /// When the last event or later revision arrived, or the feed fell behind.
    advanced: Instant,
    /// A proven revision that the feed has not reached, and since when it is asked for it.
    target: Option<(i64, Instant)>,
}

impl Lateness {
    pub(crate) fn new() -> Lateness {
        Lateness {
            advanced: Instant::now(),
            target: None,
        }
    }

    /// Records an event or a later revision.
    pub(crate) fn record_advance(&mut self) {
        self.advanced = Instant::now();
    }

    /// Records that readers want the revision `wanted` and the feed is at `reached`; returns whether it is behind.
    pub(crate) fn is_behind(&mut self, wanted: i64, reached: i64) -> bool {
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

    /// Why the feed on `connection` has to be replaced, if it has.
    pub(super) fn is_too_late(&self, upstream: &Upstream, connection: &Connection) -> Option<&'static str> {
        self.judge(
            || upstream.has_better_than(connection.url()),
            || upstream.has_another_than(connection.url()),
        )
    }

    /// Returns why the feed has to be replaced, if it has. `has_better` returns whether another member is healthy and the
    /// feed's is not, `has_another` whether another one is healthy at all.
    fn judge(
        &self,
        has_better: impl FnOnce() -> bool,
        has_another: impl FnOnce() -> bool,
    ) -> Option<&'static str> {
        let stalled = self.advanced.elapsed();
        if stalled > STALL_TIMEOUT {
            return Some("the watch stays behind etcd's revision");
        }
        if stalled > STALL_TIMEOUT_UNHEALTHY && has_better() {
            return Some("the watch stays behind etcd's revision and its member is unhealthy");
        }
        let lags = self
            .target
            .is_some_and(|(_, since)| since.elapsed() > LAG_TIMEOUT);
        (lags && has_another()).then_some("the watch lags behind etcd")
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

    #[tokio::test(start_paused = true)]
    async fn feed_is_left_once_it_stays_or_falls_behind_a_proven_revision() {
        let mut feed = Lateness::new();
        tokio::time::advance(Duration::from_secs(60)).await;
        assert!(!feed.is_behind(10, 10), "no reader waits");
        assert!(feed.is_behind(11, 10));
        assert_eq!(feed.judge(|| true, || true), None, "it has just fallen behind");
        tokio::time::advance(STALL_TIMEOUT / 2).await;
        assert_eq!(feed.judge(|| false, || true), None);
        assert!(feed.judge(|| true, || true).is_some(), "its member is unhealthy");
        tokio::time::advance(STALL_TIMEOUT).await;
        assert!(
            feed.judge(|| false, || false).is_some(),
            "there is no other member"
        );
        feed.record_advance();
        assert_eq!(feed.judge(|| false, || false), None);
    }

    #[tokio::test(start_paused = true)]
    async fn feed_that_advances_but_never_arrives_is_left_if_there_is_another_member() {
        let mut feed = Lateness::new();
        let second = Duration::from_secs(1);
        for reached in 10..15 {
            assert!(feed.is_behind(100, reached));
            assert_eq!(feed.judge(|| false, || true), None, "{reached}");
            tokio::time::advance(second).await;
            feed.record_advance();
        }
        tokio::time::advance(second).await;
        assert_eq!(feed.judge(|| false, || false), None, "another one would not help");
        assert_eq!(feed.judge(|| false, || true), Some("the watch lags behind etcd"));
        // One that reaches each revision in time is not late, although readers want later ones meanwhile.
        let mut feed = Lateness::new();
        for reached in 10..30 {
            assert!(feed.is_behind(reached + 1, reached));
            tokio::time::advance(second).await;
            feed.record_advance();
            assert_eq!(feed.judge(|| false, || true), None, "{reached}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn feed_is_left_after_its_times_and_not_at_them() {
        let moment = Duration::from_nanos(1);
        for (time, has_better, advances) in [
            (STALL_TIMEOUT, false, false),
            (STALL_TIMEOUT_UNHEALTHY, true, false),
            (LAG_TIMEOUT, false, true),
        ] {
            let mut feed = Lateness::new();
            assert!(feed.is_behind(100, 10));
            tokio::time::advance(time).await;
            if advances {
                feed.record_advance();
            }
            assert_eq!(feed.judge(|| has_better, || advances), None, "{time:?}");
            tokio::time::advance(moment).await;
            assert!(feed.judge(|| has_better, || advances).is_some(), "{time:?}");
        }
    }
}
