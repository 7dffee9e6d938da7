//! Futures that are polled only once they were woken.
//!
//! A task polls all of its futures whenever one of them is woken. Without a gate a stream of events, or its connection,
//! would poll the stop of the process, the end of its age and the client's next request at each event, and each of these
//! polls takes locks that other tasks need.

use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::{future::poll_fn, pin::pin, sync::Arc};

use parking_lot::Mutex;

/// Runs `future`, which is polled only when it was woken, however often its task is.
pub async fn wake_gated<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut gate = WakeGated::new();
    poll_fn(|cx| gate.poll_if_woken(cx, |cx| future.as_mut().poll(cx))).await
}

/// Gate before a poll that passes only after a wake-up.
#[derive(Debug)]
pub struct WakeGated {
    flag: Arc<WakeFlag>,
    /// Wakes `flag`.
    waker: Waker,
    /// Task that `flag` wakes.
    task: Option<Waker>,
}

/// Whether the gated future was woken, and the task that polls it.
#[derive(Debug)]
struct WakeFlag {
    is_woken: AtomicBool,
    /// Stays when it is woken: the task registers it once.
    task: Mutex<Option<Waker>>,
}

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // In this order: the task that is woken polls, and one that registers now sees the flag.
        self.is_woken.store(true, Ordering::Release);
        let task = self.task.lock().clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl WakeGated {
    /// Creates a gate whose first poll passes.
    #[must_use]
    pub fn new() -> WakeGated {
        let flag = Arc::new(WakeFlag {
            is_woken: AtomicBool::new(true),
            task: Mutex::new(None),
        });
        let waker = Waker::from(Arc::clone(&flag));
        WakeGated {
            flag,
            waker,
            task: None,
        }
    }

    /// Polls by `poll` if it was woken since it was last pending, or never polled; otherwise it is pending.
    pub fn poll_if_woken<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if !self.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            // Before the check: what arrives after it wakes this task.
            *self.flag.task.lock() = Some(cx.waker().clone());
            self.task = Some(cx.waker().clone());
        }
        if !self.flag.is_woken.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        // Before the poll: what arrives after it lets the next poll pass.
        self.flag.is_woken.swap(false, Ordering::AcqRel);
        let polled = poll(&mut Context::from_waker(&self.waker));
        if polled.is_ready() {
            self.flag.is_woken.store(true, Ordering::Release);
        }
        polled
    }
}

impl Default for WakeGated {
    fn default() -> WakeGated {
        WakeGated::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn poll_is_repeated_only_after_a_wake_up_which_the_task_gets() {
        let (first, second) = (Arc::new(Wakes::default()), Arc::new(Wakes::default()));
        let mut gate = WakeGated::new();
        let (mut polls, mut source) = (0, None::<Waker>);
        let mut poll = |task: &Arc<Wakes>, source: &mut Option<Waker>| {
            let task = Waker::from(Arc::clone(task));
            let polled = gate.poll_if_woken(&mut Context::from_waker(&task), |cx| {
                polls += 1;
                *source = Some(cx.waker().clone());
                Poll::<()>::Pending
            });
            assert!(polled.is_pending());
            polls
        };
        assert_eq!(poll(&first, &mut source), 1);
        assert_eq!(poll(&first, &mut source), 1, "nothing has woken it");
        for round in 1..=2 {
            source.as_ref().unwrap().wake_by_ref();
            assert_eq!(first.0.load(Ordering::SeqCst), round);
            assert_eq!(poll(&first, &mut source), 1 + round);
        }
        assert_eq!(poll(&second, &mut source), 3, "the task is another");
        source.as_ref().unwrap().wake_by_ref();
        assert_eq!(second.0.load(Ordering::SeqCst), 1);
        assert_eq!(first.0.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn wake_up_during_a_poll_lets_the_next_one_pass() {
        let mut gate = WakeGated::new();
        let mut cx = Context::from_waker(Waker::noop());
        let polled = gate.poll_if_woken(&mut cx, |cx| {
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        assert!(polled.is_pending());
        assert!(gate.poll_if_woken(&mut cx, |_| Poll::Ready(())).is_ready());
        assert!(
            gate.poll_if_woken(&mut cx, |_| Poll::Ready(())).is_ready(),
            "until it is pending"
        );
    }
}
