//! [`LeanError`]: why a lean connection cannot be used any more.

use std::io;

/// Why a call failed, and its connection with it.
#[derive(Debug, thiserror::Error)]
pub enum LeanError {
    /// The connection is closed.
    #[error("the connection is closed")]
    Closed,
    /// A write, too, may be sent again (RFC 9113, section 6.8).
    #[error("the server leaves, and has not processed the call")]
    NotProcessed,
    /// With the server's reason, as hyper has it.
    #[error("reset by the server: {0}")]
    Reset(#[source] h2::Error),
    /// The peer does not answer a ping.
    #[error("the peer does not respond")]
    Unresponsive,
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Nothing was sent: a call that another client may take.
    #[error("the request is too long, or too many are in flight")]
    Full,
    /// The peer has sent what this client does not know.
    #[error("the peer has sent {0}")]
    Unexpected(&'static str),
}
