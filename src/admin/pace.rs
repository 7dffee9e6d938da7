//! Bound on the requests per second of the admin port: a page or a set of metrics takes as long as a hundred reads of
//! clients, and they are made by the same threads.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep_until};

use rangecache_base::faults::{self, Fault};

/// A number of requests per second, which take turns in the order of their arrival. One that is dropped while it waits
/// has used up nothing.
#[derive(Debug)]
pub(super) struct RequestPace {
    /// Time between two requests.
    interval: Duration,
    /// Time by which requests may be ahead of the interval, after a pause.
    burst: Duration,
    /// Held by the request that waits for its time; all others wait for it.
    first: Semaphore,
    /// Time at which the next request is due. Only the holder of `first` changes it.
    next: Mutex<Instant>,
}

impl RequestPace {
    /// Pace of a request per `interval`, which begins with a burst of `burst` requests.
    pub(super) fn new(interval: Duration, burst: u32) -> RequestPace {
        RequestPace {
            interval,
            burst: interval * burst,
            first: Semaphore::new(1),
            next: Mutex::new(Instant::now()),
        }
    }

    /// Waits until a request may be handled; the next one waits until the returned permit is dropped. `None` never
    /// happens: the semaphore is not closed.
    pub(super) async fn turn(&self) -> Option<SemaphorePermit<'_>> {
        let first = self.first.acquire().await.ok()?;
        faults::hold(Fault::AdminTurn).await;
        let due = Instant::max(*self.next.lock(), Instant::now());
        sleep_until(due.checked_sub(self.burst).unwrap_or(due)).await;
        // Only now: until here the request may have been dropped.
        *self.next.lock() = due + self.interval;
        Some(first)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INTERVAL: Duration = Duration::from_millis(1);
    const BURST: u32 = 100;

    #[tokio::test(start_paused = true)]
    async fn requests_beyond_a_burst_keep_the_interval() {
        let pace = RequestPace::new(INTERVAL, BURST);
        let start = Instant::now();
        for _ in 0..=BURST {
            pace.turn().await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        for _ in 0..50 {
            pace.turn().await;
        }
        assert_eq!(start.elapsed(), 50 * INTERVAL);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let start = Instant::now();
        for _ in 0..=BURST {
            pace.turn().await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_are_dropped_while_they_wait_cost_the_next_one_nothing() {
        let pace = RequestPace::new(INTERVAL, BURST);
        for _ in 0..=BURST {
            pace.turn().await;
        }
        let start = Instant::now();
        for _ in 0..1_000 {
            let mut waiting = [(); 16].map(|()| Box::pin(pace.turn()));
            for turn in &mut waiting {
                assert!(futures_util::poll!(turn).is_pending());
            }
        }
        pace.turn().await;
        assert_eq!(start.elapsed(), INTERVAL);
    }
}
