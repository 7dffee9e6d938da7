//! Wall-clock time: the present in seconds since 1970, as metrics, certificates and files have it, and the time of monotonic
//! instants. A leaf.

use std::time::SystemTime;

use tokio::time::Instant;

/// Seconds since 1970; 0 with a clock that is set to before.
#[must_use]
pub fn now_seconds() -> i64 {
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    now.map_or(0, |now| i64::try_from(now.as_secs()).unwrap_or(i64::MAX))
}

/// Converts instants to wall-clock time by one reading of both clocks, so that the spans of a call keep their distances
/// even if the wall clock is set.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    instant: Instant,
    time: SystemTime,
}

impl Clock {
    /// Reads both clocks.
    #[must_use]
    pub fn new() -> Clock {
        Clock {
            instant: Instant::now(),
            time: SystemTime::now(),
        }
    }

    /// The wall-clock time of `instant`.
    #[must_use]
    pub fn at(&self, instant: Instant) -> SystemTime {
        let before = self.instant.saturating_duration_since(instant);
        let after = instant.saturating_duration_since(self.instant);
        let time = self.time.checked_sub(before).unwrap_or(self.time);
        time.checked_add(after).unwrap_or(time)
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn instants_keep_their_distances() {
        let before = Instant::now();
        tokio::time::advance(Duration::from_millis(5)).await;
        let clock = Clock::new();
        tokio::time::advance(Duration::from_millis(7)).await;
        let distance = clock.at(Instant::now()).duration_since(clock.at(before));
        assert_eq!(distance.unwrap(), Duration::from_millis(12));
    }
}
