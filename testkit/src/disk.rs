//! Folders on a disk with room.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use tempfile::TempDir;

/// Share of a disk that is left free for rangecache to write to it, and as much again.
const ROOM: f64 = 0.2;

/// Temporary folder for images, which rangecache does not write to a disk that is nearly full: in memory (`/dev/shm`) if the disk
/// of temporary files is. It is its user's alone.
///
/// # Panics
/// If the folder cannot be made.
#[must_use]
pub fn folder_with_room() -> TempDir {
    let (disk, memory) = (std::env::temp_dir(), Path::new("/dev/shm"));
    let is_full = free(&disk) < ROOM && free(memory) >= ROOM;
    let mut builder = tempfile::Builder::new();
    builder
        .prefix("rangecache-images-")
        .permissions(Permissions::from_mode(0o700));
    let made = builder.tempdir_in(if is_full { memory } else { &disk });
    made.expect("a temporary folder")
}

/// Share of a disk that is free; 0 if there is none.
fn free(path: &Path) -> f64 {
    rustix::fs::statvfs(path).map_or(0.0, |disk| disk.f_bavail as f64 / disk.f_blocks as f64)
}
