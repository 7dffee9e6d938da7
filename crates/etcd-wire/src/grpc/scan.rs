//! Readers of responses that pass through unchanged: etcd's header in each message, the result of a write, and the number of events
//! of a watch.
//!
//! Every etcd response message starts with its `ResponseHeader` as field 1 (RangeStream's one level deeper), so the first
//! few bytes of each message are enough.

use bytes::Bytes;
use prost::Message as _;

use super::Method;
use super::frame::{MessageReader, Part, Prefix, PrefixReader};
use crate::etcdserverpb::{DeleteRangeResponse, PutResponse, ResponseHeader, TxnResponse};
use crate::protobuf::{FieldReader, Fields, Malformed, Value, to_usize};

/// Twice the longest header of etcd 3.8, with the tags and lengths around it.
const HEAD_BYTES: usize = 128;
/// Fields of a ResponseHeader.
const CLUSTER_ID: u64 = 1;
const REVISION: u64 = 3;

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
    /// The message is compressed: it may show any revision.
    Compressed,
    /// The header cannot be read: it may show any revision.
    Malformed,
}

/// Scans the response to one call, piece by piece.
#[derive(Debug)]
pub struct HeaderScanner {
    /// Nesting depth of the header, in messages: 1, or 2 in a RangeStreamResponse.
    depth: u8,
    messages: MessageReader,
    head: [u8; HEAD_BYTES],
    /// Bytes of `head` that have arrived, or [`HEAD_BYTES`] if no more are needed.
    head_bytes: usize,
}

impl HeaderScanner {
    /// A scanner for a response to `method`; `None` where responses carry no header of etcd's.
    #[must_use]
    pub fn new(method: Method) -> Option<HeaderScanner> {
        Some(HeaderScanner {
            depth: method.header_depth()?,
            messages: MessageReader::default(),
            head: [0; HEAD_BYTES],
            head_bytes: 0,
        })
    }

    /// Whether the bytes so far end between two messages.
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        self.messages.is_at_boundary()
    }

    /// Scans the next bytes; must be called before they are sent to the client (I11). `report` gets what each message shows,
    /// at once when it is known.
    pub fn scan(&mut self, mut data: &[u8], mut report: impl FnMut(Scanned)) {
        while let Some(part) = self.messages.next(&mut data) {
            match part {
                Part::Prefix(Prefix {
                    is_compressed: true, ..
                }) => {
                    report(Scanned::Compressed);
                    self.head_bytes = HEAD_BYTES;
                }
                Part::Prefix(_) => self.head_bytes = 0,
                Part::Message(part) if self.head_bytes < HEAD_BYTES => {
                    let copied = (HEAD_BYTES - self.head_bytes).min(part.len());
                    self.head[self.head_bytes..self.head_bytes + copied].copy_from_slice(&part[..copied]);
                    self.head_bytes += copied;
                    if self.head_bytes == HEAD_BYTES || self.messages.is_at_boundary() {
                        match header(&self.head[..self.head_bytes], self.depth) {
                            Ok(Some((cluster_id, revision))) => {
                                report(Scanned::Header { cluster_id, revision })
                            }
                            Ok(None) => {}
                            Err(Malformed) => report(Scanned::Malformed),
                        }
                        self.head_bytes = HEAD_BYTES;
                    }
                }
                Part::Message(_) => {}
            }
        }
    }
}

/// `cluster_id` and `revision` of the header at the start of `message`, of which only the beginning may be there; `None`
/// where there is no revision. Fields that a newer etcd has in addition are skipped.
fn header(message: &[u8], depth: u8) -> Result<Option<(u64, i64)>, Malformed> {
    let mut fields = Fields::new(message);
    for level in 1..=depth {
        // Fields are encoded in order: a message that begins with another one has no header.
        let Some((1, Value::Bytes(inner))) = fields.next().transpose()? else {
            return Ok(None);
        };
        // Of a message around the header, only the beginning is needed.
        if level == depth && fields.is_cut_off() {
            return Err(Malformed);
        }
        fields = Fields::new(inner);
    }
    let (mut cluster_id, mut revision) = (0, 0);
    for field in fields {
        match field? {
            (CLUSTER_ID, Value::Number(number)) => cluster_id = number,
            (REVISION, Value::Number(number)) => revision = number.cast_signed(),
            _ => {}
        }
    }
    Ok((revision > 0).then_some((cluster_id, revision)))
}

/// Longest response that is decoded, in bytes.
const MAX_RESPONSE_BYTES: usize = 64 << 10;

/// Result of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Written {
    /// Cluster that has written.
    pub cluster_id: u64,
    /// Its revision after the write.
    pub revision: i64,
    /// Whether the write has changed anything, so that this revision is its own.
    pub has_changed: bool,
}

