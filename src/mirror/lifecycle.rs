//! A mirror's life: load, follow, resume; load anew when what it holds cannot be resumed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Mirrors;
use super::feed::{self, FeedEnd};
use super::load::{Load, LoadError};
use super::state::{Epoch, Mirror};
use crate::cache::Store;
use crate::net::Url;
use crate::telemetry::Why;
use crate::upstream::Windows;

/// First pause before a lost feed is made again, and before a failed load is tried again.
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
/// Longest pause before a lost feed is made again.
const FEED_BACKOFF_LAST: Duration = Duration::from_millis(500);
/// Longest pause before a failed load is tried again: a load is the dearest thing that etcd is asked for.
const LOAD_BACKOFF_LAST: Duration = Duration::from_secs(5);
/// How long to wait for any endpoint before saying so again.
const ENDPOINT_PATIENCE: Duration = Duration::from_secs(10);

/// Keeps `mirror` in step with etcd. Returns when it has stepped aside for good; cancelled at a stop.
pub(super) async fn run(mirrors: &Mirrors, mirror: &Mirror) {
    let mut why = "start";
    let mut backoff = BACKOFF_FIRST;
    loop {
        let epoch = mirror.epoch();
        mirrors.metrics.mirror_reload(&mirror.name, why);
        let began = Instant::now();
        let loaded = tokio::select! {
            loaded = load(mirrors, mirror, epoch) => loaded,
            () = mirror.until_void(epoch) => { why = Why::HistoryReplaced.as_str(); continue; }
        };
        match loaded {
            Ok(true) => {}
            Ok(false) => {
                why = Why::HistoryReplaced.as_str();
                continue;
            }
            Err(error @ LoadError::OverBudget { .. }) => {
                tracing::warn!(mirror = mirror.name, %error, "the mirror steps aside for good: its reads are forwarded. \
                    Raise --cache-max-bytes, or mirror less with --cache-prefix or --no-cache-prefix");
                let _ = mirror.drop_contents(epoch, Why::OverBudget);
                return;
            }
            Err(error) => {
                tracing::warn!(mirror = mirror.name, %error, "loading failed; reads are forwarded; trying again");
                tokio::time::sleep(backoff).await;
                backoff = (backoff * 2).min(LOAD_BACKOFF_LAST);
                why = "load_failed";
                continue;
            }
        }
        backoff = BACKOFF_FIRST;
        tracing::info!(
            mirror = mirror.name,
            keys = mirror.metrics.load_keys.get(),
            bytes = mirror.metrics.load_bytes.get(),
            seconds = began.elapsed().as_secs_f64(),
            "loaded"
        );
        match follow(mirrors, mirror, epoch).await {
            FeedEnd::OverBudget => {
                tracing::warn!(
                    mirror = mirror.name,
                    "the mirror has outgrown its memory and steps aside for good: its reads are \
                    forwarded. Raise --cache-max-bytes, or mirror less with --cache-prefix or --no-cache-prefix"
                );
                let _ = mirror.drop_contents(epoch, Why::OverBudget);
                return;
            }
            FeedEnd::Reload(reason, explanation) => {
                tracing::warn!(
                    mirror = mirror.name,
                    reason,
                    explanation,
                    "the mirror is loaded anew"
                );
                let _ = mirror.drop_contents(epoch, Why::Loading);
                why = reason;
            }
            FeedEnd::Void | FeedEnd::Lost(_) => why = Why::HistoryReplaced.as_str(),
        }
    }
}

/// Loads `mirror`; `Ok(false)` if history was replaced meanwhile.
async fn load(mirrors: &Mirrors, mirror: &Mirror, epoch: Epoch) -> Result<bool, LoadError> {
    if mirror.drop_contents(epoch, Why::Loading).is_err() {
        return Ok(false);
    }
    let loaded = Load { mirrors, mirror }.run().await?;
    let store = Store::new(
        loaded.tree,
        loaded.header.revision,
        mirrors.history_limits,
        mirror.now(),
    );
    Ok(mirror.fill(epoch, store, loaded.newest_key).is_ok())
}

/// Follows etcd, feed after feed, for as long as what the mirror holds can be resumed.
async fn follow(mirrors: &Mirrors, mirror: &Mirror, epoch: Epoch) -> FeedEnd {
    let mut backoff = BACKOFF_FIRST;
    let mut last: Option<Url> = None;
    loop {
        let began = Instant::now();
        let deadline = began + ENDPOINT_PATIENCE;
        let end = match mirrors
            .upstream
            .dedicated(Windows::DEDICATED, last.as_ref(), deadline)
            .await
        {
            Ok(connection) => {
                last = Some(connection.url().clone());
                feed::follow(mirrors, mirror, epoch, &connection).await
            }
            Err(error) => FeedEnd::Lost(error.to_string()),
        };
        let FeedEnd::Lost(explanation) = end else {
            return end;
        };
        if mirror.step_out(epoch, Why::FeedLost).is_err() {
            return FeedEnd::Void;
        }
        if began.elapsed() > Duration::from_secs(5) {
            backoff = BACKOFF_FIRST;
        }
        tracing::warn!(
            mirror = mirror.name,
            explanation,
            "the feed was lost; reads are forwarded until it stands again"
        );
        tokio::select! {
            () = tokio::time::sleep(backoff) => {}
            () = mirror.until_void(epoch) => return FeedEnd::Void,
        }
        backoff = (backoff * 2).min(FEED_BACKOFF_LAST);
    }
}

/// Starts one task per mirror.
pub(super) fn start(mirrors: &Arc<Mirrors>) {
    for index in 0..mirrors.all.len() {
        let mirrors_of_task = Arc::clone(mirrors);
        let stop = mirrors.stop.clone();
        mirrors.tasks.spawn(async move {
            let mirror = &mirrors_of_task.all[index];
            stop.run_until_cancelled(run(&mirrors_of_task, mirror)).await;
        });
    }
}
