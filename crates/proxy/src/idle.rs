//! Timeout for clients that stop reading a response.
//!
//! A response in flight keeps its source: a snapshot of the mirror with all entries that have been replaced since, a
//! call to etcd with its turn, or buffered bytes. A client that opens many responses over time and reads none of them
//! could thereby take memory and turns from all others. A response of which nothing was read for one minute drops its
//! source, and its HTTP/2 stream is reset.
//!
//! Old views that slow readers keep count against `--cache-max-bytes`. When the bound is exceeded, their responses are
//! given up, the slowest first, until it is not.
//!
//! Reading slowly is reading: each byte that is written to the client's connection counts. A response that waits for
//! etcd is not unread.
//!
//! A watch from memory may stay unread: it keeps a position in the mirror's log. Events of a message that was begun
//! count against `--watch-max-bytes`. Only while other watches wait for room there, streams of which nothing was read
//! for ten seconds are given up, the slowest first.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::{cmp::Reverse, time::Duration};

use etcd_store::cache::Rope;
use http_body::{Frame, SizeHint};
use parking_lot::Mutex;
use rangecache_base::telemetry::metrics::Source;
use rangecache_mirror::Mirrors;
use rangecache_upstream::BoxError;
use tokio::time::{Instant, MissedTickBehavior};

use super::metrics::AbortedResponses;
use super::source::{BodySource, FrameBytes, Polled};

/// Interval of the check for idle responses.
const TICK: Duration = Duration::from_secs(5);
/// Interval of the check for views that must be given up.
const RELIEF_TICK: Duration = Duration::from_millis(250);
/// Shortest time between two log lines about views that were given up.
const LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Number of ticks without a read after which a response is aborted; one minute.
pub(super) const IDLE_TICKS: u32 = 12;
/// Number of ticks without a read after which a watch is given up for others that wait for room.
const STALLED_TICKS: u32 = 2;

/// Responses in flight that keep more than a few bytes.
#[derive(Debug, Default)]
pub(super) struct ResponseRegistry {
    /// Number of the current interval. A read stores it instead of the time: one load instead of a clock call per
    /// frame.
    tick: Arc<AtomicU32>,
    /// Weak references: a response that is complete drops its state at once, and is removed here at the next tick.
    in_flight: Mutex<Vec<Weak<WatchedSource>>>,
}

/// Tick of the last read of one response.
#[derive(Debug)]
pub(super) struct ReadProgress {
    /// Current tick of the registry.
    tick: Arc<AtomicU32>,
    last_read: AtomicU32,
}

/// Source of a response that is aborted if its client stops reading.
#[derive(Debug)]
pub(super) struct WatchedSource {
    /// The reason after the response was aborted.
    state: Mutex<Result<SourceState, Aborted>>,
    progress: Arc<ReadProgress>,
}

#[derive(Debug)]
struct SourceState {
    source: Box<dyn BodySource>,
    /// Frame or end that the registry polled from the source and the client has not read.
    polled: Option<Option<Result<Frame<Rope>, BoxError>>>,
    /// Task of the response while it waits for the source; `None` while the source waits for the client.
    pending: Option<Waker>,
}

/// Result of polling a response for its next frame.
pub(super) struct PolledFrame {
    pub(super) polled: Polled,
    /// Budget against which the frame's bytes count.
    pub(super) bytes: FrameBytes,
    /// Source that produced the frame of a watch: memory or etcd; `None` if not known, and for other responses.
    pub(super) source: Option<Source>,
}

impl PolledFrame {
    /// A frame of which nothing more is known.
    fn new(polled: Polled) -> PolledFrame {
        PolledFrame {
            polled,
            bytes: FrameBytes::Connection,
            source: None,
        }
    }
}

/// Reason for which a response was aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
enum Aborted {
    #[error("the client has not read this response for a minute")]
    Idle,
    #[error("the old data of this response takes memory that the mirror needs")]
    Memory,
    #[error("the client does not read this watch, and its events take memory that other watches need")]
    Watch,
}

impl ResponseRegistry {
    /// Registers a response with this `source`, until the result is dropped.
    pub(super) fn watch(&self, source: Box<dyn BodySource>) -> Arc<WatchedSource> {
        let watched = Arc::new(WatchedSource {
            state: Mutex::new(Ok(SourceState {
                source,
                polled: None,
                pending: None,
            })),
            progress: Arc::new(ReadProgress {
                last_read: AtomicU32::new(self.tick.load(Ordering::Relaxed)),
                tick: Arc::clone(&self.tick),
            }),
        });
        self.in_flight.lock().push(Arc::downgrade(&watched));
        watched
    }

