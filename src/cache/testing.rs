//! Helpers of tests: a KeyValue encoded by prost, entries made from it, and strategies for property tests.

use proptest::prelude::*;
use prost::Message as _;

use super::Entry;

/// etcd's KeyValue.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub(crate) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub(crate) create_revision: i64,
    #[prost(int64, tag = "3")]
    pub(crate) mod_revision: i64,
    #[prost(int64, tag = "4")]
    pub(crate) version: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub(crate) lease: i64,
}

impl KeyValue {
    pub(crate) fn new(key: impl Into<Vec<u8>>, revision: i64, value: impl Into<Vec<u8>>) -> KeyValue {
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
    pub(crate) fn deleted(key: impl Into<Vec<u8>>, revision: i64) -> KeyValue {
        KeyValue {
            key: key.into(),
            mod_revision: revision,
            ..KeyValue::default()
        }
    }

    pub(crate) fn entry(&self) -> Entry {
        Entry::from_key_value(&self.encode_to_vec()).unwrap()
    }

    /// The encoded field `kvs` of a RangeResponse.
    pub(crate) fn field(&self) -> Vec<u8> {
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

/// Key number `index`. Keys have the order of their numbers and long common prefixes; some are a prefix of the next.
pub(super) fn key(index: usize) -> Vec<u8> {
    let mut key = format!("/registry/pods/namespace-{:03}/pod-{:04}", index / 300, index / 2).into_bytes();
    if index % 2 == 1 {
        key.push(if index.is_multiple_of(3) { 0x00 } else { 0xff });
    }
    key
}

/// Values of all relevant sizes: empty, short, around the threshold of copying, and large enough to be cut.
pub(super) fn value() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        3 => Just(0_usize),
        8 => 1_usize..200,
        2 => 900_usize..1200,
        1 => 4000_usize..70_000,
    ]
    .prop_flat_map(|length| any::<u8>().prop_map(move |byte| vec![byte; length]))
}

/// Revisions, versions and leases whose varints have every length.
pub(super) fn number() -> impl Strategy<Value = i64> {
    (any::<i64>(), 0..63_u32).prop_map(|(number, shift)| (number >> shift).saturating_abs())
}

prop_compose! {
    pub(super) fn key_value()(
        key in prop::collection::vec(any::<u8>(), 1..300),
        create_revision in number(),
        mod_revision in number(),
        version in number(),
        value in value(),
        lease in prop_oneof![Just(0), any::<i64>()],
    ) -> KeyValue {
        KeyValue { key, create_revision, mod_revision, version, value, lease }
    }
}
