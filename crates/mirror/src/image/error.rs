//! Why an image is of no use.

use std::io;

use etcd_store::cache::MalformedKeyValue;

/// Why an image is of no use: it is discarded, and its mirror is loaded.
#[derive(Debug, thiserror::Error)]
pub(super) enum Useless {
    #[error("it cannot be read: {0}")]
    Io(#[from] io::Error),
    #[error("it is cut off")]
    CutOff,
    #[error("a checksum is wrong")]
    Checksum,
    #[error("it is not of --image-key-file, or is damaged")]
    Seal,
    #[error("it is encrypted, and there is no --image-key-file")]
    NoKey,
    #[error("it is not encrypted, and --image-key-file is given")]
    NotEncrypted,
    #[error("it has no header")]
    NoHeader,
    #[error("it was written by another version")]
    Format,
    #[error("it is of another mirror")]
    Scope,
    /// Whole frames that make no image.
    #[error("its contents are not those of an image")]
    Order,
    #[error("its keys take more memory than --cache-max-bytes allows without packing and leaving out values")]
    TooLarge,
    #[error("reading it failed")]
    Panicked,
}

impl From<MalformedKeyValue> for Useless {
    fn from(_: MalformedKeyValue) -> Self {
        Useless::Order
    }
}
