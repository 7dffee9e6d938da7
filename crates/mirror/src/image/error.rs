//! Why an image is of no use.

use std::io;

use super::frame::FrameError;
use super::header::HeaderError;

/// Why an image is of no use: it is discarded, and its mirror is loaded.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Useless {
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error(transparent)]
    Frame(FrameError),
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// Whole frames that make no image.
    #[error("its contents are not those of an image")]
    Order,
    #[error("its keys take more memory than --cache-max-bytes allows without packing and leaving out values")]
    TooLarge,
    #[error("reading it failed")]
    Panicked,
}

impl From<FrameError> for Useless {
    fn from(error: FrameError) -> Self {
        match error {
            FrameError::Io(error) => Useless::Io(error),
            error => Useless::Frame(error),
        }
    }
}
