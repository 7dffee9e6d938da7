//! A key-value of a load: the message that brought it, until its leaf is full.

use std::ops::Range;

use bytes::Bytes;

use super::entry::{self, Entry, KeyHead, MalformedKeyValue};

/// The body of a KeyValue message that was checked.
#[derive(Clone)]
pub(super) struct Arrived {
    pub(super) key_value: Bytes,
    /// Range of its value; empty without one.
    value: Range<usize>,
}

impl Arrived {
    /// Checks the body of a KeyValue message.
    pub(super) fn checked(key_value: Bytes) -> Result<Arrived, MalformedKeyValue> {
        let value = entry::check(&key_value)?;
        Ok(Arrived { key_value, value })
    }

    /// The entry in an allocation of its own.
    pub(super) fn alone(&self) -> Entry {
        Entry::alone(&self.key_value, self.value.clone())
    }

    /// Length of the field `kvs` with it, in bytes.
    pub(super) fn encoded_len(&self) -> usize {
        entry::field_len(self.key_value.len())
    }

    pub(super) fn key(&self) -> &[u8] {
        KeyHead::key_of(&self.key_value)
    }
}
