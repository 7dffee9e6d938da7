//! Bounds on what requests of the admin port cost: how many there are per second, how many pages are rendered, and the memory of
//! those that their clients have not read yet. A page or a set of metrics takes as long as a hundred reads of clients, and they are
//! made by the same threads.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use rangecache_base::faults::{self, Fault};
use rangecache_base::telemetry::metrics::Gauge;
use tokio::sync::{Notify, Semaphore, SemaphorePermit};
use tokio::time::{Instant, sleep_until};

/// Time between two renderings.
const INTERVAL: Duration = Duration::from_millis(20);
/// Renderings that need not keep the interval, after a pause.
const BURST: u32 = 20;
/// Bytes of responses that were not read: no page is rendered while there are as many. Part of the 48 MiB for the program.
const MAX_UNREAD_BYTES: i64 = 8 << 20;
/// Time for a closed connection to give its responses back, before the next one is closed.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(50);

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

/// Renders pages: one at a time, each for one request and after its arrival, so that a page is never older than its
/// request.
#[derive(Debug)]
pub(super) struct Renderings {
    pace: RequestPace,
    unread: Arc<UnreadResponses>,
}

/// Responses that were not read.
#[derive(Debug)]
struct UnreadResponses {
    bytes: Gauge,
    /// Notified when a response was read or dropped.
    freed: Notify,
}

/// Body of a response, counted until its last piece was written or dropped.
struct CountedBody {
    bytes: Box<[u8]>,
    counted: i64,
    unread: Arc<UnreadResponses>,
}

impl AsRef<[u8]> for CountedBody {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for CountedBody {
    fn drop(&mut self) {
        self.unread.bytes.dec_by(self.counted);
        self.unread.freed.notify_one();
    }
}

impl Renderings {
    /// `unread_bytes` shows the bytes of responses that were not read.
    pub(super) fn new(unread_bytes: Gauge) -> Renderings {
        Renderings {
            pace: RequestPace::new(INTERVAL, BURST),
            unread: Arc::new(UnreadResponses {
                bytes: unread_bytes,
                freed: Notify::new(),
            }),
        }
    }

    /// Renders a page once it has its turn and there is room for it. `close_oldest` closes a connection, so that its
    /// responses make room.
    pub(super) async fn render<T>(&self, close_oldest: impl Fn(), render: impl FnOnce() -> T) -> T {
        let turn = self.pace.turn().await;
        while self.unread.bytes.get() >= MAX_UNREAD_BYTES {
            close_oldest();
            // That connection may have had no response.
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, self.unread.freed.notified()).await;
        }
        let page = render();
        drop(turn);
        page
    }

    /// Counts `body` as not read until it was written or dropped.
    pub(super) fn count(&self, body: impl Into<Vec<u8>>) -> Bytes {
        let bytes = body.into().into_boxed_slice();
        let counted = i64::try_from(bytes.len()).unwrap_or(i64::MAX);
        self.unread.bytes.inc_by(counted);
        Bytes::from_owner(CountedBody {
            bytes,
            counted,
            unread: Arc::clone(&self.unread),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use futures_util::poll;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn page_is_rendered_once_closed_connections_have_given_enough_back() {
        let unread = Gauge::default();
        let renderings = Renderings::new(unread.clone());
        let page = || renderings.count("x".repeat(5 << 20));
        let closed = AtomicUsize::new(0);
        let close_oldest = || {
            closed.fetch_add(1, Ordering::Relaxed);
        };

        let first = renderings.render(close_oldest, page).await;
        let second = renderings.render(close_oldest, page).await;
        assert_eq!((unread.get(), closed.load(Ordering::Relaxed)), (10 << 20, 0));

        let mut third = Box::pin(renderings.render(close_oldest, page));
        assert!(poll!(&mut third).is_pending());
        assert_eq!(closed.load(Ordering::Relaxed), 1);
        // The closed connection had no response.
        tokio::time::sleep(CLOSE_TIMEOUT).await;
        assert!(poll!(&mut third).is_pending());
        assert_eq!(closed.load(Ordering::Relaxed), 2);
        // A piece of the response that is still to be written keeps all of it.
        let piece = first.slice(..1);
        drop(first);
        assert!(poll!(&mut third).is_pending());
        assert_eq!(unread.get(), 10 << 20);
        drop(piece);
        let third = third.await;
        assert_eq!(unread.get(), 10 << 20);
        assert_eq!(closed.load(Ordering::Relaxed), 2);
        drop((second, third));
        assert_eq!(unread.get(), 0);
    }

    const PACE: Duration = Duration::from_millis(1);
    const PACE_BURST: u32 = 100;

    #[tokio::test(start_paused = true)]
    async fn requests_beyond_a_burst_keep_the_interval() {
        let pace = RequestPace::new(PACE, PACE_BURST);
        let start = Instant::now();
        for _ in 0..=PACE_BURST {
            pace.turn().await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
        for _ in 0..50 {
            pace.turn().await;
        }
        assert_eq!(start.elapsed(), 50 * PACE);
        tokio::time::sleep(Duration::from_secs(1)).await;
        let start = Instant::now();
        for _ in 0..=PACE_BURST {
            pace.turn().await;
        }
        assert_eq!(start.elapsed(), Duration::ZERO);
    }

    #[tokio::test(start_paused = true)]
    async fn requests_that_are_dropped_while_they_wait_cost_the_next_one_nothing() {
        let pace = RequestPace::new(PACE, PACE_BURST);
        for _ in 0..=PACE_BURST {
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
        assert_eq!(start.elapsed(), PACE);
    }
}
