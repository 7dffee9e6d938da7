//! Intake of one connection: whether and when its next requests are read. The limits that its calls run into delay or
//! stop it; the connection's task asks it before each read.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::{sync::Arc, time::Duration};

use futures_util::task::AtomicWaker;

/// Delay of the next requests after a call that the client has reset: that costs more than sending it again.
const RESET_DELAY: Duration = Duration::from_millis(1);

/// Delay of the next requests after a call that was refused at once: that costs more than sending it again.
pub(super) const REFUSAL_DELAY: Duration = Duration::from_millis(10);
/// Bytes of a call up to which it does not delay the next requests.
pub(super) const USUAL_CALL_BYTES: u64 = 16 << 10;
/// Bytes beyond them that delay the next requests by a millisecond: unpacking long header lists costs time that others
/// wait for.
pub(super) const BYTES_PER_MILLISECOND: u64 = 16 << 10;

/// A request whose handler has not run yet.
#[derive(Debug)]
pub struct Unhandled(Arc<Intake>);

impl Drop for Unhandled {
    fn drop(&mut self) {
        if self.0.unhandled.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.0.reader.wake();
        }
    }
}

/// Controls the reading of one connection's requests.
#[derive(Debug, Default)]
pub struct Intake {
    stopped: AtomicBool,
    /// Requests that were read and whose handlers have not run yet.
    unhandled: AtomicU32,
    /// Delay of the next read, in microseconds.
    delay_micros: AtomicU32,
    /// Bytes that were received and not counted yet.
    received_bytes: AtomicU64,
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
    fn delay(&self, delay: Duration) {
        let micros = u32::try_from(delay.as_micros()).unwrap_or(u32::MAX);
        let add = |sum: u32| Some(sum.saturating_add(micros));
        let _ = self
            .delay_micros
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, add);
    }

    /// Counts a request that was read until its handler runs, which then drops the guard.
    #[must_use]
    pub fn begin(self: &Arc<Self>) -> Unhandled {
        self.unhandled.fetch_add(1, Ordering::SeqCst);
        Unhandled(Arc::clone(self))
    }

    /// Delays the next read, as the client has reset this number of calls.
    pub fn record_resets(&self, calls: u32) {
        if calls > 0 {
            self.delay(RESET_DELAY * calls);
        }
    }

    /// Delays the next read, as a call was refused at once.
    pub(super) fn record_refusal(&self) {
        self.delay(REFUSAL_DELAY);
    }

    /// Delays the next read if a call of `bytes` is longer than usual.
    pub(super) fn record_call(&self, bytes: u64) {
        if bytes > USUAL_CALL_BYTES {
            let millis = (bytes - USUAL_CALL_BYTES).div_ceil(BYTES_PER_MILLISECOND);
            self.delay(Duration::from_millis(millis));
        }
    }

    /// Counts bytes that were received on the connection.
    pub fn record_received(&self, bytes: usize) {
        self.received_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Bytes that were received since the last call of this function.
    pub(super) fn take_received(&self) -> u64 {
        self.received_bytes.swap(0, Ordering::Relaxed)
    }

    /// Waits until the handlers of all requests that were read have run.
    pub fn poll_handled(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.unhandled.load(Ordering::SeqCst) > 0 {
            self.reader.register(cx.waker());
            if self.unhandled.load(Ordering::SeqCst) > 0 {
                return Poll::Pending;
            }
        }
        Poll::Ready(())
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

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use super::*;

    #[test]
    fn requests_wait_for_the_handlers_of_earlier_ones() {
        let intake = Arc::new(Intake::default());
        let mut cx = Context::from_waker(Waker::noop());
        assert!(intake.poll_handled(&mut cx).is_ready());
        let requests = [intake.begin(), intake.begin()];
        assert!(intake.poll_handled(&mut cx).is_pending());
        for request in requests {
            assert!(intake.poll_handled(&mut cx).is_pending());
            drop(request);
        }
        assert!(intake.poll_handled(&mut cx).is_ready());
    }

    #[test]
    fn stopped_intake_is_read_when_it_is_resumed_and_after_the_sum_of_delays() {
        let intake = Intake::default();
        let mut cx = Context::from_waker(Waker::noop());
        intake.stop();
        intake.delay(Duration::from_millis(2));
        intake.delay(Duration::from_millis(2));
        intake.record_resets(1);
        intake.record_resets(0);
        assert!(intake.poll_read(&mut cx).is_pending());
        intake.resume();
        assert_eq!(intake.poll_read(&mut cx), Poll::Ready(Duration::from_millis(5)));
        assert_eq!(intake.poll_read(&mut cx), Poll::Ready(Duration::ZERO));
    }
}
