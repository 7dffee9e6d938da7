//! Receive windows of HTTP/2 connections: bytes of requests that clients may send before a call has taken and counted them.
//!
//! Each connection has [`MIN_BYTES`], with which `--max-connections` reckons. What its window has beyond them is from one
//! budget: a connection gets a part of what is free, so that the windows of the first ones are as large as uploads from
//! afar need them, and those of thousands small.

use std::sync::Arc;

use parking_lot::Mutex;

/// Smallest window, in bytes: HTTP/2 has no smaller one.
const MIN_BYTES: u32 = 65_535;
/// Largest window, in bytes. The HTTP/2 library closes connections with many small frames that no call has taken: with
/// this window, with more than two thousand.
const MAX_BYTES: u32 = 1 << 20;
/// Largest window of one stream, in bytes.
const MAX_STREAM_BYTES: u32 = 256 << 10;
/// A connection gets what is free divided by this.
const DIVISOR: u64 = 16;

/// Budget of the windows.
#[derive(Debug)]
pub(super) struct Windows {
    free: Mutex<u64>,
}

/// Window of one connection, until dropped.
#[derive(Debug)]
pub(super) struct Window {
    windows: Arc<Windows>,
    /// Bytes of the budget.
    more: u32,
}

impl Windows {
    /// A budget of `max_bytes`.
    pub(super) fn new(max_bytes: u64) -> Arc<Windows> {
        Arc::new(Windows {
            free: Mutex::new(max_bytes),
        })
    }

    /// Takes the window of a connection.
    pub(super) fn take(self: &Arc<Self>) -> Window {
        let mut free = self.free.lock();
        let more = u32::try_from(*free / DIVISOR).unwrap_or(u32::MAX);
        let more = more.min(MAX_BYTES - MIN_BYTES);
        *free -= u64::from(more);
        Window {
            windows: Arc::clone(self),
            more,
        }
    }
}

impl Window {
    /// Window of the connection, in bytes.
    pub(super) fn connection_bytes(&self) -> u32 {
        MIN_BYTES + self.more
    }

    /// Window of each of its streams, in bytes.
    pub(super) fn stream_bytes(&self) -> u32 {
        self.connection_bytes().min(MAX_STREAM_BYTES)
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        *self.windows.free.lock() += u64::from(self.more);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_connections_have_large_windows_and_all_together_stay_within_the_budget() {
        const BUDGET: u64 = 48 << 20;
        let windows = Windows::new(BUDGET);
        let taken: Vec<Window> = (0..2_000).map(|_| windows.take()).collect();
        let large = taken
            .iter()
            .take_while(|window| window.connection_bytes() == MAX_BYTES);
        assert!((30..40).contains(&large.count()));
        assert!(taken.iter().all(|window| window.connection_bytes() >= MIN_BYTES));
        assert_eq!(taken[0].stream_bytes(), MAX_STREAM_BYTES);
        let last = &taken[1_999];
        assert_eq!(
            (last.connection_bytes(), last.stream_bytes()),
            (MIN_BYTES, MIN_BYTES)
        );
        let more: u64 = taken.iter().map(|window| u64::from(window.more)).sum();
        assert!(more <= BUDGET);
        drop(taken);
        assert_eq!(*windows.free.lock(), BUDGET);
        assert_eq!(Windows::new(0).take().connection_bytes(), MIN_BYTES);
    }
}