    /// Aborts idle responses every [`TICK`] until the future is dropped.
    pub(super) async fn run(&self, metrics: &AbortedResponses) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            ticks.tick().await;
            let aborted = self.abort_idle();
            metrics.record_given_up("idle", aborted);
            if aborted > 0 {
                tracing::warn!(
                    responses = aborted,
                    "clients have not read these responses for a minute; their streams are reset"
                );
            }
        }
    }

    /// Aborts responses with old views while these exceed the memory of `mirrors`, until the future is dropped.
    pub(super) async fn relieve(&self, mirrors: &Mirrors, metrics: &AbortedResponses) {
        let mut ticks = tokio::time::interval(RELIEF_TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut unlogged, mut last_log) = (0, None::<Instant>);
        loop {
            ticks.tick().await;
            let aborted = self.abort_views(|| mirrors.excess_held_bytes() > 0);
            metrics.record_given_up("memory", aborted);
            unlogged += aborted;
            if unlogged > 0 && last_log.is_none_or(|at| at.elapsed() >= LOG_INTERVAL) {
                tracing::warn!(
                    responses = unlogged,
                    "slow readers keep more old data than --cache-max-bytes allows; the streams of the slowest are reset"
                );
                (unlogged, last_log) = (0, Some(Instant::now()));
            }
        }
    }

    /// Aborts watches that are not read while others wait for room, as `is_waited_for` says, until the future is dropped.
    pub(super) async fn relieve_watches(&self, is_waited_for: impl Fn() -> bool, metrics: &AbortedResponses) {
        let mut ticks = tokio::time::interval(RELIEF_TICK);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let aborted = self.abort_stalled_watches(&is_waited_for);
            metrics.record_given_up("watch_memory", aborted);
            if aborted > 0 {
                tracing::warn!(
                    watches = aborted,
                    "clients do not read these watches, whose events take memory that other watches need; their \
                     streams are reset. Raise --watch-max-bytes if it repeats"
                );
            }
        }
    }

    /// Aborts responses with a view while `is_exceeded`, the slowest first; returns their number.
    fn abort_views(&self, is_exceeded: impl Fn() -> bool) -> usize {
        // Among responses that were read in the same interval, the oldest is the slowest.
        let number = |source: &dyn BodySource, _| source.held_view().map(|view| view.number());
        self.abort_slowest(Aborted::Memory, is_exceeded, number)
    }

    /// Aborts watches that are not read and keep events, while `is_waited_for`, the slowest first; returns their
    /// number.
    fn abort_stalled_watches(&self, is_waited_for: impl Fn() -> bool) -> usize {
        let bytes = |source: &dyn BodySource, idle_ticks| {
            let bytes = source.unread_bytes();
            (idle_ticks >= STALLED_TICKS && bytes > 0).then_some(Reverse(bytes))
        };
        self.abort_slowest(Aborted::Watch, is_waited_for, bytes)
    }

    /// Aborts responses while `is_needed`, those that were read longest ago first; `order` is by what they are aborted
    /// among equals, `None` for one that is not aborted.
    fn abort_slowest<O: Ord>(
        &self,
        reason: Aborted,
        is_needed: impl Fn() -> bool,
        order: impl Fn(&dyn BodySource, u32) -> Option<O>,
    ) -> usize {
        if !is_needed() {
            return 0;
        }
        let in_flight: Vec<_> = self.in_flight.lock().iter().filter_map(Weak::upgrade).collect();
        let now = self.tick.load(Ordering::Relaxed);
        let mut slowest: Vec<_> = in_flight
            .iter()
            .filter_map(|response| {
                let (state, idle_ticks) = (response.state.lock(), response.idle_ticks(now));
                let order = order(&*state.as_ref().ok()?.source, idle_ticks)?;
                Some(((Reverse(idle_ticks), order), response))
            })
            .collect();
        slowest.sort_unstable_by(|(one, _), (other, _)| one.cmp(other));
        let mut aborted = 0;
        for (_, response) in slowest {
            if !is_needed() {
                break;
            }
            aborted += usize::from(response.abort(reason));
        }
        aborted
    }

    /// Begins the next interval and aborts idle responses; returns their number.
    pub(super) fn abort_idle(&self) -> usize {
        let now = self.tick.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let mut in_flight = Vec::new();
        self.in_flight.lock().retain(|response| {
            response
                .upgrade()
                .map(|response| in_flight.push(response))
                .is_some()
        });
        // Polled and aborted after the registry's lock is released: new responses must not wait until snapshots are
        // freed.
        let idle = in_flight.iter().filter(|response| response.is_idle(now));
        idle.filter(|response| response.abort(Aborted::Idle)).count()
    }
}

impl ReadProgress {
    /// Records that the client has read something.
    pub(super) fn record(&self) {
        // Relaxed: a tick that is missed only delays the abort by one interval.
        let tick = self.tick.load(Ordering::Relaxed);
        self.last_read.store(tick, Ordering::Relaxed);
    }
}

