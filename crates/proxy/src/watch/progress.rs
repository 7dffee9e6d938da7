//! Progress notifications of one stream: on request, for all of its watchers, and periodically, for each that asked.

use std::task::{Context, Poll};
use std::{collections::VecDeque, pin::Pin, time::Duration};

use etcd_store::cache::WatchFields;
use tokio::time::{Instant, Sleep};

use super::watchers::{Watcher, Watchers};
use super::{downstream::Downstream, receive::MAX_PROGRESS_RUN, request::NO_WATCHER};

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
    owed: VecDeque<i64>,
    /// Requests of the client that were not answered yet.
    pub(super) requested: Option<Requested>,
}

/// Progress requests that are answered together.
#[derive(Debug)]
pub(super) struct Requested {
    /// Number of requests, each of which gets a response, as from etcd.
    count: usize,
    /// Revision that all mirrors should reach first.
    pub(super) target: i64,
    /// Time at which they were taken up.
    began: Instant,
    expires: Pin<Box<Sleep>>,
}

impl Progress {
    pub(super) fn new(interval: Duration) -> Progress {
        Progress {
            interval,
            tick: None,
            owed: VecDeque::new(),
            requested: None,
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

    fn with_jitter(&self) -> Duration {
        use std::hash::BuildHasher as _;
        let random = std::collections::hash_map::RandomState::new().hash_one(0) % 1000;
        let jitter = MAX_JITTER * random as f64 / 1000.0;
        self.interval.mul_f64(1.0 + jitter)
    }

    /// Whether the next tick has come; otherwise registers `cx`.
    fn has_ticked(&mut self, cx: &mut Context<'_>) -> bool {
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

    /// Takes up a progress request of the client, with those that have arrived behind it: a client that asks faster than
    /// the mirrors respond would otherwise fill the connection with its requests.
    pub(super) fn take_up(&mut self, down: &mut Downstream, watchers: &Watchers) {
        let count = 1 + down.requests.take_progress(MAX_PROGRESS_RUN - 1);
        let reached = watchers.all().map(|watcher| watcher.reader.reached());
        let known = reached.fold(down.mirrors().cluster_state.known(), i64::max);
        // Like etcd: no answer before a watcher that waits for the future, and none while one is cancelled.
        let waits_for_the_future = |watcher: &Watcher| watcher.since > known;
        if down.has_cancelled() || watchers.all().any(waits_for_the_future) {
            return watchers.nudge(&down.stream);
        }
        if watchers.is_empty() {
            return;
        }
        let sent = watchers.all().map(|watcher| watcher.last_event);
        let target = sent.fold(known.max(down.reported), i64::max);
        // A client that asks again, though nothing has happened, knows of more.
        if target == down.reported {
            watchers.nudge(&down.stream);
        }
        self.requested = Some(Requested {
            count,
            target,
            began: Instant::now(),
            expires: Box::pin(tokio::time::sleep(REQUEST_TIMEOUT)),
        });
        watchers.want(&down.stream, target, |watcher| watcher.reader.reached() < target);
    }

    /// Answers the client's progress requests, or drops them; returns whether they are done. Called between messages.
    pub(super) fn poll_requested(
        &mut self,
        down: &mut Downstream,
        watchers: &Watchers,
        cx: &mut Context<'_>,
    ) -> bool {
        let Some(requested) = &mut self.requested else {
            return false;
        };
        let has_expired = requested.has_expired(cx);
        let (count, target, began) = (requested.count, requested.target, requested.began);
        // What all watchers have may be below the start of one that begins later than the others.
        let starts = watchers.all().map(|watcher| watcher.since);
        let least = starts.fold(down.last_event.max(down.reported), i64::max);
        let revision = watchers.progress().filter(|revision| *revision >= least);
        let revision = revision.filter(|_| !down.has_cancelled());
        if !has_expired && revision.is_none_or(|revision| revision < target) {
            return false;
        }
        self.requested = None;
        for _ in 0..count {
            if let Some(revision) = revision
                && report(down, watchers, NO_WATCHER, revision)
            {
                down.metrics().record_progress(began.elapsed());
                down.reported = revision;
            }
        }
        true
    }

    /// Sends the periodic progress notification of the next watcher that is owed one.
    pub(super) fn poll_periodic(
        &mut self,
        down: &mut Downstream,
        watchers: &mut Watchers,
        cx: &mut Context<'_>,
    ) {
        if self.has_ticked(cx) {
            for (id, watcher) in watchers.all_mut() {
                if watcher.create.options.progress_notify
                    && std::mem::replace(&mut watcher.progress_due, true)
                    && !self.owed.contains(&id)
                {
                    self.owed.push_back(id);
                }
            }
        }
        while let Some(id) = self.owed.pop_front() {
            let progress = watchers.get(id).and_then(Watcher::progress);
            if let Some(revision) = progress
                && report(down, watchers, id, revision)
            {
                if let Some(watcher) = watchers.get_mut(id) {
                    watcher.quiet_since = Instant::now();
                }
                return;
            }
        }
    }
}

/// Sends a progress notification; returns whether it was possible.
fn report(down: &mut Downstream, watchers: &Watchers, id: i64, revision: i64) -> bool {
    let Some(watcher) = watchers.all().next() else {
        return false;
    };
    // Before a byte leaves (W16).
    let history = watcher.reader.history();
    if !down.mirrors().cluster_state.record_served(history, revision) {
        return false;
    }
    let header = down.header(revision);
    down.send(&WatchFields {
        header,
        watch_id: id,
        ..WatchFields::default()
    });
    true
}

impl Requested {
    /// Whether the request is answered with what there is; otherwise registers `cx`.
    fn has_expired(&mut self, cx: &mut Context<'_>) -> bool {
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
        let mut progress = Progress::new(INTERVAL);
        tokio::time::advance(INTERVAL * 3).await;
        let mut cx = Context::from_waker(Waker::noop());
        assert!(!progress.has_ticked(&mut cx), "no watcher asks for notifications");
        progress.begin(sent_by_etcd);
        assert!(progress.has_ticked(&mut cx), "it is due");
        assert!(!progress.has_ticked(&mut cx));
    }
}
