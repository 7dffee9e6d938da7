//! Images of mirrors on the disk (`--image-dir`), for a start that reads from etcd what has changed since.
//!
//! An image is one file: every key at one revision, and the newest events. What is read from it is only a
//! beginning: etcd's position must be of the same history, and then the proofs of a feed decide as after any break. Damaged
//! and foreign images are discarded. A disk that is full or slow stops the writing and nothing else.
//!
//! | file | subject |
//! |---|---|
//! | `folder` | [`Images`]: where images are, and how they are written; files, permissions, the lock, room on the disk |
//! | `frame` | frames with a checksum, or encrypted, and the key; why an image is of no use |
//! | `file` | what a file has |
//! | `keep` | the task that writes an image |
//! | `restore` | reads of images |

mod file;
mod folder;
mod frame;
#[cfg(any(test, fuzzing, feature = "testing"))]
pub(crate) mod fuzzing;
mod keep;
mod restore;

pub(crate) use folder::Images;
pub(crate) use keep::keep;
pub(crate) use restore::read;

pub use folder::{ImageError, check_images};

#[cfg(test)]
mod tests;
