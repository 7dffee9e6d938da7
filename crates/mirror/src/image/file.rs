//! The file of an image: every key of a mirror at one revision, in compressed pieces, and its newest events.
//!
//! Each piece is a frame: entries in key order, each with its length, compressed together with LZ4. The last frame has
//! the number of keys and the newest events: a file without it was not finished.

use std::io::{self, Read};
use std::{fs::File, ops::ControlFlow};

use bytes::{Buf as _, Bytes};
use etcd_store::cache::{Change, ChangeKind, Entry, MalformedKeyValue, Tree, TreeBuilder};
use etcd_store::keyspace::scope::Scope;
use etcd_wire::etcdserverpb::Event;
use prost::Message as _;

use super::frame::{END, ENTRIES, FrameWriter, Frames, ImageKey, Useless};
use crate::lineage::{Anchor, Fingerprint};

/// Entries of a piece, in bytes; a larger entry is a piece of its own.
const PIECE_BYTES: usize = 1 << 20;
/// Largest ratio of LZ4: what claims more was not compressed by it, and gets no memory.
const MAX_RATIO: usize = 256;

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
    fn fingerprint(&self) -> Fingerprint {
        Fingerprint {
            cluster_id: self.cluster_id,
            revision: self.revision,
            compacted: self.compacted,
            raft_gap: self.raft_gap,
        }
    }

    pub(super) fn encoded(&self) -> Vec<u8> {
        self.encode_to_vec()
    }

    /// The header of a file of `scope`. Refuses one that is encrypted although there is no key, and the other way around: who can
    /// write the file must not be able to put plain keys there.
    fn decoded(encoded: &[u8], scope: &Scope, key: Option<&ImageKey>) -> Result<Header, Useless> {
        let header = Header::decode(encoded).map_err(|_| Useless::NoHeader)?;
        if header.format != FORMAT {
            return Err(Useless::Format);
        }
        if header.key != scope.key() || header.range_end != scope.range_end() {
            return Err(Useless::Scope);
        }
        match (header.is_encrypted, key.is_some()) {
            (true, false) => Err(Useless::NoKey),
            (false, true) => Err(Useless::NotEncrypted),
            _ => Ok(header),
        }
    }
}

/// Last frame of a file.
#[derive(Clone, PartialEq, prost::Message)]
struct End {
    /// Keys of the file.
    #[prost(uint64, tag = "1")]
    keys: u64,
    #[prost(bytes = "bytes", optional, tag = "2")]
    newest_key: Option<Bytes>,
    #[prost(int64, optional, tag = "3")]
    last_event: Option<i64>,
    #[prost(message, repeated, tag = "4")]
    recent: Vec<Event>,
    #[prost(bool, tag = "5")]
    recent_is_full: bool,
}

/// A file that is being written.
pub(super) struct ImageWriter {
    frames: FrameWriter,
    keys: u64,
}

impl ImageWriter {
    /// Begins an image in an empty file.
    pub(super) fn begin(file: File, header: &Header, key: Option<&ImageKey>) -> io::Result<ImageWriter> {
        Ok(ImageWriter {
            frames: FrameWriter::begin(file, &header.encoded(), key)?,
            keys: 0,
        })
    }

    /// Writes the next piece of `tree`, whose values are all held; returns whether it was the last one.
    ///
    /// # Errors
    /// The file cannot be written, or memory is damaged.
    pub(super) fn write_piece(&mut self, tree: &Tree) -> io::Result<bool> {
        let (mut piece, mut keys) = (Vec::new(), 0);
        let read = tree.read_from(self.keys, |entry| {
            if !piece.is_empty() && piece.len() + entry.encoded_len() > PIECE_BYTES {
                return ControlFlow::Break(());
            }
            keys += 1;
            let message = entry.key_value();
            piece.extend_from_slice(&(message.len() as u64).to_le_bytes());
            piece.extend_from_slice(&message);
            ControlFlow::Continue(())
        });
        read.map_err(io::Error::other)?;
        self.keys += keys;
        if !piece.is_empty() {
            self.frames
                .write(ENTRIES, &lz4_flex::block::compress_prepend_size(&piece))?;
        }
        Ok(self.keys == tree.len())
    }

