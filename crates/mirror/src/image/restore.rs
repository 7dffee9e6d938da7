//! Reads of images: what a start has from the disk.

use std::io::{self, BufReader};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use etcd_store::{cache::TreeBuilder, keyspace::scope::Scope};
use rangecache_base::blocking;
use tokio::time::Instant;

use super::folder::{Images, open_to_read};
use super::{file::read_image, frame::Useless};
use crate::load::{Have, Load, Source};

/// Interval at which the memory of what is being read is recorded.
const RECORD_INTERVAL: Duration = Duration::from_millis(50);
/// Bytes that are read from a file at once.
const BUFFER_BYTES: usize = 1 << 20;

/// Reads the image of the mirror that is loaded; `None` if there is none of use.
pub(crate) async fn read(images: &Arc<Images>, load: &Load<'_>) -> Option<Have> {
    let (began, memory, mirror) = (Instant::now(), Arc::new(AtomicU64::new(0)), load.mirror);
    let bounds = (load.builder.clone(), load.set.budget_of(mirror));
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
        Ok((have, bytes)) => {
            tracing::info!(
                mirror = mirror.name,
                keys = have.anchor.tree.len(),
                revision = have.anchor.revision,
                bytes,
                seconds = began.elapsed().as_secs_f64(),
                "an image was read"
            );
            Some(have)
        }
        Err(Useless::Io(error)) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            mirror.record_loading(0);
            tracing::info!(mirror = mirror.name, %error, "the image is of no use and is discarded");
            None
        }
    }
}

/// Contents of the image of `scope`, whose tree may take `bounds`, and the length of its file. `record` gets the memory that it takes
/// meanwhile.
pub(super) fn read_file(
    images: &Images,
    scope: &Scope,
    bounds: (TreeBuilder, u64),
    record: impl Fn(u64),
) -> Result<(Have, u64), Useless> {
    let file = open_to_read(&images.files(scope).image)?;
    let metadata = file.metadata()?;
    let (bytes, written) = (metadata.len(), metadata.modified()?.duration_since(UNIX_EPOCH));
    let from = BufReader::with_capacity(BUFFER_BYTES, file);
    let (reached, anchor) = read_image(from, bytes, images.key.as_ref(), scope, bounds, record)?;
    let have = Have {
        lineage: Some(reached),
        from: Source::Image {
            revision: anchor.revision,
            bytes,
            written: written.unwrap_or_default().as_secs(),
        },
        anchor,
        // Only what a feed has proven is written.
        verified: true,
    };
    Ok((have, bytes))
}
