//! The task that keeps the image of a mirror: writes a base, and then each second the events since.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::base::BaseWriter;
use super::folder::ImageFiles;
use super::header::Header;
use super::images::{Continuation, Images};
use super::log::LogWriter;
use crate::lineage::{ClusterState, Fingerprint};
use crate::view::{Epoch, LogRead, Mirror};
use etcd_store::cache::Batch;
use rangecache_base::panics::caught;
use rangecache_base::telemetry::metrics::gauge;
use rangecache_base::unix_time;
use rangecache_upstream::Backoff;

/// Interval at which events are appended: a crash loses those of this time, which are in etcd.
const INTERVAL: Duration = if cfg!(test) {
    Duration::from_millis(5)
} else {
    Duration::from_secs(1)
};
/// Pauses after failures.
const BACKOFF_FIRST: Duration = if cfg!(test) {
    INTERVAL
} else {
    Duration::from_secs(5)
};
const BACKOFF_LAST: Duration = Duration::from_secs(60);
/// Time for the last events at the end of the process.
const LAST_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after which a disk is reported that does not respond.
const DISK_TIMEOUT: Duration = if cfg!(test) {
    Duration::from_millis(50)
} else {
    Duration::from_secs(10)
};
/// Part of the base that the log may have before the next base is written.
const LOG_FRACTION: u64 = 4;
/// Length of a log that is never too long, in bytes.
const LOG_MIN_BYTES: u64 = 4 << 20;

/// Keeps the image of `mirror` until `stop`; removes it once `removed` is cancelled.
pub(crate) async fn keep(
    images: &Arc<Images>,
    cluster_state: &ClusterState,
    mirror: &Mirror,
    stop: &CancellationToken,
    removed: &CancellationToken,
) {
    let mut keeper = Keeper {
        images,
        cluster_state,
        mirror,
        stop,
        files: images.files(&mirror.scope),
        kept: None,
        epoch: mirror.epoch(),
        backoff: Backoff::new(BACKOFF_FIRST, BACKOFF_LAST),
        has_failed: AtomicBool::new(false),
    };
    let mut pause = INTERVAL;
    loop {
        let epoch = keeper.epoch;
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = mirror.epoch_ended(epoch) => {}
            () = removed.cancelled() => {
                keeper.remove().await;
                return;
            }
            () = stop.cancelled() => {
                keeper.append_last().await;
                return;
            }
        }
        pause = match caught(keeper.step()).await {
            Ok(pause) => pause,
            Err(_) => {
                tracing::warn!(
                    mirror = mirror.name,
                    "the task that writes an image panicked and is restarted"
                );
                keeper.kept = None;
                BACKOFF_LAST
            }
        };
    }
}

struct Keeper<'a> {
    images: &'a Arc<Images>,
    cluster_state: &'a ClusterState,
    mirror: &'a Mirror,
    stop: &'a CancellationToken,
    files: ImageFiles,
    kept: Option<Kept>,
    /// Epoch of the mirror that the image is of.
    epoch: Epoch,
    backoff: Backoff,
    has_failed: AtomicBool,
}

/// An image that is on the disk.
struct Kept {
    base_bytes: u64,
    log: LogWriter,
    /// Revision that it has reached.
    revision: i64,
    /// Load of the mirror that it is of.
    generation: u64,
}

impl Kept {
    fn bytes(&self) -> u64 {
        self.base_bytes + self.log.bytes()
    }

    /// Whether `log` has every event that the image lacks.
    fn continues_with(&self, log: &LogRead) -> bool {
        self.generation == log.generation && self.revision >= log.complete_after
    }

    fn may_grow(&self) -> bool {
        self.log.bytes() <= (self.base_bytes / LOG_FRACTION).max(LOG_MIN_BYTES)
    }
}