    /// Ends the file with the newest events of `anchor`, once it is on the disk; returns its length in bytes.
    pub(super) fn finish(mut self, anchor: &Anchor) -> io::Result<u64> {
        let event = |change: &Change| Event {
            r#type: i32::from(change.kind == ChangeKind::Delete),
            kv: change.entry.key_value(),
            prev_kv: Bytes::new(),
        };
        let end = End {
            keys: self.keys,
            newest_key: anchor.key.clone(),
            last_event: anchor.last_event,
            recent: anchor.recent.iter().map(event).collect(),
            recent_is_full: anchor.recent_is_full,
        };
        self.frames.write(END, &end.encode_to_vec())?;
        self.frames.file().sync_all()?;
        Ok(self.frames.bytes())
    }

    /// Bytes that were written.
    pub(super) fn bytes(&self) -> u64 {
        self.frames.bytes()
    }
}

/// Reads an image of `length` bytes: the history of its keys, and the mirror that it was, whose tree, made by a
/// builder without keys, may take `max_bytes`. `record` gets the memory that it takes meanwhile.
pub(super) fn read_image(
    from: impl Read,
    length: u64,
    key: Option<&ImageKey>,
    scope: &Scope,
    (mut builder, max_bytes): (TreeBuilder, u64),
    record: impl Fn(u64),
) -> Result<(Fingerprint, Anchor), Useless> {
    let (mut frames, header) = Frames::begin(from, length, key)?;
    let reached = Header::decoded(&header, scope, key)?.fingerprint();
    let end = loop {
        match frames.next()? {
            Some((ENTRIES, piece)) => {
                push(&mut builder, &piece)?;
                record(builder.memory_bytes());
                if builder.memory_bytes() > max_bytes {
                    return Err(Useless::TooLarge);
                }
            }
            Some((END, end)) => break End::decode(end).map_err(|_| Useless::Order)?,
            _ => return Err(Useless::Order),
        }
    };
    let keys = builder.len();
    let tree = builder.finish();
    // No key twice.
    if end.keys != keys || tree.len() != keys {
        return Err(Useless::Order);
    }
    let anchor = Anchor {
        revision: reached.revision,
        key: end.newest_key,
        last_event: end.last_event,
        recent: end.recent.iter().map(change).collect::<Result<_, _>>()?,
        recent_is_full: end.recent_is_full,
        tree,
        base: None,
    };
    Ok((reached, anchor))
}

/// The last frame of a file with `keys` keys and no events.
#[cfg(any(test, fuzzing, feature = "testing"))]
pub(super) fn encoded_end(keys: u64) -> Vec<u8> {
    let end = End {
        keys,
        ..End::default()
    };
    end.encode_to_vec()
}

fn change(event: &Event) -> Result<Change, MalformedKeyValue> {
    let entry = Entry::from_key_value(&event.kv)?;
    Ok(match event.r#type {
        0 => Change::put(entry),
        _ => Change::delete(entry),
    })
}

/// Adds the entries of a piece.
fn push(builder: &mut TreeBuilder, piece: &Bytes) -> Result<(), Useless> {
    let claimed = piece
        .first_chunk()
        .map(|length| u32::from_le_bytes(*length) as usize);
    if claimed.is_none_or(|claimed| claimed / MAX_RATIO > piece.len()) {
        return Err(Useless::Order);
    }
    let plain = lz4_flex::block::decompress_size_prepended(piece).map_err(|_| Useless::Order)?;
    let mut plain = Bytes::from(plain);
    while !plain.is_empty() {
        let message = take_message(&mut plain).ok_or(Useless::Order)?;
        builder.push(message)?;
    }
    Ok(())
}

/// Takes a message with its length from the front.
fn take_message(from: &mut Bytes) -> Option<Bytes> {
    let length = usize::try_from(from.try_get_u64_le().ok()?).ok()?;
    (length <= from.len()).then(|| from.split_to(length))
}
