//! The life of a mirror: load, follow, resume; reload when its contents cannot be resumed.
//!
//! ```text
//!          ┌───────────── another history, or compacted ◀─────┐
//!          ▼                                                  │
//! start ▶ loading ── loaded ─▶ out of service ── a feed is ──▶ proving ── continues ─▶ in service ─┐
//!          │ ▲                 with contents     opened                                            │
//!   does   │ │ may             ▲                                                                   │
//!  not fit ▼ │ fit             └──────────────── the feed is lost ◀────────────────────────────────┤
//!       over budget ◀─────────────────────────── has outgrown its memory ◀─────────────────────────┘
//! ```
//!
//! "Proving" judges a feed (the table in `lineage/judge.rs`). A step that began in an [`Epoch`] changes nothing
//! once that has ended: a replaced history, a mismatch that verification found, a panic and a removal end it, and the mirror
//! is loaded again.

use std::{sync::Arc, time::Duration};

use rangecache_base::telemetry::trace::{Span, SpanExt as _};
use rangecache_base::{net::Url, panics::caught, telemetry::Reason};
use rangecache_upstream::{Backoff, ReceiveWindow};
use tokio::time::Instant;

use super::feed::{Feed, FeedEnd, Feeding};
use super::image::{self, Images};
use super::load::{self, Adopted, Have, Load, LoadCause, LoadError, LoadedBy};
use super::mirrors::{Mirrors, background};
use super::view::{Epoch, LoadedStore, Mirror, ReaderEnd};
use super::{fan_out, memory, metrics::MirrorsMetrics};

/// First pause before a lost watch is created again, and before a failed load is retried.
const BACKOFF_FIRST: Duration = Duration::from_millis(10);
/// Longest pause before a lost watch is created again.
const FEED_BACKOFF_LAST: Duration = Duration::from_millis(500);
/// Longest pause before a failed load is retried: a load is the most expensive request to etcd.
const LOAD_BACKOFF_LAST: Duration = Duration::from_secs(5);
/// A feed that lasted longer than this resets the backoff.
const FEED_IS_STABLE: Duration = Duration::from_secs(5);
/// Pause after a panic: a task that panics at once must not keep etcd busy with loads.
const PANIC_PAUSE: Duration = Duration::from_secs(1);
/// Timeout for connecting to any endpoint, after which a failure is logged and the next attempt begins.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);

/// Starts the task of the mirror at `position`, and that of its fan-out.
pub(super) fn start(mirrors: &Arc<Mirrors>, position: usize) {
    let mirrors_of_task = Arc::clone(mirrors);
    mirrors.tasks.spawn(async move {
        let Some(slot) = mirrors_of_task.set.get(position) else {
            return;
        };
        let running = run_despite_panics(&mirrors_of_task, &slot.mirror);
        slot.stop.run_until_cancelled(running).await;
        if slot.is_removed() {
            remove(&mirrors_of_task, &slot.mirror);
            slot.ended.cancel();
        }
    });
    if let Some(images) = mirrors.images.clone() {
        let mirrors_of_image = Arc::clone(mirrors);
        // Not dropped at the end: the last image is written.
        mirrors.tasks.spawn(async move {
            if let Some(slot) = mirrors_of_image.set.get(position) {
                let (state, stop) = (&mirrors_of_image.cluster_state, &mirrors_of_image.stop);
                image::keep(&images, state, &slot.mirror, stop, &slot.ended).await;
            }
        });
    }
    let mirrors_of_fan_out = Arc::clone(mirrors);
    let stop = mirrors.stop.clone();
    mirrors.tasks.spawn(async move {
        // Continues after a removal, so that the watches get what they have not taken yet and the end.
        if let Some(slot) = mirrors_of_fan_out.set.get(position) {
            stop.run_until_cancelled(fan_out::follow(&slot.mirror, &slot.fan_out))
                .await;
        }
    });
}