impl Keeper<'_> {
    /// Brings the image up to date; returns the pause before the next step.
    async fn step(&mut self) -> Duration {
        match self.try_step().await {
            Ok(()) => {
                self.backoff.reset();
                if self.has_failed.swap(false, Ordering::Relaxed) {
                    tracing::info!(mirror = self.mirror.name, "the image is written again");
                }
                self.mirror.metrics.image_failed.set(0);
                INTERVAL
            }
            Err(error) => {
                self.kept = None;
                if !self.stop.is_cancelled() {
                    self.report(&error);
                }
                self.backoff.pause()
            }
        }
    }

    /// Reports that the image is not written, once until it is again.
    fn report(&self, error: &io::Error) {
        if !self.has_failed.swap(true, Ordering::Relaxed) {
            tracing::warn!(mirror = self.mirror.name, %error,
                "the image cannot be written; serving continues, and the next start reads more from etcd. Check --image-dir \
                 and its disk");
        }
        self.mirror.metrics.image_failed.set(1);
    }

    /// Runs `work`, which waits for the disk, on a thread that serves no calls. A disk that does not respond is reported, and is not
    /// waited for at the end of the process.
    async fn on_disk<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> io::Result<T> {
        let stopped = async {
            self.stop.cancelled().await;
            tokio::time::sleep(LAST_TIMEOUT).await;
        };
        let reported = async {
            tokio::time::sleep(DISK_TIMEOUT).await;
            self.report(&io::Error::new(
                io::ErrorKind::TimedOut,
                "the disk does not respond",
            ));
            std::future::pending::<Infallible>().await
        };
        tokio::select! {
            biased;
            result = rangecache_base::blocking::run(work) => {
                result.unwrap_or_else(|_| Err(io::Error::other("writing panicked")))
            }
            () = stopped => Err(io::Error::other("the process stops")),
            never = reported => match never {},
        }
    }

    async fn try_step(&mut self) -> io::Result<()> {
        let epoch = self.mirror.epoch();
        // Also without the lock: otherwise the end of that epoch would be waited for again.
        let has_ended = epoch != std::mem::replace(&mut self.epoch, epoch);
        if !self.images.folder.lock()? {
            return Ok(());
        }
        if has_ended {
            // Its keys were wrong, or of another history.
            self.remove().await;
        }
        if let Some(continuation) = self.images.take_continuation(&self.mirror.name) {
            self.continue_log(continuation).await?;
        }
        let reached = self.kept.as_ref().map_or(i64::MAX, |kept| kept.revision);
        let Some(log) = self.mirror.observe(reached, usize::MAX).log else {
            return Ok(());
        };
        let Some(reached) = self.fingerprint(&log) else {
            return Ok(());
        };
        match self
            .kept
            .take_if(|kept| kept.continues_with(&log) && kept.may_grow())
        {
            Some(kept) => self.append(kept, reached, log.batches).await,
            None => self.write_base(log.generation).await,
        }
    }

    /// The history of what was read; `None` if etcd's history was replaced meanwhile.
    fn fingerprint(&self, log: &LogRead) -> Option<Fingerprint> {
        let history = self.cluster_state.current();
        (history.id == log.history).then(|| history.fingerprint(log.revision))
    }

    /// Appends the events of `batches` that the image does not have.
    async fn append(&mut self, mut kept: Kept, reached: Fingerprint, batches: Vec<Batch>) -> io::Result<()> {
        let images = Arc::clone(self.images);
        let kept = self.on_disk(move || {
            if reached.revision > kept.revision {
                images.folder.check_room(0)?;
                kept.log.append(kept.revision, reached, &batches)?;
                kept.revision = reached.revision;
            }
            Ok(kept)
        });
        self.record(kept.await?);
        Ok(())
    }

    /// Appends what the image does not have at the end of the process.
    async fn append_last(&mut self) {
        let Some(kept) = self.kept.take() else { return };
        let log = self.mirror.observe(kept.revision, usize::MAX).log;
        let Some(log) = log.filter(|log| kept.continues_with(log)) else {
            return;
        };
        if let Some(reached) = self.fingerprint(&log) {
            // Otherwise it is only older.
            let _ = self.append(kept, reached, log.batches).await;
        }
    }

    /// Writes every key at the mirror's revision, at a pace; the image before is kept meanwhile.
    async fn write_base(&mut self, generation: u64) -> io::Result<()> {
        let Ok(view) = self.mirror.view() else {
            return Ok(());
        };
        let summary = view.tree.summary();
        let history = self.cluster_state.current();
        if history.id != view.history || summary.not_held_bytes > 0 {
            return Ok(());
        }
        let _held = self.mirror.hold_view(false);
        let (began, images, files) = (Instant::now(), Arc::clone(self.images), self.files.clone());
        let fingerprint = history.fingerprint(view.revision);
        let header = Header::of_base(&self.mirror.scope, &fingerprint, images.key.is_some());
        let begin = {
            let (images, files, header) = (Arc::clone(&images), files.clone(), header.clone());
            move || {
                // First: a base that could not be finished takes no room any more.
                let file = files.create_base()?;
                images.folder.check_room(summary.encoded_bytes)?;
                BaseWriter::begin(file, &header, images.key.as_ref())
            }
        };
        let mut writer = self.on_disk(begin).await?;
        loop {
            let (before, piece_began, tree) = (writer.bytes(), Instant::now(), view.tree.clone());
            let is_last;
            (writer, is_last) = self
                .on_disk(move || {
                    let is_last = writer.write_piece(&tree)?;
                    Ok((writer, is_last))
                })
                .await?;
            if is_last {
                break;
            }
            let bytes = writer.bytes() - before;
            let paced = Duration::from_millis(bytes * 1000 / images.max_bytes_per_second);
            tokio::select! {
                () = tokio::time::sleep_until(piece_began + paced) => {}
                () = self.mirror.epoch_ended(self.epoch) => return Ok(()),
                () = self.stop.cancelled() => return Ok(()),
            }
        }
        if self.mirror.observe(i64::MAX, 0).log.map(|log| log.generation) != Some(generation) {
            return Ok(());
        }
        let base_bytes = self.on_disk(move || {
            let base_bytes = writer.finish()?;
            files.replace_base(&images.folder)?;
            Ok(base_bytes)
        });
        let begun = Continuation {
            header,
            base_bytes: base_bytes.await?,
            log_bytes: 0,
            revision: fingerprint.revision,
            generation,
        };
        let bytes = begun.base_bytes;
        self.continue_log(begun).await?;
        tracing::info!(
            mirror = self.mirror.name,
            revision = fingerprint.revision,
            keys = view.tree.len(),
            bytes,
            seconds = began.elapsed().as_secs_f64(),
            "an image was written"
        );
        Ok(())
    }

    /// Continues the log of a base: a new one, or that of the image that the mirror was restored from.
    async fn continue_log(&mut self, continuation: Continuation) -> io::Result<()> {
        let (images, files) = (Arc::clone(self.images), self.files.clone());
        let kept = self.on_disk(move || {
            let section = continuation.header.of_next_section();
            let log = LogWriter::begin(
                files.open_log()?,
                continuation.log_bytes,
                &section,
                images.key.as_ref(),
            )?;
            Ok(Kept {
                base_bytes: continuation.base_bytes,
                log,
                revision: continuation.revision,
                generation: continuation.generation,
            })
        });
        self.record(kept.await?);
        Ok(())
    }

    fn record(&mut self, kept: Kept) {
        let metrics = &self.mirror.metrics;
        metrics.image_bytes.set(gauge(kept.bytes()));
        metrics.image_written.set(unix_time::now_seconds());
        self.kept = Some(kept);
    }

    /// Removes the image.
    async fn remove(&mut self) {
        self.kept = None;
        let _ = self.images.take_continuation(&self.mirror.name);
        self.mirror.metrics.image_bytes.set(0);
        self.mirror.metrics.image_written.set(0);
        let files = self.files.clone();
        if let Err(error) = self.on_disk(move || files.remove()).await {
            tracing::warn!(mirror = self.mirror.name, %error, "an image whose keys are of no use cannot be removed");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{Bench, serve};
    use rangecache_base::telemetry::Reason;

    #[tokio::test]
    async fn end_of_an_epoch_is_waited_for_once_also_without_the_lock() {
        let (bench, dir) = (Bench::new().await, testkit::disk::folder_with_room());
        let flag = format!("--image-dir={}", dir.path().join("images").display());
        let [first, second] = [0, 1].map(|_| bench.mirrors(&[&flag]));
        assert!(first.images.as_ref().unwrap().folder.lock().unwrap());
        let (mirror, images) = (second.at(0).unwrap(), second.images.as_ref().unwrap());
        let stop = CancellationToken::new();
        let mut keeper = Keeper {
            images,
            cluster_state: &second.cluster_state,
            mirror,
            stop: &stop,
            files: images.files(&mirror.scope),
            kept: None,
            epoch: mirror.epoch(),
            backoff: Backoff::new(BACKOFF_FIRST, BACKOFF_LAST),
            has_failed: AtomicBool::new(false),
        };
        serve(mirror, 4);
        mirror.end_epoch(mirror.epoch(), Reason::Mismatch).unwrap();
        keeper.try_step().await.unwrap();
        assert_eq!(keeper.epoch, mirror.epoch());
    }
}
