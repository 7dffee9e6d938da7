//! Calls that are costly for etcd: etcd handles [`MAX_CALLS`] of one client at once, over all of its connections. The others wait in
//! their own client's queue, so that other clients do not notice.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use super::metrics::ShareMetrics;
use super::turns::NoTurn;

/// Calls of one client that etcd handles at once: a client that checks passwords or hashes the store without pause would
/// otherwise take all of etcd's CPUs.
const MAX_CALLS: usize = 2;
/// Calls of one client that may wait.
const MAX_WAITING: u32 = 256;
/// Longest wait.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Clients whose queues are kept; beyond it, queues without a call are dropped.
const KEPT_QUEUES: usize = 2_048;

/// Costly calls of all clients, by their numbers.
#[derive(Debug)]
pub struct CostlyCalls {
    queues: Mutex<HashMap<u64, Arc<CostlyQueue>>>,
    metrics: Arc<ShareMetrics>,
}

/// Costly calls of one client.
#[derive(Debug)]
struct CostlyQueue {
    free: Arc<Semaphore>,
    waiting: AtomicU32,
}

impl CostlyCalls {
    /// Creates the queues of clients, which are empty.
    #[must_use]
    pub fn new(metrics: Arc<ShareMetrics>) -> CostlyCalls {
        CostlyCalls {
            queues: Mutex::default(),
            metrics,
        }
    }

    /// Waits until a costly call of the client with the number `client` may begin, at most until `deadline`. The call keeps
    /// what is returned until its response has been sent.
    ///
    /// # Errors
    /// [`NoTurn`] when the wait is over, or if too many wait.
    pub async fn begin(
        &self,
        client: u64,
        deadline: Option<Instant>,
    ) -> Result<OwnedSemaphorePermit, NoTurn> {
        let begun = self.of(client).acquire(deadline).await;
        begun.inspect_err(|cause| {
            if *cause != NoTurn::Deadline {
                self.metrics.record_refused("costly");
            }
        })
    }

    fn of(&self, client: u64) -> Arc<CostlyQueue> {
        let mut queues = self.queues.lock();
        if queues.len() >= KEPT_QUEUES && !queues.contains_key(&client) {
            queues.retain(|_, queue| queue.has_calls());
        }
        Arc::clone(queues.entry(client).or_default())
    }
}

impl Default for CostlyQueue {
    fn default() -> CostlyQueue {
        CostlyQueue {
            free: Arc::new(Semaphore::new(MAX_CALLS)),
            waiting: AtomicU32::new(0),
        }
    }
}

impl CostlyQueue {
    /// Whether a call has a permit, or is about to wait for one: each has a reference to the semaphore.
    fn has_calls(self: &Arc<Self>) -> bool {
        Arc::strong_count(self) > 1 || Arc::strong_count(&self.free) > 1
    }

    /// Waits for one of the permits, in order of arrival.
    async fn acquire(&self, deadline: Option<Instant>) -> Result<OwnedSemaphorePermit, NoTurn> {
        let free = Arc::clone(&self.free);
        if let Ok(permit) = Arc::clone(&free).try_acquire_owned() {
            return Ok(permit);
        }
        let _waiting = WaiterCount::enter(&self.waiting).ok_or(NoTurn::TooManyWaiting)?;
        let latest = Instant::now() + MAX_WAIT;
        let latest = deadline.map_or(latest, |deadline| deadline.min(latest));
        match tokio::time::timeout_at(latest, free.acquire_owned()).await {
            // The semaphore is not closed.
            Ok(permit) => permit.map_err(|_| NoTurn::TooManyWaiting),
            Err(_) if deadline == Some(latest) => Err(NoTurn::Deadline),
            Err(_) => Err(NoTurn::Late),
        }
    }
}

/// Counts a call as waiting until dropped.
struct WaiterCount<'a>(&'a AtomicU32);

impl WaiterCount<'_> {
    fn enter(waiting: &AtomicU32) -> Option<WaiterCount<'_>> {
        let guard = WaiterCount(waiting);
        (waiting.fetch_add(1, Ordering::Relaxed) < MAX_WAITING).then_some(guard)
    }
}

impl Drop for WaiterCount<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn costly_calls_of_one_client_wait_for_each_other() {
        let costly = CostlyCalls::new(Arc::default());
        let [noisy, honest] = [1, 2];
        let first = costly.begin(noisy, None).await.unwrap();
        let _second = costly.begin(noisy, None).await.unwrap();
        let mut third = Box::pin(costly.begin(noisy, None));
        assert!(futures_util::poll!(&mut third).is_pending());
        assert!(costly.begin(honest, None).await.is_ok());
        drop(first);
        let _third = third.await.unwrap();
        let begun = Instant::now();
        assert_eq!(costly.begin(noisy, None).await.unwrap_err(), NoTurn::Late);
        assert_eq!(begun.elapsed(), MAX_WAIT);
        let soon = Instant::now() + Duration::from_secs(1);
        let late = costly.begin(noisy, Some(soon)).await;
        assert_eq!((late.unwrap_err(), Instant::now()), (NoTurn::Deadline, soon));
        let mut waiting: Vec<_> = (0..MAX_WAITING)
            .map(|_| Box::pin(costly.begin(noisy, None)))
            .collect();
        for call in &mut waiting {
            assert!(futures_util::poll!(call).is_pending());
        }
        assert_eq!(
            costly.begin(noisy, None).await.unwrap_err(),
            NoTurn::TooManyWaiting
        );
    }

    #[tokio::test]
    async fn queues_without_a_call_are_dropped() {
        let costly = CostlyCalls::new(Arc::default());
        let _call = costly.begin(0, None).await.unwrap();
        for client in 1..=KEPT_QUEUES as u64 {
            drop(costly.begin(client, None).await.unwrap());
        }
        let queues = costly.queues.lock();
        assert!(queues.contains_key(&0), "it has a call");
        assert_eq!(queues.len(), 2);
    }
}
