use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::cache::testing::{number, query_of};

const NEWEST: Dialect = Dialect {
    keys_only_has_lease: false,
    unknown_sort_is_refused: true,
};

fn decode(message: &[u8]) -> Result<RangeQuery, Undecodable> {
    RangeQuery::decode(Bytes::copy_from_slice(message))
}

fn signed() -> impl Strategy<Value = i64> {
    prop_oneof![3 => Just(0), 3 => number(), 1 => any::<i64>()]
}

prop_compose! {
    fn request()(
        key in prop::collection::vec(any::<u8>(), 0..40),
        range_end in prop::collection::vec(any::<u8>(), 0..40),
        numbers in prop::array::uniform6(signed()),
        sort in prop::array::uniform2(prop_oneof![-2..6, any::<i32>()]),
        flags in any::<[bool; 3]>(),
    ) -> RangeRequest {
        let [limit, revision, min_mod_revision, max_mod_revision, min_create_revision, max_create_revision] = numbers;
        let [sort_order, sort_target] = sort;
        let [serializable, keys_only, count_only] = flags;
        RangeRequest {
            key: key.into(),
            range_end: range_end.into(),
            limit, revision, sort_order, sort_target, serializable, keys_only, count_only,
            min_mod_revision, max_mod_revision, min_create_revision, max_create_revision,
        }
    }
}

proptest! {
    #[test]
    fn requests_decode_like_protobuf(request in request()) {
        prop_assert_eq!(decode(&request.encode_to_vec()), Ok(query_of(&request)));
    }

    /// A damaged message that is accepted decodes to the same fields by protobuf, and has neither repeated fields nor
    /// padding.
    #[test]
    fn accepted_messages_have_one_meaning(
        request in request(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..3_u8), 0..4),
    ) {
        let mut message = request.encode_to_vec();
        for (index, byte, how) in damage {
            let at = index.index(message.len() + 1);
            match how {
                0 if at < message.len() => message[at] = byte,
                1 if at < message.len() => drop(message.remove(at)),
                _ => message.insert(at, byte),
            }
        }
        if let Ok(query) = decode(&message) {
            let read = RangeRequest::decode(message.as_slice());
            prop_assert_eq!(read.map(|read| query_of(&read)), Ok(query));
        }
    }
}

#[test]
fn fields_decode_in_any_order() {
    let query = decode(&[0x40, 0x01, 0x12, 0x01, b'b', 0x18, 0x07, 0x0a, 0x01, b'a']).unwrap();
    assert_eq!(
        (&*query.key, &*query.range_end, query.limit, query.keys_only),
        (&b"a"[..], &b"b"[..], 7, true)
    );
    assert_eq!(query.interval(), Interval::Range(b"a", b"b"));
}

#[test]
fn ambiguous_messages_are_rejected() {
    let refused: [(&str, &[u8]); 14] = [
        ("an explicitly empty range_end", &[0x0a, 0x01, b'a', 0x12, 0x00]),
        ("a key twice", &[0x0a, 0x01, b'a', 0x0a, 0x01, b'a']),
        ("a limit twice", &[0x0a, 0x01, b'a', 0x18, 0x01, 0x18, 0x01]),
        ("an unknown field", &[0x0a, 0x01, b'a', 0x70, 0x01]),
        ("field 0", &[0x00, 0x01]),
        ("a group", &[0x0a, 0x01, b'a', 0x1b, 0x1c]),
        ("a limit of 64 fixed bits", &[0x19, 0, 0, 0, 0, 0, 0, 0, 1]),
        ("a key that is a number", &[0x08, 0x01]),
        ("a limit that is bytes", &[0x1a, 0x01, 0x01]),
        ("an overlong varint", &[0x18, 0x81, 0x00]),
        ("an overlong tag", &[0x98, 0x00, 0x01]),
        (
            "more than 64 bits",
            &[0x18, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x02],
        ),
        ("a key beyond the end", &[0x0a, 0x02, b'a']),
        ("a varint cut short", &[0x18, 0x80]),
    ];
    for (what, message) in refused {
        assert_eq!(decode(message), Err(Undecodable), "{what}");
    }
    assert_eq!(decode(&[]), Ok(RangeQuery::default()));
}

#[test]
fn unknown_sort_target_is_found_around_groups_that_etcd_skips() {
    let key = b"\x0a\x01a";
    for unknown in [
        &b"\x30\x09\x7b\x30\x01\x7c"[..],
        b"\x7b\x7b\x30\x01\x7c\x30\x01\x7c\x30\x09",
        b"\x30\x09\x7b\x0a\x00\x7c",
    ] {
        assert!(names_unknown_sort_target(&[key, unknown].concat()), "{unknown:?}");
    }
    for other in [&b"\x30\x01\x7b\x30\x09\x7c"[..], b"\x30\x09\x7b", b"\x30\x09\x7c"] {
        assert!(!names_unknown_sort_target(&[key, other].concat()), "{other:?}");
    }
}

