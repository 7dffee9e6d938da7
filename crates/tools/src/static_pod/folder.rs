//! The kubelet's folder: the manifests, and the files next to them whose names begin with a dot, which the kubelet ignores.
//!
//! A new manifest has a name of its own, so that the kubelet runs its pod beside the one before it. At most one is on trial
//! ([`ManifestState::OnTrial`]); a file that names it is written before it, and removed after everything else.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use rangecache_base::net::Url;

use super::flags::StaticPodConfig;
use super::manifest::{self, Manifest};

/// Files of one release.
#[derive(Debug)]
pub(super) struct ManifestFolder {
    folder: PathBuf,
    /// File name of the manifests without their digits, such as `rangecache` and `.yaml`.
    stem: String,
    extension: String,
    /// A file that is being written.
    new: PathBuf,
    /// The file name of the manifest whose pod was not seen ready yet.
    trial: PathBuf,
    /// The manifest that did not become ready, behind a line with the name of the attempt.
    failed: PathBuf,
    /// Beginning of the name of a manifest that was stopped for the one on trial, before its file name.
    stopped: String,
}

/// State of a manifest in the folder.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ManifestState {
    /// In the folder, and its pod was ready.
    Accepted,
    /// In the folder for this long, and its pod was not seen ready.
    OnTrial {
        /// Time since it was written.
        since: Duration,
    },
    /// Not in the folder.
    Missing,
}

impl ManifestFolder {
    /// The files of the release that `options` names.
    ///
    /// # Errors
    /// If the folder does not exist: it would not be the kubelet's.
    pub(super) fn open(options: &StaticPodConfig) -> io::Result<ManifestFolder> {
        let (folder, name) = (&options.manifests_dir, &options.manifest_name);
        if !folder.is_dir() {
            let text = format!("--manifests-dir {} is not a folder", folder.display());
            return Err(io::Error::new(io::ErrorKind::NotFound, text));
        }
        let hidden = |role: &str| folder.join(format!(".{name}.{role}"));
        let (stem, extension) = name.split_at(name.rfind('.').unwrap_or(name.len()));
        Ok(ManifestFolder {
            folder: folder.clone(),
            new: hidden("new"),
            trial: hidden("trial"),
            failed: hidden("failed"),
            stopped: format!(".{name}.stopped."),
            stem: stem.to_owned(),
            extension: extension.to_owned(),
        })
    }

    /// The file of `pod`'s manifest; `None` if its name is not the release's with eight hexadecimal digits behind it.
    pub(super) fn file_of(&self, pod: &str) -> Option<PathBuf> {
        let name = format!("{pod}{}", self.extension);
        let is_own = manifest::is_own(&name, &self.stem, &self.extension) && pod != self.stem;
        is_own.then(|| self.folder.join(name))
    }

    /// Whether `attempt` has failed with `manifest`.
    pub(super) fn has_failed(&self, attempt: &str, manifest: &str) -> io::Result<bool> {
        Ok(read(&self.failed)? == Some(note(attempt, manifest)))
    }

    /// Returns the state of `manifest`, whose file is `file`.
    pub(super) fn state(&self, file: &Path, manifest: &str) -> io::Result<ManifestState> {
        if read(file)?.as_deref() != Some(manifest) {
            return Ok(ManifestState::Missing);
        }
        if read(&self.trial)?.as_deref() != file_name(file) {
            return Ok(ManifestState::Accepted);
        }
        let written = fs::metadata(file)?.modified()?;
        // A clock that was set back makes the wait longer, not shorter.
        let since = SystemTime::now().duration_since(written).unwrap_or_default();
        Ok(ManifestState::OnTrial { since })
    }

    /// The texts of the release's manifests, but for `file`.
    pub(super) fn others(&self, file: &Path) -> io::Result<Vec<String>> {
        let others = self.manifests()?.into_iter().filter(|path| path != file);
        others.filter_map(|path| read(&path).transpose()).collect()
    }

    /// Begins the trial of `manifest`, in the file `file`.
    pub(super) fn begin(&self, file: &Path, manifest: &str) -> io::Result<()> {
        self.write(&self.trial, file_name(file).unwrap_or_default())?;
        self.write(file, manifest)
    }

