//! Timeout for clients that stop reading a response.
//!
//! A response in flight keeps its source: a snapshot of the mirror with all entries that have been replaced since, a
//! call to etcd with its turn, or buffered bytes. A client that opens many responses over time and reads none of them
//! could thereby take memory and turns from all others. A response of which nothing was read for one minute drops its
//! source, and its HTTP/2 stream is reset.
//!
//! Reading slowly is reading: each byte that is written to the client's connection counts. A response that waits for
//! etcd is not unread.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http_body::{Frame, SizeHint};
use parking_lot::Mutex;

use super::source::{BodySource, Polled};
use crate::cache::Rope;
use crate::upstream::BoxError;

/// Interval of the check for idle responses.
const TICK: Duration = Duration::from_secs(5);
/// Number of ticks without a read after which a response is aborted; one minute.
pub(super) const IDLE_TICKS: u32 = 12;

/// Responses in flight that keep more than a few bytes.
#[derive(Debug, Default)]
pub(super) struct ResponseRegistry {
    /// Number of the current interval. A read stores it instead of the time: one load instead of a clock call per
    /// frame.
    tick: Arc<AtomicU32>,
    /// Weak references: a response that is complete drops its state at once, and is removed here at the next tick.
    in_flight: Mutex<Vec<Weak<Watched>>>,
}

/// Tick of the last read of one response.
#[derive(Debug)]
pub(super) struct Progress {
    /// Current tick of the registry.
    tick: Arc<AtomicU32>,
    last_read: AtomicU32,
}

/// Source of a response that is aborted if its client stops reading.
#[derive(Debug)]
pub(super) struct Watched {
    /// `None` after the response was aborted.
    state: Mutex<Option<State>>,
    progress: Arc<Progress>,
}

#[derive(Debug)]
struct State {
    source: Box<dyn BodySource>,
    /// Frame or end that the registry polled from the source and the client has not read.
    polled: Option<Option<Result<Frame<Rope>, BoxError>>>,
    /// Task of the response while it waits for the source; `None` while the source waits for the client.
    pending: Option<Waker>,
}

/// Error of a response that was aborted because its client stopped reading.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client has not read this response for a minute")]
pub(super) struct IdleError;

impl ResponseRegistry {
    /// Registers a response with this `source`, until the result is dropped.
    pub(super) fn watch(&self, source: Box<dyn BodySource>) -> Arc<Watched> {
        let watched = Arc::new(Watched {
            state: Mutex::new(Some(State {
                source,
                polled: None,
                pending: None,
            })),
            progress: Arc::new(Progress {
                last_read: AtomicU32::new(self.tick.load(Ordering::Relaxed)),
                tick: Arc::clone(&self.tick),
            }),
        });
        self.in_flight.lock().push(Arc::downgrade(&watched));
        watched
    }

    /// Aborts idle responses every [`TICK`] until the future is dropped.
    pub(super) async fn run(&self) {
        let mut ticks = tokio::time::interval(TICK);
        loop {
            ticks.tick().await;
            let aborted = self.abort_idle();
            if aborted > 0 {
                tracing::warn!(
                    responses = aborted,
                    "clients have not read these responses for a minute; their streams are reset"
                );
            }
        }
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
        idle.filter(|response| response.abort()).count()
    }
}

impl Progress {
    /// Records that the client has read something.
    pub(super) fn record(&self) {
        // Relaxed: a tick that is missed only delays the abort by one interval.
        let tick = self.tick.load(Ordering::Relaxed);
        self.last_read.store(tick, Ordering::Relaxed);
    }
}

impl Watched {
    /// Records a read, and polls the source.
    pub(super) fn poll_frame(&self, cx: &mut Context<'_>) -> Polled {
        self.progress.record();
        let mut state = self.state.lock();
        let Some(state) = state.as_mut() else {
            return Poll::Ready(Some(Err(IdleError.into())));
        };
        if let Some(polled) = state.polled.take() {
            return Poll::Ready(polled);
        }
        let polled = state.source.poll_frame(cx);
        state.pending = polled.is_pending().then(|| cx.waker().clone());
        polled
    }

    pub(super) fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    pub(super) fn is_end_stream(&self) -> bool {
        let state = self.state.lock();
        state
            .as_ref()
            .is_some_and(|state| state.polled.is_none() && state.source.is_end_stream())
    }

    pub(super) fn size_hint(&self) -> SizeHint {
        let state = self.state.lock();
        state
            .as_ref()
            .filter(|state| state.polled.is_none())
            .map_or_else(SizeHint::default, |state| state.source.size_hint())
    }

    /// Whether the client has read nothing for too long at tick `now`, although there is something to read.
    fn is_idle(&self, now: u32) -> bool {
        let ticks = now.wrapping_sub(self.progress.last_read.load(Ordering::Relaxed));
        if ticks > 1
            && let Some(state) = self.state.lock().as_mut()
            && state.polled.is_none()
            && (state.pending.is_some() || state.source.may_be_idle())
        {
            // The connection's task does not poll while the client's window is closed. Whether bytes are waiting to be
            // sent is only known by polling here.
            self.progress.record();
            state.poll_ahead();
            return false;
        }
        ticks > IDLE_TICKS
    }

    /// Drops the source; returns false if it was dropped before.
    fn abort(&self) -> bool {
        // Dropped after the lock is released: freeing a large snapshot takes long, and the body's task would block on
        // the lock.
        let state = self.state.lock().take();
        state.is_some()
    }
}

impl State {
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

    fn read(response: &Watched) -> Polled {
        response.poll_frame(&mut Context::from_waker(Waker::noop()))
    }

    fn is_aborted(response: &Watched) -> bool {
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
        assert!(unread.state.lock().is_none(), "the source is dropped");
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
                .is_some_and(|state| state.polled.is_some())
        );
        assert!(read(&watch).is_ready());
        assert!(
            watch
                .state
                .lock()
                .as_ref()
                .is_some_and(|state| state.polled.is_none())
        );
    }
}
