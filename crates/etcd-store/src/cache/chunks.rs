//! The chunks of a RangeStream: one answer, divided as etcd divides it.
//!
//! The first chunk has up to 10 entries; then the number doubles or halves towards 1.5 MB, etcd's default limit of a
//! request. The layout is no contract, but clients that depend on etcd's find the same here. Each chunk is taken from
//! the same immutable [`Selection`] only when it is needed (I5).

use etcd_wire::protobuf::{put_varint, varint_len};

use super::answer::{Answer, ResponseHeader};
use super::selection::Selection;

/// Number of entries of the first chunk.
const FIRST_ENTRIES: u64 = 10;
/// Target size of a chunk in bytes.
const CHUNK_TARGET_BYTES: u64 = 3 << 19;
/// Tag of the field `range_response` of a RangeStreamResponse.
const RANGE_RESPONSE_TAG: u8 = 0x0a;

/// Number of entries per chunk, by etcd's rule: it doubles or halves towards 1.5 MB.
#[derive(Debug)]
pub struct ChunkSize {
    entries: u64,
}

impl Default for ChunkSize {
    fn default() -> ChunkSize {
        ChunkSize {
            entries: FIRST_ENTRIES,
        }
    }
}

impl ChunkSize {
    /// Largest number of entries of the next chunk.
    pub fn entries(&self) -> u64 {
        self.entries
    }

    /// Whether a chunk with this many entries and bytes is full, where its entries are copied together: such a chunk stays
    /// near the target size, however large its entries are.
    pub fn is_full(&self, entries: u64, bytes: u64) -> bool {
        entries >= self.entries || bytes >= CHUNK_TARGET_BYTES
    }

    /// Adapts the number to a chunk of `chunk_bytes` that has been cut.
    pub fn record(&mut self, chunk_bytes: u64) {
        if chunk_bytes < CHUNK_TARGET_BYTES / 2 {
            self.entries *= 2;
        } else if chunk_bytes > CHUNK_TARGET_BYTES * 2 {
            self.entries = (self.entries / 2).max(1);
        }
    }
}

/// Iterator over the remaining chunks of one answer.
#[derive(Debug)]
pub struct Chunks {
    header: ResponseHeader,
    /// Remaining entries; `None` after the last chunk.
    rest: Option<Selection>,
    size: ChunkSize,
}

impl Chunks {
    /// Chunks of `selection`; `header` goes into the last one.
    pub fn new(header: ResponseHeader, selection: Selection) -> Chunks {
        Chunks {
            header,
            rest: Some(selection),
            size: ChunkSize::default(),
        }
    }
}

impl Iterator for Chunks {
    type Item = Answer;

    /// RangeResponse of the next chunk, to be sent after its [`chunk_head`]. All but the last carry entries only; the
    /// last carries header, count and `more`, too.
    fn next(&mut self) -> Option<Answer> {
        let mut rest = self.rest.take()?;
        if rest.len() <= self.size.entries() {
            return Some(Answer::new(self.header, rest));
        }
        let chunk = Answer::entries_alone(rest.take_front(self.size.entries()));
        self.rest = Some(rest);
        self.size.record(chunk.len());
        Some(chunk)
    }
}

/// Head of a chunk whose RangeResponse has `response_bytes`: `prefix_bytes` zeroes for the caller to fill, and the tag
/// and length of a RangeStreamResponse.
pub fn chunk_head(prefix_bytes: usize, response_bytes: u64) -> Vec<u8> {
    let mut head = Vec::with_capacity(prefix_bytes + 1 + varint_len(response_bytes));
    head.resize(prefix_bytes, 0);
    head.push(RANGE_RESPONSE_TAG);
    put_varint(response_bytes, &mut head);
    head
}

#[cfg(test)]
mod tests {
    use bytes::{Buf as _, Bytes};
    use etcd_wire::etcdserverpb;
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::cache::{Dialect, RangeQuery, Selected, Tree, select, testing::KeyValue};

