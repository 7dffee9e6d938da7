//! Wake-ups of a stream (W17: none is lost).

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Context;

use futures_util::task::AtomicWaker;

/// Wakes one stream, which may have readers of several hubs.
#[derive(Debug, Default)]
pub struct Signal {
    waker: AtomicWaker,
    /// Whether the stream was woken and has not looked since.
    is_set: AtomicBool,
}

impl Signal {
    /// Polls the stream by `look`, which looks at its readers: everything that arrives from the beginning of the look on
    /// wakes the stream again.
    pub fn look<T>(&self, context: &mut Context<'_>, look: impl FnOnce(&mut Context<'_>) -> T) -> T {
        self.waker.register(context.waker());
        // Before the look; also acquires what was published before the signal was set.
        self.is_set.swap(false, Ordering::AcqRel);
        look(context)
    }

    /// Wakes the stream, unless it was woken and has not looked since.
    pub(super) fn set(&self) {
        if !self.is_set.swap(true, Ordering::AcqRel) {
            self.waker.wake();
        }
    }
}
