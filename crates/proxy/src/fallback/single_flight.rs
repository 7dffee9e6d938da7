//! Single flight: identical calls share a call to etcd.
//!
//! The first call for a key is made at once. Calls for the same key that arrive while it is in flight do not use its
//! response, which may be older than they are (I2). They wait for the **next** call, which starts when the one in
//! flight is complete and serves all of them; calls that arrive during that call wait for the one after it.

use std::{collections::HashMap, fmt, pin::Pin, sync::Arc};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

/// Calls in flight and the shared calls that follow them, by key.
pub(super) struct SingleFlight<T> {
    /// Shared call that starts next, if a call waits for it, by key. Exactly the keys with a call in flight have an entry,
    /// so that the map is bounded by the calls in flight.
    next_calls: Mutex<HashMap<Bytes, Option<SharedCall<T>>>>,
    /// Joins the tasks of shared calls.
    tasks: TaskTracker,
}

/// Call that has not started, for all calls that wait for it.
struct SharedCall<T> {
    call: Pin<Box<dyn Future<Output = T> + Send>>,
    /// Sends the result to the waiting calls; has no receivers once all of them are cancelled.
    result: watch::Sender<Option<T>>,
}

/// Role of a call among identical calls.
pub(super) enum CallRole<T: Clone + Send + Sync + 'static> {
    /// No call for the key is in flight: the caller makes it, and keeps the [`Leader`] until it is complete.
    Lead(Leader<T>),
    /// A call for the key is in flight: the caller waits for the next one.
    Join(JoinedCall<T>),
}

/// Guard held by the in-flight call for a key; dropping it starts the next shared call, or removes the key.
pub(super) struct Leader<T: Clone + Send + Sync + 'static> {
    registry: Arc<SingleFlight<T>>,
    key: Bytes,
}

/// Membership in a shared call. When all are dropped, the shared call is cancelled.
pub(super) struct JoinedCall<T>(watch::Receiver<Option<T>>);

impl<T: Clone + Send + Sync + 'static> SingleFlight<T> {
    /// Creates an empty registry; `tasks` joins the tasks of shared calls.
    pub(super) fn new(tasks: &TaskTracker) -> Arc<SingleFlight<T>> {
        Arc::new(SingleFlight {
            next_calls: Mutex::default(),
            tasks: tasks.clone(),
        })
    }

    /// Returns the role of a call for `key`. The first call that has to wait provides the shared `call`.
    pub(super) fn lead_or_join<F>(self: &Arc<Self>, key: &Bytes, call: impl FnOnce() -> F) -> CallRole<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        let mut next = self.next_calls.lock();
        match next.get_mut(key) {
            None => {
                next.insert(key.clone(), None);
                CallRole::Lead(Leader {
                    registry: Arc::clone(self),
                    key: key.clone(),
                })
            }
            Some(waiting) => {
                let shared = waiting.get_or_insert_with(|| SharedCall {
                    call: Box::pin(call()),
                    result: watch::Sender::new(None),
                });
                CallRole::Join(JoinedCall(shared.result.subscribe()))
            }
        }
    }
}

impl<T: Clone> JoinedCall<T> {
    /// Waits for the shared call and returns its result; `None` if the call panicked or was cancelled.
    pub(super) async fn wait(mut self) -> Option<T> {
        let result = self.0.wait_for(Option::is_some).await.ok()?;
        result.clone()
    }
}

impl<T: Clone + Send + Sync + 'static> Drop for Leader<T> {
    fn drop(&mut self) {
        // The key stays in the map until no call waits for it. Take the waiting call and keep the key under one lock:
        // otherwise a call that arrives in between would lead a second call for the same key.
        let shared = {
            let mut next = self.registry.next_calls.lock();
            match next.get_mut(&self.key).and_then(Option::take) {
                Some(shared) => shared,
                None => {
                    next.remove(&self.key);
                    return;
                }
            }
        };
        let leader = Leader {
            registry: Arc::clone(&self.registry),
            key: self.key.clone(),
        };
        self.registry.tasks.spawn(run(shared, leader));
    }
}

