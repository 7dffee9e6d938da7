//! Queue of calls that wait until others release bytes. Connections are woken in turn, one call of each; the queue bounds
//! how many new calls wait, and pauses the reading of a connection's requests while many of its calls do.

use std::collections::VecDeque;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use parking_lot::Mutex;
use rangecache_base::telemetry::metrics::{Counted, Gauge};
use tokio::sync::Notify;

use super::intake::Intake;

/// Largest new call that may wait for room, in bytes.
pub(super) const QUEUED_MAX_BYTES: u64 = 12 << 10;
/// Bounds of the number of new calls of all connections that may wait for room. They are not counted: up to a quarter of
/// the calls' bound, at most 48 MiB.
const QUEUED: RangeInclusive<u64> = 64..=4_096;
/// With as many waiting calls as there are free places divided by this, a connection's next requests are not read.
const QUEUED_DIVISOR: u64 = 8;
/// Bounds of that number: the lower one lets a connection wait in any case.
const QUEUED_PER_CONNECTION: RangeInclusive<u64> = 32..=64;
/// Connections whose oldest waiting call is woken when bytes are released. More than a few are woken in turn: bytes are
/// released all the time, and waking thousands of calls each time would take longer than the calls.
const WOKEN_CONNECTIONS: usize = 64;

/// Calls of all connections that wait for room.
#[derive(Debug)]
pub(super) struct RoomQueue {
    /// New calls that may wait.
    max_new_calls: u64,
    /// New calls that wait.
    new_calls: AtomicU64,
    /// Connections with calls that wait, new ones or not.
    connections: Mutex<VecDeque<Arc<ConnectionQueue>>>,
    /// Length of `connections`, to be read without the lock.
    connection_count: AtomicUsize,
}

/// Calls of one connection that wait for room.
#[derive(Debug)]
pub(super) struct ConnectionQueue {
    of_all: Arc<RoomQueue>,
    /// Stopped while too many new calls of the connection wait.
    intake: Arc<Intake>,
    /// New calls that wait.
    new_calls: AtomicU64,
    /// Calls that wait to be woken. Changed under the lock of [`RoomQueue::connections`].
    waiters: AtomicU64,
    /// Wakes one call.
    room: Notify,
}

impl RoomQueue {
    /// Creates a queue for room within `max_bytes`.
    pub(super) fn new(max_bytes: u64) -> Arc<RoomQueue> {
        let (min, max) = QUEUED.into_inner();
        Arc::new(RoomQueue {
            max_new_calls: (max_bytes / 4 / QUEUED_MAX_BYTES).clamp(min, max),
            new_calls: AtomicU64::new(0),
            connections: Mutex::default(),
            connection_count: AtomicUsize::new(0),
        })
    }

    /// Returns the queue of a new connection, whose requests are read by `intake`.
    pub(super) fn of_connection(self: &Arc<Self>, intake: Arc<Intake>) -> Arc<ConnectionQueue> {
        Arc::new(ConnectionQueue {
            of_all: Arc::clone(self),
            intake,
            new_calls: AtomicU64::new(0),
            waiters: AtomicU64::new(0),
            room: Notify::new(),
        })
    }

    /// Wakes a call of each connection that waits, of [`WOKEN_CONNECTIONS`] at most.
    pub(super) fn wake(&self) {
        // Ordered after the release, as the attempt of a waiting call is after its entry: one of the two sees the other.
        if self.connection_count.load(Ordering::SeqCst) == 0 {
            return;
        }
        let mut connections = self.connections.lock();
        let woken = connections.len().min(WOKEN_CONNECTIONS);
        for connection in connections.iter().take(woken) {
            connection.room.notify_one();
        }
        connections.rotate_left(woken);
    }

    /// New calls that may wait.
    #[cfg(test)]
    pub(super) fn max_new_calls(&self) -> u64 {
        self.max_new_calls
    }

    /// Whether no call waits.
    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.new_calls.load(Ordering::Relaxed) == 0 && self.connections.lock().is_empty()
    }
}

impl ConnectionQueue {
    /// Notified when a call of the connection may find room.
    pub(super) fn room(&self) -> &Notify {
        &self.room
    }