impl WatchedSource {
    /// Records a read, and polls the source.
    pub(super) fn poll_frame(&self, cx: &mut Context<'_>) -> PolledFrame {
        self.progress.record();
        let mut state = self.state.lock();
        let state = match state.as_mut() {
            Ok(state) => state,
            Err(aborted) => {
                return PolledFrame::new(Poll::Ready(Some(Err((*aborted).into()))));
            }
        };
        if let Some(polled) = state.polled.take() {
            return PolledFrame::new(Poll::Ready(polled));
        }
        let polled = state.source.poll_frame(cx);
        state.pending = polled.is_pending().then(|| cx.waker().clone());
        PolledFrame {
            polled,
            bytes: state.source.frame_bytes(),
            source: state.source.source(),
        }
    }

    pub(super) fn progress(&self) -> &Arc<ReadProgress> {
        &self.progress
    }

    pub(super) fn is_end_stream(&self) -> bool {
        let state = self.state.lock();
        state
            .as_ref()
            .is_ok_and(|state| state.polled.is_none() && state.source.is_end_stream())
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        let state = self.state.lock();
        state
            .as_ref()
            .ok()
            .filter(|state| state.polled.is_none())
            .map_or_else(SizeHint::default, |state| state.source.size_hint())
    }

    /// Number of ticks since the last read.
    fn idle_ticks(&self, now: u32) -> u32 {
        now.wrapping_sub(self.progress.last_read.load(Ordering::Relaxed))
    }

    /// Whether the client has read nothing for too long at tick `now`, although there is something to read.
    fn is_idle(&self, now: u32) -> bool {
        let ticks = self.idle_ticks(now);
        if ticks > 1
            && let Ok(state) = self.state.lock().as_mut()
            && state.polled.is_none()
        {
            if state.source.may_stay_unread() {
                return false;
            }
            if state.pending.is_none() && !state.source.may_be_idle() {
                return ticks > IDLE_TICKS;
            }
            // The connection's task does not poll while the client's window is closed. Whether bytes are waiting to be
            // sent is only known by polling here.
            self.progress.record();
            state.poll_ahead();
            return false;
        }
        ticks > IDLE_TICKS
    }

    /// Drops the source; returns false if it was dropped before.
    fn abort(&self, reason: Aborted) -> bool {
        // Dropped after the lock is released: freeing a large snapshot takes long, and the body's task would block on
        // the lock.
        let state = std::mem::replace(&mut *self.state.lock(), Err(reason));
        state.is_ok()
    }
}