/// Makes the shared call; stops when every call that waits for it is cancelled.
async fn run<T: Clone + Send + Sync + 'static>(shared: SharedCall<T>, leader: Leader<T>) {
    let SharedCall { call, result } = shared;
    let value = tokio::select! {
        // The cancellation is polled first, so that a call without waiting clients is not even started.
        biased;
        () = result.closed() => return,
        value = call => value,
    };
    // The response is complete: the next shared call may start before the waiting calls have read it.
    drop(leader);
    result.send_replace(Some(value));
}

impl<T> fmt::Debug for SingleFlight<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SingleFlight")
            .field("keys", &self.next_calls.lock().len())
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

    fn registry() -> Arc<SingleFlight<usize>> {
        SingleFlight::new(&TaskTracker::new())
    }

    fn lead(registry: &Arc<SingleFlight<usize>>) -> Leader<usize> {
        match registry.lead_or_join(&KEY, || async { unreachable!("no call is in flight") }) {
            CallRole::Lead(leader) => leader,
            CallRole::Join(_) => panic!("a call is in flight"),
        }
    }

    fn join<F: Future<Output = usize> + Send + 'static>(
        registry: &Arc<SingleFlight<usize>>,
        call: impl FnOnce() -> F,
    ) -> JoinedCall<usize> {
        match registry.lead_or_join(&KEY, call) {
            CallRole::Join(join) => join,
            CallRole::Lead(_) => panic!("no call is in flight"),
        }
    }

    /// Lets the tasks of shared calls run until they wait.
    async fn settle() {
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn waiting_calls_share_a_call_that_starts_after_the_leader_is_dropped() {
        let (registry, calls) = (registry(), Arc::new(AtomicUsize::new(0)));
        let leader = lead(&registry);
        let joins: Vec<_> = (0..3)
            .map(|_| {
                let calls = Arc::clone(&calls);
                join(
                    &registry,
                    || async move { calls.fetch_add(1, Ordering::SeqCst) + 1 },
                )
            })
            .collect();
        settle().await;
        assert_eq!(
            calls.load(Ordering::SeqCst),
            0,
            "the shared call must not start while the leader exists"
        );
        drop(leader);
        for join in joins {
            assert_eq!(join.wait().await, Some(1));
        }
        assert!(registry.next_calls.lock().is_empty(), "the key is removed");
    }

    #[tokio::test]
    async fn call_that_arrives_during_a_shared_call_gets_the_next_one() {
        let (registry, finish) = (registry(), Arc::new(Notify::new()));
        let leader = lead(&registry);
        let first = join(&registry, || {
            let finish = Arc::clone(&finish);
            async move {
                finish.notified().await;
                1
            }
        });
        drop(leader);
        settle().await;
        let second = join(&registry, || async { 2 });
        settle().await;
        finish.notify_one();
        assert_eq!(first.wait().await, Some(1));
        assert_eq!(second.wait().await, Some(2));
        settle().await;
        assert!(registry.next_calls.lock().is_empty());
    }

    #[tokio::test]
    async fn shared_call_without_waiting_calls_is_cancelled() {
        let (registry, running) = (registry(), Arc::new(()));
        let leader = lead(&registry);
        let held = Arc::clone(&running);
        let waiting = join(&registry, || async move {
            let _held = held;
            std::future::pending().await
        });
        drop(leader);
        settle().await;
        assert_eq!(Arc::strong_count(&running), 2);
        drop(waiting);
        settle().await;
        assert_eq!(Arc::strong_count(&running), 1);
        assert!(registry.next_calls.lock().is_empty(), "the next call leads");
    }

    #[tokio::test]
    async fn shared_call_whose_waiting_calls_were_dropped_is_not_started() {
        let registry = registry();
        let leader = lead(&registry);
        drop(join(&registry, || async { unreachable!("no client waits") }));
        drop(leader);
        settle().await;
        assert!(registry.next_calls.lock().is_empty());
    }

    #[tokio::test]
    async fn panic_in_a_shared_call_fails_waiting_calls_and_removes_the_key() {
        let registry = registry();
        let leader = lead(&registry);
        let waiting = join(&registry, || async { panic!("a bug") });
        drop(leader);
        assert_eq!(waiting.wait().await, None);
        settle().await;
        assert!(registry.next_calls.lock().is_empty());
    }
}
