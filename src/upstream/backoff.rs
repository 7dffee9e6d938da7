//! Pauses between attempts: longer each time, and never the same for two that failed together.

use std::hash::{BuildHasher, RandomState};
use std::time::Duration;

/// Doubles from the first pause to the last.
#[derive(Debug)]
pub struct Backoff {
    first: Duration,
    last: Duration,
    next: Duration,
}

impl Backoff {
    /// Starts at `first`, and stays at `last` once it is there.
    #[must_use]
    pub const fn new(first: Duration, last: Duration) -> Backoff {
        Backoff {
            first,
            last,
            next: first,
        }
    }

    /// The next pause.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next;
        self.next = (pause * 2).min(self.last);
        jittered(pause)
    }

    /// Starts anew.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

/// Between three quarters of `duration` and all of it: sidecars that lost the same etcd do not come back in step.
#[must_use]
pub fn jittered(duration: Duration) -> Duration {
    // The standard library seeds its hash maps anew each time, which is random enough.
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
    fn two_that_failed_together_come_back_apart() {
        let pauses: std::collections::HashSet<_> =
            (0..100).map(|_| jittered(Duration::from_secs(1))).collect();
        assert!(pauses.len() > 50, "{}", pauses.len());
    }
}
