//! The folder of the images (`--image-dir`): its files, who may use it, how much room it has, and how they are written ([`Images`]).

use std::collections::{HashMap, HashSet};
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::{fmt::Display, io};

use etcd_store::keyspace::scope::{Scope, scopes};
use parking_lot::Mutex;
use rangecache_base::telemetry::metrics::gauge;
use rustix::fs::{FlockOperation, OFlags, flock};
use rustix::{io::Errno, process::geteuid};

use super::frame::ImageKey;
use crate::load::{Loaded, Source};
use crate::{flags::MirrorConfig, view::Mirror};

/// Part of a file system that images never take, in percent: the disk may be etcd's, too.
const FREE_PERCENT: u64 = 10;

/// The process that holds the lock on this file writes the images.
const LOCK: &str = "lock";
/// Beginning of the names of all other files.
const IMAGE: &str = "mirror-";

/// The folder of the images.
#[derive(Debug)]
pub(super) struct Folder {
    path: PathBuf,
    /// Largest size of all files together, in bytes.
    max_bytes: u64,
    /// Images of this process's mirrors at its start.
    own: HashSet<PathBuf>,
    lock: Mutex<Option<File>>,
}

/// A folder that cannot be used.
#[derive(Debug, thiserror::Error)]
pub(super) enum FolderError {
    /// The folder cannot be made or read.
    #[error("{0}")]
    Io(#[from] io::Error),
    /// The path is something else.
    #[error("it is no folder")]
    NoFolder,
    /// Others may read it, or change it.
    #[error("other users may read or change it (mode {mode:03o}), and images have values of etcd: chmod 700")]
    Open {
        /// Permissions.
        mode: u32,
    },
    /// The folder, or a file in it, is not this user's.
    #[error("{what} {foreign}: remove it, or name a folder of this user alone")]
    Foreign {
        /// `it`, or the file.
        what: String,
        /// Why.
        foreign: Foreign,
    },
}

/// Reason why a file or folder is not taken for one of this user.
#[derive(Debug, thiserror::Error)]
pub(super) enum Foreign {
    /// Of another user, who may change it.
    #[error("is of user {0}, and rangecache runs as user {1}")]
    Owner(u32, u32),
    /// A link, which may lead anywhere, or a device.
    #[error("is not a regular file")]
    Special,
}

/// Files of one image.
#[derive(Clone, Debug)]
pub(super) struct ImageFiles {
    pub(super) image: PathBuf,
    /// The image that is being written.
    pub(super) new_image: PathBuf,
}

impl Folder {
    /// The folder at `path` with the images of `scopes`, which is made if it does not exist.
    ///
    /// # Errors
    /// [`FolderError`]
    pub(super) fn open(path: &Path, max_bytes: u64, scopes: &[Scope]) -> Result<Folder, FolderError> {
        Folder::check(path)?;
        DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        let mut folder = Folder {
            path: path.to_path_buf(),
            max_bytes,
            own: HashSet::new(),
            lock: Mutex::default(),
        };
        folder.own = scopes.iter().map(|scope| folder.files(scope).image).collect();
        Ok(folder)
    }

