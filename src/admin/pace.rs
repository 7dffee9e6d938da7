//! Bound on the requests per second of the admin port: a page or a set of metrics takes as long as a hundred reads of
//! clients, and they are made by the same threads.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Time between two requests.
const INTERVAL: Duration = Duration::from_millis(1);
/// Requests that need not keep the interval, after a pause.
const BURST: u32 = 100;

/// Time at which the next request may be handled if no burst is left.
#[derive(Debug)]
pub(super) struct Pace(Mutex<Instant>);

impl Pace {
    /// Pace that begins with a whole burst.
    pub(super) fn new() -> Pace {
        Pace(Mutex::new(Instant::now()))
    }

    /// Waits until a request may be handled. The bounds on connections and streams bound the wait, to about a second.
    pub(super) async fn turn(&self) {
        let wait = {
            let mut next = self.0.lock();
            let now = Instant::now();
            let turn = (*next).max(now);
            *next = turn + INTERVAL;
            (turn - now).saturating_sub(INTERVAL * BURST)
        };
        if !wait.is_zero() {
            tokio::time::sleep(wait).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn requests_beyond_a_burst_keep_the_interval() {
        let pace = Pace::new();
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
}
