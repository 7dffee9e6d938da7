//! Socket files of unix domain sockets: created with a mode, removed when stale, replaced without a gap.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;

use socket2::{Domain, SockAddr, Socket, Type};
use tokio::net::{UnixListener, UnixStream};

/// Listens at `path`. A socket file that an earlier process left behind is removed; one with a live listener is not.
///
/// # Errors
/// The system's, `AddrInUse` among them.
pub(super) async fn bind(path: &Path, mode: u32, backlog: u32) -> io::Result<UnixListener> {
    remove_stale(path).await?;
    listen(path, mode, backlog)
}

/// Listens at a name next to `path`, and then renames it to `path` in one step, so that clients find a listener at any moment.
/// A file that is not a socket is not replaced.
///
/// # Errors
/// The system's.
pub(super) async fn replace(path: &Path, mode: u32, backlog: u32) -> io::Result<UnixListener> {
    if std::fs::symlink_metadata(path).is_ok_and(|found| !found.file_type().is_socket()) {
        return Err(io::ErrorKind::AlreadyExists.into());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(format!(".{}", std::process::id()));
    remove_stale(Path::new(&temporary)).await?;
    let listener = listen(Path::new(&temporary), mode, backlog)?;
    std::fs::rename(temporary, path)?;
    Ok(listener)
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
fn listen(path: &Path, mode: u32, backlog: u32) -> io::Result<UnixListener> {
    let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
    socket.bind(&SockAddr::unix(path)?)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    socket.listen(backlog.cast_signed())?;
    socket.set_nonblocking(true)?;
    UnixListener::from_std(socket.into())
}
