//! The folder of a rangecache's images, which a simulation keeps over restarts, or puts back as it was at an earlier one.

use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;
use testkit::disk::folder_with_room;

/// A folder, and a copy of what it had at an earlier restart.
pub struct Images {
    folder: TempDir,
    earlier: Option<TempDir>,
}

impl Images {
    /// An empty folder.
    pub fn new() -> Self {
        Self {
            folder: folder_with_room(),
            earlier: None,
        }
    }

    /// `--image-dir`.
    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// While no process uses the folder: copies it at every other restart, and puts the copy back at the others, as if the disk were
    /// an older one.
    pub fn restart(&mut self) {
        match self.earlier.take() {
            Some(earlier) => self.folder = earlier,
            None => {
                let earlier = folder_with_room();
                copy(self.path(), earlier.path());
                self.earlier = Some(earlier);
            }
        }
    }
}

/// Copies the files of a folder.
fn copy(from: &Path, to: &Path) {
    for entry in fs::read_dir(from).expect("the folder is there") {
        let file: PathBuf = entry.expect("an entry").path();
        let name = file.file_name().expect("a name");
        fs::copy(&file, to.join(name)).expect("the file can be copied");
    }
}
