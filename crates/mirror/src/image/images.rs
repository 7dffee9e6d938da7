//! [`Images`]: where images are, and how they are written.

use std::collections::HashMap;
use std::fmt::Display;
use std::path::{Path, PathBuf};

use parking_lot::Mutex;

use super::folder::{Folder, FolderError, ImageFiles};
use super::key::ImageKey;
use crate::flags::MirrorConfig;
use crate::load::{Loaded, Source};
use crate::view::Mirror;
use etcd_store::keyspace::scope::{Scope, scopes};
use rangecache_base::telemetry::metrics::gauge;

/// Place of images, and the way in which they are written.
#[derive(Debug)]
pub(crate) struct Images {
    pub(super) folder: Folder,
    pub(super) key: Option<ImageKey>,
    /// `--image-max-bytes-per-second`
    pub(super) max_bytes_per_second: u64,
    /// Revisions of the images on the disk, by the names of their mirrors.
    pub(super) revisions: Mutex<HashMap<String, i64>>,
}

/// A folder of images, or a key of them, that cannot be used.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{flag} {}: {error}", .path.display())]
pub struct ImageError {
    flag: &'static str,
    path: PathBuf,
    error: String,
}

impl ImageError {
    fn new(flag: &'static str, path: &Path, error: &impl Display) -> ImageError {
        ImageError {
            flag,
            path: path.to_path_buf(),
            error: error.to_string(),
        }
    }

    fn of_folder(path: &Path, error: &FolderError) -> ImageError {
        ImageError::new("--image-dir", path, error)
    }
}

/// Refuses a folder of images, and a key, that cannot be used.
///
/// # Errors
/// [`ImageError`]
pub fn check_images(flags: &MirrorConfig) -> Result<(), ImageError> {
    let Some(path) = &flags.image_dir else {
        return Ok(());
    };
    read_key(flags)?;
    Folder::check(path).map_err(|error| ImageError::of_folder(path, &error))
}

fn read_key(flags: &MirrorConfig) -> Result<Option<ImageKey>, ImageError> {
    let refused = |path, error| ImageError::new("--image-key-file", path, &error);
    let path = flags.image_key_file.as_deref();
    path.map(|path| ImageKey::read(path).map_err(|error| refused(path, error)))
        .transpose()
}

impl Images {
    /// Images as `flags` say, which [`check_images`] has accepted; `None` without `--image-dir`.
    ///
    /// # Errors
    /// [`ImageError`]
    pub(crate) fn open(flags: &MirrorConfig) -> Result<Option<Images>, ImageError> {
        let Some(path) = &flags.image_dir else {
            return Ok(None);
        };
        let scopes = scopes(&flags.cache_prefix, &flags.no_cache_prefix);
        let folder = Folder::open(path, flags.image_max_bytes, &scopes);
        Ok(Some(Images {
            key: read_key(flags)?,
            folder: folder.map_err(|error| ImageError::of_folder(path, &error))?,
            max_bytes_per_second: flags.image_max_bytes_per_second,
            revisions: Mutex::default(),
        }))
    }

    /// Records that the image on the disk has what `mirror` starts with.
    pub(crate) fn record_start(&self, mirror: &Mirror, loaded: &Loaded) {
        if let Some(Source::Image {
            revision,
            bytes,
            written,
        }) = loaded.adopted.map(|adopted| adopted.source)
            && revision == loaded.anchor.revision
        {
            mirror.metrics.image_bytes.set(gauge(bytes));
            mirror.metrics.image_written.set(gauge(written));
            self.revisions.lock().insert(mirror.name.clone(), revision);
        }
    }

    pub(super) fn files(&self, scope: &Scope) -> ImageFiles {
        self.folder.files(scope)
    }
}
