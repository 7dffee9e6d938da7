//! Key-value pair, stored once, in the encoding in which it is sent.

use std::{borrow::Cow, cmp::Ordering, fmt, ops::Range, sync::Arc};

use bytes::Bytes;
use etcd_wire::protobuf::{
    LENGTH_DELIMITED, VARINT, put_varint, strict_bytes, strict_varint, to_usize, trusted_varint, varint_len,
};

use super::memory::{self, ARC_HEADER_BYTES, Block, ENTRY_MAX_BYTES, class_bytes, class_bytes_within};

/// The tag of the field `kvs` (2, length-delimited) of a RangeResponse.
const KVS_TAG: u8 = 0x12;
const KEY_TAG: u8 = 0x0a;
const VALUE_TAG: u8 = 0x2a;
const LEASE_TAG: u8 = 0x30;

/// Smallest entry that is cut into two allocations. Below it, rounding costs less than a second allocation would: the
/// header of an `Arc` and two smaller size classes.
const SPLIT_FROM_BYTES: usize = 4 << 10;

/// A key-value pair of one revision, encoded as the field `kvs` of a RangeResponse: tag, length, and the KeyValue
/// message exactly as etcd sent it. A clone counts a reference; the bytes are never copied or changed.
#[derive(Clone)]
pub struct Entry(Stored);

/// The bytes of an entry: a part of a block, or in one or two allocations. jemalloc rounds 10,300 bytes up to 12,288, a
/// fifth too much. An entry that would waste more than a sixteenth is cut, within its value, into a head that fills a
/// size class exactly, and a tail.
#[derive(Clone)]
enum Stored {
    Whole(Arc<[u8]>),
    Split(Arc<Halves>),
    InBlock { block: Arc<Block>, start: u32, end: u32 },
}

struct Halves {
    head: Box<[u8]>,
    tail: Box<[u8]>,
}

/// A byte string in one or two parts. Compares like the concatenation.
#[derive(Clone, Copy)]
pub struct Pieces<'a> {
    head: &'a [u8],
    tail: &'a [u8],
}

/// The fields of an [`Entry`], borrowed from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyValueRef<'a> {
    /// The key; never empty.
    pub key: &'a [u8],
    /// Revision of the key's last creation.
    pub create_revision: i64,
    /// Revision that wrote this entry.
    pub mod_revision: i64,
    /// Number of writes since the key's creation, which counts as 1.
    pub version: i64,
    /// The value; in two parts if the entry was cut.
    pub value: Pieces<'a>,
    /// Lease id; 0 without a lease.
    pub lease: i64,
}

/// The fields of an entry before its value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyHead<'a> {
    /// The key; never empty.
    pub key: &'a [u8],
    /// Revision of the key's last creation.
    pub create_revision: i64,
    /// Revision that wrote this entry.
    pub mod_revision: i64,
    /// Number of writes since the key's creation, which counts as 1.
    pub version: i64,
}

/// Rejection of bytes that are not a KeyValue in etcd's encoding: fields in order, none twice, none zero, none unknown,
/// a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed KeyValue at byte {at} of {length}")]
pub struct MalformedKeyValue {
    /// Offset at which parsing stopped.
    pub at: usize,
    /// Length of the message in bytes.
    pub length: usize,
}

/// The parts of an encoded entry.
struct Layout<'a> {
    /// The fields before the value: key, create_revision, mod_revision, version.
    prelude: &'a [u8],
    value: Pieces<'a>,
    /// The encoded field `lease`, or nothing.
    lease: &'a [u8],
}

impl Entry {
    /// Copies the body of a KeyValue message into one allocation of exactly its size, or, if it is large, into two that
    /// fit the allocator's size classes.
    ///
    /// # Errors
    /// The message is not a KeyValue in etcd's canonical encoding.
    pub fn from_key_value(key_value: &[u8]) -> Result<Entry, MalformedKeyValue> {
        Ok(Entry::alone(key_value, check(key_value)?))
    }

    /// Of the body of a KeyValue message that was checked, with its value at `value_at`.
    pub(super) fn alone(key_value: &[u8], value_at: Range<usize>) -> Entry {
        let mut prefix = Vec::with_capacity(11);
        put_kvs_head(key_value.len(), &mut prefix);
        let length = prefix.len() + key_value.len();
        if let Some(cut) = cut_at(length, prefix.len() + value_at.start, prefix.len() + value_at.end) {
            let (before, after) = key_value.split_at(cut - prefix.len());
            let head = [prefix.as_slice(), before].concat().into_boxed_slice();
            return Entry(Stored::Split(Arc::new(Halves {
                head,
                tail: after.into(),
            })));
        }
        // Zeroes first: an iterator that knows its length is how `Arc<[u8]>` is allocated once, without unsafe code.
        let mut bytes: Arc<[u8]> = std::iter::repeat_n(0, length).collect();
        if let Some(room) = Arc::get_mut(&mut bytes) {
            let (start, rest) = room.split_at_mut(prefix.len());
            start.copy_from_slice(&prefix);
            rest.copy_from_slice(key_value);
        }
        Entry(Stored::Whole(bytes))
    }

