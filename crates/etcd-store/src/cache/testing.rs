//! Helpers of tests and fuzz targets: a KeyValue encoded by prost, entries made from it, and strategies for property
//! tests.

#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "compiled for tests and fuzz targets only"
)]

#[cfg(test)]
mod strategies;

use etcd_wire::etcdserverpb::RangeRequest;
use prost::Message as _;

use super::{Entry, RangeQuery, StoredEntry};

#[cfg(test)]
pub(super) use strategies::{Remaking, key_value, number, packing, remaking};

/// The query that a request decodes to, unless it is refused.
pub fn query_of(request: &RangeRequest) -> RangeQuery {
    RangeQuery {
        key: request.key.clone(),
        range_end: request.range_end.clone(),
        limit: request.limit,
        revision: request.revision,
        sort_order: request.sort_order,
        sort_target: request.sort_target,
        serializable: request.serializable,
        keys_only: request.keys_only,
        count_only: request.count_only,
        min_mod_revision: request.min_mod_revision,
        max_mod_revision: request.max_mod_revision,
        min_create_revision: request.min_create_revision,
        max_create_revision: request.max_create_revision,
    }
}

/// etcd's KeyValue.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub create_revision: i64,
    #[prost(int64, tag = "3")]
    pub mod_revision: i64,
    #[prost(int64, tag = "4")]
    pub version: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub lease: i64,
}

impl KeyValue {
    pub fn new(key: impl Into<Vec<u8>>, revision: i64, value: impl Into<Vec<u8>>) -> KeyValue {
        let (key, value) = (key.into(), value.into());
        KeyValue {
            key,
            create_revision: revision,
            mod_revision: revision,
            version: 1,
            value,
            lease: 0,
        }
    }

    /// The `kv` of a delete's event.
    pub fn deleted(key: impl Into<Vec<u8>>, revision: i64) -> KeyValue {
        KeyValue {
            key: key.into(),
            mod_revision: revision,
            ..KeyValue::default()
        }
    }

    pub fn entry(&self) -> Entry {
        Entry::from_key_value(&self.encode_to_vec()).unwrap()
    }

    /// The encoded field `kvs` of a RangeResponse.
    pub fn field(&self) -> Vec<u8> {
        let mut field = vec![0x12];
        prost::encode_length_delimiter(self.encoded_len(), &mut field).unwrap();
        self.encode(&mut field).unwrap();
        field
    }
}

impl From<&Entry> for KeyValue {
    fn from(entry: &Entry) -> KeyValue {
        let encoded = entry.encoded().contiguous();
        let mut message = &encoded[1..];
        let length = prost::decode_length_delimiter(&mut message).unwrap();
        assert_eq!(message.len(), length);
        KeyValue::decode(message).unwrap()
    }
}

impl KeyValue {
    /// Whether `stored` is this one; by its digest if its value is not held.
    pub fn is(&self, stored: &StoredEntry) -> bool {
        stored.is_same(&self.entry())
    }
}

impl From<&StoredEntry> for KeyValue {
    fn from(stored: &StoredEntry) -> KeyValue {
        KeyValue::from(&stored.read().unwrap())
    }
}

/// Key number `index`. Keys have the order of their numbers and long common prefixes; some are a prefix of the next.
#[cfg(test)]
pub(super) fn key(index: usize) -> Vec<u8> {
    let mut key = format!("/registry/pods/namespace-{:03}/pod-{:04}", index / 300, index / 2).into_bytes();
    if index % 2 == 1 {
        key.push(if index.is_multiple_of(3) { 0x00 } else { 0xff });
    }
    key
}