    /// Enters a call that waits to be woken, and which `gauge` counts.
    pub(super) fn enter(self: &Arc<Self>, gauge: &Gauge) -> Waiter<'_> {
        let mut connections = self.of_all.connections.lock();
        if self.waiters.fetch_add(1, Ordering::Relaxed) == 0 {
            connections.push_back(Arc::clone(self));
            self.of_all
                .connection_count
                .store(connections.len(), Ordering::SeqCst);
        }
        Waiter {
            connection: self,
            _waiting: Counted::on(gauge),
        }
    }

    /// Counts a new call of `bytes` as waiting; `None` if it is too long, or if too many wait.
    pub(super) fn enter_new(&self, bytes: u64) -> Option<NewCall<'_>> {
        if bytes > QUEUED_MAX_BYTES {
            return None;
        }
        self.new_calls.fetch_add(1, Ordering::Relaxed);
        let of_all = self.of_all.new_calls.fetch_add(1, Ordering::Relaxed);
        let call = NewCall(self);
        if self.has_too_many() {
            self.intake.stop();
        }
        (of_all < self.of_all.max_new_calls).then_some(call)
    }

    /// Whether no more requests of the connection should be read.
    fn has_too_many(&self) -> bool {
        let of_all = self.of_all.new_calls.load(Ordering::Relaxed);
        let free = self.of_all.max_new_calls.saturating_sub(of_all);
        let (min, max) = QUEUED_PER_CONNECTION.into_inner();
        self.new_calls.load(Ordering::Relaxed) >= (free / QUEUED_DIVISOR).clamp(min, max)
    }
}

/// A call that waits to be woken when bytes are released.
#[derive(Debug)]
pub(super) struct Waiter<'a> {
    connection: &'a Arc<ConnectionQueue>,
    _waiting: Counted,
}

impl Drop for Waiter<'_> {
    fn drop(&mut self) {
        let of_all = &self.connection.of_all;
        let mut connections = of_all.connections.lock();
        if self.connection.waiters.fetch_sub(1, Ordering::Relaxed) == 1 {
            connections.retain(|connection| !Arc::ptr_eq(connection, self.connection));
            of_all.connection_count.store(connections.len(), Ordering::SeqCst);
        }
    }
}

/// A new call that counts as waiting until dropped.
#[derive(Debug)]
pub(super) struct NewCall<'a>(&'a ConnectionQueue);

impl Drop for NewCall<'_> {
    fn drop(&mut self) {
        self.0.new_calls.fetch_sub(1, Ordering::Relaxed);
        self.0.of_all.new_calls.fetch_sub(1, Ordering::Relaxed);
        // Stopped only by a call that enters: the last one to leave resumes in any case.
        if !self.0.has_too_many() {
            self.0.intake.resume();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::{Context, Waker};

    use super::*;

    #[tokio::test]
    async fn connections_are_woken_in_turn_and_one_that_has_left_is_not() {
        let queue = RoomQueue::new(0);
        let connections: Vec<_> = (0..WOKEN_CONNECTIONS + 2)
            .map(|_| queue.of_connection(Arc::default()))
            .collect();
        let gauge = Gauge::default();
        let mut waiters: Vec<_> = connections.iter().map(|one| one.enter(&gauge)).collect();
        let again = connections[1].enter(&gauge);
        drop(waiters.remove(0));
        drop(waiters.remove(0));
        assert_eq!(gauge.get(), 65, "of the second connection one still waits");
        queue.wake();
        let mut woken = Vec::new();
        for connection in &connections {
            woken.push(futures_util::poll!(Box::pin(connection.room().notified())).is_ready());
        }
        assert_eq!(woken.iter().filter(|woken| **woken).count(), WOKEN_CONNECTIONS);
        assert!(!woken[0], "it has left");
        assert!(!woken[WOKEN_CONNECTIONS + 1], "its turn comes next");
        queue.wake();
        let last = Box::pin(connections[WOKEN_CONNECTIONS + 1].room().notified());
        assert!(futures_util::poll!(last).is_ready());
        drop((waiters, again));
        assert!(queue.is_empty());
        assert_eq!(gauge.get(), 0);
    }

    #[test]
    fn new_calls_beyond_the_bound_and_long_ones_do_not_wait_and_many_pause_their_connection() {
        let queue = RoomQueue::new(0);
        let intakes: [Arc<Intake>; 2] = Default::default();
        let [many, few] = [0, 1].map(|one: usize| queue.of_connection(Arc::clone(&intakes[one])));
        let is_read = |one: usize| {
            let mut cx = Context::from_waker(Waker::noop());
            intakes[one].poll_read(&mut cx).is_ready()
        };
        assert!(many.enter_new(QUEUED_MAX_BYTES + 1).is_none());
        let mut calls: Vec<_> = (0..31)
            .map(|_| many.enter_new(QUEUED_MAX_BYTES).unwrap())
            .collect();
        assert!(is_read(0));
        calls.push(many.enter_new(1).unwrap());
        assert!(!is_read(0));
        let others: Vec<_> = (0..31).map(|_| few.enter_new(1).unwrap()).collect();
        assert!(is_read(1));
        calls.push(many.enter_new(1).unwrap());
        assert!(few.enter_new(1).is_none(), "64 calls wait");
        assert!(is_read(1), "the refused call has left");
        calls.truncate(31);
        assert!(is_read(0));
        drop((calls, others));
        assert!(queue.is_empty());
    }
}