    const HEADER: ResponseHeader = ResponseHeader {
        cluster_id: 1,
        member_id: 2,
        revision: 3,
        raft_term: 4,
        leader_id: 5,
    };

    fn selection(sizes: &[usize], query: &RangeQuery) -> Selection {
        let kv = |(index, size): (usize, &usize)| {
            KeyValue::new(
                format!("key-{index:05}"),
                1 + index as i64,
                vec![index as u8; *size],
            )
        };
        let tree = Tree::from_sorted(sizes.iter().enumerate().map(kv).map(|kv| kv.entry()));
        let query = RangeQuery {
            key: Bytes::from_static(b"\0"),
            range_end: Bytes::from_static(b"\0"),
            ..query.clone()
        };
        match select(&tree, &query, &Dialect::of_version(3, 7)) {
            Selected::Answer(selection) => selection,
            _ => panic!("no ties here"),
        }
    }

    fn sent(answer: Answer) -> Vec<u8> {
        let mut answer = answer;
        let length = answer.len();
        let mut bytes = Vec::new();
        while let Some(mut piece) = answer.next_piece(10_000).unwrap() {
            bytes.extend_from_slice(&piece.copy_to_bytes(piece.remaining()));
        }
        assert_eq!(bytes.len() as u64, length, "the computed length");
        bytes
    }

    proptest! {
        #[test]
        fn merged_chunks_equal_the_unary_answer(
            sizes in prop::collection::vec(prop_oneof![8 => 0..200_usize, 1 => 100_000..700_000_usize], 0..80),
            limit in prop_oneof![Just(0), 1..90_i64],
            sort_target in prop_oneof![3 => Just(0), 1 => Just(3)],
            keys_only in any::<bool>(), count_only in any::<bool>(),
        ) {
            let query = RangeQuery { limit, sort_target, keys_only, count_only, ..RangeQuery::default() };
            let unary = Answer::new(HEADER, selection(&sizes, &query)).small(0).unwrap();
            let mut merged = etcdserverpb::RangeResponse::default();
            let mut chunks = Chunks::new(HEADER, selection(&sizes, &query));
            while let Some(chunk) = chunks.next() {
                let bytes = sent(chunk);
                let alone = etcdserverpb::RangeResponse::decode(bytes.as_slice()).unwrap();
                if chunks.rest.is_none() {
                    prop_assert!(alone.header.is_some());
                } else {
                    prop_assert!(alone.header.is_none() && !alone.more && alone.count == 0);
                    prop_assert!(!alone.kvs.is_empty());
                }
                merged.merge(bytes.as_slice()).unwrap();
            }
            prop_assert_eq!(merged.encode_to_vec(), unary);
        }
    }

    #[test]
    fn chunks_grow_and_shrink_towards_the_target() {
        let lengths = |sizes: &[usize]| {
            let all = selection(sizes, &RangeQuery::default());
            let entries = |chunk: Answer| chunk.selection().len();
            Chunks::new(HEADER, all).map(entries).collect::<Vec<_>>()
        };
        assert_eq!(lengths(&[]), [0]);
        assert_eq!(lengths(&[1; 10]), [10]);
        assert_eq!(lengths(&[1; 100]), [10, 20, 40, 30]);
        assert_eq!(lengths(&[400_000; 30]), [10, 5, 5, 5, 5]);
        assert_eq!(lengths(&[4_000_000; 17]), [10, 5, 2]);
    }

    #[test]
    fn chunk_head_makes_a_range_stream_response() {
        let response = Answer::new(HEADER, selection(&[300; 3], &RangeQuery::default()))
            .small(0)
            .unwrap();
        let framed = [chunk_head(5, response.len() as u64), response.clone()].concat();
        let decoded = etcdserverpb::RangeStreamResponse::decode(&framed[5..]).unwrap();
        assert_eq!(decoded.range_response.unwrap().encode_to_vec(), response);
    }
}
