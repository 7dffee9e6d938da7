//! Progress notifications of one stream: on request, for all of its watchers, and periodically, for each that asked.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::time::{Instant, Sleep};

/// Longest wait of a client's request for its mirrors: apiserver repeats it after 100 ms.
const REQUEST_TIMEOUT: Duration = Duration::from_millis(50);

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

    /// Begins the periodic notifications, with a jitter of up to a tenth of the interval.
    pub(super) fn begin(&mut self) {
        if self.tick.is_none() {
            self.tick = Some(Box::pin(tokio::time::sleep(self.with_jitter())));
        }
    }

    fn with_jitter(&self) -> Duration {
        use std::hash::BuildHasher as _;
        let random = std::collections::hash_map::RandomState::new().hash_one(0) % 1000;
        self.interval + self.interval.mul_f64(random as f64 / 10_000.0)
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
