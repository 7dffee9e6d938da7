//! Socket files of unix domain sockets: created with a mode, removed when stale, replaced without a gap.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};

/// Listens at `path`. A socket file that an earlier process left behind is removed; one with a live listener is not.
///
/// # Errors
/// The system's, `AddrInUse` among them.
pub(super) async fn bind(path: &Path, mode: u32, backlog: u32) -> io::Result<(UnixListener, SocketFile)> {
    remove_stale(path).await?;
    listen(path, mode, backlog)
}

/// Listens at a name next to `path`, and then renames it to `path` in one step, so that clients find a listener at any moment.
/// A file that is not a socket is not replaced.
///
/// # Errors
/// The system's.
pub(super) async fn replace(path: &Path, mode: u32, backlog: u32) -> io::Result<(UnixListener, SocketFile)> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket()) {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    remove_stale(Path::new(&temporary)).await?;
    let (listener, mut file) = listen(Path::new(&temporary), mode, backlog)?;
    std::fs::rename(temporary, path)?;
    path.clone_into(&mut file.path);
    Ok((listener, file))
}

/// The file of a listening socket. Dropping it before [`SocketFile::keep`] removes the file, unless another process has
/// replaced it: a start that fails must not leave a socket on which nothing listens.
#[derive(Debug)]
pub(super) struct SocketFile {
    path: PathBuf,
    inode: Option<u64>,
}

impl SocketFile {
    fn new(path: &Path) -> SocketFile {
        SocketFile {
            path: path.to_owned(),
            inode: inode(path),
        }
    }

    /// Leaves the file to the process that serves: the next one may take its path over at any moment.
    pub(super) fn keep(mut self) {
        self.inode = None;
    }
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        if self.inode.is_some() && inode(&self.path) == self.inode {
            // The start has failed already, with an error of its own.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn inode(path: &Path) -> Option<u64> {
    std::fs::symlink_metadata(path).ok().map(|found| found.ino())
}

/// Removes a socket file on which no process listens any more.
async fn remove_stale(path: &Path) -> io::Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_socket());
    if is_socket
        && let Err(error) = UnixStream::connect(path).await
        && error.kind() == io::ErrorKind::ConnectionRefused
    {
        std::fs::remove_file(path)?;
    }
    Ok(())
}

/// Sets the mode between `bind` and `listen`, so that no other user can connect in between.
fn listen(path: &Path, mode: u32, backlog: u32) -> io::Result<(UnixListener, SocketFile)> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&SockAddr::unix(path)?)?;
    let file = SocketFile::new(path);
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    socket.listen(backlog.cast_signed())?;
    socket.set_nonblocking(true)?;
    Ok((UnixListener::from_std(socket.into())?, file))
}