/// Drops what a removed mirror holds, once its task has ended: reads that wait for it are forwarded, and its watches
/// continue at etcd.
fn remove(mirrors: &Mirrors, mirror: &Mirror) {
    let _ = mirror.end_epoch(mirror.epoch(), Reason::NotMirrored);
    let all = mirrors.telemetry.metrics.group::<MirrorsMetrics>();
    all.forget(&mirror.name);
}

/// Runs a mirror's lifecycle. After a panic its contents may be inconsistent, so they are dropped at once.
async fn run_despite_panics(mirrors: &Mirrors, mirror: &Mirror) {
    let mut cause = LoadCause::Start;
    while caught(run(mirrors, mirror, cause)).await.is_err() {
        cause = LoadCause::Dropped(Reason::Panicked);
        let _ = mirror.end_epoch(mirror.epoch(), Reason::Panicked);
        tracing::warn!(
            mirror = mirror.name,
            "the mirror's task panicked; reloading the mirror"
        );
        tokio::time::sleep(PANIC_PAUSE).await;
    }
}

/// Keeps `mirror` up to date with etcd until cancelled; `cause` is that of the first load.
async fn run(mirrors: &Mirrors, mirror: &Mirror, mut cause: LoadCause) {
    let mut lifecycle = Lifecycle {
        mirrors,
        mirror,
        load_backoff: Backoff::new(BACKOFF_FIRST, LOAD_BACKOFF_LAST),
        reason_while_loading: Reason::Loading,
        have: None,
        images: mirrors.images.as_ref(),
    };
    loop {
        let epoch = mirror.epoch();
        cause = match lifecycle.load(epoch, cause).await {
            Ok(loaded_by) => tokio::select! {
                cause = lifecycle.follow(epoch, loaded_by) => cause,
                reason = mirror.damage_reported(epoch) => LoadCause::Dropped(reason),
            },
            Err(cause) => cause,
        };
    }
}

struct Lifecycle<'a> {
    mirrors: &'a Mirrors,
    mirror: &'a Mirror,
    load_backoff: Backoff,
    /// Reason of reads that are forwarded during the next load: still [`Reason::OverBudget`] if the mirror may not fit.
    reason_while_loading: Reason,
    /// Keys that the next load need not read, and the epoch that they are of.
    have: Option<(Epoch, Have)>,
    /// Images on the disk, until the first load has read that of the mirror.
    images: Option<&'a Arc<Images>>,
}

