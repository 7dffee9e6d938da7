//! Request of a watcher to join a fan-out, and wake-ups of its stream (W17: none is lost).

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Context;

use bytes::Bytes;
use futures_util::task::AtomicWaker;

/// A watcher that joins a fan-out.
#[derive(Clone, Debug)]
pub struct Join {
    /// `key` of the create request; not empty.
    pub key: Bytes,
    /// `range_end` of the create request. Together with `key` inside the mirror's scope.
    pub range_end: Bytes,
    /// Revision of the first event that the watcher gets, if there is one. May be in the future.
    pub first_revision: i64,
    /// Highest revision that etcd is known to have reached. No client has got events of a later one.
    pub known_revision: i64,
}

impl Join {
    /// Revision up to which the watcher's events were delivered elsewhere, if there were any.
    pub(super) fn delivered_through(&self) -> i64 {
        self.known_revision.min(self.first_revision - 1)
    }
}

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
