//! What a panic costs: one request, or one run of a background task, and never the process. A leaf.
//!
//! No code here panics on purpose, but a bug must not take the sidecar of a whole cluster down. Every panic is counted and
//! logged by [`install`]'s hook; [`caught`] turns it into an error where a caller waits, [`restarting`] starts a task anew.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::Duration;

use futures_util::FutureExt;
use prometheus_client::metrics::counter::Counter;

#[cfg(not(panic = "unwind"))]
compile_error!("a panic must end one request, not the process: build with panic=unwind");

/// Pause before a task that panicked is started again: what panics at once must not spin.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// Counts every panic of the process in `count`, and logs where it was.
pub fn install(count: Counter) {
    std::panic::set_hook(Box::new(move |panic| {
        count.inc();
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        // A literal is the program's own. A formatted text may hold what was being handled: keys, values (I10).
        let text = panic.payload().downcast_ref::<&'static str>().unwrap_or(&"");
        tracing::error!(
            place,
            text,
            "a panic, which is a bug: please report it; all but what panicked goes on"
        );
    }));
}

/// `future`, whose panic is an error. What it shared with others must be as good after a panic as before.
pub fn caught<F: Future>(future: F) -> impl Future<Output = Result<F::Output, Box<dyn Any + Send>>> + use<F> {
    AssertUnwindSafe(future).catch_unwind()
}

/// Runs a background task to its end, from the start again whenever it panics.
pub async fn restarting<F: Future<Output = ()>>(task: &'static str, mut run: impl FnMut() -> F) {
    while caught(run()).await.is_err() {
        tracing::warn!(task, "a background task panicked and is started again");
        tokio::time::sleep(RESTART_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_task_that_panics_is_started_again() {
        let mut runs = 0;
        restarting("test", || {
            runs += 1;
            let run = runs;
            async move { assert!(run == 3, "a bug") }
        })
        .await;
        assert_eq!(runs, 3);
    }
}
