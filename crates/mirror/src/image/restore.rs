//! A start from an image: what it has, and whether that is of etcd's present history.

use std::io::{self, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

use super::base::read_base;
use super::error::Useless;
use super::folder::open_to_read;
use super::header::Header;
use super::images::{Continuation, Images};
use super::log::read_log;
use crate::lineage::{Fingerprint, Position};
use crate::load::{AdoptedFrom, Load, LoadError, Previous};
use crate::view::{Epoch, LoadedStore, Mirror, StaleEpoch};
use etcd_store::cache::{HistoryLimits, Packing, Store};
use etcd_store::keyspace::scope::Scope;
use rangecache_base::blocking;
use rangecache_upstream::{header_request, is_compaction, is_future_revision, range};

/// Interval at which the memory of what is being read is recorded.
const RECORD_INTERVAL: Duration = Duration::from_millis(50);
/// Bytes that are read from a file at once.
const BUFFER_BYTES: usize = 1 << 20;

/// Contents of an image; not known yet to be of etcd's history.
pub(crate) struct Restored {
    pub(super) loaded: LoadedStore,
    /// History of the newest keys.
    pub(super) reached: Fingerprint,
    header: Header,
    base_bytes: u64,
    log_bytes: u64,
    /// Whether no other process could write the image since it was read.
    is_ours: bool,
}

/// Use of an image.
pub(crate) enum Proven {
    /// etcd has the events since: a feed may continue it.
    Continues(Box<Restored>),
    /// etcd has compacted its revision: what has changed since is read.
    Differs(Previous),
}

/// Reads the image of `mirror`; `None` if there is none of use.
pub(crate) async fn read(
    images: &Arc<Images>,
    mirror: &Mirror,
    bounds: (Packing, u64),
    limits: HistoryLimits,
) -> Option<Restored> {
    let (began, memory) = (Instant::now(), Arc::new(AtomicU64::new(0)));
    let (images, scope, now, recorded) = (
        Arc::clone(images),
        mirror.scope.clone(),
        mirror.now(),
        Arc::clone(&memory),
    );
    let reading = blocking::run(move || {
        // A folder that cannot be locked can be read.
        let is_ours = images.folder.lock().unwrap_or(false);
        let record = |bytes| recorded.store(bytes, Ordering::Relaxed);
        let restored = read_files(&images, &scope, bounds, (limits, now), record)?;
        Ok(Restored { is_ours, ..restored })
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
                keys = restored.loaded.tree().len(),
                revision = restored.reached.revision,
                bytes = restored.base_bytes + restored.log_bytes,
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

pub(super) fn read_files(
    images: &Images,
    scope: &Scope,
    (packing, max_bytes): (Packing, u64),
    (limits, now): (HistoryLimits, Duration),
    record: impl Fn(u64),
) -> Result<Restored, Useless> {
    let (files, key) = (images.files(scope), images.key.as_ref());
    let base = open_to_read(&files.base)?;
    let base_bytes = base.metadata()?.len();
    let from = BufReader::with_capacity(BUFFER_BYTES, base);
    let (header, tree) = read_base(from, base_bytes, key, scope, (packing, max_bytes), record)?;
    let mut reached = header.fingerprint();
    let mut loaded = LoadedStore::new(Store::new(tree, reached.revision, limits, now));
    let log_bytes = match open_to_read(&files.log) {
        Ok(log) => {
            let length = log.metadata()?.len();
            let from = BufReader::with_capacity(BUFFER_BYTES, log);
            let mut is_damaged = false;
            let used = read_log(from, length, key, (&header, scope), |events| {
                let is_next =
                    events.after == reached.revision && events.reached.cluster_id == reached.cluster_id;
                if is_next {
                    is_damaged = loaded
                        .apply(events.changes, events.reached.revision, now)
                        .is_err();
                    reached = events.reached;
                }
                is_next && !is_damaged
            });
            if is_damaged {
                return Err(Useless::Order);
            }
            used
        }
        Err(_) => 0,
    };
    if loaded.memory_bytes() > max_bytes {
        return Err(Useless::TooLarge);
    }
    Ok(Restored {
        loaded,
        reached,
        header,
        base_bytes,
        log_bytes,
        is_ours: false,
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
                tree: self.loaded.tree().clone(),
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

    /// Header of the base.
    #[cfg(test)]
    pub(super) fn header_of_tests(&self) -> &Header {
        &self.header
    }

    /// Fills `mirror`, which a feed may put in service; an image that no other process writes is continued from then on. Returns its keys and their
    /// bytes.
    pub(crate) fn fill(
        self: Box<Self>,
        images: &Images,
        mirror: &Mirror,
        epoch: Epoch,
    ) -> Result<(u64, u64), StaleEpoch> {
        let (keys, bytes) = (
            self.loaded.tree().len(),
            self.loaded.tree().summary().encoded_bytes,
        );
        let generation = mirror.fill(epoch, self.loaded)?;
        if self.is_ours {
            images.continue_later(
                &mirror.name,
                Continuation {
                    header: self.header,
                    base_bytes: self.base_bytes,
                    log_bytes: self.log_bytes,
                    revision: self.reached.revision,
                    generation,
                },
            );
        }
        Ok((keys, bytes))
    }
}
