//! Reads the header of answers that pass through, without touching them (I11).
//!
//! Every etcd response message starts with its ResponseHeader as field 1 (RangeStream's one level deeper), so the first
//! few bytes of each message are enough.

use crate::mirror::cluster_state::ClusterState;

/// More than the longest header takes, with the tags and lengths around it.
const HEAD_BYTES: usize = 64;
const PREFIX_BYTES: usize = 5;
/// Field 1, length-delimited.
const FIELD_1: u8 = 0x0a;

/// Follows the messages of one response.
#[derive(Debug)]
pub(super) struct Passed {
    /// How many messages deep the header is: 1, or 2 in a RangeStreamResponse.
    depth: u8,
    prefix: [u8; PREFIX_BYTES],
    prefix_have: usize,
    /// Bytes of the current message that are still to come.
    remaining: usize,
    head: [u8; HEAD_BYTES],
    head_have: usize,
    compressed: bool,
}

impl Passed {
    /// For the response of the RPC at `path`; `None` where answers carry no header of etcd's.
    pub(super) fn of(path: &str) -> Option<Passed> {
        let depth = match path {
            "/etcdserverpb.KV/RangeStream" => 2,
            _ if path.starts_with("/etcdserverpb.") => 1,
            _ if path.starts_with("/v3lockpb.") || path.starts_with("/v3electionpb.") => 1,
            _ => return None,
        };
        Some(Passed {
            depth,
            prefix: [0; PREFIX_BYTES],
            prefix_have: 0,
            remaining: 0,
            head: [0; HEAD_BYTES],
            head_have: 0,
            compressed: false,
        })
    }

    /// Whether the stream stands between two messages.
    pub(super) fn at_boundary(&self) -> bool {
        self.prefix_have == 0 && self.remaining == 0
    }

    /// Looks at the next bytes that go to the client, before they go.
    pub(super) fn see(&mut self, mut data: &[u8], cluster_state: &ClusterState) {
        while !data.is_empty() {
            if self.remaining == 0 {
                let take = (PREFIX_BYTES - self.prefix_have).min(data.len());
                self.prefix[self.prefix_have..self.prefix_have + take].copy_from_slice(&data[..take]);
                self.prefix_have += take;
                data = &data[take..];
                if self.prefix_have < PREFIX_BYTES {
                    return;
                }
                let [flag, length @ ..] = self.prefix;
                self.compressed = flag != 0;
                self.remaining = u32::from_be_bytes(length) as usize;
                self.prefix_have = 0;
                self.head_have = 0;
                if self.compressed {
                    cluster_state.note_unreadable();
                }
                continue;
            }
            let take = self.remaining.min(data.len());
            let (message, rest) = data.split_at(take);
            if !self.compressed && self.head_have < HEAD_BYTES {
                let copy = (HEAD_BYTES - self.head_have).min(message.len());
                self.head[self.head_have..self.head_have + copy].copy_from_slice(&message[..copy]);
                self.head_have += copy;
                if self.head_have == HEAD_BYTES || copy == self.remaining {
                    if let Some((cluster_id, revision)) = header(&self.head[..self.head_have], self.depth) {
                        cluster_state.record_forwarded(cluster_id, revision);
                    }
                    self.head_have = HEAD_BYTES;
                }
            }
            self.remaining -= take;
            data = rest;
        }
    }
}

/// `cluster_id` and `revision` of the header at the start of `message`; `None` where there is none.
fn header(mut message: &[u8], depth: u8) -> Option<(u64, i64)> {
    for _ in 0..depth {
        let (tag, rest) = message.split_first()?;
        if *tag != FIELD_1 {
            return None;
        }
        let (length, rest) = varint(rest)?;
        message = rest.get(..usize::try_from(length).ok()?).unwrap_or(rest);
    }
    let (mut cluster_id, mut revision) = (0, 0);
    while let Some((tag, rest)) = message.split_first() {
        let (value, rest) = varint(rest)?;
        match tag {
            0x08 => cluster_id = value,
            0x18 => revision = value.cast_signed(),
            0x10 | 0x20 => {}
            _ => return None,
        }
        message = rest;
    }
    (revision > 0).then_some((cluster_id, revision))
}

fn varint(bytes: &[u8]) -> Option<(u64, &[u8])> {
    let mut value = 0_u64;
    for (index, byte) in bytes.iter().take(10).enumerate() {
        value |= u64::from(byte & 0x7f) << (7 * index);
        if byte & 0x80 == 0 {
            return Some((value, &bytes[index + 1..]));
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;
    use crate::etcdserverpb::{RangeResponse, RangeStreamResponse, ResponseHeader, WatchResponse};

    fn header_at(revision: i64) -> Option<ResponseHeader> {
        Some(ResponseHeader {
            cluster_id: u64::MAX,
            member_id: u64::MAX,
            revision,
            raft_term: u64::MAX,
        })
    }

    fn framed(message: &impl Message) -> Vec<u8> {
        let body = message.encode_to_vec();
        let mut out = vec![0];
        out.extend_from_slice(&u32::try_from(body.len()).unwrap().to_be_bytes());
        out.extend_from_slice(&body);
        out
    }

    #[test]
    fn every_header_of_a_stream_is_seen_however_it_is_cut() {
        let mut stream = framed(&WatchResponse {
            header: header_at(7),
            created: true,
            ..Default::default()
        });
        let events = vec![
            crate::etcdserverpb::Event {
                kv: vec![7; 200].into(),
                ..Default::default()
            };
            3
        ];
        stream.extend(framed(&WatchResponse {
            header: header_at(i64::MAX),
            events,
            ..Default::default()
        }));
        stream.extend(framed(&WatchResponse::default()));
        stream.extend(framed(&WatchResponse {
            header: header_at(9),
            ..Default::default()
        }));
        for size in [1, 2, 3, 5, 7, 64, 1000] {
            let cluster_state = ClusterState::default();
            let mut passed = Passed::of("/etcdserverpb.Watch/Watch").unwrap();
            let mut seen = Vec::new();
            for piece in stream.chunks(size) {
                passed.see(piece, &cluster_state);
                seen.push(cluster_state.min_served_revision().unwrap());
            }
            assert!(passed.at_boundary());
            assert_eq!(seen.last(), Some(&i64::MAX), "{size}");
            assert!(size > 40 || seen.contains(&7), "{size}: {seen:?}");
        }
    }

    #[test]
    fn a_range_stream_has_its_header_one_level_deeper() {
        let cluster_state = ClusterState::default();
        let kvs = vec![vec![1; 100].into()];
        let response = RangeResponse {
            header: header_at(12),
            kvs,
            ..Default::default()
        };
        let mut passed = Passed::of("/etcdserverpb.KV/RangeStream").unwrap();
        passed.see(
            &framed(&RangeStreamResponse {
                range_response: Some(response),
            }),
            &cluster_state,
        );
        assert_eq!(cluster_state.min_served_revision(), Some(12));
    }

    #[test]
    fn a_compressed_message_hides_the_floor() {
        let cluster_state = ClusterState::default();
        let mut passed = Passed::of("/etcdserverpb.KV/Put").unwrap();
        passed.see(&[1, 0, 0, 0, 2, 9], &cluster_state);
        assert_eq!(cluster_state.min_served_revision(), None);
        assert!(!passed.at_boundary());
    }
}
