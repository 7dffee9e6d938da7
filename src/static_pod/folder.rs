//! The kubelet's folder: the manifest, and the files next to it whose names begin with a dot, which the kubelet ignores.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use super::flags::StaticPodConfig;

/// Files of one manifest.
#[derive(Debug)]
pub(super) struct Folder {
    folder: PathBuf,
    manifest: PathBuf,
    /// A file that is being written.
    new: PathBuf,
    /// The manifest before, until the new pod was ready; empty if there was none.
    previous: PathBuf,
    /// The manifest that did not become ready, behind a line with the name of the attempt.
    failed: PathBuf,
}

/// Change that a manifest needs.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ManifestChange {
    /// None: the manifest is in the folder, and its pod was ready.
    None,
    /// The manifest has been in the folder for this long, and its pod was not seen ready.
    Unfinished {
        /// Time since it was written.
        since: Duration,
    },
    /// The folder has another one, or none.
    Needed,
}

impl Folder {
    /// The files of the manifest that `options` names.
    ///
    /// # Errors
    /// If the folder does not exist: it would not be the kubelet's.
    pub(super) fn open(options: &StaticPodConfig) -> io::Result<Folder> {
        let (folder, name) = (&options.manifests_dir, &options.manifest_name);
        if !folder.is_dir() {
            let text = format!("--manifests-dir {} is not a folder", folder.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        let hidden = |role: &str| folder.join(format!(".{name}.{role}"));
        Ok(Folder {
            folder: folder.clone(),
            manifest: folder.join(name),
            new: hidden("new"),
            previous: hidden("previous"),
            failed: hidden("failed"),
        })
    }

    /// Whether `attempt` has failed with `manifest`.
    pub(super) fn has_failed(&self, attempt: &str, manifest: &str) -> io::Result<bool> {
        Ok(read(&self.failed)? == Some(note(attempt, manifest)))
    }

    /// Returns the change that `manifest` needs.
    pub(super) fn change_to(&self, manifest: &str) -> io::Result<ManifestChange> {
        if read(&self.manifest)?.as_deref() != Some(manifest) {
            return Ok(ManifestChange::Needed);
        }
        if read(&self.previous)?.is_none() {
            return Ok(ManifestChange::None);
        }
        let written = fs::metadata(&self.manifest)?.modified()?;
        // A clock that was set back makes the wait longer, not shorter.
        let since = SystemTime::now().duration_since(written).unwrap_or_default();
        Ok(ManifestChange::Unfinished { since })
    }

    /// Writes `manifest`, and keeps the one before it. If an earlier replacement was not finished, the one before that
    /// is kept: no pod of the unfinished one was ready.
    pub(super) fn replace(&self, manifest: &str) -> io::Result<()> {
        if read(&self.previous)?.is_none() {
            let current = read(&self.manifest)?.unwrap_or_default();
            self.write(&self.previous, &current)?;
        }
        self.write(&self.manifest, manifest)
    }

    /// Keeps the new manifest for good.
    pub(super) fn accept(&self) -> io::Result<()> {
        remove(&self.previous)?;
        remove(&self.failed)?;
        self.sync()
    }

    /// Notes that `manifest` did not become ready.
    pub(super) fn note_failure(&self, attempt: &str, manifest: &str) -> io::Result<()> {
        self.write(&self.failed, &note(attempt, manifest))
    }

    /// Brings the manifest before back, or none if there was none. Nothing happens if that was done before.
    pub(super) fn restore(&self) -> io::Result<()> {
        match read(&self.previous)?.as_deref() {
            None => return Ok(()),
            Some("") => {
                remove(&self.manifest)?;
                remove(&self.previous)?;
            }
            Some(_) => {
                fs::rename(&self.previous, &self.manifest).map_err(|error| at(&self.manifest, &error))?
            }
        }
        self.sync()
    }

    /// Removes all files. The manifest is the first, so that a run that is interrupted has stopped the pod.
    pub(super) fn remove(&self) -> io::Result<()> {
        for file in [&self.manifest, &self.new, &self.previous, &self.failed] {
            remove(file)?;
        }
        self.sync()
    }

    /// Writes a file at once: the kubelet sees the whole text or the old one. Only root may read it, as kubeadm's.
    fn write(&self, path: &Path, text: &str) -> io::Result<()> {
        let written = || {
            remove(&self.new)?;
            let mut file = OpenOptions::new()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&self.new)?;
            file.write_all(text.as_bytes())?;
            file.sync_all()?;
            fs::rename(&self.new, path)?;
            self.sync()
        };
        written().map_err(|error| at(path, &error))
    }

    /// Makes renames and removals durable.
    fn sync(&self) -> io::Result<()> {
        File::open(&self.folder)?.sync_all()
    }
}

fn note(attempt: &str, manifest: &str) -> String {
    format!("{attempt}\n{manifest}")
}

/// Text of a file; `None` if it does not exist.
fn read(path: &Path) -> io::Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(at(path, &error)),
    }
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(at(path, &error)),
        _ => Ok(()),
    }
}

fn at(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}
