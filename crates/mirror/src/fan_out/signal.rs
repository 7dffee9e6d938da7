//! Wake-ups of a stream (W17: none is lost).

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Context;

use futures_util::task::AtomicWaker;

/// Wakes one stream, which may have readers of several fan-outs.
#[derive(Debug, Default)]
pub struct Signal {
    waker: AtomicWaker,
    /// Whether the stream was woken and has not looked since.
    is_set: AtomicBool,
    /// Number of the stream's connection.
    connection: u64,
}

impl Signal {
    /// Signal of a stream on the connection with this number, which no other open connection has.
    #[must_use]
    pub fn new(connection: u64) -> Signal {
        Signal {
            connection,
            ..Signal::default()
        }
    }

    /// Number of the stream's connection.
    pub(super) fn connection(&self) -> u64 {
        self.connection
    }

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
