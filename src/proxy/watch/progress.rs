//! Progress notifications of one stream: on request, for all of its watchers, and periodically, for each that asked.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// Longest wait of a client's request for its mirrors: apiserver repeats it after 100 ms.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(50);

/// Longest jitter, as a part of the interval.
const MAX_JITTER: f64 = 0.1;

/// Progress that is owed to a client.
#[derive(Debug)]
pub(super) struct Progress {
    /// Interval of the periodic notifications.
    interval: Duration,
    /// Next tick; `None` until a watcher asks for notifications.
    tick: Option<Pin<Box<Sleep>>>,
    /// Watchers that are owed a notification since the last tick.
    pub(super) owed: VecDeque<i64>,
    /// Requests of the client that were not answered yet.
    pub(super) requested: Option<Requested>,
    /// Highest revision that was reported for the whole stream.
    pub(super) reported: i64,
}

/// Progress requests that are answered together.
#[derive(Debug)]
pub(super) struct Requested {
    /// Number of requests, each of which gets a response, as from etcd.
    pub(super) count: usize,
    /// Revision that all mirrors should reach first.
    pub(super) target: i64,
    /// Time at which they were taken up.
    pub(super) began: Instant,
    expires: Pin<Box<Sleep>>,
}

impl Progress {
    pub(super) fn new(interval: Duration) -> Progress {
        Progress {
            interval,
            tick: None,
            owed: VecDeque::new(),
            requested: None,
            reported: 0,
        }
    }

    /// Lets a watcher have periodic notifications that has got nothing since `quiet_since`: an interval later, with a
    /// jitter of up to a tenth of it, or earlier together with the others of the stream.
    pub(super) fn begin(&mut self, quiet_since: Instant) {
        let latest = quiet_since + self.interval.mul_f64(1.0 + MAX_JITTER);
        if self.tick.as_ref().is_none_or(|tick| tick.deadline() > latest) {
            let tick = tokio::time::sleep_until(quiet_since + self.with_jitter());
            self.tick = Some(Box::pin(tick));
        }
    }

    /// Ends the periodic notifications: etcd has its own.
    pub(super) fn stop(&mut self) {
        self.tick = None;
        self.owed.clear();
    }

    fn with_jitter(&self) -> Duration {
        use std::hash::BuildHasher as _;
        let random = std::collections::hash_map::RandomState::new().hash_one(0) % 1000;
        let jitter = MAX_JITTER * random as f64 / 1000.0;
        self.interval.mul_f64(1.0 + jitter)
    }

    /// Whether the next tick has come; otherwise registers `cx`.
    pub(super) fn has_ticked(&mut self, cx: &mut Context<'_>) -> bool {
        let next = self.with_jitter();
        let Some(tick) = &mut self.tick else {
            return false;
        };
        if tick.as_mut().poll(cx).is_pending() {
            return false;
        }
        tick.as_mut().reset(Instant::now() + next);
        // Registers the task for the next tick.
        let _ = tick.as_mut().poll(cx);
        true
    }

    /// Takes up `count` requests, which are answered once every mirror has reached `target`.
    pub(super) fn request(&mut self, count: usize, target: i64) {
        self.requested = Some(Requested {
            count,
            target,
            began: Instant::now(),
            expires: Box::pin(tokio::time::sleep(REQUEST_TIMEOUT)),
        });
    }
}

impl Requested {
    /// Whether the request is answered with what there is; otherwise registers `cx`.
    pub(super) fn has_expired(&mut self, cx: &mut Context<'_>) -> bool {
        matches!(self.expires.as_mut().poll(cx), Poll::Ready(()))
    }
}

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    const INTERVAL: Duration = Duration::from_secs(5);

    fn ticks_within(progress: &Progress) -> Duration {
        let now = Instant::now();
        let tick = progress.tick.as_ref().map(|tick| tick.deadline());
        tick.map_or(Duration::MAX, |tick| tick.saturating_duration_since(now))
    }

    #[tokio::test(start_paused = true)]
    async fn silence_before_a_notification_is_one_interval_with_the_time_at_etcd() {
        let mut progress = Progress::new(INTERVAL);
        let sent_by_etcd = Instant::now();
        tokio::time::advance(INTERVAL.mul_f64(0.6)).await;
        progress.begin(sent_by_etcd);
        let within = ticks_within(&progress);
        assert!(within <= INTERVAL.mul_f64(0.51), "{within:?}");
        progress.begin(Instant::now());
        assert_eq!(ticks_within(&progress), within, "a later watcher delays none");

        // Once more at etcd, and longer.
        progress.stop();
        tokio::time::advance(INTERVAL * 3).await;
        let mut cx = Context::from_waker(Waker::noop());
        assert!(!progress.has_ticked(&mut cx), "etcd has notifications of its own");
        progress.begin(sent_by_etcd);
        assert!(progress.has_ticked(&mut cx), "it is due");
        assert!(!progress.has_ticked(&mut cx));
    }
}
