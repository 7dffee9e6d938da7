//! A start from an image: what it has, and whether that is of etcd's present history.

use std::io::{self, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use tokio::time::Instant;

use super::error::Useless;
use super::file::read_image;
use super::folder::open_to_read;
use super::images::Images;
use crate::lineage::{Anchor, Fingerprint, Position};
use crate::load::{AdoptedFrom, Load, LoadError, Previous};
use crate::view::{Epoch, LoadedStore, Mirror, StaleEpoch};
use etcd_store::cache::{HistoryLimits, Packing};
use etcd_store::keyspace::scope::Scope;
use rangecache_base::blocking;
use rangecache_base::telemetry::metrics::gauge;
use rangecache_upstream::{header_request, is_compaction, is_future_revision, range};

/// Interval at which the memory of what is being read is recorded.
const RECORD_INTERVAL: Duration = Duration::from_millis(50);
/// Bytes that are read from a file at once.
const BUFFER_BYTES: usize = 1 << 20;

/// Contents of an image; not known yet to be of etcd's history.
pub(crate) struct Restored {
    pub(super) anchor: Anchor,
    /// History of the keys.
    pub(super) reached: Fingerprint,
    /// Length of the file, and when it was written, in seconds since 1970.
    file: (u64, u64),
}

/// Use of an image.
pub(crate) enum Proven {
    /// etcd has the events since: a feed may continue it.
    Continues(Box<Restored>),
    /// etcd has compacted its revision: what has changed since is read.
    Differs(Previous),
}

/// Reads the image of `mirror`; `None` if there is none of use.
pub(crate) async fn read(images: &Arc<Images>, mirror: &Mirror, bounds: (Packing, u64)) -> Option<Restored> {
    let (began, memory) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let (images, scope, recorded) = (Arc::clone(images), mirror.scope.clone(), Arc::clone(&memory));
    let reading = blocking::run(move || {
        let record = |bytes| recorded.store(bytes, Ordering::Relaxed);
        read_file(&images, &scope, bounds, record)
    });
    let mut reading = std::pin::pin!(reading);
    let read = loop {
        tokio::select! {
            read = &mut reading => break read.unwrap_or(Err(Useless::Panicked)),
            () = tokio::time::sleep(RECORD_INTERVAL) => mirror.record_loading(memory.load(Ordering::Relaxed)),
        }
    };
    match read {
        Ok(restored) => {
            tracing::info!(
                mirror = mirror.name,
                keys = restored.anchor.tree.len(),
                revision = restored.reached.revision,
                bytes = restored.file.0,
                seconds = began.elapsed().as_secs_f64(),
                "an image was read"
            );
            Some(restored)
        }
        Err(Useless::Io(error)) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            discard(mirror, &error);
            None
        }
    }
}

fn discard(mirror: &Mirror, error: &Useless) {
    mirror.record_loading(0);
    tracing::info!(mirror = mirror.name, %error, "the image is of no use and is discarded");
}

pub(super) fn read_file(
    images: &Images,
    scope: &Scope,
    bounds: (Packing, u64),
    record: impl Fn(u64),
) -> Result<Restored, Useless> {
    let file = open_to_read(&images.files(scope).image)?;
    let metadata = file.metadata()?;
    let from = BufReader::with_capacity(BUFFER_BYTES, file);
    let (header, anchor) = read_image(from, metadata.len(), images.key.as_ref(), scope, bounds, record)?;
    let written = metadata.modified()?.duration_since(UNIX_EPOCH);
    Ok(Restored {
        anchor,
        reached: header.fingerprint(),
        file: (metadata.len(), written.unwrap_or_default().as_secs()),
    })
}

impl Restored {
    /// Compares the image's history with etcd's, as far as etcd's position shows; the feed that continues it proves the rest.
    /// `None` if it is of another one.
    ///
    /// # Errors
    /// [`LoadError`]; the image is given back.
    pub(crate) async fn prove(
        self: Box<Self>,
        load: &Load<'_>,
    ) -> Result<Option<Proven>, (Box<Restored>, LoadError)> {
        match self.compare(load).await {
            Ok(Some(true)) => Ok(Some(Proven::Continues(self))),
            Ok(Some(false)) => Ok(Some(Proven::Differs(Previous {
                tree: self.anchor.tree,
                source: AdoptedFrom::Image,
                cluster_id: Some(self.reached.cluster_id),
            }))),
            Ok(None) => {
                discard(load.mirror, &Useless::Foreign);
                Ok(None)
            }
            Err(error) => Err((self, error)),
        }
    }

    /// Whether etcd has the events since; `None` if its history is another one.
    async fn compare(&self, load: &Load<'_>) -> Result<Option<bool>, LoadError> {
        let (connection, ..) = load.begin(None).await?;
        let (key, before) = (load.mirror.scope.key(), self.reached.before());
        if !Position::read(&connection, key.clone(), &before)
            .await?
            .continues(&before)
        {
            return Ok(None);
        }
        let request = etcd_wire::etcdserverpb::RangeRequest {
            revision: self.reached.revision,
            ..header_request(key)
        };
        match range(&connection, request).await {
            Ok(_) => Ok(Some(true)),
            Err(status) if is_compaction(&status) => Ok(Some(false)),
            Err(status) if is_future_revision(&status) => Ok(None),
            Err(status) => Err(status.into()),
        }
    }

    /// Fills `mirror`, which a feed may put in service. Returns its keys and their bytes.
    pub(crate) fn fill(
        self: Box<Self>,
        images: &Images,
        mirror: &Mirror,
        epoch: Epoch,
        limits: HistoryLimits,
    ) -> Result<(u64, u64), StaleEpoch> {
        let (keys, bytes) = (self.anchor.tree.len(), self.anchor.tree.summary().encoded_bytes);
        mirror.metrics.image_bytes.set(gauge(self.file.0));
        mirror.metrics.image_written.set(gauge(self.file.1));
        let mut revisions = images.revisions.lock();
        revisions.insert(mirror.name.clone(), self.anchor.revision);
        drop(revisions);
        mirror.fill(epoch, LoadedStore::restored(self.anchor, limits, mirror.now()))?;
        Ok((keys, bytes))
    }
}