impl Lifecycle<'_> {
    /// Loads the mirror once, and returns its connection. After a failure, waits
    /// until another attempt makes sense and returns its cause.
    async fn load(&mut self, epoch: Epoch, cause: LoadCause) -> Result<LoadedBy, LoadCause> {
        let (mirrors, mirror) = (self.mirrors, self.mirror);
        mirror.metrics.reloads.of(cause.as_str()).inc();
        let began = Instant::now();
        let span_name = if cause == LoadCause::Start {
            "load"
        } else {
            "reload"
        };
        let span = background(&mirrors.telemetry, span_name, mirror);
        let have = self.have.take().filter(|(of, _)| *of == epoch);
        let mut have = have.map(|(_, have)| have);
        let loaded = tokio::select! {
            loaded = self.load_once(epoch, &mut have) => loaded,
            () = mirror.epoch_ended(epoch) => Ok(None),
        };
        if let Some(span) = span {
            end_load_span(mirrors, mirror, *span, cause, &loaded);
        }
        match loaded {
            Ok(Some((connection, adopted))) => {
                self.load_backoff.reset();
                self.reason_while_loading = Reason::Loading;
                if let Some(adopted) = adopted {
                    let source = adopted.source.as_str();
                    mirror.metrics.adopted.of(source).inc();
                    mirror.metrics.adopted_bytes.of(source).inc_by(adopted.bytes);
                }
                tracing::info!(
                    mirror = mirror.name,
                    keys = mirror.metrics.load_keys.get(),
                    bytes = mirror.metrics.load_bytes.get(),
                    from = adopted.map(|adopted| adopted.source.as_str()),
                    kept_keys = adopted.map(|adopted| adopted.keys),
                    kept_bytes = adopted.map(|adopted| adopted.bytes),
                    seconds = began.elapsed().as_secs_f64(),
                    "loaded"
                );
                Ok(connection)
            }
            Ok(None) => Err(LoadCause::Dropped(reason_out(mirror))),
            Err(error @ LoadError::OverBudget { mean_bytes, .. }) => {
                if self.reason_while_loading == Reason::OverBudget {
                    tracing::info!(mirror = mirror.name, %error, "the mirror still does not fit");
                } else {
                    tracing::warn!(mirror = mirror.name, %error,
                        "mirror disabled (over budget): its keys do not fit; forwarding its reads until they do. \
                        Raise --cache-max-bytes, or mirror less with --cache-prefix or --no-cache-prefix");
                }
                Err(self.wait_until_it_fits(epoch, mean_bytes).await)
            }
            Err(error) => {
                tracing::warn!(mirror = mirror.name, %error, "load failed; forwarding reads and retrying");
                self.have = have.map(|have| (epoch, have));
                tokio::time::sleep(self.load_backoff.pause()).await;
                Err(LoadCause::LoadFailed)
            }
        }
    }

    /// Loads the mirror, and returns its connection, and what it had already; `None` if its epoch ended meanwhile.
    async fn load_once(
        &mut self,
        epoch: Epoch,
        have: &mut Option<Have>,
    ) -> Result<Option<(LoadedBy, Option<Adopted>)>, LoadError> {
        let (mirrors, mirror, reason) = (self.mirrors, self.mirror, self.reason_while_loading);
        // There is nothing to drop, but a failed load may have left the mirror out of service for another reason.
        if mirror
            .drop_contents(epoch, reason, ReaderEnd::Dropped(reason))
            .is_err()
        {
            return Ok(None);
        }
        let load = Load {
            set: &mirrors.set,
            upstream: &mirrors.upstream,
            telemetry: &mirrors.telemetry,
            builder: memory::builder(&mirrors.set, mirror),
            mirror,
        };
        if let Some(images) = self.images {
            *have = image::read(images, &load).await;
            self.images = None;
        }
        let loaded = load::bring(&load, have).await?;
        if let Some(images) = &mirrors.images {
            images.record_start(mirror, &loaded);
        }
        let store = LoadedStore::of(loaded.anchor, mirrors.history_limits, mirror.now());
        let filled = mirror.fill(epoch, store);
        Ok(filled.is_ok().then_some((loaded.connection, loaded.adopted)))
    }

    /// Follows etcd until the mirror has to be loaded again; returns the cause of that load. `loaded_by` is the
    /// connection of the last one.
    async fn follow(&mut self, epoch: Epoch, loaded_by: LoadedBy) -> LoadCause {
        let mirror = self.mirror;
        match follow(self.mirrors, mirror, epoch, loaded_by).await {
            FeedEnd::OverBudget => {
                tracing::warn!(
                    mirror = mirror.name,
                    "mirror disabled (over budget): it has outgrown its memory; forwarding its reads until it fits. \
                    Raise --cache-max-bytes, or mirror less with --cache-prefix or --no-cache-prefix"
                );
                let grown = &mirror.metrics;
                let mean_bytes = mean(grown.memory_bytes.get(), grown.keys.get());
                self.wait_until_it_fits(epoch, mean_bytes).await
            }
            FeedEnd::Reload(cause, explanation) => {
                tracing::warn!(
                    mirror = mirror.name,
                    reason = cause.as_str(),
                    explanation,
                    "reloading the mirror"
                );
                if matches!(cause, LoadCause::Compacted(_) | LoadCause::Unproven) {
                    let anchor = mirror.anchor(epoch).ok().flatten();
                    self.have = anchor.map(|anchor| (epoch, Have::of_memory(anchor.tree, anchor.revision)));
                }
                let ended = match cause {
                    LoadCause::Compacted(compact_revision) => ReaderEnd::Compacted { compact_revision },
                    // Nothing shows that etcd has the event that watchers were sent last.
                    LoadCause::Unproven => ReaderEnd::FeedLost,
                    _ => ReaderEnd::Dropped(Reason::Loading),
                };
                let _ = mirror.drop_contents(epoch, Reason::Loading, ended);
                cause
            }
            FeedEnd::StaleEpoch | FeedEnd::Lost(_) | FeedEnd::NoLeader => {
                LoadCause::Dropped(reason_out(mirror))
            }
        }
    }

    /// Frees the mirror's memory and waits until its keys, at `mean_bytes` each, may fit.
    async fn wait_until_it_fits(&mut self, epoch: Epoch, mean_bytes: u64) -> LoadCause {
        let (mirrors, mirror) = (self.mirrors, self.mirror);
        let _ = mirror.drop_contents(epoch, Reason::OverBudget, ReaderEnd::Dropped(Reason::OverBudget));
        let (set, upstream, probe_interval) = (&mirrors.set, &mirrors.upstream, mirrors.probe_interval);
        memory::until_it_may_fit(set, upstream, probe_interval, mirror, epoch, mean_bytes).await;
        self.reason_while_loading = mirror.revision().err().unwrap_or(Reason::Loading);
        LoadCause::MayFit
    }
}

