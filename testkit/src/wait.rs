//! Waiting for a condition with a deadline: the only way in which a test lets time pass.

use std::time::{Duration, Instant};

/// How long a condition may take that has no reason to be slow. Generous: tests share the machine with builds.
pub const SOON: Duration = Duration::from_secs(20);

/// Calls `probe` until it returns `Some`, and returns that with the time that it took. Panics with `what` at the deadline.
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
