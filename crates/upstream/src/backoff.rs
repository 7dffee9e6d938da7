//! Pauses between attempts, doubled after each and jittered, so that clients that failed together do not retry
//! together.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Pauses that double from the first to the last.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    last: Duration,
    next: Duration,
}

impl Backoff {
    /// Starts at `first` and stays at `last` once reached.
    #[must_use]
    pub const fn new(first: Duration, last: Duration) -> Backoff {
        Backoff {
            first,
            last,
            next: first,
        }
    }

    /// Returns the next pause, jittered.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.last);
        jittered(pause)
    }

    /// Starts at the first pause again.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

/// Random duration between three quarters of `duration` and all of it, so that sidecars that lost the same etcd do not
/// reconnect at the same time.
#[must_use]
pub fn jittered(duration: Duration) -> Duration {
    // The standard library seeds each hash map differently, which is random enough.
    let random = RandomState::new().hash_one(0_u8);
    let quarter = duration / 4;
    let part = u32::try_from(random % 1024).unwrap_or(0);
    duration - quarter * part / 1024
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_last() {
        let mut backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(100));
        for longest in [20, 40, 80, 100, 100] {
            let longest = Duration::from_millis(longest);
            let pause = backoff.pause();
            assert!(
                pause <= longest && pause >= longest * 3 / 4,
                "{pause:?} of {longest:?}"
            );
        }
        backoff.reset();
        assert!(backoff.pause() <= Duration::from_millis(20));
    }

    #[test]
    fn jittered_pauses_differ() {
        let pauses: std::collections::HashSet<_> =
            (0..100).map(|_| jittered(Duration::from_secs(1))).collect();
        assert!(pauses.len() > 50, "{}", pauses.len());
    }
}