/// Ends the span of an opening of a feed with its result.
fn end_opening_span(mirrors: &Mirrors, mut span: Span, url: &Url, opened: &Result<Feed<'_>, FeedEnd>) {
    span.set_endpoint(url);
    match opened {
        Ok(feed) => span.set("rangecache.revision.served", feed.revision()),
        Err(end) => span.fail(end.to_string()),
    }
    mirrors.telemetry.tracer.end(span);
}

/// Ends the span of a load with its result.
fn end_load_span(
    mirrors: &Mirrors,
    mirror: &Mirror,
    mut span: Span,
    cause: LoadCause,
    loaded: &Result<Option<(LoadedBy, Option<Adopted>)>, LoadError>,
) {
    span.set("rangecache.reason", cause.as_str());
    span.set("rangecache.keys", mirror.metrics.load_keys.get());
    span.set("rangecache.bytes", mirror.metrics.load_bytes.get());
    match loaded {
        Ok(Some((_, Some(adopted)))) => {
            span.set("rangecache.adopted.source", adopted.source.as_str());
            span.set_count("rangecache.adopted.keys", adopted.keys);
            span.set_count("rangecache.adopted.bytes", adopted.bytes);
        }
        Ok(Some((_, None))) => {}
        Ok(None) => span.fail(reason_out(mirror).as_str()),
        Err(error) => span.fail(error.to_string()),
    }
    mirrors.telemetry.tracer.end(span);
}

fn mean(bytes: i64, keys: i64) -> u64 {
    u64::try_from(bytes / keys.max(1)).unwrap_or(0).max(1)
}

/// Reason why the mirror is out of service after its epoch ended.
fn reason_out(mirror: &Mirror) -> Reason {
    mirror.revision().err().unwrap_or(Reason::HistoryReplaced)
}

