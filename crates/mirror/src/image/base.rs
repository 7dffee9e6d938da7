//! The base of an image: every key of a mirror at one revision, in compressed pieces.
//!
//! Each piece is a frame: entries in key order, each with its length, compressed together with LZ4. The last frame has
//! the number of keys: a base without it was not finished.

use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;

use bytes::{Buf as _, Bytes};

use super::error::Useless;
use super::frame::{END, ENTRIES, FrameWriter, Frames, HEADER};
use super::header::Header;
use super::key::ImageKey;
use etcd_store::cache::{MalformedKeyValue, Packing, Tree, TreeBuilder, Unpacker};
use etcd_store::keyspace::scope::Scope;

/// Entries of a piece, in bytes; a larger entry is a piece of its own.
const PIECE_BYTES: usize = 1 << 20;
/// Largest ratio of LZ4: what claims more was not compressed by it, and gets no memory.
const MAX_RATIO: usize = 256;

/// A base that is being written.
pub(super) struct BaseWriter {
    frames: FrameWriter,
    keys: u64,
}

impl BaseWriter {
    /// Begins a base in an empty file.
    pub(super) fn begin(file: File, header: &Header, key: Option<&ImageKey>) -> io::Result<BaseWriter> {
        Ok(BaseWriter {
            frames: FrameWriter::begin(file, 0, &header.encoded(), key)?,
            keys: 0,
        })
    }

    /// Writes the next piece of `tree`, whose values are all held; returns whether it was the last one.
    ///
    /// # Errors
    /// The file cannot be written, or a packed block of the tree is damaged.
    pub(super) fn write_piece(&mut self, tree: &Tree) -> io::Result<bool> {
        let (mut piece, mut keys, mut damaged) = (Vec::new(), 0, None);
        // Neighbours share packed blocks.
        let mut unpacker = Unpacker::default();
        tree.for_each_from(self.keys, |stored| {
            if !piece.is_empty() && piece.len() + stored.encoded_len() > PIECE_BYTES {
                return ControlFlow::Break(());
            }
            keys += 1;
            match unpacker.read(stored) {
                Ok(entry) => {
                    let message = entry.key_value();
                    piece.extend_from_slice(&(message.len() as u64).to_le_bytes());
                    piece.extend_from_slice(&message);
                    ControlFlow::Continue(())
                }
                Err(error) => {
                    damaged = Some(error);
                    ControlFlow::Break(())
                }
            }
        });
        if let Some(damaged) = damaged {
            return Err(io::Error::other(damaged));
        }
        self.keys += keys;
        if !piece.is_empty() {
            self.frames
                .write(ENTRIES, &lz4_flex::block::compress_prepend_size(&piece))?;
        }
        Ok(self.keys == tree.len())
    }

    /// Ends the base, once it is on the disk; returns its length in bytes.
    pub(super) fn finish(mut self) -> io::Result<u64> {
        let keys = self.keys.to_le_bytes();
        self.frames.write(END, &keys)?;
        self.frames.file().sync_all()?;
        Ok(self.frames.bytes())
    }

    /// Bytes that were written.
    pub(super) fn bytes(&self) -> u64 {
        self.frames.bytes()
    }
}

/// Reads a base of `length` bytes: its header and its tree, which may take `max_bytes`. `record` gets the memory that it
/// takes meanwhile.
pub(super) fn read_base(
    from: impl Read,
    length: u64,
    key: Option<&ImageKey>,
    scope: &Scope,
    (packing, max_bytes): (Packing, u64),
    record: impl Fn(u64),
) -> Result<(Header, Tree), Useless> {
    let mut frames = Frames::new(from, length, key);
    let header = match frames.next()? {
        Some((HEADER, header)) => Header::decoded(&header, scope)?,
        _ => return Err(Useless::Order),
    };
    header.check_encryption(key)?;
    let mut builder = TreeBuilder::new(packing);
    loop {
        match frames.next()? {
            Some((ENTRIES, piece)) => {
                push(&mut builder, &piece)?;
                record(builder.memory_bytes());
                if builder.memory_bytes() > max_bytes {
                    return Err(Useless::TooLarge);
                }
            }
            Some((END, keys)) if keys[..] == builder.len().to_le_bytes() => break,
            _ => return Err(Useless::Order),
        }
    }
    let keys = builder.len();
    let tree = builder.finish();
    // No key twice.
    if tree.len() == keys {
        Ok((header, tree))
    } else {
        Err(Useless::Order)
    }
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
pub(super) fn take_message(from: &mut Bytes) -> Option<Bytes> {
    let length = usize::try_from(from.try_get_u64_le().ok()?).ok()?;
    (length <= from.len()).then(|| from.split_to(length))
}

impl From<MalformedKeyValue> for Useless {
    fn from(_: MalformedKeyValue) -> Self {
        Useless::Order
    }
}
