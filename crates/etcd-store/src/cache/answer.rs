//! The RangeResponse message, encoded piece by piece while it is sent.

use std::ops::ControlFlow;

use etcd_wire::protobuf::{put_varint, to_usize, varint_len};

use super::entry::Entry;
use super::rope::{COPY_BELOW_BYTES, Rope};
use super::selection::{Selection, Values};
use super::stored::{EntryReader, MemoryError, StoredEntry};

const HEADER_TAG: u8 = 0x0a;
const MORE_TAG: u8 = 0x18;
const COUNT_TAG: u8 = 0x20;

/// etcd's ResponseHeader.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseHeader {
    /// Id of the cluster.
    pub cluster_id: u64,
    /// Id of the member that responds.
    pub member_id: u64,
    /// The store's revision, also in the response to a read of a past one.
    pub revision: i64,
    /// The raft term.
    pub raft_term: u64,
    /// Id of the leader as the member knows it; 0 if it knows none, and before etcd 3.8.
    pub leader_id: u64,
}

impl From<etcd_wire::etcdserverpb::ResponseHeader> for ResponseHeader {
    fn from(header: etcd_wire::etcdserverpb::ResponseHeader) -> ResponseHeader {
        ResponseHeader {
            cluster_id: header.cluster_id,
            member_id: header.member_id,
            revision: header.revision,
            raft_term: header.raft_term,
            leader_id: header.leader_id,
        }
    }
}

/// A RangeResponse that is not encoded yet: it holds a snapshot, not bytes (I5).
#[derive(Debug)]
pub struct Answer {
    /// `None` for entries without a header, as part of a larger answer.
    header: Option<ResponseHeader>,
    selection: Selection,
    kvs_bytes: u64,
    length: u64,
    /// Number of entries produced so far. The header precedes the first entry, `more` and `count` follow the last.
    produced: u64,
    produced_bytes: u64,
    reader: EntryReader,
    state: AnswerStep,
}

/// The piece of an answer to be produced next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AnswerStep {
    Header,
    Kvs,
    Done,
}

/// Part of an entry that is sent.
enum EntryPart<'a> {
    Whole(&'a Entry),
    Key {
        stored: &'a StoredEntry,
        keep_lease: bool,
    },
}

impl Answer {
    /// An answer with the entries of `selection`.
    pub fn new(header: ResponseHeader, selection: Selection) -> Answer {
        let header_bytes = 1 + varint_len(header.len() as u64) + header.len();
        Answer::with(Some(header), header_bytes, selection)
    }

    /// An answer with the entries of `selection` only, as part of a larger one. The selection must have neither count
    /// nor `more`.
    pub(super) fn entries_alone(selection: Selection) -> Answer {
        Answer::with(None, 0, selection)
    }

    fn with(header: Option<ResponseHeader>, header_bytes: usize, selection: Selection) -> Answer {
        let kvs_bytes = kvs_bytes(&selection);
        let length = (header_bytes + tail_len(&selection)) as u64 + kvs_bytes;
        Answer {
            header,
            selection,
            kvs_bytes,
            length,
            produced: 0,
            produced_bytes: 0,
            reader: EntryReader::default(),
            state: AnswerStep::Header,
        }
    }

    /// Exact length of the message in bytes; known before any of it is produced.
    pub fn len(&self) -> u64 {
        self.length
    }

    /// Always false: a RangeResponse has a header or an entry.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The selected entries, of an answer of which nothing was produced.
    pub fn into_selection(self) -> Selection {
        self.selection
    }

    /// The selected entries.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    /// Encodes the whole message into one allocation, after `prefix_bytes` zero bytes for the caller to fill. For short
    /// answers: its memory is not bounded.
    ///
    /// # Errors
    /// Memory is damaged.
    pub fn small(mut self, prefix_bytes: usize) -> Result<Vec<u8>, MemoryError> {
        let mut out = Vec::with_capacity(prefix_bytes.saturating_add(to_usize(self.length)));
        out.resize(prefix_bytes, 0);
        if let Some(header) = self.header {
            header.write(&mut out);
        }
        self.for_each_remaining(|part| {
            match part {
                EntryPart::Whole(entry) => {
                    for piece in entry.encoded().as_slices() {
                        out.extend_from_slice(piece);
                    }
                }
                EntryPart::Key { stored, keep_lease } => stored.encode_keys_only(keep_lease, &mut out),
            }
            ControlFlow::Continue(())
        })?;
        put_tail(&self.selection, &mut out);
        Ok(out)
    }

