//! Wake-ups of a stream (W17: none is lost).

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Waker;

use futures_util::task::AtomicWaker;

/// Wakes one stream, which may have readers of several hubs.
#[derive(Debug, Default)]
pub struct Signal {
    waker: AtomicWaker,
    /// Whether the stream was woken and has not looked since.
    is_set: AtomicBool,
}

impl Signal {
    /// Begins a poll of the stream: everything that arrives from now on wakes `waker`. To be called before the stream
    /// looks at its readers, in every poll.
    pub fn begin_poll(&self, waker: &Waker) {
        self.waker.register(waker);
        // Also acquires what was published before the signal was set.
        self.is_set.swap(false, Ordering::AcqRel);
    }

    /// Wakes the stream, unless it was woken and has not looked since.
    pub(super) fn set(&self) {
        if !self.is_set.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }
}
