//! [`LeanError`]: why a lean connection cannot be used any more.

use std::io;

/// Why a call failed, and its connection with it.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LeanError {
    #[error("the connection is closed")]
    Closed,
    #[error("etcd has reset the call")]
    Reset,
    #[error("the peer does not respond")]
    Unresponsive,
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the request is too long")]
    TooLong,
    #[error("the peer has sent {0}")]
    Unexpected(&'static str),
}
