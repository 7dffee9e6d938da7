//! An incremental scanner of etcd's response headers in responses that pass through unchanged.
//!
//! Every etcd response message starts with its `ResponseHeader` as field 1 (RangeStream's one level deeper), so the first
//! few bytes of each message are enough.

use super::Method;
use super::frame::PrefixReader;

/// More than the longest header takes, with the tags and lengths around it.
const HEAD_BYTES: usize = 64;
/// Field 1, length-delimited.
const FIELD_1: u8 = 0x0a;

/// Revision that a response message shows its client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scanned {
    /// The store's revision.
    Header {
        /// Cluster that sent the response.
        cluster_id: u64,
        /// Revision of its store.
        revision: i64,
    },
    /// A compressed message: it may show any revision.
    Unreadable,
}

/// Scans the response to one call, piece by piece.
#[derive(Debug)]
pub struct HeaderScanner {
    /// How many messages deep the header is: 1, or 2 in a RangeStreamResponse.
    depth: u8,
    prefix: PrefixReader,
    /// Bytes of the current message that are still to come.
    remaining: usize,
    head: [u8; HEAD_BYTES],
    head_bytes: usize,
    is_compressed: bool,
}

impl HeaderScanner {
    /// A scanner for a response to `method`; `None` where responses carry no header of etcd's.
    #[must_use]
    pub fn new(method: Method) -> Option<HeaderScanner> {
        Some(HeaderScanner {
            depth: method.header_depth()?,
            prefix: PrefixReader::default(),
            remaining: 0,
            head: [0; HEAD_BYTES],
            head_bytes: 0,
            is_compressed: false,
        })
    }

    /// Whether the bytes so far end between two messages.
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        self.prefix.is_empty() && self.remaining == 0
    }

    /// Scans the next bytes; must be called before they are sent to the client (I11). `report` gets what each message shows,
    /// at once when it is known.
    pub fn scan(&mut self, mut data: &[u8], mut report: impl FnMut(Scanned)) {
        while !data.is_empty() {
            if self.remaining == 0 {
                let (taken, prefix) = self.prefix.read(data);
                data = &data[taken..];
                let Some(prefix) = prefix else {
                    return;
                };
                self.is_compressed = prefix.is_compressed;
                self.remaining = prefix.length_bytes as usize;
                self.head_bytes = 0;
                if self.is_compressed {
                    report(Scanned::Unreadable);
                }
                continue;
            }
            let taken = self.remaining.min(data.len());
            let (message, rest) = data.split_at(taken);
            if !self.is_compressed && self.head_bytes < HEAD_BYTES {
                let copied = (HEAD_BYTES - self.head_bytes).min(message.len());
                self.head[self.head_bytes..self.head_bytes + copied].copy_from_slice(&message[..copied]);
                self.head_bytes += copied;
                if self.head_bytes == HEAD_BYTES || copied == self.remaining {
                    if let Some((cluster_id, revision)) = header(&self.head[..self.head_bytes], self.depth) {
                        report(Scanned::Header { cluster_id, revision });
                    }
                    self.head_bytes = HEAD_BYTES;
                }
            }
            self.remaining -= taken;
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
    use super::*;
    use crate::etcdserverpb::{RangeResponse, RangeStreamResponse, ResponseHeader, WatchResponse};
    use crate::grpc::frame::framed;

    fn header_at(revision: i64) -> Option<ResponseHeader> {
        Some(ResponseHeader {
            cluster_id: u64::MAX,
            member_id: u64::MAX,
            revision,
            raft_term: u64::MAX,
        })
    }

    #[test]
    fn every_header_of_a_stream_is_reported_however_it_is_cut() {
        let mut stream = Vec::from(framed(&WatchResponse {
            header: header_at(7),
            created: true,
            ..Default::default()
        }));
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
            let mut scanner = HeaderScanner::new(Method::Watch).unwrap();
            let mut revisions = Vec::new();
            for piece in stream.chunks(size) {
                scanner.scan(piece, |scanned| match scanned {
                    Scanned::Header { cluster_id, revision } => {
                        assert_eq!(cluster_id, u64::MAX);
                        revisions.push(revision);
                    }
                    Scanned::Unreadable => panic!("nothing is compressed"),
                });
            }
            assert!(scanner.is_at_boundary());
            assert_eq!(revisions, [7, i64::MAX, 9], "{size}");
        }
    }

    #[test]
    fn header_is_reported_before_its_message_ends() {
        let message = framed(&WatchResponse {
            header: header_at(7),
            events: vec![crate::etcdserverpb::Event {
                kv: vec![7; 200].into(),
                ..Default::default()
            }],
            ..Default::default()
        });
        let mut scanner = HeaderScanner::new(Method::Watch).unwrap();
        let mut count = 0;
        scanner.scan(&message[..100], |_| count += 1);
        assert_eq!(count, 1);
        assert!(!scanner.is_at_boundary());
    }

    #[test]
    fn range_stream_header_is_one_level_deeper() {
        let response = RangeResponse {
            header: header_at(12),
            kvs: vec![vec![1; 100].into()],
            ..Default::default()
        };
        let message = framed(&RangeStreamResponse {
            range_response: Some(response),
        });
        let mut scanned = Vec::new();
        HeaderScanner::new(Method::RangeStream)
            .unwrap()
            .scan(&message, |found| scanned.push(found));
        let expected = Scanned::Header {
            cluster_id: u64::MAX,
            revision: 12,
        };
        assert_eq!(scanned, [expected]);
    }

    #[test]
    fn compressed_message_is_unreadable() {
        let mut scanned = Vec::new();
        let mut scanner = HeaderScanner::new(Method::EtcdUnary).unwrap();
        scanner.scan(&[1, 0, 0, 0, 2, 9], |found| scanned.push(found));
        assert_eq!(scanned, [Scanned::Unreadable]);
        assert!(!scanner.is_at_boundary());
    }
}
