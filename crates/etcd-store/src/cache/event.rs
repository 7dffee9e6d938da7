//! Encodes WatchResponses: the fields before the events, and events by reference to their entries.
//!
//! An [`Entry`] is already encoded as field 2 of a message, which is `kv` of an event; `prev_kv` is the same body under
//! another tag. An event therefore costs at most 24 bytes in addition to its entries.

use etcd_wire::protobuf::{put_varint, varint_len};

use super::event_log::{Change, ChangeKind};
use super::{answer::ResponseHeader, entry::Entry, rope::Rope};

const WATCH_ID_TAG: u8 = 0x10;
const CREATED_TAG: u8 = 0x18;
const CANCELED_TAG: u8 = 0x20;
const COMPACT_REVISION_TAG: u8 = 0x28;
const CANCEL_REASON_TAG: u8 = 0x32;
const FRAGMENT_TAG: u8 = 0x38;
const EVENT_TAG: u8 = 0x5a;
/// Field `type` of an event, with the value DELETE.
const DELETE_TYPE: [u8; 2] = [0x08, 0x01];
const PREV_KV_TAG: u8 = 0x1a;
/// Length of the field `fragment` where it is set.
const FRAGMENT_BYTES: usize = 2;

/// The fields of a WatchResponse that precede its events. Zero, false and empty fields are left out, as protobuf does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WatchFields<'a> {
    /// Header.
    pub header: ResponseHeader,
    /// Id of the watcher; -1 for a response that is about no watcher.
    pub watch_id: i64,
    /// Response to a create request.
    pub created: bool,
    /// The watcher has ended.
    pub canceled: bool,
    /// Lowest revision that etcd has not compacted, if that is why the watcher has ended.
    pub compact_revision: i64,
    /// Why the watcher has ended.
    pub cancel_reason: &'a str,
    /// More events of the same revision follow in the next response.
    pub fragment: bool,
}

impl WatchFields<'_> {
    /// Length of the encoded fields, in bytes.
    pub fn encoded_len(&self) -> usize {
        let number = |value: i64| {
            if value == 0 {
                0
            } else {
                1 + varint_len(value.cast_unsigned())
            }
        };
        let flag = |value: bool| 2 * usize::from(value);
        let reason = if self.cancel_reason.is_empty() {
            0
        } else {
            field_len(self.cancel_reason.len())
        };
        field_len(self.header.len())
            + number(self.watch_id)
            + flag(self.created)
            + flag(self.canceled)
            + number(self.compact_revision)
            + reason
            + flag(self.fragment)
    }

    /// Appends the encoded fields to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.header.write(out);
        for (tag, value) in [
            (WATCH_ID_TAG, self.watch_id),
            (CREATED_TAG, i64::from(self.created)),
            (CANCELED_TAG, i64::from(self.canceled)),
            (COMPACT_REVISION_TAG, self.compact_revision),
        ] {
            if value != 0 {
                out.push(tag);
                put_varint(value.cast_unsigned(), out);
            }
        }
        if !self.cancel_reason.is_empty() {
            out.push(CANCEL_REASON_TAG);
            put_varint(self.cancel_reason.len() as u64, out);
            out.extend_from_slice(self.cancel_reason.as_bytes());
        }
        if self.fragment {
            out.extend_from_slice(&[FRAGMENT_TAG, 1]);
        }
    }
}

/// Event as a watcher gets it.
#[derive(Clone, Copy, Debug)]
pub struct WatchEvent<'a> {
    change: &'a Change,
    /// The pair before the event, for a watcher that asked for it.
    prev: Option<&'a Entry>,
}

impl<'a> WatchEvent<'a> {
    /// The event of `change`, with the pair that it replaced if the watcher asked for that.
    pub fn new(change: &'a Change, with_prev_kv: bool) -> WatchEvent<'a> {
        WatchEvent {
            change,
            prev: change.replaced.as_ref().filter(|_| with_prev_kv),
        }
    }

    /// Length of the encoded field `events` with this event, in bytes.
    pub fn encoded_len(&self) -> usize {
        field_len(self.body_len())
    }

    /// Appends the field `events` with this event to `rope`.
    pub fn write(&self, rope: &mut Rope) {
        rope.write(|slab| {
            slab.push(EVENT_TAG);
            put_varint(self.body_len() as u64, slab);
            slab.extend_from_slice(self.kind());
        });
        rope.push(&self.change.entry);
        if let Some(prev) = self.prev {
            rope.push_with_tag(PREV_KV_TAG, prev);
        }
    }

    /// The encoded field `type`, which is left out for a put.
    fn kind(&self) -> &'static [u8] {
        match self.change.kind {
            ChangeKind::Put => &[],
            ChangeKind::Delete => &DELETE_TYPE,
        }
    }

    fn body_len(&self) -> usize {
        self.kind().len() + self.change.entry.encoded_len() + self.prev.map_or(0, Entry::encoded_len)
    }
}

/// Numbers of events per response in which etcd sends events of these encoded `lengths` to a watcher that asked for
/// fragments: one response if they fit `max_bytes`, otherwise as many events in each as fit, at least one. `fields` are
/// those of the response with `fragment` false.
pub fn fragments(fields: &WatchFields<'_>, lengths: &[usize], max_bytes: usize) -> Vec<usize> {
    let head = fields.encoded_len();
    let whole = lengths
        .iter()
        .fold(head, |sum, length| sum.saturating_add(*length));
    if lengths.len() < 2 || whole < max_bytes {
        return vec![lengths.len()];
    }
    let mut counts = Vec::new();
    let (mut count, mut size) = (0, head + FRAGMENT_BYTES);
    for length in lengths {
        if count > 0 && size.saturating_add(*length) >= max_bytes {
            counts.push(count);
            (count, size) = (0, head + FRAGMENT_BYTES);
        }
        count += 1;
        size = size.saturating_add(*length);
    }
    counts.push(count);
    counts
}

fn field_len(body: usize) -> usize {
    1 + varint_len(body as u64) + body
}

#[cfg(test)]
mod tests;
