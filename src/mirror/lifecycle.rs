//! A mirror's life: load, follow, resume; load anew when what it holds cannot be resumed.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::feed::{self, FeedEnd};
use super::load::{ENTRY_OVERHEAD_BYTES, Load, LoadError};
use super::mirrors::Mirrors;
use super::over_budget;
use super::state::{Epoch, Mirror};
use crate::cache::Store;
use crate::net::Url;
use crate::panics::caught;
use crate::telemetry::Reason;
use crate::telemetry::trace::Span;
use crate::upstream::{Backoff, ReceiveWindow};

/// First pause before a lost feed is made again, and before a failed load is tried again.
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
/// Longest pause before a lost feed is made again.
const FEED_BACKOFF_LAST: Duration = Duration::from_millis(500);
/// Longest pause before a failed load is tried again: a load is the dearest thing that etcd is asked for.
const LOAD_BACKOFF_LAST: Duration = Duration::from_secs(5);
/// Pause after a panic: what panics at once must not keep etcd busy with loads.
const PANIC_PAUSE: Duration = Duration::from_secs(1);
/// How long to wait for any endpoint before saying so again.
const ENDPOINT_PATIENCE: Duration = Duration::from_secs(10);

/// Keeps `mirror` in step with etcd, until cancelled; `reason` it has to be loaded, for the metric.
pub(super) async fn run(mirrors: &Mirrors, mirror: &Mirror, mut reason: &'static str) {
    let mut backoff = Backoff::new(BACKOFF_FIRST, LOAD_BACKOFF_LAST);
    // What readers are told while a load is under way: one that may well be too large changes nothing for them.
    let mut meanwhile = Reason::Loading;
    loop {
        let epoch = mirror.epoch();
        mirrors
            .telemetry
            .metrics
            .mirrors
            .record_reload(&mirror.name, reason);
        let began = Instant::now();
        let span = mirrors.background(if reason == "start" { "load" } else { "reload" }, mirror);
        let loaded = tokio::select! {
            loaded = load(mirrors, mirror, epoch, meanwhile) => loaded,
            () = mirror.epoch_ended(epoch) => Ok(false),
        };
        if let Some(span) = span {
            load_ended(mirrors, mirror, *span, reason, &loaded);
        }
        match loaded {
            Ok(true) => {}
            Ok(false) => {
                reason = why_void(mirror);
                continue;
            }
            Err(error @ LoadError::OverBudget { .. }) => {
                let loaded = &mirror.metrics;
                let mean_bytes = mean(loaded.load_bytes.get(), loaded.load_keys.get()) + ENTRY_OVERHEAD_BYTES;
                if meanwhile == Reason::OverBudget {
                    tracing::info!(mirror = mirror.name, %error, "the mirror still does not fit");
                } else {
                    tracing::warn!(mirror = mirror.name, %error, "the mirror steps aside until it fits: its reads are forwarded. \
                        Raise --cache-max-bytes, or mirror less with --cache-prefix or --no-cache-prefix");
                }
                meanwhile = step_aside(mirrors, mirror, epoch, mean_bytes).await;
                reason = "may_fit";
                continue;
            }
            Err(error) => {
                tracing::warn!(mirror = mirror.name, %error, "loading failed; reads are forwarded; trying again");
                tokio::time::sleep(backoff.pause()).await;
                reason = "load_failed";
                continue;
            }
        }
        backoff.reset();
        meanwhile = Reason::Loading;
        tracing::info!(
            mirror = mirror.name,
            keys = mirror.metrics.load_keys.get(),
            bytes = mirror.metrics.load_bytes.get(),
            seconds = began.elapsed().as_secs_f64(),
            "loaded"
        );
        match follow(mirrors, mirror, epoch).await {
            FeedEnd::OverBudget => {
                let grown = &mirror.metrics;
                let mean_bytes = mean(grown.memory_bytes.get(), grown.keys.get());
                tracing::warn!(
                    mirror = mirror.name,
                    "the mirror has outgrown its memory and steps aside until it fits: its reads are \
                    forwarded. Raise --cache-max-bytes, or mirror less with --cache-prefix or --no-cache-prefix"
                );
                meanwhile = step_aside(mirrors, mirror, epoch, mean_bytes).await;
                reason = "may_fit";
            }
            FeedEnd::Reload(cause, explanation) => {
                tracing::warn!(
                    mirror = mirror.name,
                    reason = cause,
                    explanation,
                    "the mirror is loaded anew"
                );
                let _ = mirror.drop_contents(epoch, Reason::Loading);
                reason = cause;
            }
            FeedEnd::StaleEpoch | FeedEnd::Lost(_) => reason = why_void(mirror),
        }
    }
}

