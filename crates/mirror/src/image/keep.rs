//! The task that keeps the image of a mirror: writes it at an interval, and at the end of the process.

use std::sync::atomic::{AtomicBool, Ordering};
use std::{convert::Infallible, io, sync::Arc, time::Duration};

use rangecache_base::{panics::caught, telemetry::metrics::gauge, unix_time};
use rangecache_upstream::Backoff;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::file::{Header, ImageWriter};
use super::folder::{ImageFiles, Images};
use crate::lineage::{Anchor, ClusterState, Fingerprint};
use crate::view::{Epoch, Mirror};

/// Interval at which an image is written: what has changed since is read from etcd after a crash.
const INTERVAL: Duration = if cfg!(test) {
    Duration::from_millis(5)
} else {
    Duration::from_secs(600)
};
/// Multiple of the time that an image took, for which no other is written.
const REST_FACTOR: u32 = 20;
/// Pause while there is nothing to write yet.
const LOOK_INTERVAL: Duration = if cfg!(test) {
    INTERVAL
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
/// Time for a disk at the end of the process.
const LAST_TIMEOUT: Duration = Duration::from_secs(2);
/// Time after which a disk is reported that does not respond.
const DISK_TIMEOUT: Duration = if cfg!(test) {
    Duration::from_millis(50)
} else {
    Duration::from_secs(10)
};

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
        epoch: mirror.epoch(),
        due: Instant::now() + INTERVAL,
        backoff: Backoff::new(BACKOFF_FIRST, BACKOFF_LAST),
        has_failed: AtomicBool::new(false),
    };
    let mut pause = LOOK_INTERVAL;
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
                // Otherwise the image is only older. A disk that did not respond is not asked again.
                if !keeper.has_failed.load(Ordering::Relaxed) {
                    let _ = caught(keeper.try_step(true)).await;
                }
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
    /// Epoch of the mirror that the image is of.
    epoch: Epoch,
    /// Time at which the image on the disk is replaced.
    due: Instant,
    backoff: Backoff,
    has_failed: AtomicBool,
}

impl Keeper<'_> {
    /// Brings the image up to date if it is time; returns the pause before the next step.
    async fn step(&mut self) -> Duration {
        match self.try_step(false).await {
            Ok(()) => {
                self.backoff.reset();
                if self.has_failed.swap(false, Ordering::Relaxed) {
                    tracing::info!(mirror = self.mirror.name, "the image is written again");
                }
                self.mirror.metrics.image_failed.set(0);
                LOOK_INTERVAL
            }
            Err(error) => {
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

    /// Writes an image if it is time, or the process ends, and the mirror has changed.
    async fn try_step(&mut self, is_last: bool) -> io::Result<()> {
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
        let on_disk = self.images.revisions.lock().get(&self.mirror.name).copied();
        let is_due = is_last || on_disk.is_none() || Instant::now() >= self.due;
        let Some((anchor, reached)) = self.contents().filter(|_| is_due) else {
            return Ok(());
        };
        if on_disk == Some(reached.revision) {
            self.mirror.metrics.image_written.set(unix_time::now_seconds());
            return Ok(());
        }
        let began = Instant::now();
        if self.write(anchor, reached, is_last).await? {
            self.due = Instant::now() + INTERVAL.max(began.elapsed() * REST_FACTOR);
        }
        Ok(())
    }

    /// The mirror, and the history of its keys; `None` unless a feed has proven them, memory has all values, and the history is
    /// the present one.
    fn contents(&self) -> Option<(Anchor, Fingerprint)> {
        let anchor = self.mirror.anchor(self.epoch).ok()??;
        let proven = self.mirror.last_view()?;
        let history = self.cluster_state.current();
        let is_whole = history.id == proven.history && anchor.tree.summary().has_all_values();
        let reached = history.fingerprint(anchor.revision);
        is_whole.then_some((anchor, reached))
    }

    /// Writes an image, at a pace unless the process ends; the one before is kept meanwhile. Returns whether it was written:
    /// not if the mirror was dropped, or the process ends.
    async fn write(&mut self, anchor: Anchor, reached: Fingerprint, is_last: bool) -> io::Result<bool> {
        let _held = self.mirror.hold_view(false);
        let (began, images, files) = (Instant::now(), Arc::clone(self.images), self.files.clone());
        let header = Header::new(&self.mirror.scope, &reached, images.key.is_some());
        let summary = anchor.tree.summary();
        let begin = {
            let (images, files) = (Arc::clone(&images), files.clone());
            move || {
                // First: an image that could not be finished takes no room any more.
                let file = files.create()?;
                images.folder.check_room(summary.encoded_bytes)?;
                ImageWriter::begin(file, &header, images.key.as_ref())
            }
        };
        let mut writer = self.on_disk(begin).await?;
        loop {
            let (before, piece_began, tree) = (writer.bytes(), Instant::now(), anchor.tree.clone());
            let is_end;
            (writer, is_end) = self
                .on_disk(move || {
                    let is_end = writer.write_piece(&tree)?;
                    Ok((writer, is_end))
                })
                .await?;
            if is_end {
                break;
            }
            let bytes = if is_last { 0 } else { writer.bytes() - before };
            let paced = Duration::from_millis(bytes * 1000 / images.max_bytes_per_second);
            tokio::select! {
                () = tokio::time::sleep_until(piece_began + paced) => {}
                () = self.mirror.epoch_ended(self.epoch) => return Ok(false),
                () = self.stop.cancelled(), if !is_last => return Ok(false),
            }
        }
        let keys = anchor.tree.len();
        let bytes = self.on_disk(move || {
            let bytes = writer.finish(&anchor)?;
            files.replace(&images.folder)?;
            Ok(bytes)
        });
        let bytes = bytes.await?;
        let mut revisions = self.images.revisions.lock();
        revisions.insert(self.mirror.name.clone(), reached.revision);
        drop(revisions);
        self.mirror.metrics.image_bytes.set(gauge(bytes));
        self.mirror.metrics.image_written.set(unix_time::now_seconds());
        tracing::info!(
            mirror = self.mirror.name,
            revision = reached.revision,
            keys,
            bytes,
            seconds = began.elapsed().as_secs_f64(),
            "an image was written"
        );
        Ok(true)
    }

    /// Removes the image.
    async fn remove(&mut self) {
        self.images.revisions.lock().remove(&self.mirror.name);
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
    use rangecache_base::telemetry::Reason;

    use super::*;
    use crate::testing::{Bench, serve};

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
            epoch: mirror.epoch(),
            due: Instant::now(),
            backoff: Backoff::new(BACKOFF_FIRST, BACKOFF_LAST),
            has_failed: AtomicBool::new(false),
        };
        serve(mirror, 4);
        mirror.end_epoch(mirror.epoch(), Reason::Mismatch).unwrap();
        keeper.try_step(false).await.unwrap();
        assert_eq!(keeper.epoch, mirror.epoch());
    }
}