/// Follows etcd, one feed after another, as long as the mirror's contents can be resumed.
async fn follow(mirrors: &Mirrors, mirror: &Mirror, epoch: Epoch, mut loaded_by: LoadedBy) -> FeedEnd {
    let mut backoff = Backoff::new(BACKOFF_FIRST, FEED_BACKOFF_LAST);
    let mut last: Option<Url> = None;
    let mut span_name = "follow";
    let mut lost_at: Option<Instant> = None;
    loop {
        let began = Instant::now();
        let span_name = std::mem::replace(&mut span_name, "resume");
        let span = background(&mirrors.telemetry, span_name, mirror);
        let deadline = began + CONNECT_TIMEOUT;
        let end = match mirrors
            .upstream
            .dedicated(ReceiveWindow::DEDICATED, last.as_ref(), deadline)
            .await
        {
            Ok(connection) => {
                last = Some(connection.url().clone());
                let feeding = Feeding {
                    set: &mirrors.set,
                    upstream: &mirrors.upstream,
                    mirror,
                    epoch,
                    connection: &connection,
                };
                let opened = feeding.open(&mut loaded_by).await;
                if let Some(span) = span {
                    end_opening_span(mirrors, *span, connection.url(), &opened);
                }
                match opened {
                    Ok(feed) => {
                        if let Some(lost_at) = lost_at.take() {
                            tracing::info!(
                                mirror = mirror.name,
                                revision = feed.revision(),
                                seconds = lost_at.elapsed().as_secs_f64(),
                                "in service again"
                            );
                        }
                        feed.follow().await
                    }
                    Err(end) => end,
                }
            }
            Err(error) => FeedEnd::Lost(error.to_string()),
        };
        if !matches!(end, FeedEnd::Lost(_) | FeedEnd::NoLeader) {
            return end;
        }
        let has_no_leader = matches!(end, FeedEnd::NoLeader);
        if mirror.lose_feed(epoch, has_no_leader).is_err() {
            return FeedEnd::StaleEpoch;
        }
        if began.elapsed() > FEED_IS_STABLE {
            backoff.reset();
        }
        lost_at.get_or_insert_with(Instant::now);
        tracing::warn!(
            mirror = mirror.name,
            endpoint = last.as_ref().map(tracing::field::display),
            explanation = %end,
            "watch lost; forwarding reads until it is re-established"
        );
        tokio::select! {
            () = tokio::time::sleep(backoff.pause()) => {}
            () = mirror.epoch_ended(epoch) => return FeedEnd::StaleEpoch,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, SOON};

    /// Waits until the mirror is at a revision, or out of service for a reason.
    async fn until(mirror: &Mirror, expected: Result<i64, Reason>) {
        let mut changes = mirror.changes();
        let changed = changes.wait_for(|()| mirror.revision() == expected);
        let reached = tokio::time::timeout(SOON, changed).await;
        assert!(reached.is_ok(), "{:?} instead of {expected:?}", mirror.revision());
    }

    fn loads(mirror: &Mirror, cause: LoadCause) -> u64 {
        mirror.metrics.reloads.of(cause.as_str()).get()
    }

    #[tokio::test]
    async fn mirror_is_loaded_and_follows_etcd() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&[]);
        let mirror = mirrors.at(0).unwrap();
        start(&mirrors, 0);
        until(mirror, Ok(4)).await;
        bench.etcd.lock().revision = 9;
        mirror.want(mirrors.cluster_state.history(), 9);
        until(mirror, Ok(9)).await;
        assert_eq!(loads(mirror, LoadCause::Start), 1);
        assert_eq!(bench.etcd.lock().watches.len(), 1);
    }

    #[tokio::test]
    async fn replaced_history_is_loaded_again_at_once() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&[]);
        let mirror = mirrors.at(0).unwrap();
        start(&mirrors, 0);
        until(mirror, Ok(4)).await;
        bench.etcd.lock().put("d", "new");
        let before = mirrors.cluster_state.before_check();
        mirrors.set.replace_history(&before, 0, "restored");
        until(mirror, Ok(5)).await;
        assert_eq!(loads(mirror, LoadCause::Dropped(Reason::HistoryReplaced)), 1);
        assert!(mirror.view().unwrap().tree.get(b"d").is_some());
    }

    #[tokio::test]
    async fn mirror_with_a_damaged_value_is_loaded_again_at_once() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&["--cache-pack=always"]);
        let mirror = mirrors.at(0).unwrap();
        start(&mirrors, 0);
        until(mirror, Ok(4)).await;
        bench.etcd.lock().put("d", "new");
        mirror.report_damage();
        until(mirror, Ok(5)).await;
        assert_eq!(loads(mirror, LoadCause::Dropped(Reason::Damaged)), 1);
    }

    #[tokio::test]
    async fn failed_load_is_retried() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&[]);
        let mirror = mirrors.at(0).unwrap();
        bench.etcd.lock().cluster_id = 0;
        start(&mirrors, 0);
        let retried = async {
            while loads(mirror, LoadCause::LoadFailed) < 2 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(SOON, retried).await.unwrap();
        assert_eq!(mirror.revision().err(), Some(Reason::Loading));
        bench.etcd.lock().cluster_id = 7;
        until(mirror, Ok(4)).await;
    }

    #[tokio::test]
    async fn mirror_that_does_not_fit_is_out_of_service_until_it_does() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&["--cache-max-bytes", "2KiB"]);
        let mirror = mirrors.at(0).unwrap();
        bench.etcd.lock().put("d", &"x".repeat(4096));
        start(&mirrors, 0);
        until(mirror, Err(Reason::OverBudget)).await;
        bench.etcd.lock().put("d", "small");
        until(mirror, Ok(6)).await;
        assert!(loads(mirror, LoadCause::MayFit) >= 1);
        assert_eq!(loads(mirror, LoadCause::LoadFailed), 0);
    }

    #[tokio::test]
    async fn mirror_is_loaded_again_once_its_feed_cannot_be_resumed() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&[]);
        let mirror = mirrors.at(0).unwrap();
        bench.fill().await;
        // Nothing proves a feed of contents that were loaded before a compaction, without a connection of theirs.
        let anchor = bench.mirror().anchor(bench.mirror().epoch()).unwrap().unwrap();
        let store = LoadedStore::of(anchor, mirrors.history_limits, mirror.now());
        mirror.fill(mirror.epoch(), store).unwrap();
        bench.etcd.lock().revision = 9;
        bench.etcd.lock().compacted = 9;
        let mut lifecycle = Lifecycle {
            mirrors: &mirrors,
            mirror,
            load_backoff: Backoff::new(BACKOFF_FIRST, LOAD_BACKOFF_LAST),
            reason_while_loading: Reason::Loading,
            have: None,
            images: None,
        };
        let following = lifecycle.follow(mirror.epoch(), None);
        let cause = tokio::time::timeout(SOON, following).await.unwrap();
        assert!(matches!(cause, LoadCause::Compacted(_)), "{cause:?}");
        assert_eq!(mirror.revision().err(), Some(Reason::Loading));
        let (_, ended) = mirror.observe(0, 0).ended.unwrap();
        assert!(matches!(ended, ReaderEnd::Compacted { .. }), "{ended:?}");
        // What the mirror had is not read again.
        let loading = lifecycle.load(mirror.epoch(), cause);
        let loaded_by = tokio::time::timeout(SOON, loading).await.unwrap().unwrap();
        assert!(loaded_by.is_some() && lifecycle.have.is_none());
        assert_eq!(mirror.metrics.adopted.of("memory").get(), 1);
        assert!(mirror.metrics.adopted_bytes.of("memory").get() > 0);
        let anchor = mirror.anchor(mirror.epoch()).unwrap().unwrap();
        assert_eq!((anchor.revision, anchor.tree.len()), (9, 3));
    }

    #[tokio::test]
    async fn removed_mirror_drops_its_contents_and_ends() {
        let bench = Bench::new().await;
        let mirrors = bench.mirrors(&[]);
        let slot = mirrors.set.get(0).unwrap();
        start(&mirrors, 0);
        until(&slot.mirror, Ok(4)).await;
        slot.remove();
        tokio::time::timeout(SOON, slot.ended.cancelled()).await.unwrap();
        assert_eq!(slot.mirror.revision(), Err(Reason::NotMirrored));
        assert!(slot.mirror.anchor(slot.mirror.epoch()).unwrap().is_none());
    }
}