/// Says in its span how a load ended.
fn load_ended(
    mirrors: &Mirrors,
    mirror: &Mirror,
    mut span: Span,
    reason: &'static str,
    loaded: &Result<bool, LoadError>,
) {
    span.set("rangecache.reason", reason);
    span.set("rangecache.keys", mirror.metrics.load_keys.get());
    span.set("rangecache.bytes", mirror.metrics.load_bytes.get());
    match loaded {
        Ok(true) => {}
        Ok(false) => span.error = Some(why_void(mirror).into()),
        Err(error) => span.error = Some(error.to_string().into()),
    }
    mirrors.telemetry.tracer.end(span);
}

/// Gives the memory back, and waits until it may be enough; returns what readers are told during the load that follows.
async fn step_aside(mirrors: &Mirrors, mirror: &Mirror, epoch: Epoch, mean_bytes: u64) -> Reason {
    let _ = mirror.drop_contents(epoch, Reason::OverBudget);
    over_budget::until_it_may_fit(mirrors, mirror, epoch, mean_bytes).await;
    mirror.revision().err().unwrap_or(Reason::Loading)
}

fn mean(bytes: i64, keys: i64) -> u64 {
    u64::try_from(bytes / keys.max(1)).unwrap_or(0).max(1)
}

/// What voided the epoch.
fn why_void(mirror: &Mirror) -> &'static str {
    mirror
        .revision()
        .err()
        .unwrap_or(Reason::HistoryReplaced)
        .as_str()
}

/// Loads `mirror`; `Ok(false)` if history was replaced meanwhile.
async fn load(
    mirrors: &Mirrors,
    mirror: &Mirror,
    epoch: Epoch,
    meanwhile: Reason,
) -> Result<bool, LoadError> {
    if mirror.drop_contents(epoch, meanwhile).is_err() {
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
    let mut backoff = Backoff::new(BACKOFF_FIRST, FEED_BACKOFF_LAST);
    let mut last: Option<Url> = None;
    let mut opening = "follow";
    loop {
        let began = Instant::now();
        let span = mirrors.background(std::mem::replace(&mut opening, "resume"), mirror);
        let deadline = began + ENDPOINT_PATIENCE;
        let end = match mirrors
            .upstream
            .dedicated(ReceiveWindow::DEDICATED, last.as_ref(), deadline)
            .await
        {
            Ok(connection) => {
                last = Some(connection.url().clone());
                feed::follow(mirrors, mirror, epoch, &connection, span).await
            }
            Err(error) => FeedEnd::Lost(error.to_string()),
        };
        let FeedEnd::Lost(explanation) = end else {
            return end;
        };
        if mirror.take_out_of_service(epoch, Reason::FeedLost).is_err() {
            return FeedEnd::StaleEpoch;
        }
        if began.elapsed() > Duration::from_secs(5) {
            backoff.reset();
        }
        tracing::warn!(
            mirror = mirror.name,
            explanation,
            "the feed was lost; reads are forwarded until it stands again"
        );
        tokio::select! {
            () = tokio::time::sleep(backoff.pause()) => {}
            () = mirror.epoch_ended(epoch) => return FeedEnd::StaleEpoch,
        }
    }
}

/// A mirror's life over panics: what one leaves behind may be half done, so that it is dropped at once.
async fn live(mirrors: &Mirrors, mirror: &Mirror) {
    let mut reason = "start";
    while caught(run(mirrors, mirror, reason)).await.is_err() {
        reason = Reason::Panicked.as_str();
        let _ = mirror.end_epoch(mirror.epoch(), Reason::Panicked);
        tracing::warn!(
            mirror = mirror.name,
            "the mirror's task panicked: the mirror is loaded anew"
        );
        tokio::time::sleep(PANIC_PAUSE).await;
    }
}

/// Starts one task per mirror.
pub(super) fn start(mirrors: &Arc<Mirrors>) {
    for index in 0..mirrors.all.len() {
        let mirrors_of_task = Arc::clone(mirrors);
        let stop = mirrors.stop.clone();
        mirrors.tasks.spawn(async move {
            let mirror = &mirrors_of_task.all[index];
            stop.run_until_cancelled(live(&mirrors_of_task, mirror)).await;
        });
    }
}
