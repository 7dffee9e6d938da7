//! Idle responses: the timeout of clients that stop reading.
//!
//! A response in flight holds the snapshot that it is made of, and with it all entries that have changed since: a client
//! that reads nothing, but keeps its connection open, could keep one keyspace after the other in memory. A response that
//! was not read for a minute drops its snapshot, and its stream is reset.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

/// Interval at which responses are checked.
const TICK: Duration = Duration::from_secs(5);
/// Ticks without a read after which a response is aborted: one minute.
const IDLE_TICKS: u32 = 12;

/// All responses in flight that hold something.
#[derive(Debug, Default)]
pub(super) struct ResponseRegistry {
    /// Counts intervals, so that a response need not read the clock.
    tick: Arc<AtomicU32>,
    in_flight: Mutex<Vec<Weak<dyn Idle>>>,
}

/// A response's state; empty once the response was aborted.
#[derive(Debug)]
pub(super) struct Watched<T> {
    state: Mutex<Option<T>>,
    /// The registry's.
    tick: Arc<AtomicU32>,
    /// The tick of the last read.
    last_read: AtomicU32,
}

/// The response was aborted.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the client has not read this response for a minute")]
pub(super) struct IdleError;

/// A [`Watched`] of any type.
trait Idle: std::fmt::Debug + Send + Sync {
    /// The tick of the last read.
    fn last_read(&self) -> u32;
    /// Drops the state.
    fn abort(&self);
}

impl<T: std::fmt::Debug + Send> Idle for Watched<T> {
    fn last_read(&self) -> u32 {
        self.last_read.load(Ordering::Relaxed)
    }

    fn abort(&self) {
        // Dropped after the lock is released: a snapshot may be large.
        let state = self.state.lock().take();
        drop(state);
    }
}

impl ResponseRegistry {
    /// Watches the response with this `state` until it is dropped.
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

    /// Aborts idle responses, until cancelled.
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
        for response in &idle {
            response.abort();
        }
        idle.len()
    }
}

impl<T> Watched<T> {
    /// Reads from the state, by `next`.
    ///
    /// # Errors
    /// [`IdleError`] if the response was aborted.
    pub(super) fn read<R>(&self, next: impl FnOnce(&mut T) -> R) -> Result<R, IdleError> {
        self.last_read
            .store(self.tick.load(Ordering::Relaxed), Ordering::Relaxed);
        self.state.lock().as_mut().map(next).ok_or(IdleError)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::{Answer, Dialect, Entry, RangeQuery, ResponseHeader, Selected, Tree, select};

    /// A response of several pieces.
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
    fn response_that_is_not_read_for_a_minute_is_aborted() {
        let responses = ResponseRegistry::default();
        let (read, unread, gone) = (
            responses.watch(answer()),
            responses.watch(answer()),
            responses.watch(answer()),
        );
        assert!(unread.read(|answer| answer.next_piece(1024)).is_ok());
        drop(gone);
        for _ in 0..IDLE_TICKS {
            assert_eq!(responses.abort_idle(), 0);
        }
        assert!(
            read.read(|answer| answer.next_piece(1024))
                .is_ok_and(|piece| piece.is_some())
        );
        assert_eq!(responses.abort_idle(), 1);
        assert!(unread.state.lock().is_none(), "its snapshot is dropped");
        assert!(unread.read(|answer| answer.next_piece(1024)).is_err());
        while read
            .read(|answer| answer.next_piece(1024))
            .expect("it is being read")
            .is_some()
        {}
        assert_eq!(responses.in_flight.lock().len(), 1);
    }
}
