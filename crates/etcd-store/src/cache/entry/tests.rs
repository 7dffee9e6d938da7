use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::cache::testing::{KeyValue, key_value};
use crate::cache::{StoredEntry, Summary};

proptest! {
    #[test]
    fn entry_has_the_bytes_and_fields_that_were_sent(kv in key_value()) {
        let entry = kv.entry();
        prop_assert_eq!(entry.encoded().contiguous(), kv.field());
        prop_assert_eq!(entry.encoded_len(), kv.field().len());
        prop_assert_eq!(entry.key(), &kv.key);
        prop_assert_eq!(entry.mod_revision(), kv.mod_revision);
        let fields = entry.fields();
        prop_assert_eq!(fields.value.contiguous(), kv.value.as_slice());
        let numbers = (fields.create_revision, fields.mod_revision, fields.version, fields.lease);
        prop_assert_eq!(fields.key, &kv.key);
        prop_assert_eq!(numbers, (kv.create_revision, kv.mod_revision, kv.version, kv.lease));
    }

    #[test]
    fn entries_are_equal_if_their_bytes_are(kv in key_value(), other in key_value()) {
        prop_assert_eq!(kv.entry(), kv.entry());
        prop_assert_eq!(kv.entry() == other.entry(), kv == other);
    }

    #[test]
    fn keys_only_encoding_equals_that_of_etcd(kv in key_value(), keep_lease: bool) {
        let expected = KeyValue { value: Vec::new(), lease: if keep_lease { kv.lease } else { 0 }, ..kv.clone() }.field();
        let entry = kv.entry();
        let mut sent = Vec::new();
        StoredEntry::from(entry.clone()).encode_keys_only(keep_lease, &mut sent);
        prop_assert_eq!(&sent, &expected);
        let Summary { encoded_bytes, keys_only_bytes, lease_bytes, .. } = Summary::of(&entry.clone().into());
        prop_assert_eq!(encoded_bytes, entry.encoded_len() as u64);
        prop_assert_eq!(keys_only_bytes + if keep_lease { lease_bytes } else { 0 }, expected.len() as u64);
    }

    /// Every accepted message is exactly the one that protobuf writes for its fields.
    #[test]
    fn only_canonical_messages_are_accepted(
        kv in key_value(),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 1..4),
    ) {
        let mut message = kv.encode_to_vec();
        for (index, byte, how) in cuts {
            let at = index.index(message.len().min(400));
            match how {
                0 => message[at] = byte,
                1 => message.insert(at, byte),
                _ => drop(message.remove(at)),
            }
            if message.is_empty() {
                message.push(byte);
            }
        }
        if let Ok(entry) = Entry::from_key_value(&message) {
            let decoded = KeyValue::decode(message.as_slice()).unwrap();
            prop_assert!(!decoded.key.is_empty());
            prop_assert_eq!(decoded.encode_to_vec(), message);
            prop_assert_eq!(KeyValue::from(&entry), decoded);
        }
    }

    #[test]
    fn pieces_compare_like_their_concatenation(
        left in prop::collection::vec(0..3_u8, 0..12),
        right in prop::collection::vec(0..3_u8, 0..12),
        cuts in any::<[prop::sample::Index; 2]>(),
    ) {
        let pieces = |bytes: &'static [u8], cut: prop::sample::Index| {
            let (head, tail) = bytes.split_at(cut.index(bytes.len() + 1));
            Pieces { head, tail }
        };
        let (left, right): (&[u8], &[u8]) = (left.leak(), right.leak());
        let (cut_left, cut_right) = (pieces(left, cuts[0]), pieces(right, cuts[1]));
        prop_assert_eq!(cut_left.cmp(&cut_right), left.cmp(right));
        prop_assert_eq!(cut_left == cut_right, left == right);
        prop_assert_eq!(cut_left.contiguous(), left);
        prop_assert_eq!(cut_left.len(), left.len());
    }
}

#[test]
fn malformed_key_values_are_refused() {
    let good = KeyValue::new("key", 7, "value").encode_to_vec();
    assert!(Entry::from_key_value(&good).is_ok());
    let with = |extra: &[u8]| [good.as_slice(), extra].concat();
    let refused: [(&str, Vec<u8>); 13] = [
        ("nothing", Vec::new()),
        ("no key", KeyValue::new("", 7, "value").encode_to_vec()),
        ("an explicitly empty key", vec![0x0a, 0x00, 0x10, 0x01]),
        ("a field twice", with(&[0x2a, 0x01, 0x61])),
        ("fields out of order", with(&[0x20, 0x01])),
        ("an unknown field", with(&[0x38, 0x01])),
        ("a zero lease", with(&[0x30, 0x00])),
        ("an overlong lease", with(&[0x30, 0x81, 0x00])),
        ("a lease as bytes", with(&[0x32, 0x01, 0x01])),
        ("an explicitly empty value", vec![0x0a, 0x01, 0x61, 0x2a, 0x00]),
        ("a cut message", good[..good.len() - 1].to_vec()),
        (
            "an endless length",
            vec![0x0a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x01],
        ),
        ("a key under an overlong tag", vec![0x8a, 0x00, 0x01, 0x61]),
    ];
    for (what, message) in refused {
        assert!(Entry::from_key_value(&message).is_err(), "{what} was accepted");
    }
}

#[test]
fn large_entries_waste_little() {
    assert_eq!(size_of::<Entry>(), 24);
    for length in (64..200_000).step_by(61) {
        let entry = KeyValue::new("/registry/pods/namespace/pod", 1 << 20, vec![b'v'; length]).entry();
        let (taken, stored) = (entry.memory_bytes() as usize, entry.encoded_len());
        let bound = if stored < SPLIT_FROM_BYTES {
            stored + stored / 4 + 32
        } else {
            stored + stored / 14
        };
        assert!(taken <= bound, "{taken} bytes for {stored}");
    }
    let entry = KeyValue::new("/registry/pods/namespace/pod", 1 << 20, vec![b'v'; 10_240]).entry();
    assert!(
        matches!(entry.0, Stored::Split(_)),
        "10 KiB and its key fit no size class"
    );
}

#[test]
fn entries_are_cut_only_within_the_value() {
    // A key so long that the size class would end inside it, and a lease directly after the boundary.
    let long_key = KeyValue {
        key: vec![b'k'; 10_300],
        ..KeyValue::new("", 1, "v")
    };
    let entry = long_key.entry();
    assert!(matches!(entry.0, Stored::Whole(_)));
    assert_eq!(KeyValue::from(&entry), long_key);
    for length in 10_200..10_240 {
        let leased = KeyValue {
            lease: i64::MAX,
            ..KeyValue::new("k", 1, vec![7; length])
        };
        let entry = leased.entry();
        assert_eq!(entry.fields().lease, i64::MAX);
        assert_eq!(KeyValue::from(&entry), leased);
    }
}

#[test]
fn debug_shows_no_value() {
    let entry = KeyValue::new("key", 7, "secret").entry();
    let shown = format!("{entry:?} {:?}", entry.fields());
    assert!(
        shown.contains("key") && !shown.contains("secret") && !shown.contains("115, 101"),
        "{shown}"
    );
}