    /// Ends the pods of all manifests but `file` until the trial has ended.
    pub(super) fn stop_others(&self, file: &Path) -> io::Result<()> {
        for path in self.manifests()?.into_iter().filter(|path| path != file) {
            let hidden = format!("{}{}", self.stopped, file_name(&path).unwrap_or_default());
            fs::rename(&path, self.folder.join(hidden)).map_err(|error| at(&path, &error))?;
        }
        self.sync()
    }

    /// Keeps the manifest on trial, and no other.
    pub(super) fn accept(&self, file: &Path) -> io::Result<()> {
        for path in self.manifests()?.into_iter().chain(self.stopped()?) {
            if path != file {
                remove(&path)?;
            }
        }
        remove(&self.failed)?;
        remove(&self.trial)?;
        self.sync()
    }

    /// Notes that `manifest` did not become ready.
    pub(super) fn note_failure(&self, attempt: &str, manifest: &str) -> io::Result<()> {
        self.write(&self.failed, &note(attempt, manifest))
    }

    /// Forgets that another manifest did not become ready.
    pub(super) fn forget_failure(&self) -> io::Result<()> {
        remove(&self.failed)?;
        self.sync()
    }

    /// Ends a trial: its manifest goes, and those that were stopped for it come back. Nothing happens if there is none.
    pub(super) fn give_up(&self) -> io::Result<()> {
        let Some(name) = read(&self.trial)? else {
            return Ok(());
        };
        if manifest::is_own(&name, &self.stem, &self.extension) {
            remove(&self.folder.join(name))?;
        }
        for path in self.stopped()? {
            let name = file_name(&path).unwrap_or_default().strip_prefix(&self.stopped);
            let manifest = self.folder.join(name.unwrap_or_default());
            fs::rename(&path, &manifest).map_err(|error| at(&manifest, &error))?;
        }
        remove(&self.trial)?;
        self.sync()
    }

    /// Removes all files. The manifests are the first, so that a run that is interrupted has stopped the pods.
    pub(super) fn remove(&self) -> io::Result<()> {
        let manifests = self.manifests()?.into_iter().chain(self.stopped()?);
        let all = manifests.chain([self.new.clone(), self.failed.clone(), self.trial.clone()]);
        for file in all {
            remove(&file)?;
        }
        self.sync()
    }

    /// The first manifest in the folder, by name, whose apiserver uses a listener of the release's pods, and would find none if
    /// only those listeners were left that `stay`: its file name and the URL.
    pub(super) fn stranded(&self, stay: &[Url]) -> io::Result<Option<(String, Url)>> {
        let texts = self.others(Path::new(""))?;
        let listeners = texts.iter().flat_map(|text| Manifest(text).client_urls());
        let listeners: Vec<_> = listeners.collect();
        for path in self.files(|name| !name.starts_with('.'))? {
            let Some(text) = read(&path)? else { continue };
            let mut servers = manifest::etcd_servers(&text).into_iter();
            let is_stranded = |url: &Url| manifest::reaches(url, &listeners) && !manifest::reaches(url, stay);
            if let Some(url) = servers.find(is_stranded) {
                return Ok(Some((file_name(&path).unwrap_or_default().to_owned(), url)));
            }
        }
        Ok(None)
    }

    fn manifests(&self) -> io::Result<Vec<PathBuf>> {
        self.files(|name| manifest::is_own(name, &self.stem, &self.extension))
    }

    fn stopped(&self) -> io::Result<Vec<PathBuf>> {
        self.files(|name| name.starts_with(&self.stopped))
    }

    /// The files whose names `are`, in the order of their names.
    fn files(&self, are: impl Fn(&str) -> bool) -> io::Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder).map_err(|error| at(&self.folder, &error))? {
            let path = entry?.path();
            if file_name(&path).is_some_and(&are) && path.is_file() {
                files.push(path);
            }
        }
        files.sort();
        Ok(files)
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

fn file_name(path: &Path) -> Option<&str> {
    path.file_name().and_then(|name| name.to_str())
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