/// Result that the response to a call of `method` shows, if `data` is the whole of it, uncompressed and short. `None` also
/// for a transaction that has changed nothing, and for methods that write no keys.
#[must_use]
pub fn written(method: Method, data: &Bytes) -> Option<Written> {
    if data.len() > MAX_RESPONSE_BYTES {
        return None;
    }
    let (taken, prefix) = PrefixReader::default().read(data);
    let prefix = prefix.filter(|prefix| !prefix.is_compressed)?;
    let message = data.slice(taken..);
    if message.len() != prefix.length_bytes as usize {
        return None;
    }
    let (header, has_changed) = match method {
        Method::Put => (PutResponse::decode(message).ok()?.header, true),
        Method::DeleteRange => {
            let response = DeleteRangeResponse::decode(message).ok()?;
            (response.header, response.deleted > 0)
        }
        Method::Txn => {
            let response = TxnResponse::decode(message).ok()?;
            // One that only reads may be answered by one member alone.
            if !has_changed(&response) {
                return None;
            }
            (response.header, true)
        }
        _ => return None,
    };
    let ResponseHeader {
        cluster_id, revision, ..
    } = header?;
    Some(Written {
        cluster_id,
        revision,
        has_changed,
    })
}

fn has_changed(transaction: &TxnResponse) -> bool {
    transaction.responses.iter().any(|response| {
        response.response_put.is_some()
            || response
                .response_delete_range
                .as_ref()
                .is_some_and(|response| response.deleted > 0)
            || response.response_txn.as_ref().is_some_and(has_changed)
    })
}

/// Field `events` of a WatchResponse.
const EVENTS: u64 = 11;

/// Counts events piece by piece; pieces may be cut anywhere.
#[derive(Debug, Default)]
pub struct EventScanner {
    messages: MessageReader,
    fields: FieldReader,
    /// Bytes of the current value, or of an unreadable message, that are skipped.
    skip: usize,
    events: u64,
}

impl EventScanner {
    /// Events so far.
    #[must_use]
    pub fn events(&self) -> u64 {
        self.events
    }

    /// Scans the next bytes.
    pub fn scan(&mut self, mut data: &[u8]) {
        while let Some(part) = self.messages.next(&mut data) {
            match part {
                Part::Prefix(prefix) => {
                    self.fields = FieldReader::default();
                    self.skip = if prefix.is_compressed { usize::MAX } else { 0 };
                }
                Part::Message(part) => self.scan_message(part),
            }
        }
    }

