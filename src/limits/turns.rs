//! Bounds on large reads: how many may call etcd at once (`--forward-max-large`), and how many may wait
//! (`--forward-max-waiting`).

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bounds large reads that call etcd, and reads that wait. First come, first served.
#[derive(Debug)]
pub struct Turns {
    turns: Arc<Semaphore>,
    waiting: AtomicU32,
    max_waiting: u32,
    in_flight_gauge: Gauge,
    waiting_gauge: Gauge,
}

/// Permission for one large read to call etcd; released when dropped.
#[derive(Debug)]
pub struct Turn {
    _permit: OwnedSemaphorePermit,
    in_flight_gauge: Gauge,
}

/// Guard that counts one read as waiting until dropped.
#[derive(Debug)]
pub struct Waiting<'a>(&'a Turns);

/// Reason for which a read got no turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoTurn {
    /// The bound on waiting reads is reached.
    #[error("too many large reads wait for etcd")]
    TooManyWaiting,
    /// The process is stopping.
    #[error("stopping")]
    Stopping,
}

impl Turns {
    /// Lets `max_turns` reads call etcd at once and `max_waiting` reads wait. The gauges count both.
    #[must_use]
    pub fn new(
        max_turns: usize,
        max_waiting: u32,
        in_flight_gauge: &Gauge,
        waiting_gauge: &Gauge,
    ) -> Arc<Turns> {
        Arc::new(Turns {
            turns: Arc::new(Semaphore::new(max_turns)),
            waiting: AtomicU32::new(0),
            max_waiting,
            in_flight_gauge: in_flight_gauge.clone(),
            waiting_gauge: waiting_gauge.clone(),
        })
    }

    /// Returns a turn; waits for one in order of arrival.
    ///
    /// # Errors
    /// [`NoTurn::TooManyWaiting`] immediately, if the bound on waiting reads is reached.
    pub async fn acquire(&self) -> Result<Turn, NoTurn> {
        let permit = match Arc::clone(&self.turns).try_acquire_owned() {
            Ok(permit) => permit,
            Err(_) => {
                let _waiting = self.count_waiting()?;
                let permit = Arc::clone(&self.turns).acquire_owned().await;
                permit.map_err(|_| NoTurn::Stopping)?
            }
        };
        self.in_flight_gauge.inc();
        Ok(Turn {
            _permit: permit,
            in_flight_gauge: self.in_flight_gauge.clone(),
        })
    }

    /// Counts the calling read as waiting, for a turn or for another read's response, until the guard is dropped.
    ///
    /// # Errors
    /// [`NoTurn::TooManyWaiting`] if the bound is reached.
    pub fn count_waiting(&self) -> Result<Waiting<'_>, NoTurn> {
        let waiting = self.waiting.fetch_add(1, Ordering::Relaxed);
        self.waiting_gauge.inc();
        // Created before the comparison: when the read is refused, dropping the guard takes its count back.
        let guard = Waiting(self);
        if waiting >= self.max_waiting {
            return Err(NoTurn::TooManyWaiting);
        }
        Ok(guard)
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.in_flight_gauge.dec();
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
        self.0.waiting_gauge.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn turns(max_turns: usize, max_waiting: u32) -> (Arc<Turns>, Gauge, Gauge) {
        let (in_flight, waiting) = (Gauge::default(), Gauge::default());
        let turns = Turns::new(max_turns, max_waiting, &in_flight, &waiting);
        (turns, in_flight, waiting)
    }

    #[tokio::test]
    async fn read_waits_until_a_turn_is_dropped() {
        let (turns, in_flight, waiting) = turns(1, 1);
        let first = turns.acquire().await.unwrap();
        let second = tokio::spawn({
            let turns = Arc::clone(&turns);
            async move { turns.acquire().await }
        });
        tokio::task::yield_now().await;
        assert!(!second.is_finished());
        assert_eq!((in_flight.get(), waiting.get()), (1, 1));
        drop(first);
        let second = second.await.unwrap().unwrap();
        assert_eq!((in_flight.get(), waiting.get()), (1, 0));
        drop(second);
        assert_eq!(in_flight.get(), 0);
    }

    #[tokio::test]
    async fn read_beyond_the_waiting_bound_is_refused_at_once() {
        let (turns, _in_flight, waiting) = turns(1, 1);
        let turn = turns.acquire().await.unwrap();
        let guard = turns.count_waiting().unwrap();
        assert_eq!(turns.acquire().await.unwrap_err(), NoTurn::TooManyWaiting);
        assert_eq!(waiting.get(), 1, "the refused read is not counted");
        drop(guard);
        assert_eq!(waiting.get(), 0);
        assert!(turns.count_waiting().is_ok());
        drop(turn);
        assert!(turns.acquire().await.is_ok());
    }
}