    /// Refuses a path that is there and cannot be a folder of images.
    ///
    /// # Errors
    /// [`FolderError`]
    pub(super) fn check(path: &Path) -> Result<(), FolderError> {
        let metadata = match fs::metadata(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            metadata => metadata?,
        };
        if !metadata.is_dir() {
            return Err(FolderError::NoFolder);
        }
        let foreign = |what: &str, foreign| FolderError::Foreign {
            what: what.to_owned(),
            foreign,
        };
        check_owner(&metadata).map_err(|why| foreign("it", why))?;
        let mode = metadata.mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(FolderError::Open { mode });
        }
        for entry in fs::read_dir(path)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            // The process that has the lock may have replaced it meanwhile.
            if let Ok(metadata) = entry.metadata()
                && (name == LOCK || name.starts_with(IMAGE))
            {
                check_file(&metadata).map_err(|why| foreign(&name, why))?;
            }
        }
        Ok(())
    }

    /// Files of the image of `scope`.
    pub(super) fn files(&self, scope: &Scope) -> ImageFiles {
        let mut name = crc32fast::Hasher::new();
        let (key, end) = (scope.key(), scope.range_end());
        name.update(&(key.len() as u64).to_le_bytes());
        name.update(&key);
        name.update(&end);
        let path = |suffix: &str| {
            self.path
                .join(format!("{IMAGE}{:08x}.{suffix}", name.clone().finalize()))
        };
        ImageFiles {
            image: path("base"),
            new_image: path("base.new"),
        }
    }

    /// Whether this process may write: it does if no other one has the lock. With the lock, what earlier processes left behind is
    /// removed: images that were not finished, and those that no mirror reads.
    ///
    /// # Errors
    /// The lock cannot be made, or a file cannot be removed.
    pub(super) fn lock(&self) -> io::Result<bool> {
        let mut lock = self.lock.lock();
        if lock.is_some() {
            return Ok(true);
        }
        let file = open_to_write(&self.path.join(LOCK))?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {
                self.remove_leftovers()?;
                *lock = Some(file);
                Ok(true)
            }
            Err(Errno::WOULDBLOCK) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn remove_leftovers(&self) -> io::Result<()> {
        for entry in fs::read_dir(&self.path)? {
            let path = entry?.path();
            let name = path.file_name().and_then(|name| name.to_str());
            if name.is_some_and(|name| name.starts_with(IMAGE)) && !self.own.contains(&path) {
                fs::remove_file(path)?;
            }
        }
        Ok(())
    }

    /// Fails unless there is room for `bytes` more.
    ///
    /// # Errors
    /// The disk is nearly full, or `--image-max-bytes` is reached.
    pub(super) fn check_room(&self, bytes: u64) -> io::Result<()> {
        let mut used = 0;
        for entry in fs::read_dir(&self.path)? {
            // One that has just been replaced has no length.
            used += entry?.metadata().map_or(0, |metadata| metadata.len());
        }
        let disk = rustix::fs::statvfs(&self.path)?;
        if used.saturating_add(bytes) > self.max_bytes {
            return Err(io::Error::other("--image-max-bytes is reached"));
        }
        let (free, all) = (disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize);
        if has_room(bytes, free, all) {
            Ok(())
        } else {
            Err(io::Error::other(format!(
                "less than {FREE_PERCENT} % of the disk would be free"
            )))
        }
    }

    /// Waits until names of files are on the disk.
    pub(super) fn sync(&self) -> io::Result<()> {
        File::open(&self.path)?.sync_all()
    }
}

fn has_room(bytes: u64, free: u64, all: u64) -> bool {
    free.saturating_sub(bytes) >= all / 100 * FREE_PERCENT
}

impl ImageFiles {
    /// An empty file for an image.
    pub(super) fn create(&self) -> io::Result<File> {
        let file = open_to_write(&self.new_image)?;
        file.set_len(0)?;
        Ok(file)
    }

    /// Puts the image that was written in the place of the one before.
    pub(super) fn replace(&self, folder: &Folder) -> io::Result<()> {
        fs::rename(&self.new_image, &self.image)?;
        folder.sync()
    }