    fn scan_message(&mut self, mut part: &[u8]) {
        loop {
            let skipped = self.skip.min(part.len());
            part = &part[skipped..];
            self.skip -= skipped;
            if part.is_empty() {
                return;
            }
            match self.fields.read(&mut part) {
                Ok(None | Some((_, Value::Number(_)))) => {}
                Ok(Some((number, Value::Bytes(length)))) => {
                    self.events += u64::from(number == EVENTS);
                    self.skip = to_usize(length);
                }
                Ok(Some((_, Value::Fixed(length)))) => self.skip = to_usize(length),
                Err(Malformed) => self.skip = usize::MAX,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::*;
    use crate::etcdserverpb::{
        RangeResponse, RangeStreamResponse, ResponseHeader, ResponseOp, WatchResponse,
    };
    use crate::grpc::frame::framed;

    fn header_at(revision: i64) -> Option<ResponseHeader> {
        Some(ResponseHeader {
            cluster_id: u64::MAX,
            member_id: u64::MAX,
            revision,
            raft_term: u64::MAX,
            leader_id: u64::MAX,
        })
    }

    /// Findings of the scanner in a unary response with this message.
    fn scanned(message: &[u8]) -> Vec<Scanned> {
        let mut framed = vec![0, 0, 0, 0, u8::try_from(message.len()).unwrap()];
        framed.extend(message);
        let mut scanned = Vec::new();
        let mut scanner = HeaderScanner::new(Method::EtcdUnary).unwrap();
        scanner.scan(&framed, |found| scanned.push(found));
        assert!(scanner.is_at_boundary());
        scanned
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
                    other => panic!("{other:?}"),
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
        scanner.scan(&message[..150], |_| count += 1);
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
    fn fields_of_a_newer_etcd_are_skipped() {
        let (known, later) = (&[0x08, 7, 0x18, 0x96, 0x01][..], &[0x20, 2][..]);
        for (what, unknown) in [
            ("number", &[0x28, 0x80, 0x01][..]),
            ("number of a high field", &[0xa8, 0x06, 1]),
            ("bytes", &[0x32, 3, 1, 2, 3]),
            ("fixed 64", &[0x39, 1, 2, 3, 4, 5, 6, 7, 8]),
            ("fixed 32", &[0x3d, 1, 2, 3, 4]),
            ("nothing", &[]),
        ] {
            let orders = [
                [known, later, unknown],
                [unknown, known, later],
                [known, unknown, later],
            ];
            for header in orders.map(|order| order.concat()) {
                let mut message = vec![0x0a, u8::try_from(header.len()).unwrap()];
                message.extend(&header);
                // A key-value after the header.
                message.extend([0x12, 2, 0x0a, 0]);
                let expected = Scanned::Header {
                    cluster_id: 7,
                    revision: 150,
                };
                assert_eq!(scanned(&message), [expected], "{what}: {message:?}");
            }
        }
    }

    #[test]
    fn header_that_cannot_be_read_is_reported() {
        let long = [&[0x0a, 0x82, 0x01, 0x18, 9, 0x32, 126][..], &[b'x'; 126]].concat();
        for (what, message) in [
            ("group", &[0x0a, 3, 0x18, 9, 0x2b][..]),
            ("cut off in a number", &[0x0a, 3, 0x18, 9, 0x28]),
            ("cut off in bytes", &[0x0a, 4, 0x18, 9, 0x32, 2]),
            ("longer than its message", &[0x0a, 9, 0x18, 9]),
            ("longer than what is kept", &long),
        ] {
            assert_eq!(scanned(message), [Scanned::Malformed], "{what}");
        }
        for (what, message) in [
            ("empty", &[][..]),
            ("no header", &[0x12, 2, 0x0a, 0]),
            ("no revision", &[0x0a, 2, 0x08, 7]),
        ] {
            assert_eq!(scanned(message), [], "{what}");
        }
    }

    #[test]
    fn compressed_message_is_unreadable() {
        let mut scanned = Vec::new();
        let mut scanner = HeaderScanner::new(Method::EtcdUnary).unwrap();
        scanner.scan(&[1, 0, 0, 0, 2, 9], |found| scanned.push(found));
        assert_eq!(scanned, [Scanned::Compressed]);
        assert!(!scanner.is_at_boundary());
    }

    fn header() -> Option<ResponseHeader> {
        Some(ResponseHeader {
            cluster_id: 7,
            revision: 9,
            ..ResponseHeader::default()
        })
    }

    fn transaction(responses: Vec<ResponseOp>) -> Bytes {
        framed(&TxnResponse {
            header: header(),
            responses,
        })
    }

    fn delete(deleted: i64) -> Option<DeleteRangeResponse> {
        Some(DeleteRangeResponse {
            header: header(),
            deleted,
        })
    }

    #[test]
    fn changes_are_recognized() {
        let at = |has_changed| {
            Some(Written {
                cluster_id: 7,
                revision: 9,
                has_changed,
            })
        };
        let put = framed(&PutResponse { header: header() });
        assert_eq!(written(Method::Put, &put), at(true));
        assert_eq!(
            written(Method::DeleteRange, &framed(&delete(0).unwrap())),
            at(false)
        );
        assert_eq!(
            written(Method::DeleteRange, &framed(&delete(2).unwrap())),
            at(true)
        );
        let read = ResponseOp::default();
        let deleted = |deleted| ResponseOp {
            response_delete_range: delete(deleted),
            ..ResponseOp::default()
        };
        let nested = |deletes| ResponseOp {
            response_txn: Some(TxnResponse {
                header: None,
                responses: vec![deleted(deletes)],
            }),
            ..ResponseOp::default()
        };
        for (responses, expected) in [
            (vec![read.clone(), deleted(0), nested(0)], None),
            (vec![read.clone(), deleted(1)], at(true)),
            (vec![nested(1)], at(true)),
        ] {
            assert_eq!(written(Method::Txn, &transaction(responses)), expected);
        }
    }

    #[test]
    fn parts_and_compressed_responses_show_nothing() {
        let put = framed(&PutResponse { header: header() });
        assert_eq!(written(Method::Put, &put.slice(..put.len() - 1)), None);
        assert_eq!(written(Method::Put, &put.slice(..3)), None);
        let mut compressed = put.to_vec();
        compressed[0] = 1;
        assert_eq!(written(Method::Put, &compressed.into()), None);
    }

    #[test]
    fn events_are_counted_wherever_pieces_are_cut() {
        let mut stream = Vec::new();
        for events in [0, 3, 0, 200] {
            let response = WatchResponse {
                header: Some(ResponseHeader {
                    cluster_id: u64::MAX,
                    revision: 300,
                    ..ResponseHeader::default()
                }),
                watch_id: 1 << 40,
                cancel_reason: "x".repeat(events),
                events: vec![Default::default(); events],
                ..WatchResponse::default()
            };
            let message = response.encode_to_vec();
            stream.push(0);
            stream.extend(u32::try_from(message.len()).unwrap().to_be_bytes());
            stream.extend(message);
        }
        // A compressed message is passed over.
        stream.extend([1, 0, 0, 0, 3, 0x5a, 0x5a, 0x5a]);
        for size in [1, 2, 3, 7, 4096] {
            let mut scanner = EventScanner::default();
            stream.chunks(size).for_each(|piece| scanner.scan(piece));
            assert_eq!(scanner.events(), 203, "{size}");
            assert!(scanner.messages.is_at_boundary(), "{size}");
        }
    }
}
