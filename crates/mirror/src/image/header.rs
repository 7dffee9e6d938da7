//! [`Header`]: what begins an image.

use prost::Message as _;

use super::frame::FrameError;
use super::key::ImageKey;
use crate::lineage::Fingerprint;
use etcd_store::keyspace::scope::Scope;

/// Number of the format; files of another one are discarded.
const FORMAT: u32 = 2;
/// Random bytes that distinguish images.
const ID_BYTES: usize = 16;

/// Beginning of an image: of which mirror it is, and of which history of etcd.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Header {
    /// First, so that files of another format are recognized.
    #[prost(uint32, tag = "1")]
    format: u32,
    /// Of this image alone.
    #[prost(bytes = "vec", tag = "2")]
    id: Vec<u8>,
    #[prost(bytes = "vec", tag = "4")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "5")]
    range_end: Vec<u8>,
    #[prost(bool, tag = "6")]
    is_encrypted: bool,
    #[prost(uint64, tag = "7")]
    cluster_id: u64,
    #[prost(int64, tag = "8")]
    revision: i64,
    #[prost(int64, tag = "9")]
    compacted: i64,
    #[prost(int64, tag = "10")]
    raft_gap: i64,
}

/// A header that is of no use here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum HeaderError {
    #[error("it has no header")]
    None,
    #[error("it was written by another version")]
    Format,
    #[error("it is of another mirror")]
    Scope,
}

impl Header {
    /// The header of an image of `scope`, whose keys are of the history of `fingerprint`.
    pub(super) fn new(scope: &Scope, fingerprint: &Fingerprint, is_encrypted: bool) -> Header {
        Header {
            format: FORMAT,
            id: rand::random::<[u8; ID_BYTES]>().to_vec(),
            key: scope.key().to_vec(),
            range_end: scope.range_end().to_vec(),
            is_encrypted,
            cluster_id: fingerprint.cluster_id,
            revision: fingerprint.revision,
            compacted: fingerprint.compacted,
            raft_gap: fingerprint.raft_gap,
        }
    }

    /// The history of the keys at the image's revision.
    pub(super) fn fingerprint(&self) -> Fingerprint {
        Fingerprint {
            cluster_id: self.cluster_id,
            revision: self.revision,
            compacted: self.compacted,
            raft_gap: self.raft_gap,
        }
    }

    /// Refuses an image that is encrypted although there is no key, and the other way around: who can write the file must
    /// not be able to put plain keys there.
    pub(super) fn check_encryption(&self, key: Option<&ImageKey>) -> Result<(), FrameError> {
        match (self.is_encrypted, key.is_some()) {
            (true, false) => Err(FrameError::NoKey),
            (false, true) => Err(FrameError::NotEncrypted),
            _ => Ok(()),
        }
    }

    pub(super) fn encoded(&self) -> Vec<u8> {
        self.encode_to_vec()
    }

    /// The header of a file of `scope`.
    ///
    /// # Errors
    /// [`HeaderError`]
    pub(super) fn decoded(encoded: &[u8], scope: &Scope) -> Result<Header, HeaderError> {
        let header = Header::decode(encoded).map_err(|_| HeaderError::None)?;
        if header.format != FORMAT {
            return Err(HeaderError::Format);
        }
        let is_same = header.key == scope.key() && header.range_end == scope.range_end();
        if is_same {
            Ok(header)
        } else {
            Err(HeaderError::Scope)
        }
    }
}
