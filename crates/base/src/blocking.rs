//! Work that waits for the disk, or takes long.

use tokio::task::JoinError;

/// Runs `work`, which waits for the disk, on a thread that serves no calls; in a simulation on the only thread, because another one
/// would end at a time that no seed decides. It ends also if this is dropped.
///
/// # Errors
/// It has panicked.
pub async fn run<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<T, JoinError> {
    #[cfg(debug_assertions)]
    if crate::simulated::max_page_keys().is_some() {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await
}

/// Runs `work`, which computes: at once if it `is_small`, which takes less than handing it to another thread and back, otherwise on a
/// thread that serves no calls.
///
/// # Errors
/// It has panicked on that thread.
pub async fn compute<T: Send + 'static>(
    is_small: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, JoinError> {
    if is_small {
        return Ok(work());
    }
    tokio::task::spawn_blocking(work).await
}