    /// The entry at `start..end` of a block, which is below 4 GiB.
    pub(super) fn in_block(block: &Arc<Block>, start: usize, end: usize) -> Entry {
        let offset = |at: usize| u32::try_from(at).unwrap_or(u32::MAX);
        Entry(Stored::InBlock {
            block: Arc::clone(block),
            start: offset(start),
            end: offset(end),
        })
    }

    /// The block that the entry is a part of, and its place there.
    pub(super) fn block(&self) -> Option<(&Arc<Block>, Range<usize>)> {
        match &self.0 {
            Stored::InBlock { block, start, end } => Some((block, *start as usize..*end as usize)),
            _ => None,
        }
    }

    /// Whether a new block may hold the entry in the place of where it is now: nothing else has that memory, or a block has.
    pub(super) fn is_movable(&self) -> bool {
        match &self.0 {
            Stored::Whole(bytes) => bytes.len() < ENTRY_MAX_BYTES && Arc::strong_count(bytes) == 1,
            Stored::Split(_) => false,
            Stored::InBlock { .. } => true,
        }
    }

    /// Address of the allocation that has the entry, alone or with others.
    pub(super) fn place(&self) -> usize {
        match &self.0 {
            Stored::Whole(bytes) => Arc::as_ptr(bytes).addr(),
            Stored::Split(halves) => Arc::as_ptr(halves).addr(),
            Stored::InBlock { block, .. } => Arc::as_ptr(block).addr(),
        }
    }

    /// Number of references to that allocation.
    pub(super) fn holders(&self) -> usize {
        match &self.0 {
            Stored::Whole(bytes) => Arc::strong_count(bytes),
            Stored::Split(halves) => Arc::strong_count(halves),
            Stored::InBlock { block, .. } => Arc::strong_count(block),
        }
    }

    /// The entry outside of blocks: what outlives its leaf must not keep a block.
    pub(super) fn detached(&self) -> Entry {
        if self.block().is_none() {
            return self.clone();
        }
        let (layout, [key_value, _]) = (self.layout(), self.body());
        let value_end = key_value.len() - layout.lease.len();
        Entry::alone(key_value, value_end - layout.value.len()..value_end)
    }

