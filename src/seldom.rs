//! Futures that are polled only once they were woken.
//!
//! A task polls everything that it waits for whenever it is woken for any of it. A stream of events, or its connection,
//! would look for the stop of the process, for the end of its age and for the client's next request at each event: each
//! look takes locks that other tasks need.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

use parking_lot::Mutex;

/// Runs `future`, which is polled only when it was woken, however often its task is.
pub async fn seldom<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut seldom = Seldom::new();
    poll_fn(|cx| seldom.poll(cx, |cx| future.as_mut().poll(cx))).await
}

/// Something that is looked at only when it was woken.
#[derive(Debug)]
pub struct Seldom {
    due: Arc<Due>,
    /// Wakes `due`.
    waker: Waker,
    /// The task that `due` wakes.
    task: Option<Waker>,
}

/// Waker of the looks.
#[derive(Debug)]
struct Due {
    is_due: AtomicBool,
    /// Stays when it is woken: the task registers it once.
    task: Mutex<Option<Waker>>,
}

impl Wake for Due {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        // In this order: the task that is woken looks, and one that registers now sees that a look is due.
        self.is_due.store(true, Ordering::Release);
        let task = self.task.lock().clone();
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl Seldom {
    /// Something that was not looked at.
    #[must_use]
    pub fn new() -> Seldom {
        let due = Arc::new(Due {
            is_due: AtomicBool::new(true),
            task: Mutex::new(None),
        });
        let waker = Waker::from(Arc::clone(&due));
        Seldom {
            due,
            waker,
            task: None,
        }
    }

    /// Polls by `look` if it was woken since it was last pending, or never polled; otherwise it is pending.
    pub fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        look: impl FnOnce(&mut Context<'_>) -> Poll<T>,
    ) -> Poll<T> {
        if !self.task.as_ref().is_some_and(|task| task.will_wake(cx.waker())) {
            // Before the check: what arrives after it wakes this task.
            *self.due.task.lock() = Some(cx.waker().clone());
            self.task = Some(cx.waker().clone());
        }
        if !self.due.is_due.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        // Before the look: what arrives after it makes the next look due.
        self.due.is_due.swap(false, Ordering::AcqRel);
        let looked = look(&mut Context::from_waker(&self.waker));
        if looked.is_ready() {
            self.due.is_due.store(true, Ordering::Release);
        }
        looked
    }
}

impl Default for Seldom {
    fn default() -> Seldom {
        Seldom::new()
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
    fn look_is_repeated_only_after_a_wake_up_which_the_task_gets() {
        let (first, second) = (Arc::new(Wakes::default()), Arc::new(Wakes::default()));
        let mut seldom = Seldom::new();
        let (mut looks, mut source) = (0, None::<Waker>);
        let mut poll = |task: &Arc<Wakes>, source: &mut Option<Waker>| {
            let task = Waker::from(Arc::clone(task));
            let polled = seldom.poll(&mut Context::from_waker(&task), |cx| {
                looks += 1;
                *source = Some(cx.waker().clone());
                Poll::<()>::Pending
            });
            assert!(polled.is_pending());
            looks
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
    fn wake_up_during_a_look_makes_the_next_look_due() {
        let mut seldom = Seldom::new();
        let mut cx = Context::from_waker(Waker::noop());
        let looked = seldom.poll(&mut cx, |cx| {
            cx.waker().wake_by_ref();
            Poll::<()>::Pending
        });
        assert!(looked.is_pending());
        assert!(seldom.poll(&mut cx, |_| Poll::Ready(())).is_ready());
        assert!(
            seldom.poll(&mut cx, |_| Poll::Ready(())).is_ready(),
            "until it is pending"
        );
    }
}