    /// Removes the image.
    pub(super) fn remove(&self) -> io::Result<()> {
        for path in [&self.image, &self.new_image] {
            match fs::remove_file(path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }
}

/// Opens a file of this user to be read.
pub(super) fn open_to_read(path: &Path) -> io::Result<File> {
    open(path, OpenOptions::new().read(true))
}

/// Opens a file that only this user may read, to be written; it is made if it does not exist.
fn open_to_write(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    open(path, &mut options)
}

/// Opens a regular file of this user, and follows no link.
fn open(path: &Path, options: &mut OpenOptions) -> io::Result<File> {
    let file = options
        .custom_flags(OFlags::NOFOLLOW.bits().cast_signed())
        .open(path)?;
    check_file(&file.metadata()?).map_err(io::Error::other)?;
    Ok(file)
}

fn check_file(metadata: &Metadata) -> Result<(), Foreign> {
    if !metadata.is_file() {
        return Err(Foreign::Special);
    }
    check_owner(metadata)
}

fn check_owner(metadata: &Metadata) -> Result<(), Foreign> {
    match (metadata.uid(), geteuid().as_raw()) {
        (owner, own) if owner == own => Ok(()),
        (owner, own) => Err(Foreign::Owner(owner, own)),
    }
}

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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn folder_that_others_may_read_is_refused() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("new/images");
        let folder = Folder::open(&path, 1 << 20, &[]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o700);
        assert!(folder.lock().unwrap() && folder.lock().unwrap());
        let file = fs::metadata(path.join(LOCK)).unwrap();
        assert_eq!(file.mode() & 0o777, 0o600);
        fs::set_permissions(&path, fs::Permissions::from_mode(0o750)).unwrap();
        assert!(matches!(
            Folder::open(&path, 0, &[]),
            Err(FolderError::Open { mode: 0o750 })
        ));
        let file = parent.path().join("file");
        File::create(&file).unwrap();
        assert!(matches!(Folder::open(&file, 0, &[]), Err(FolderError::NoFolder)));
    }

    #[test]
    fn links_and_files_of_other_users_are_refused_and_stay_as_they_are() {
        let parent = tempfile::tempdir().unwrap();
        let path = parent.path().join("images");
        let folder = Folder::open(&path, 1 << 20, &[]).unwrap();
        let files = folder.files(&Scope::prefix(b""));
        let target = parent.path().join("target");
        fs::write(&target, "of another program").unwrap();
        for file in [&files.image, &files.new_image, &path.join(LOCK)] {
            std::os::unix::fs::symlink(&target, file).unwrap();
            let error = Folder::open(&path, 0, &[]).unwrap_err().to_string();
            let name = file.file_name().unwrap().to_str().unwrap();
            assert!(
                error.starts_with(&format!("{name} is not a regular file: ")),
                "{error}"
            );
            // Placed there after the start.
            assert!(open_to_read(file).is_err() && open_to_write(file).is_err());
            fs::remove_file(file).unwrap();
        }
        assert_eq!(fs::read(&target).unwrap(), b"of another program");
        // Root alone can give files away.
        if geteuid().is_root() {
            fs::write(&files.image, "").unwrap();
            for given in [&files.image, &path] {
                std::os::unix::fs::chown(given, Some(65534), None).unwrap();
                let error = Folder::open(&path, 0, &[]).unwrap_err().to_string();
                assert!(
                    error.contains("is of user 65534, and rangecache runs as user 0"),
                    "{error}"
                );
            }
            assert!(open_to_write(&files.image).is_err());
        }
    }

    #[test]
    fn second_process_does_not_write() {
        let path = testkit::disk::folder_with_room();
        let [first, second] = [0, 1].map(|_| Folder::open(path.path(), 1 << 20, &[]).unwrap());
        assert!(first.lock().unwrap());
        assert!(!second.lock().unwrap());
        drop(first);
        assert!(second.lock().unwrap());
    }

    #[test]
    fn images_leave_room() {
        let path = testkit::disk::folder_with_room();
        let folder = Folder::open(path.path(), 1000, &[]).unwrap();
        folder.check_room(1000).unwrap();
        fs::write(folder.files(&Scope::prefix(b"/a/")).image, [0; 600]).unwrap();
        folder.check_room(400).unwrap();
        assert!(folder.check_room(401).is_err());
        assert!(has_room(800, 1000, 2000) && !has_room(801, 1000, 2000));
        assert!(!has_room(2000, 1000, 2000));
    }

    #[test]
    fn each_scope_has_files_of_its_own() {
        let path = tempfile::tempdir().unwrap();
        fs::set_permissions(path.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let folder = Folder::open(path.path(), 0, &[]).unwrap();
        let scopes = [&b"/a/"[..], b"/b/", b"/a", b""].map(Scope::prefix);
        let mut images: Vec<_> = scopes.iter().map(|scope| folder.files(scope).image).collect();
        images.dedup();
        assert_eq!(images.len(), scopes.len());
        folder.files(&scopes[0]).remove().unwrap();
    }
}