    /// Tag, length and message, as a RangeResponse carries them.
    pub fn encoded(&self) -> Pieces<'_> {
        match &self.0 {
            Stored::Whole(bytes) => Pieces {
                head: bytes,
                tail: &[],
            },
            Stored::Split(halves) => Pieces {
                head: &halves.head,
                tail: &halves.tail,
            },
            Stored::InBlock { .. } => Pieces {
                head: self.head(),
                tail: &[],
            },
        }
    }

    /// A copy of the KeyValue message.
    pub fn key_value(&self) -> Bytes {
        self.body().concat().into()
    }

    /// The KeyValue message, in two parts if the entry was cut.
    fn body(&self) -> [&[u8]; 2] {
        let [head, tail] = self.encoded().as_slices();
        let mut at = 1;
        trusted_varint(head, &mut at);
        [&head[at..], tail]
    }

    /// Length of [`Entry::encoded`] in bytes.
    pub fn encoded_len(&self) -> usize {
        match &self.0 {
            Stored::InBlock { start, end, .. } => (end - start) as usize,
            _ => self.encoded().len(),
        }
    }

    /// The key; never empty.
    pub fn key(&self) -> &[u8] {
        let bytes = self.head();
        let mut at = 1;
        while bytes[at] >= 0x80 {
            at += 1;
        }
        at += 2; // the last byte of the length, and the key's tag
        let length = to_usize(trusted_varint(bytes, &mut at));
        &bytes[at..at + length]
    }

    /// Revision that wrote this entry.
    pub fn mod_revision(&self) -> i64 {
        self.fields().mod_revision
    }

    /// All fields, decoded.
    pub fn fields(&self) -> KeyValueRef<'_> {
        let layout = self.layout();
        let KeyHead {
            key,
            create_revision,
            mod_revision,
            version,
        } = KeyHead::of_prelude(layout.prelude);
        let lease = if layout.lease.is_empty() {
            0
        } else {
            trusted_varint(layout.lease, &mut 1) as i64
        };
        KeyValueRef {
            key,
            create_revision,
            mod_revision,
            version,
            value: layout.value,
            lease,
        }
    }

    /// The fields before the value, and the encoded field `lease`, or nothing.
    pub(super) fn head_parts(&self) -> (&[u8], &[u8]) {
        let layout = self.layout();
        (layout.prelude, layout.lease)
    }

    /// Memory of this entry in bytes, the allocator's rounding included; of a block, the entry's own bytes.
    pub fn memory_bytes(&self) -> u64 {
        let bytes = match &self.0 {
            Stored::Whole(bytes) => class_bytes(ARC_HEADER_BYTES + bytes.len()),
            Stored::Split(halves) => split_bytes(halves.head.len(), halves.tail.len()),
            Stored::InBlock { .. } => self.encoded_len(),
        };
        bytes as u64
    }

    /// Memory that the entry takes in a tree which was loaded with others of its size, the tree's nodes not included, in bytes.
    pub fn loaded_bytes(&self) -> u64 {
        match self.encoded_len() {
            length if length < ENTRY_MAX_BYTES => memory::share_bytes(length),
            _ => self.memory_bytes(),
        }
    }

    /// Whether this is the only reference to the stored bytes.
    #[cfg(test)]
    pub(super) fn is_unshared(&self) -> bool {
        match &self.0 {
            Stored::Whole(bytes) => Arc::strong_count(bytes) == 1,
            Stored::Split(halves) => Arc::strong_count(halves) == 1,
            Stored::InBlock { .. } => false,
        }
    }

    /// The bytes from the start on, in one piece: the first half of an entry that was cut, otherwise all.
    pub(super) fn head(&self) -> &[u8] {
        match &self.0 {
            Stored::Whole(bytes) => bytes,
            Stored::Split(halves) => &halves.head,
            Stored::InBlock { block, start, end } => &block.bytes[*start as usize..*end as usize],
        }
    }

    fn layout(&self) -> Layout<'_> {
        let Pieces { head, tail } = self.encoded();
        let mut at = 1;
        while head[at] >= 0x80 {
            at += 1;
        }
        at += 1;
        let start = at;
        at += 1;
        let key_length = to_usize(trusted_varint(head, &mut at));
        at += key_length;
        while at < head.len() && head[at] < VALUE_TAG {
            at += 1;
            while head[at] >= 0x80 {
                at += 1;
            }
            at += 1;
        }
        let prelude = &head[start..at];
        if at == head.len() || head[at] != VALUE_TAG {
            return Layout {
                prelude,
                value: Pieces { head: &[], tail: &[] },
                lease: &head[at..],
            };
        }
        at += 1;
        let value_length = to_usize(trusted_varint(head, &mut at));
        let in_head = value_length.min(head.len() - at);
        let (value_head, after_head) = head[at..].split_at(in_head);
        let (value_tail, after_tail) = tail.split_at(value_length - in_head);
        // The cut is never after the value, so that the lease is never divided.
        let lease = if tail.is_empty() { after_head } else { after_tail };
        Layout {
            prelude,
            value: Pieces {
                head: value_head,
                tail: value_tail,
            },
            lease,
        }
    }
}

impl KeyHead<'_> {
    /// The key of a KeyValue.
    pub(super) fn key_of(message: &[u8]) -> &[u8] {
        let mut at = 1;
        let length = to_usize(trusted_varint(message, &mut at));
        &message[at..at + length]
    }

    /// Decodes the fields of a KeyValue up to its value.
    pub(super) fn of_prelude(prelude: &[u8]) -> KeyHead<'_> {
        let key = KeyHead::key_of(prelude);
        let mut at = 1 + varint_len(key.len() as u64) + key.len();
        let mut numbers = [0_i64; 5];
        while at < prelude.len() {
            let field = usize::from(prelude[at] >> 3);
            at += 1;
            numbers[field] = trusted_varint(prelude, &mut at) as i64;
        }
        let [_, _, create_revision, mod_revision, version] = numbers;
        KeyHead {
            key,
            create_revision,
            mod_revision,
            version,
        }
    }
}

impl PartialEq for Entry {
    fn eq(&self, other: &Entry) -> bool {
        self.encoded() == other.encoded()
    }
}

impl Eq for Entry {}

impl fmt::Debug for Entry {
    /// Omits the value: values must not be logged (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = self.fields();
        f.debug_struct("Entry")
            .field("key", &fields.key.escape_ascii().to_string())
            .field("mod_revision", &fields.mod_revision)
            .field("value_bytes", &fields.value.len())
            .finish_non_exhaustive()
    }
}

impl<'a> Pieces<'a> {
    /// Total length in bytes.
    pub fn len(self) -> usize {
        self.head.len() + self.tail.len()
    }

