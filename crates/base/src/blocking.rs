//! Work that waits for the disk.

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
