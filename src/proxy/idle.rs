//! Timeout for clients that stop reading a response.
//!
//! A response in flight keeps its snapshot of the mirror, and with it all entries that have been replaced since. A
//! client that opens many responses over time and reads none of them could thereby keep many versions of the keyspace
//! in memory. A response of which nothing was read for one minute drops its snapshot, and its HTTP/2 stream is reset.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

/// Interval of the check for idle responses.
const TICK: Duration = Duration::from_secs(5);
/// Number of ticks without a read after which a response is aborted; one minute.
const IDLE_TICKS: u32 = 12;

/// Responses in flight that keep a snapshot or buffered bytes.
#[derive(Debug, Default)]
pub(super) struct ResponseRegistry {
    /// Number of the current interval. A read stores it instead of the time: one load instead of a clock call per
    /// frame.
    tick: Arc<AtomicU32>,
    /// Weak references: a response that is complete drops its state at once, and is removed here at the next tick.
    in_flight: Mutex<Vec<Weak<dyn Idle>>>,
}

/// State of a response that is aborted if its client stops reading.
#[derive(Debug)]
pub(super) struct Watched<T> {
    /// `None` after the response was aborted.
    state: Mutex<Option<T>>,
    /// Current tick of the registry.
    tick: Arc<AtomicU32>,
    /// Tick of the last read.
    last_read: AtomicU32,
}

/// Error of a response that was aborted because its client stopped reading.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client has not read this response for a minute")]
pub(super) struct IdleError;

/// [`Watched`] of any state.
trait Idle: std::fmt::Debug + Send + Sync {
    /// Returns the tick of the last read.
    fn last_read(&self) -> u32;
    /// Drops the state.
    fn abort(&self);
}

impl<T: std::fmt::Debug + Send> Idle for Watched<T> {
    fn last_read(&self) -> u32 {
        self.last_read.load(Ordering::Relaxed)
    }

    fn abort(&self) {
        // Dropped after the lock is released: freeing a large snapshot takes long, and the body's task would block on
        // the lock.
        let state = self.state.lock().take();
        drop(state);
    }
}

impl ResponseRegistry {
    /// Registers a response with this `state`, until the result is dropped.
    pub(super) fn watch<T: std::fmt::Debug + Send + 'static>(&self, state: T) -> Arc<Watched<T>> {
        let watched = Arc::new(Watched {
            state: Mutex::new(Some(state)),
            last_read: AtomicU32::new(self.tick.load(Ordering::Relaxed)),
            tick: Arc::clone(&self.tick),
        });
        let weak: Weak<Watched<T>> = Arc::downgrade(&watched);
        self.in_flight.lock().push(weak);
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
    fn abort_idle(&self) -> usize {
        let now = self.tick.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        let mut idle = Vec::new();
        self.in_flight.lock().retain(|response| match response.upgrade() {
            Some(response) if now.wrapping_sub(response.last_read()) > IDLE_TICKS => {
                idle.push(response);
                false
            }
            Some(_) => true,
            None => false,
        });
        // Aborted after the registry's lock is released: new responses must not wait until snapshots are freed.
        for response in &idle {
            response.abort();
        }
        idle.len()
    }
}

impl<T> Watched<T> {
    /// Records a read, and calls `next` with the state.
    ///
    /// # Errors
    /// [`IdleError`] if the response was aborted.
    pub(super) fn read<R>(&self, next: impl FnOnce(&mut T) -> R) -> Result<R, IdleError> {
        // Recorded before the lock is taken, and relaxed: a tick that is missed only delays the abort by one interval.
        self.last_read
            .store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
        self.state.lock().as_mut().map(next).ok_or(IdleError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Answer, Dialect, Entry, RangeQuery, ResponseHeader, Selected, Tree, select};

    /// Response that is read in several pieces.
    fn answer() -> Answer {
        let entries = (0..100_u8).map(|n| {
            let mut key_value = vec![0x0a, 1, n, 0x2a, 100];
            key_value.extend([b'v'; 100]);
            Entry::from_key_value(&key_value).unwrap()
        });
        let tree = Tree::from_sorted(entries);
        let all = RangeQuery {
            key: b"\0".as_slice().into(),
            range_end: b"\0".as_slice().into(),
            ..RangeQuery::default()
        };
        match select(&tree, &all, &Dialect::of_version(3, 7)) {
            Selected::Answer(selection) => Answer::new(ResponseHeader::default(), selection),
            Selected::TiesAreEtcds => unreachable!("there is no order"),
        }
    }

    #[test]
    fn response_without_reads_for_a_minute_is_aborted() {
        let responses = ResponseRegistry::default();
        let (read, unread, dropped) = (
            responses.watch(answer()),
            responses.watch(answer()),
            responses.watch(answer()),
        );
        assert!(unread.read(|answer| answer.next_piece(1024)).is_ok());
        drop(dropped);
        for _ in 0..IDLE_TICKS {
            assert_eq!(responses.abort_idle(), 0);
        }
        assert!(
            read.read(|answer| answer.next_piece(1024))
                .is_ok_and(|piece| piece.is_some())
        );
        assert_eq!(responses.abort_idle(), 1);
        assert!(unread.state.lock().is_none(), "the snapshot is dropped");
        assert!(unread.read(|answer| answer.next_piece(1024)).is_err());
        while read
            .read(|answer| answer.next_piece(1024))
            .expect("the response is being read")
            .is_some()
        {}
        assert_eq!(responses.in_flight.lock().len(), 1);
    }
}