    /// Whether the length is 0.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// Both parts in order; the second is often empty.
    pub fn as_slices(self) -> [&'a [u8]; 2] {
        [self.head, self.tail]
    }

    /// The whole byte string; copied only if it has two parts.
    pub fn contiguous(self) -> Cow<'a, [u8]> {
        if self.tail.is_empty() {
            Cow::Borrowed(self.head)
        } else {
            Cow::Owned(self.as_slices().concat())
        }
    }
}

impl<'a> From<&'a [u8]> for Pieces<'a> {
    fn from(head: &'a [u8]) -> Pieces<'a> {
        Pieces { head, tail: &[] }
    }
}

impl Ord for Pieces<'_> {
    fn cmp(&self, other: &Self) -> Ordering {
        let (mut left, mut right) = (*self, *other);
        loop {
            for pieces in [&mut left, &mut right] {
                if pieces.head.is_empty() {
                    *pieces = Pieces {
                        head: pieces.tail,
                        tail: &[],
                    };
                }
            }
            let common = left.head.len().min(right.head.len());
            if common == 0 {
                return left.head.len().cmp(&right.head.len());
            }
            let (left_now, left_later) = left.head.split_at(common);
            let (right_now, right_later) = right.head.split_at(common);
            match left_now.cmp(right_now) {
                Ordering::Equal => (left.head, right.head) = (left_later, right_later),
                decided => return decided,
            }
        }
    }
}

impl PartialOrd for Pieces<'_> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Pieces<'_> {
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len() && self.cmp(other) == Ordering::Equal
    }
}

impl Eq for Pieces<'_> {}

impl fmt::Debug for Pieces<'_> {
    /// Shows the length only: values must not be logged (I10).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

/// Appends a field `kvs` without value to `out`, of the fields before it, and of the lease if that is kept.
pub(super) fn write_keys_only((prelude, lease): (&[u8], &[u8]), keep_lease: bool, out: &mut Vec<u8>) {
    let lease = if keep_lease { lease } else { &[] };
    put_kvs_head(prelude.len() + lease.len(), out);
    out.extend_from_slice(prelude);
    out.extend_from_slice(lease);
}

/// Appends tag and length of a field `kvs` to `out`.
pub(super) fn put_kvs_head(body: usize, out: &mut Vec<u8>) {
    out.push(KVS_TAG);
    put_varint(body as u64, out);
}

pub(super) fn field_len(body: usize) -> usize {
    1 + varint_len(body as u64) + body
}

/// Checks the encoding of a KeyValue; returns the range of its value, empty without one.
pub(super) fn check(message: &[u8]) -> Result<Range<usize>, MalformedKeyValue> {
    let mut at = 0;
    read(message, &mut at).ok_or(MalformedKeyValue {
        at,
        length: message.len(),
    })
}

fn read(message: &[u8], at: &mut usize) -> Option<Range<usize>> {
    let mut value = message.len()..message.len();
    let mut last_field = 0;
    while *at < message.len() {
        let tag = strict_varint(message, at)?;
        let (field, wire_type) = (tag >> 3, tag & 7);
        if field <= last_field || (last_field == 0 && tag != u64::from(KEY_TAG)) {
            return None;
        }
        last_field = field;
        match (field, wire_type) {
            (1 | 5, LENGTH_DELIMITED) => {
                let bytes = strict_bytes(message, at)?;
                if bytes.is_empty() {
                    return None;
                }
                if tag == u64::from(VALUE_TAG) {
                    value = *at - bytes.len()..*at;
                }
            }
            (2..=4 | 6, VARINT) => {
                debug_assert!(field != 6 || tag == u64::from(LEASE_TAG));
                if strict_varint(message, at)? == 0 {
                    return None;
                }
            }
            _ => return None,
        }
    }
    (last_field != 0).then_some(value)
}

/// Offset at which to cut an entry of `length` bytes whose value is at `value_start..value_end`; `None` to keep it
/// whole.
fn cut_at(length: usize, value_start: usize, value_end: usize) -> Option<usize> {
    let whole = class_bytes(ARC_HEADER_BYTES + length);
    if length < SPLIT_FROM_BYTES || whole - length <= length / 16 {
        return None;
    }
    let cut = class_bytes_within(length);
    let inside_value = value_start <= cut && cut <= value_end && cut < length;
    (inside_value && split_bytes(cut, length - cut) < whole).then_some(cut)
}

fn split_bytes(head: usize, tail: usize) -> usize {
    class_bytes(ARC_HEADER_BYTES + size_of::<Halves>()) + class_bytes(head) + class_bytes(tail)
}

#[cfg(test)]
mod tests;