#[test]
fn numbers_are_truncated_like_in_protobuf() {
    // 2^32 + 2 as an enum is 2; any number but 0 as a bool is true.
    let query = decode(&[0x28, 0x82, 0x80, 0x80, 0x80, 0x10, 0x38, 0x02]).unwrap();
    assert_eq!((query.sort_order, query.serializable), (2, true));
}

#[test]
fn keys_reference_the_message() {
    let message = Bytes::from_static(&[0x0a, 0x03, b'k', b'e', b'y']);
    let query = RangeQuery::decode(message.clone()).unwrap();
    assert!(std::ptr::eq(query.key.as_ptr(), &message[2]));
}

#[test]
fn range_ends_have_etcds_meaning() {
    let of = |key: &'static [u8], range_end: &'static [u8]| RangeQuery {
        key: Bytes::from_static(key),
        range_end: Bytes::from_static(range_end),
        ..RangeQuery::default()
    };
    assert_eq!(of(b"a", b"").interval(), Interval::Single(b"a"));
    assert_eq!(of(b"a", b"\0").interval(), Interval::From(b"a"));
    assert_eq!(of(b"\0", b"\0").interval(), Interval::From(b"\0"));
    assert_eq!(of(b"a", b"\0\0").interval(), Interval::Range(b"a", b"\0\0"));
    assert_eq!(of(b"b", b"a").interval(), Interval::Range(b"b", b"a"));
}

#[test]
fn unknown_sort_options_are_refused_by_version() {
    let old = Dialect::of_version(3, 5);
    assert_eq!(
        old,
        Dialect {
            keys_only_has_lease: true,
            unknown_sort_is_refused: false
        }
    );
    assert_eq!(
        Dialect::of_version(3, 6),
        Dialect {
            keys_only_has_lease: true,
            unknown_sort_is_refused: true
        }
    );
    assert_eq!(Dialect::of_version(3, 7), NEWEST);
    assert_eq!(Dialect::of_version(4, 0), NEWEST);

    let query = |key: &'static [u8], sort_order, sort_target| RangeQuery {
        key: Bytes::from_static(key),
        sort_order,
        sort_target,
        ..RangeQuery::default()
    };
    for (order, target) in [(0, 0), (1, 4), (2, 3)] {
        assert_eq!(query(b"a", order, target).check(&NEWEST), Ok(()));
        assert_eq!(query(b"a", order, target).check(&old), Ok(()));
    }
    for (order, target) in [(3, 0), (-1, 1)] {
        assert_eq!(
            query(b"a", order, target).check(&NEWEST),
            Err(QueryError::InvalidSortOption)
        );
        assert_eq!(query(b"a", order, target).check(&old), Ok(()));
    }
    for (order, target) in [(0, 5), (1, -1), (7, 9)] {
        assert_eq!(
            query(b"a", order, target).check(&NEWEST),
            Err(QueryError::InvalidSortOption)
        );
        assert_eq!(
            query(b"a", order, target).check(&old),
            Err(QueryError::InvalidSortOption)
        );
    }
    assert_eq!(query(b"", 9, 9).check(&NEWEST), Err(QueryError::EmptyKey));
    assert_eq!(
        QueryError::EmptyKey.to_string(),
        "etcdserver: key is not provided"
    );
    assert_eq!(
        QueryError::InvalidSortOption.to_string(),
        "etcdserver: invalid sort option"
    );
}

fn list() -> RangeQuery {
    RangeQuery {
        key: "k".into(),
        range_end: "l".into(),
        ..RangeQuery::default()
    }
}

#[test]
fn queries_that_a_stream_answers_differently_are_not_streamable() {
    for streamable in [
        list(),
        RangeQuery {
            sort_order: 1,
            ..list()
        },
        RangeQuery {
            keys_only: true,
            limit: 5000,
            revision: 7,
            ..list()
        },
    ] {
        assert!(streamable.is_streamable(), "{streamable:?}");
    }
    for other in [
        RangeQuery {
            range_end: Bytes::new(),
            ..list()
        },
        RangeQuery {
            count_only: true,
            ..list()
        },
        RangeQuery {
            sort_order: 2,
            ..list()
        },
        RangeQuery {
            sort_order: 9,
            ..list()
        },
        RangeQuery {
            sort_target: 3,
            ..list()
        },
        RangeQuery {
            min_mod_revision: 1,
            ..list()
        },
    ] {
        assert!(!other.is_streamable(), "{other:?}");
    }
}

#[test]
fn intervals_without_a_small_limit_are_large() {
    let with_limit = |limit| RangeQuery { limit, ..list() };
    assert!(with_limit(0).is_large());
    assert!(with_limit(-1).is_large());
    assert!(with_limit(1000).is_large());
    assert!(!with_limit(999).is_large());
    let get = RangeQuery {
        key: "k".into(),
        ..RangeQuery::default()
    };
    assert!(!get.is_large());
}

#[test]
fn pages_have_a_limit_and_key_order() {
    let page = RangeQuery { limit: 1, ..list() };
    assert!(page.is_page());
    assert!(!list().is_page());
    let sorted = RangeQuery {
        sort_target: 3,
        ..page
    };
    assert!(!sorted.is_page());
    assert!(!sorted.may_page());
    assert!(list().may_page());
}