    /// Next piece of the message: at least `target_bytes`, exceeded by one entry at most; the last one may be shorter.
    /// `None` after the last.
    ///
    /// # Errors
    /// Memory is damaged: the message cannot be completed.
    pub fn next_piece(&mut self, target_bytes: usize) -> Result<Option<Rope>, MemoryError> {
        if self.state == AnswerStep::Done {
            return Ok(None);
        }
        let mut rope = Rope::with_slab(self.slab_bytes(target_bytes));
        if self.state == AnswerStep::Header {
            self.state = AnswerStep::Kvs;
            if let Some(header) = self.header {
                rope.write(|slab| header.write(slab));
            }
        }
        let mut filled = bytes::Buf::remaining(&rope);
        let before = filled;
        let mut produced = 0;
        self.for_each_remaining(|part| {
            match part {
                EntryPart::Whole(entry) => rope.push(entry),
                EntryPart::Key { stored, keep_lease } => {
                    rope.write(|slab| stored.encode_keys_only(keep_lease, slab));
                }
            }
            produced += 1;
            filled = bytes::Buf::remaining(&rope);
            if filled < target_bytes {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        })?;
        self.produced += produced;
        self.produced_bytes += (filled - before) as u64;
        if self.produced == self.selection.len() {
            self.state = AnswerStep::Done;
            let selection = &self.selection;
            rope.write(|slab| put_tail(selection, slab));
        }
        Ok(Some(rope))
    }

    fn for_each_remaining(
        &mut self,
        mut visit: impl FnMut(EntryPart<'_>) -> ControlFlow<()>,
    ) -> Result<(), MemoryError> {
        let produced = self.produced;
        match self.selection.values {
            Values::Kept => {
                let whole = |entry: &Entry| visit(EntryPart::Whole(entry));
                self.selection
                    .read_from(produced, COPY_BELOW_BYTES, &mut self.reader, whole)
            }
            Values::Left { keep_lease } => {
                let key = |stored: &StoredEntry| visit(EntryPart::Key { stored, keep_lease });
                self.selection.visit_from(produced, 0, key);
                Ok(())
            }
        }
    }

    /// Estimate of the bytes that will be copied for the next piece: all of it, unless entries are large enough to be
    /// referenced.
    fn slab_bytes(&self, target_bytes: usize) -> usize {
        let entries = self.selection.len() - self.produced;
        let bytes = self.kvs_bytes - self.produced_bytes;
        let short = 64; // header and tail
        if self.selection.is_in_blocks(self.produced) {
            // The piece may begin and end within a block.
            return short + 2 * COPY_BELOW_BYTES;
        }
        if self.selection.values == Values::Kept && bytes >= entries.saturating_mul(COPY_BELOW_BYTES as u64) {
            return short;
        }
        short + target_bytes.saturating_add(COPY_BELOW_BYTES).min(to_usize(bytes))
    }
}

impl ResponseHeader {
    fn fields(&self) -> [(u8, u64); 5] {
        [
            (0x08, self.cluster_id),
            (0x10, self.member_id),
            (0x18, self.revision as u64),
            (0x20, self.raft_term),
            (0x28, self.leader_id),
        ]
    }

    /// Length of the message in bytes, without tag and length.
    pub(super) fn len(&self) -> usize {
        self.fields()
            .into_iter()
            .filter(|(_, value)| *value != 0)
            .map(|(_, value)| 1 + varint_len(value))
            .sum()
    }

    /// Appends the field `header` to `out`.
    pub(super) fn write(&self, out: &mut Vec<u8>) {
        out.push(HEADER_TAG);
        put_varint(self.len() as u64, out);
        for (tag, value) in self.fields() {
            if value != 0 {
                out.push(tag);
                put_varint(value, out);
            }
        }
    }
}

fn kvs_bytes(selection: &Selection) -> u64 {
    let summary = selection.summary();
    match selection.values {
        Values::Kept => summary.encoded_bytes,
        Values::Left { keep_lease: true } => summary.keys_only_bytes + summary.lease_bytes,
        Values::Left { keep_lease: false } => summary.keys_only_bytes,
    }
}

fn tail_len(selection: &Selection) -> usize {
    let more = if selection.more { 2 } else { 0 };
    let count = if selection.count == 0 {
        0
    } else {
        1 + varint_len(selection.count)
    };
    more + count
}

/// Appends the fields `more` and `count` to `out`.
fn put_tail(selection: &Selection, out: &mut Vec<u8>) {
    if selection.more {
        out.extend_from_slice(&[MORE_TAG, 1]);
    }
    if selection.count != 0 {
        out.push(COUNT_TAG);
        put_varint(selection.count, out);
    }
}

#[cfg(test)]
mod tests;
