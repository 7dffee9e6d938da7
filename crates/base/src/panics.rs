//! Containment of panics: a panic ends one request or one run of a background task, never the process. A leaf.
//!
//! No code panics on purpose, but a bug must not take down a proxy that a whole cluster depends on. The hook of
//! [`install`] counts and logs every panic; [`caught`] turns it into an error for the caller, [`restarting`] restarts a
//! task.

use std::{any::Any, future::Future, panic::AssertUnwindSafe, time::Duration};

use futures_util::FutureExt;

#[cfg(not(panic = "unwind"))]
compile_error!("a panic must end one request, not the process: build with panic=unwind");

/// Pause before a task that panicked is restarted, so that one that panics at once does not spin.
const RESTART_PAUSE: Duration = Duration::from_secs(1);

/// Calls `count` at every panic of the process, and logs its location.
pub fn install(count: impl Fn() + Send + Sync + 'static) {
    std::panic::set_hook(Box::new(move |panic| {
        count();
        let place = panic.location().map(ToString::to_string).unwrap_or_default();
        // Only literals are logged. Formatted messages may contain keys or values (I10).
        let text = panic.payload().downcast_ref::<&'static str>().unwrap_or(&"");
        tracing::error!(
            place,
            text,
            "a panic, which is a bug: please report it; everything but the call or task that panicked continues"
        );
    }));
}

/// Turns a panic of `future` into an error. State that it shares with others must stay consistent through a panic.
pub fn caught<F: Future>(future: F) -> impl Future<Output = Result<F::Output, Box<dyn Any + Send>>> + use<F> {
    AssertUnwindSafe(future).catch_unwind()
}

/// Runs a background task until it completes, and restarts it whenever it panics.
pub async fn restarting<F: Future<Output = ()>>(task: &'static str, mut run: impl FnMut() -> F) {
    while caught(run()).await.is_err() {
        tracing::warn!(task, "a background task panicked and is restarted");
        tokio::time::sleep(RESTART_PAUSE).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn task_that_panics_is_restarted() {
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
