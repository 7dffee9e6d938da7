use bytes::{Buf as _, Bytes};
use etcd_wire::etcdserverpb;
use proptest::prelude::*;
use prost::Message as _;

use super::*;
use crate::cache::testing::{KeyValue, packing};
use crate::cache::{Dialect, Packing, RangeQuery, Selected, Tree, select};

const DIALECT: Dialect = Dialect {
    keys_only_has_lease: true,
    unknown_sort_is_refused: true,
};

fn selection(tree: &Tree, query: &RangeQuery) -> Selection {
    match select(tree, query, &DIALECT) {
        Selected::Answer(selection) => selection,
        _ => panic!("no ties here"),
    }
}

fn everything() -> RangeQuery {
    RangeQuery {
        key: Bytes::from_static(b"\0"),
        range_end: Bytes::from_static(b"\0"),
        ..RangeQuery::default()
    }
}

fn tree(sizes: &[usize]) -> Tree {
    loaded(sizes, Packing::Never)
}

fn loaded(sizes: &[usize], packing: Packing) -> Tree {
    let kv = |(index, size): (usize, &usize)| KeyValue {
        lease: (index % 3) as i64,
        ..KeyValue::new(
            format!("key-{index:05}"),
            1 + index as i64,
            vec![index as u8; *size],
        )
    };
    Tree::load(sizes.iter().enumerate().map(kv).map(|kv| kv.entry()), packing)
}

proptest! {
    #[test]
    fn pieces_concatenate_to_the_message_of_the_computed_length(
        sizes in prop::collection::vec(prop_oneof![8 => 0..200_usize, 2 => 900..1100_usize, 1 => 5000..50_000_usize], 0..300),
        limit in prop_oneof![Just(0), 1..400_i64],
        sort in prop_oneof![2 => Just((0, 0)), 1 => Just((2, 0)), 1 => Just((2, 3))],
        flags in any::<[bool; 2]>(),
        from in 0..300_usize,
        packing in packing(),
        target in prop_oneof![1..100_usize, 1000..300_000_usize],
        header in any::<[u64; 5]>(),
        zeroes in any::<[bool; 5]>(),
    ) {
        let [cluster_id, member_id, revision, raft_term, leader_id] = std::array::from_fn(|at| if zeroes[at] { 0 } else { header[at] });
        let header = ResponseHeader { cluster_id, member_id, revision: revision as i64, raft_term, leader_id };
        let query = RangeQuery {
            key: format!("key-{from:05}").into(),
            limit, sort_order: sort.0, sort_target: sort.1,
            keys_only: flags[0], count_only: flags[1],
            ..everything()
        };
        let tree = loaded(&sizes, packing);
        let whole = Answer::new(header, selection(&tree, &query)).small(0).unwrap();

        let mut answer = Answer::new(header, selection(&tree, &query));
        let length = answer.len();
        let mut pieced = Vec::new();
        let largest = 51_000;
        while let Some(mut piece) = answer.next_piece(target).unwrap() {
            prop_assert!(piece.has_remaining(), "an empty piece");
            prop_assert!(piece.remaining() <= target + largest);
            pieced.extend_from_slice(&piece.copy_to_bytes(piece.remaining()));
            // The tail is part of the last piece, so only that one may be short.
            prop_assert!(pieced.len() as u64 == length || pieced.len() >= target);
        }
        prop_assert!(answer.next_piece(target).unwrap().is_none());
        prop_assert_eq!(length, whole.len() as u64);
        prop_assert_eq!(&pieced, &whole);

        let response = etcdserverpb::RangeResponse::decode(whole.as_slice()).unwrap();
        let expected = etcdserverpb::ResponseHeader { cluster_id, member_id, revision: header.revision, raft_term, leader_id };
        prop_assert_eq!(response.header.as_ref(), Some(&expected));
        prop_assert_eq!(response.encode_to_vec(), whole);
    }
}

#[test]
fn prefix_bytes_precede_the_message() {
    let tree = tree(&[10, 20]);
    let header = ResponseHeader {
        revision: 7,
        ..ResponseHeader::default()
    };
    let plain = Answer::new(header, selection(&tree, &everything()))
        .small(0)
        .unwrap();
    let prefixed = Answer::new(header, selection(&tree, &everything()))
        .small(5)
        .unwrap();
    assert_eq!(prefixed[..5], [0; 5]);
    assert_eq!(prefixed[5..], plain);
    assert_eq!(
        prefixed.capacity(),
        prefixed.len(),
        "one allocation, of the right size"
    );
}

#[test]
fn answer_is_unaffected_by_later_changes() {
    let mut tree = tree(&[100; 500]);
    let mut answer = Answer::new(ResponseHeader::default(), selection(&tree, &everything()));
    let whole = Answer::new(ResponseHeader::default(), selection(&tree, &everything()))
        .small(0)
        .unwrap();
    let mut pieced = Vec::new();
    let mut removed = 0;
    while let Some(mut piece) = answer.next_piece(4000).unwrap() {
        pieced.extend_from_slice(&piece.copy_to_bytes(piece.remaining()));
        for _ in 0..30 {
            tree.remove(format!("key-{removed:05}").as_bytes());
            removed += 1;
        }
    }
    assert_eq!(pieced, whole);
}

#[test]
fn piece_takes_few_allocations() {
    let tree = tree(&[100; 5000]);
    let mut answer = Answer::new(ResponseHeader::default(), selection(&tree, &everything()));
    let mut pieces = 0;
    loop {
        let foretold = answer.slab_bytes(64 << 10);
        let Some(piece) = answer.next_piece(64 << 10).unwrap() else {
            break;
        };
        pieces += 1;
        let mut slices = [std::io::IoSlice::new(&[]); 32];
        let leaves = (64 << 10) / (32 * 110) + 2;
        assert!(
            piece.chunks_vectored(&mut slices) <= leaves,
            "small entries of a leaf lie in one block"
        );
        assert_eq!(piece.slab_capacity(), foretold, "the slab never grew");
    }
    assert!(pieces > 5);
}
