//! Single flight: identical calls share one call to etcd.
//!
//! While a call for a key is in flight, further ones for the same key wait, and are answered by **one** further call that starts
//! after they arrived (I2). That call starts when the one in flight ends, and so on.

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

/// The calls in flight and waiting, by key.
pub(super) struct SingleFlight<T> {
    /// One entry per key with a call in flight, so that there are no more entries than calls. It holds the shared call that
    /// starts next, if a call waits for it.
    next: Mutex<HashMap<Bytes, Option<SharedCall<T>>>>,
    tasks: TaskTracker,
}

/// A call for all that wait, which has not started.
struct SharedCall<T> {
    call: Pin<Box<dyn Future<Output = T> + Send>>,
    result: watch::Sender<Option<T>>,
}

/// What a call has to do.
pub(super) enum Role<T: Clone + Send + Sync + 'static> {
    /// No call for the key is in flight: make it, and keep the leader until it ends.
    Lead(Leader<T>),
    /// Wait for the shared call.
    Join(Join<T>),
}

/// Held by the in-flight call for a key; dropping it starts the next shared call.
pub(super) struct Leader<T: Clone + Send + Sync + 'static> {
    flights: Arc<SingleFlight<T>>,
    key: Bytes,
}

/// Waits for a shared call.
pub(super) struct Join<T>(watch::Receiver<Option<T>>);

impl<T: Clone + Send + Sync + 'static> SingleFlight<T> {
    /// Shared calls run in tasks that are `tasks`' to join.
    pub(super) fn new(tasks: &TaskTracker) -> Arc<SingleFlight<T>> {
        Arc::new(SingleFlight {
            next: Mutex::default(),
            tasks: tasks.clone(),
        })
    }

    /// The role of a call for `key`. `call` makes the shared call; it is used by the first that waits.
    pub(super) fn lead_or_join<F>(self: &Arc<Self>, key: &Bytes, call: impl FnOnce() -> F) -> Role<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut next = self.next.lock();
        match next.get_mut(key) {
            None => {
                next.insert(key.clone(), None);
                Role::Lead(Leader {
                    flights: Arc::clone(self),
                    key: key.clone(),
                })
            }
            Some(waiting) => {
                let shared = waiting.get_or_insert_with(|| SharedCall {
                    call: Box::pin(call()),
                    result: watch::Sender::new(None),
                });
                Role::Join(Join(shared.result.subscribe()))
            }
        }
    }
}

impl<T: Clone> Join<T> {
    /// The result of the shared call; `None` if that was cancelled.
    pub(super) async fn join(mut self) -> Option<T> {
        let result = self.0.wait_for(Option::is_some).await.ok()?;
        result.clone()
    }
}

impl<T: Clone + Send + Sync + 'static> Drop for Leader<T> {
    fn drop(&mut self) {
        let shared = {
            let mut next = self.flights.next.lock();
            match next.get_mut(&self.key).and_then(Option::take) {
                Some(shared) => shared,
                None => {
                    next.remove(&self.key);
                    return;
                }
            }
        };
        let leader = Leader {
            flights: Arc::clone(&self.flights),
            key: self.key.clone(),
        };
        self.flights.tasks.spawn(run(shared, leader));
    }
}

/// Makes the shared call, unless all that waited for it have gone.
async fn run<T: Clone + Send + Sync + 'static>(shared: SharedCall<T>, leader: Leader<T>) {
    let SharedCall { call, result } = shared;
    let value = tokio::select! {
        // Checked first: a call that no client waits for is not started.
        biased;
        () = result.closed() => return,
        value = call => value,
    };
    // All of the response is here: the next shared call may start.
    drop(leader);
    result.send_replace(Some(value));
}

impl<T> fmt::Debug for SingleFlight<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SingleFlight")
            .field("keys", &self.next.lock().len())
            .finish_non_exhaustive()
    }
}

impl<T: Clone + Send + Sync + 'static> fmt::Debug for Leader<T> {
    // Without the key, which is a request (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Leader").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use tokio::sync::Notify;

    use super::*;

    const KEY: Bytes = Bytes::from_static(b"key");

    fn flights() -> Arc<SingleFlight<usize>> {
        SingleFlight::new(&TaskTracker::new())
    }

    fn lead(flights: &Arc<SingleFlight<usize>>) -> Leader<usize> {
        match flights.lead_or_join(&KEY, || async { unreachable!("no call is in flight") }) {
            Role::Lead(leader) => leader,
            Role::Join(_) => panic!("a call is in flight"),
        }
    }

    fn join<F: Future<Output = usize> + Send + 'static>(
        flights: &Arc<SingleFlight<usize>>,
        call: impl FnOnce() -> F,
    ) -> Join<usize> {
        match flights.lead_or_join(&KEY, call) {
            Role::Join(join) => join,
            Role::Lead(_) => panic!("no call is in flight"),
        }
    }

    async fn settle() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn waiting_calls_share_one_that_starts_after_the_leader_ended() {
        let (flights, calls) = (flights(), Arc::new(AtomicUsize::new(0)));
        let leader = lead(&flights);
        let joins: Vec<_> = (0..3)
            .map(|_| {
                let calls = Arc::clone(&calls);
                join(
                    &flights,
                    || async move { calls.fetch_add(1, Ordering::SeqCst) + 1 },
                )
            })
            .collect();
        settle().await;
        assert_eq!(
            calls.load(Ordering::SeqCst),
            0,
            "it must not start before they arrived"
        );
        drop(leader);
        for join in joins {
            assert_eq!(join.join().await, Some(1));
        }
        assert!(flights.next.lock().is_empty(), "no key is kept");
    }

    #[tokio::test]
    async fn call_that_arrives_during_a_shared_call_gets_the_next_one() {
        let (flights, finish) = (flights(), Arc::new(Notify::new()));
        let leader = lead(&flights);
        let first = join(&flights, || {
            let finish = Arc::clone(&finish);
            async move {
                finish.notified().await;
                1
            }
        });
        drop(leader);
        settle().await;
        let second = join(&flights, || async { 2 });
        settle().await;
        finish.notify_one();
        assert_eq!(first.join().await, Some(1));
        assert_eq!(second.join().await, Some(2));
        settle().await;
        assert!(flights.next.lock().is_empty());
    }

    #[tokio::test]
    async fn shared_call_is_cancelled_when_all_that_wait_have_gone() {
        let (flights, running) = (flights(), Arc::new(()));
        let leader = lead(&flights);
        let held = Arc::clone(&running);
        let waiting = join(&flights, || async move {
            let _held = held;
            std::future::pending().await
        });
        drop(leader);
        settle().await;
        assert_eq!(Arc::strong_count(&running), 2);
        drop(waiting);
        settle().await;
        assert_eq!(Arc::strong_count(&running), 1);
        assert!(flights.next.lock().is_empty(), "the next call leads");
    }

    #[tokio::test]
    async fn shared_call_that_no_client_waits_for_is_not_started() {
        let flights = flights();
        let leader = lead(&flights);
        drop(join(&flights, || async { unreachable!("no client waits") }));
        drop(leader);
        settle().await;
        assert!(flights.next.lock().is_empty());
    }

    #[tokio::test]
    async fn panic_in_a_shared_call_fails_its_waiters_and_frees_the_key() {
        let flights = flights();
        let leader = lead(&flights);
        let waiting = join(&flights, || async { panic!("a bug") });
        drop(leader);
        assert_eq!(waiting.join().await, None);
        settle().await;
        assert!(flights.next.lock().is_empty());
    }
}
