//! Waiting for conditions with a deadline. Tests do not sleep for fixed times.

use std::time::{Duration, Instant};

/// Deadline of conditions that should hold soon; generous, because tests share the machine with builds.
pub const SOON: Duration = Duration::from_secs(20);

/// Polls `probe` until it returns `Some`, and returns the value with the time taken. Panics with `what` at the
/// deadline.
pub async fn until<T>(
    deadline: Duration,
    what: &str,
    mut probe: impl AsyncFnMut() -> Option<T>,
) -> (T, Duration) {
    let started = Instant::now();
    let mut pause = Duration::from_millis(2);
    loop {
        if let Some(value) = probe().await {
            return (value, started.elapsed());
        }
        assert!(started.elapsed() < deadline, "not within {deadline:?}: {what}");
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(50));
    }
}
