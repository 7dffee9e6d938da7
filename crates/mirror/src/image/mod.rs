//! Images of mirrors on the disk (`--image-dir`), for a start that reads from etcd what has changed since.
//!
//! An image is one file: every key at one revision, and the newest events. What is read from it is only a
//! beginning: etcd's position must be of the same history, and then the proofs of a feed decide as after any break. Damaged
//! and foreign images are discarded. A disk that is full or slow stops the writing and nothing else.
//!
//! | file | subject |
//! |---|---|
//! | `images` | flags: where images are, and how they are written |
//! | `folder` | files, permissions, the lock, room on the disk |
//! | `frame` | frames with a checksum, or encrypted |
//! | `file` | what a file has |
//! | `keep` | the task that writes an image |
//! | `restore` | reads of images |
//! | `key` | the key of encrypted images |
//! | `error` | why an image is of no use |

mod error;
mod file;
mod folder;
mod frame;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub(crate) mod fuzzing;
mod images;
mod keep;
mod key;
mod restore;

pub(crate) use images::Images;
pub use images::{ImageError, check_images};
pub(crate) use keep::keep;
pub(crate) use restore::read;

#[cfg(test)]
mod tests;
