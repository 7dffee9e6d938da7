//! Intake of one connection: whether and when its next requests are read. The limits that its calls run into delay or
//! stop it; the connection's task asks it before each read.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::task::AtomicWaker;

/// Controls the reading of one connection's requests.
#[derive(Debug, Default)]
pub struct Intake {
    stopped: AtomicBool,
    /// Delay of the next read, in microseconds.
    delay_micros: AtomicU32,
    reader: AtomicWaker,
}

impl Intake {
    /// Stops reading until [`Intake::resume`].
    pub(super) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
    }

    /// Ends [`Intake::stop`].
    pub(super) fn resume(&self) {
        // A load first: calls that never stopped the intake must not contend for it.
        if self.stopped.load(Ordering::SeqCst) && self.stopped.swap(false, Ordering::SeqCst) {
            self.reader.wake();
        }
    }

    /// Adds to the delay of the next read.
    pub(super) fn delay(&self, delay: Duration) {
        let micros = u32::try_from(delay.as_micros()).unwrap_or(u32::MAX);
        let add = |sum: u32| Some(sum.saturating_add(micros));
        let _ = self
            .delay_micros
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Waits while reading is stopped; returns the delay that was added since the last call.
    pub fn poll_read(&self, cx: &mut Context<'_>) -> Poll<Duration> {
        if self.stopped.load(Ordering::SeqCst) {
            self.reader.register(cx.waker());
            // It may have been resumed before the waker was registered.
            if self.stopped.load(Ordering::SeqCst) {
                return Poll::Pending;
            }
        }
        // A load first: most reads of most connections are not delayed.
        let delay_micros = match self.delay_micros.load(Ordering::Relaxed) {
            0 => 0,
            _ => self.delay_micros.swap(0, Ordering::Relaxed),
        };
        Poll::Ready(Duration::from_micros(u64::from(delay_micros)))
    }
}