impl SourceState {
    /// Polls the source for the frame that the client will read next.
    fn poll_ahead(&mut self) {
        let waker = self.pending.clone().unwrap_or_else(|| Waker::noop().clone());
        if let Poll::Ready(polled) = self.source.poll_frame(&mut Context::from_waker(&waker)) {
            self.polled = Some(polled);
            self.pending = None;
            waker.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;

    use bytes::Bytes;
    use rangecache_mirror::{HeldView, HeldViews};

    use super::*;

    /// Source of frames that waits while `waits` is set.
    #[derive(Debug, Default)]
    struct Frames {
        waits: Arc<AtomicBool>,
        is_watch: bool,
    }

    impl BodySource for Frames {
        fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
            if self.waits.load(Ordering::Relaxed) {
                return Poll::Pending;
            }
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"frame").into()))))
        }

        fn may_be_idle(&self) -> bool {
            self.is_watch
        }
    }

    fn read(response: &WatchedSource) -> Polled {
        response
            .poll_frame(&mut Context::from_waker(Waker::noop()))
            .polled
    }

    fn is_aborted(response: &WatchedSource) -> bool {
        matches!(read(response), Poll::Ready(Some(Err(_))))
    }

    fn minute(responses: &ResponseRegistry) -> usize {
        (0..=IDLE_TICKS).map(|_| responses.abort_idle()).sum()
    }

    #[test]
    fn response_without_reads_for_a_minute_is_aborted() {
        let responses = ResponseRegistry::default();
        let [read_on, unread, dropped] = [(); 3].map(|()| responses.watch(Box::<Frames>::default()));
        assert!(read(&unread).is_ready());
        drop(dropped);
        for _ in 0..IDLE_TICKS {
            assert_eq!(responses.abort_idle(), 0);
        }
        assert!(read(&read_on).is_ready());
        assert_eq!(responses.abort_idle(), 1);
        assert!(unread.state.lock().is_err(), "the source is dropped");
        assert!(is_aborted(&unread));
        assert!(!is_aborted(&read_on));
        drop(unread);
        assert_eq!(responses.abort_idle(), 0);
        assert_eq!(responses.in_flight.lock().len(), 1);
    }

    #[test]
    fn response_of_which_single_bytes_are_read_is_not_aborted() {
        let responses = ResponseRegistry::default();
        let slow = responses.watch(Box::<Frames>::default());
        assert!(read(&slow).is_ready());
        for _ in 0..10 * IDLE_TICKS {
            slow.progress().record();
            assert_eq!(responses.abort_idle(), 0);
        }
        assert!(!is_aborted(&slow));
    }

    #[test]
    fn watch_without_events_is_not_aborted_until_an_event_is_unread() {
        let responses = ResponseRegistry::default();
        let waits = Arc::new(AtomicBool::new(true));
        let watch = |is_watch| {
            let waits = Arc::clone(&waits);
            responses.watch(Box::new(Frames { waits, is_watch }))
        };
        // The first waits for etcd; the second is not polled, as its client's window is closed.
        let (waiting, blocked) = (watch(false), watch(true));
        assert!(read(&waiting).is_pending());
        assert_eq!(minute(&responses) + minute(&responses), 0);
        waits.store(false, Ordering::Relaxed);
        assert_eq!(minute(&responses) + minute(&responses), 2);
        assert!(is_aborted(&waiting) && is_aborted(&blocked));
    }

    /// A watch from memory with this number of unread bytes.
    #[derive(Debug)]
    struct Watch(u64);

    impl BodySource for Watch {
        fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
            Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"frame").into()))))
        }

        fn may_stay_unread(&self) -> bool {
            true
        }

        fn unread_bytes(&self) -> u64 {
            self.0
        }
    }

    #[test]
    fn unread_watch_from_memory_is_given_up_only_while_others_wait_for_room() {
        let responses = ResponseRegistry::default();
        let [small, large, without, read_on] =
            [10, 20, 0, 30].map(|bytes| responses.watch(Box::new(Watch(bytes))));
        assert_eq!(minute(&responses) + minute(&responses), 0, "no time limit");
        assert_eq!(responses.abort_stalled_watches(|| false), 0);
        assert!(read(&read_on).is_ready());
        let checks = AtomicU32::new(0);
        let once = || checks.fetch_add(1, Ordering::Relaxed) < 2;
        assert_eq!(responses.abort_stalled_watches(once), 1);
        assert!(large.state.lock().is_err() && small.state.lock().is_ok());
        assert_eq!(responses.abort_stalled_watches(|| true), 1);
        assert!(is_aborted(&small) && !is_aborted(&without) && !is_aborted(&read_on));
    }

    /// Response that keeps a view.
    #[derive(Debug)]
    struct Snapshot(HeldView);

    impl BodySource for Snapshot {
        fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
            Poll::Ready(None)
        }

        fn held_view(&self) -> Option<&HeldView> {
            Some(&self.0)
        }
    }

    #[test]
    fn slowest_reader_of_an_old_view_is_given_up_first() {
        let responses = ResponseRegistry::default();
        let views = Arc::new(HeldViews::default());
        let [oldest, unread, newest] =
            [(); 3].map(|()| responses.watch(Box::new(Snapshot(views.hold(false)))));
        let without_view = responses.watch(Box::<Frames>::default());
        assert_eq!(responses.abort_views(|| false), 0);
        responses.abort_idle();
        assert!(read(&oldest).is_ready() && read(&newest).is_ready());
        let aborted = |expected: [bool; 3]| {
            let now = [&oldest, &unread, &newest].map(|response| response.state.lock().is_err());
            assert_eq!(now, expected);
        };
        let mut checks = AtomicU32::new(0);
        let first_only = || checks.fetch_add(1, Ordering::Relaxed) < 2;
        assert_eq!(responses.abort_views(first_only), 1);
        aborted([false, true, false]);
        *checks.get_mut() = 0;
        assert_eq!(
            responses.abort_views(|| checks.fetch_add(1, Ordering::Relaxed) < 2),
            1
        );
        aborted([true, true, false]);
        assert_eq!(responses.abort_views(|| true), 1);
        aborted([true; 3]);
        assert!(is_aborted(&unread) && !is_aborted(&without_view));
        assert_eq!(views.bytes(), 0);
    }

    #[test]
    fn frame_that_was_polled_ahead_is_read_first() {
        let responses = ResponseRegistry::default();
        let watch = responses.watch(Box::new(Frames {
            is_watch: true,
            ..Frames::default()
        }));
        for _ in 0..3 {
            assert_eq!(responses.abort_idle(), 0);
        }
        assert!(
            watch
                .state
                .lock()
                .as_ref()
                .is_ok_and(|state| state.polled.is_some())
        );
        assert!(read(&watch).is_ready());
        assert!(
            watch
                .state
                .lock()
                .as_ref()
                .is_ok_and(|state| state.polled.is_none())
        );
    }
}
