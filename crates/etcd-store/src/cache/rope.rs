//! A response body in segments: small entries are copied together, large ones are referenced.
//!
//! One HTTP/2 frame per small entry would be the slowest way to send them, a copy of large entries the second slowest.
//! A rope copies entries below [`COPY_BELOW_BYTES`] into one slab and holds references to the others.

use std::{io::IoSlice, ops::Range, sync::Arc};

use bytes::{Buf, Bytes};

use super::{entry::Entry, memory::Block};

/// Size in bytes below which entries are copied. Chosen by measurement (`benches/micro.rs`).
pub(super) const COPY_BELOW_BYTES: usize = 1 << 10;

/// A buffer over many segments, read once from its start to its end.
#[derive(Debug, Default)]
pub struct Rope {
    /// Copied bytes; segments of kind `Slab` are ranges of it.
    slab: Vec<u8>,
    segments: Vec<RopeSegment>,
    /// Index of the first segment with unread bytes, and the number of bytes read from it.
    first: usize,
    read: usize,
    remaining: usize,
}

#[derive(Debug)]
enum RopeSegment {
    Slab(Range<usize>),
    Entry(Entry),
    /// An entry without its first byte, the tag.
    Untagged(Entry),
    Shared(Bytes),
    /// Entries that follow one another in a block.
    Block(Arc<Block>, Range<usize>),
}

impl Rope {
    /// An empty rope with room for `slab_bytes` copied bytes.
    pub fn with_slab(slab_bytes: usize) -> Rope {
        Rope {
            slab: Vec::with_capacity(slab_bytes),
            ..Rope::default()
        }
    }

    /// Appends the bytes that `write` appends to the slab.
    pub fn write(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        self.copy_short_block();
        self.append(write);
    }

    fn append(&mut self, write: impl FnOnce(&mut Vec<u8>)) {
        let start = self.slab.len();
        write(&mut self.slab);
        let end = self.slab.len();
        self.remaining += end - start;
        match self.segments.last_mut() {
            Some(RopeSegment::Slab(range)) => range.end = end,
            _ if end > start => self.segments.push(RopeSegment::Slab(start..end)),
            _ => {}
        }
    }

    /// Appends entries of a block by reference, in one segment with those before them.
    fn push_of_block(&mut self, block: &Arc<Block>, at: Range<usize>) {
        self.remaining += at.len();
        if let Some(RopeSegment::Block(last, range)) = self.segments.last_mut()
            && Arc::ptr_eq(last, block)
            && range.end == at.start
        {
            range.end = at.end;
            return;
        }
        self.copy_short_block();
        self.segments.push(RopeSegment::Block(Arc::clone(block), at));
    }

    /// Copies the last segment, if it is of a block and too short to be worth a reference.
    fn copy_short_block(&mut self) {
        let short = |segment: &mut RopeSegment| matches!(segment, RopeSegment::Block(_, range) if range.len() < COPY_BELOW_BYTES);
        if let Some(RopeSegment::Block(block, range)) = self.segments.pop_if(short) {
            self.remaining -= range.len();
            self.append(|slab| slab.extend_from_slice(&block.bytes[range]));
        }
    }

    /// Appends an encoded entry, by copy or by reference.
    pub(super) fn push(&mut self, entry: &Entry) {
        if let Some((block, at)) = entry.block() {
            return self.push_of_block(block, at);
        }
        let encoded = entry.encoded();
        if encoded.len() < COPY_BELOW_BYTES {
            self.write(|slab| {
                encoded
                    .as_slices()
                    .into_iter()
                    .for_each(|piece| slab.extend_from_slice(piece))
            });
        } else {
            self.copy_short_block();
            self.remaining += encoded.len();
            self.segments.push(RopeSegment::Entry(entry.clone()));
        }
    }

    /// Appends an encoded entry under another `tag`, of one byte, by copy or by reference.
    pub(super) fn push_with_tag(&mut self, tag: u8, entry: &Entry) {
        let encoded = entry.encoded();
        let [head, tail] = encoded.as_slices();
        if encoded.len() < COPY_BELOW_BYTES {
            self.write(|slab| {
                slab.push(tag);
                slab.extend_from_slice(&head[1..]);
                slab.extend_from_slice(tail);
            });
        } else {
            self.write(|slab| slab.push(tag));
            self.remaining += encoded.len() - 1;
            self.segments.push(RopeSegment::Untagged(entry.clone()));
        }
    }

    /// Appends bytes by reference.
    pub fn push_shared(&mut self, bytes: Bytes) {
        if !bytes.is_empty() {
            self.copy_short_block();
            self.remaining += bytes.len();
            self.segments.push(RopeSegment::Shared(bytes));
        }
    }

    /// Unread bytes, piece by piece.
    pub fn pieces(&self) -> impl Iterator<Item = &[u8]> {
        let segments = self.first..self.segments.len();
        let read = move |index| if index == self.first { self.read } else { 0 };
        let pieces = segments.flat_map(move |index| self.unread(index, read(index)));
        pieces.filter(|piece| !piece.is_empty())
    }

    #[cfg(test)]
    pub(super) fn slab_capacity(&self) -> usize {
        self.slab.capacity()
    }

    /// Unread bytes of the segment at `index`, of which `read` are read: one or two parts, the first not empty unless
    /// both are.
    fn unread(&self, index: usize, read: usize) -> [&[u8]; 2] {
        let [head, tail]: [&[u8]; 2] = match self.segments.get(index) {
            None => return [&[]; 2],
            Some(RopeSegment::Slab(range)) => [&self.slab[range.clone()], &[]],
            Some(RopeSegment::Shared(bytes)) => [bytes, &[]],
            Some(RopeSegment::Block(block, range)) => [&block.bytes[range.clone()], &[]],
            Some(RopeSegment::Entry(entry)) => entry.encoded().as_slices(),
            Some(RopeSegment::Untagged(entry)) => {
                let [head, tail] = entry.encoded().as_slices();
                [&head[1..], tail]
            }
        };
        if read < head.len() {
            [&head[read..], tail]
        } else {
            [&tail[read - head.len()..], &[]]
        }
    }
}

impl Buf for Rope {
    fn remaining(&self) -> usize {
        self.remaining
    }

    fn chunk(&self) -> &[u8] {
        let [first, _] = self.unread(self.first, self.read);
        first
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let mut filled = 0;
        let mut read = self.read;
        for index in self.first..self.segments.len() {
            for piece in self.unread(index, read) {
                if piece.is_empty() {
                    continue;
                }
                let Some(slice) = slices.get_mut(filled) else {
                    return filled;
                };
                *slice = IoSlice::new(piece);
                filled += 1;
            }
            read = 0;
        }
        filled
    }

    /// # Panics
    /// Panics beyond the end, as [`Buf`] requires.
    fn advance(&mut self, count: usize) {
        assert!(count <= self.remaining, "advance beyond the end of a rope");
        self.remaining -= count;
        self.read += count;
        while let Some(segment) = self.segments.get(self.first) {
            let length = match segment {
                RopeSegment::Slab(range) | RopeSegment::Block(_, range) => range.len(),
                RopeSegment::Shared(bytes) => bytes.len(),
                RopeSegment::Entry(entry) => entry.encoded_len(),
                RopeSegment::Untagged(entry) => entry.encoded_len() - 1,
            };
            if self.read < length {
                break;
            }
            self.read -= length;
            self.first += 1;
        }
    }
}

impl From<Bytes> for Rope {
    fn from(bytes: Bytes) -> Rope {
        let mut rope = Rope::default();
        rope.push_shared(bytes);
        rope
    }
}

#[cfg(test)]
mod tests;
