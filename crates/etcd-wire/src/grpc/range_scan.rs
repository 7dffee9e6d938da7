//! An incremental scanner of Range and RangeStream responses: from the messages, however they are cut, it collects what one
//! unary response needs (header, `more`, `count`) and where the key-values lie, which are not decoded.

use std::ops::Range;

use prost::Message as _;

use super::frame::{MessageReader, Part};
use crate::etcdserverpb::ResponseHeader;
use crate::protobuf::{FieldReader, Malformed, Value, to_usize};

/// First byte of a key-value, as etcd encodes it: field 2 of a RangeResponse, length-delimited.
const KVS: u8 = 0x12;
/// More than the longest header takes.
const MAX_HEADER_BYTES: usize = 64;

/// The response is not encoded as etcd encodes it, so nothing may be concluded from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a Range response as etcd encodes it")]
pub struct MalformedResponse;

impl From<Malformed> for MalformedResponse {
    fn from(_: Malformed) -> MalformedResponse {
        MalformedResponse
    }
}

/// Totals over all messages of one response.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ResponseSummary {
    /// The encoded `ResponseHeader`.
    pub header: Vec<u8>,
    /// The field `more`: the limit cut the response off.
    pub more: bool,
    /// The field `count`: keys in the whole range.
    pub count: u64,
    /// Number of key-values in the response.
    pub kvs: u64,
    /// Key of the last key-value.
    pub last_key: Vec<u8>,
}

impl ResponseSummary {
    /// Decodes the header.
    ///
    /// # Errors
    /// [`MalformedResponse`] if it is not a `ResponseHeader`.
    pub fn header(&self) -> Result<ResponseHeader, MalformedResponse> {
        ResponseHeader::decode(&*self.header).map_err(|_| MalformedResponse)
    }
}

/// Position of the scanner in a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    /// Before the end of the tag and length of the RangeResponse in a RangeStreamResponse.
    Response,
    /// Between two fields of a RangeResponse, or before the value of one that is no key-value.
    Field,
    Header {
        left: usize,
    },
    /// Before the end of the tag and length of a key-value.
    KeyValue,
    /// Before the end of the tag and length of its key.
    KeyLength {
        kv_left: usize,
    },
    Key {
        left: usize,
        kv_left: usize,
    },
    Rest {
        left: usize,
    },
}

/// Scans the response to one Range or RangeStream, piece by piece.
#[derive(Debug)]
pub struct RangeResponseScanner {
    /// Whether the messages are RangeStreamResponses, which hold a RangeResponse each.
    wrapped: bool,
    messages: MessageReader,
    at: At,
    fields: FieldReader,
    summary: ResponseSummary,
}

impl RangeResponseScanner {
    /// A scanner of the one message of a Range's response.
    #[must_use]
    pub fn unary() -> RangeResponseScanner {
        RangeResponseScanner {
            wrapped: false,
            messages: MessageReader::default(),
            at: At::Field,
            fields: FieldReader::default(),
            summary: ResponseSummary::default(),
        }
    }

    /// A scanner of the messages of a RangeStream's response.
    #[must_use]
    pub fn stream() -> RangeResponseScanner {
        RangeResponseScanner {
            wrapped: true,
            ..RangeResponseScanner::unary()
        }
    }

    /// Scans the next bytes. `keep` gets the ranges of `piece` that hold key-values with their tags and lengths, one range
    /// for key-values that follow one another.
    ///
    /// # Errors
    /// [`MalformedResponse`]; the scanner is of no use afterwards.
    pub fn scan(
        &mut self,
        piece: &[u8],
        mut keep: impl FnMut(Range<usize>),
    ) -> Result<(), MalformedResponse> {
        let mut rest = piece;
        while let Some(part) = self.messages.next(&mut rest) {
            match part {
                Part::Prefix(prefix) if prefix.is_compressed => return Err(MalformedResponse),
                Part::Prefix(_) => self.at = if self.wrapped { At::Response } else { At::Field },
                Part::Message(part) => self.scan_message(part, piece.len() - rest.len(), &mut keep)?,
            }
        }
        Ok(())
    }

    /// Scans a part of a message that ends at `end` of its piece.
    fn scan_message(
        &mut self,
        mut part: &[u8],
        end: usize,
        keep: &mut impl FnMut(Range<usize>),
    ) -> Result<(), MalformedResponse> {
        let mut run = self.is_in_kv().then_some(end - part.len());
        while let Some(first) = part.first() {
            if self.is_between_fields() {
                let at = end - part.len();
                if *first == KVS {
                    run.get_or_insert(at);
                    self.at = At::KeyValue;
                } else if let Some(start) = run.take() {
                    keep(start..at);
                }
            }
            self.step(&mut part)?;
        }
        if self.messages.is_at_boundary() && !self.is_between_fields() {
            return Err(MalformedResponse);
        }
        if let Some(start) = run {
            keep(start..end);
        }
        Ok(())
    }

    /// The summary at the end of the response.
    ///
    /// # Errors
    /// [`MalformedResponse`] if the last message is incomplete or no message had a header.
    pub fn finish(self) -> Result<ResponseSummary, MalformedResponse> {
        if !self.messages.is_at_boundary() || self.summary.header.is_empty() {
            return Err(MalformedResponse);
        }
        Ok(self.summary)
    }

    /// Whether any byte of a message has been scanned.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        !self.messages.is_at_boundary() || self.summary.kvs > 0 || !self.summary.header.is_empty()
    }

    fn is_between_fields(&self) -> bool {
        self.at == At::Field && self.fields.is_empty()
    }

    fn is_in_kv(&self) -> bool {
        !matches!(self.at, At::Response | At::Field | At::Header { .. })
    }

    /// Takes at least one byte off the front of `part`, a part of a message that is not empty.
    fn step(&mut self, part: &mut &[u8]) -> Result<(), MalformedResponse> {
        self.at = match self.at {
            At::Response | At::Field | At::KeyValue => {
                let Some((number, value)) = self.fields.read(part)? else {
                    return Ok(());
                };
                self.begin(number, value, part.len() + self.messages.left())?
            }
            At::Header { left } => {
                let header = take(part, left);
                self.summary.header.extend_from_slice(header);
                match left - header.len() {
                    0 => At::Field,
                    left => At::Header { left },
                }
            }
            At::KeyLength { kv_left } => {
                let mut kv = &part[..kv_left.min(part.len())];
                let before = kv.len();
                let field = self.fields.read(&mut kv)?;
                let taken = before - kv.len();
                *part = &part[taken..];
                match (field, kv_left - taken) {
                    (None, 0) => return Err(MalformedResponse),
                    (None, kv_left) => At::KeyLength { kv_left },
                    (Some((1, Value::Bytes(length))), kv_left)
                        if (1..=kv_left).contains(&to_usize(length)) =>
                    {
                        self.summary.last_key.clear();
                        let left = to_usize(length);
                        At::Key {
                            left,
                            kv_left: kv_left - left,
                        }
                    }
                    _ => return Err(MalformedResponse),
                }
            }
            At::Key { left, kv_left } => {
                let key = take(part, left);
                self.summary.last_key.extend_from_slice(key);
                match (left - key.len(), kv_left) {
                    (0, 0) => At::Field,
                    (0, left) => At::Rest { left },
                    (left, kv_left) => At::Key { left, kv_left },
                }
            }
            At::Rest { left } => match left - take(part, left).len() {
                0 => At::Field,
                left => At::Rest { left },
            },
        };
        Ok(())
    }

    /// Position after the number of a field, or after the length of its value, behind which `left` bytes of the message
    /// follow.
    fn begin(&mut self, number: u64, value: Value<u64>, left: usize) -> Result<At, MalformedResponse> {
        let value = value.map(to_usize);
        match (self.at, number, value) {
            (At::Response, 1, Value::Bytes(length)) if length == left => Ok(At::Field),
            (At::Field, 1, Value::Bytes(length)) if (1..=MAX_HEADER_BYTES.min(left)).contains(&length) => {
                self.summary.header.clear();
                Ok(At::Header { left: length })
            }
            (At::Field, 3, Value::Number(more)) => {
                self.summary.more = more != 0;
                Ok(At::Field)
            }
            (At::Field, 4, Value::Number(count)) => {
                self.summary.count = count;
                Ok(At::Field)
            }
            // Every key-value has a key, and the key comes first.
            (At::KeyValue, _, Value::Bytes(length)) if (1..=left).contains(&length) => {
                self.summary.kvs += 1;
                Ok(At::KeyLength { kv_left: length })
            }
            _ => Err(MalformedResponse),
        }
    }
}

/// Takes at most `most` bytes off the front of `part`.
fn take<'a>(part: &mut &'a [u8], most: usize) -> &'a [u8] {
    let (taken, rest) = part.split_at(most.min(part.len()));
    *part = rest;
    taken
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::etcdserverpb::{RangeResponse, RangeStreamResponse};
    use crate::grpc::frame::framed;

    /// A KeyValue begins with its key.
    const KEY: u8 = 0x0a;

    /// A KeyValue: its key, and a value of `value_bytes`.
    fn kv(key: &str, value_bytes: usize) -> Bytes {
        let mut kv = vec![KEY, u8::try_from(key.len()).unwrap()];
        kv.extend_from_slice(key.as_bytes());
        if value_bytes > 0 {
            kv.push(0x2a);
            prost::encoding::encode_varint(value_bytes as u64, &mut kv);
            kv.resize(kv.len() + value_bytes, 0x12);
        }
        kv.into()
    }

    fn header() -> ResponseHeader {
        ResponseHeader {
            cluster_id: u64::MAX,
            member_id: 7,
            revision: i64::MAX,
            raft_term: 2,
            leader_id: 9,
        }
    }

    /// A stream of three chunks, and the kvs of all of them as one RangeResponse writes them.
    fn stream() -> (Vec<u8>, Vec<u8>) {
        let chunks = [
            vec![kv("a", 0), kv("b", 300)],
            vec![kv("c", 1), kv("d", 0)],
            vec![kv("e", 20_000)],
        ];
        let mut bytes = Vec::new();
        for (index, kvs) in chunks.iter().enumerate() {
            let is_last = index == 2;
            let response = RangeResponse {
                header: is_last.then(header),
                kvs: kvs.clone(),
                more: is_last,
                count: if is_last { 300 } else { 0 },
            };
            bytes.extend(framed(&RangeStreamResponse {
                range_response: Some(response),
            }));
        }
        let all = RangeResponse {
            kvs: chunks.concat(),
            ..RangeResponse::default()
        };
        (bytes, all.encode_to_vec())
    }

    fn scan(
        mut scanner: RangeResponseScanner,
        bytes: &[u8],
        cut: usize,
    ) -> Result<(ResponseSummary, Vec<u8>), MalformedResponse> {
        let mut kept = Vec::new();
        for piece in bytes.chunks(cut) {
            scanner.scan(piece, |run| kept.extend_from_slice(&piece[run]))?;
        }
        Ok((scanner.finish()?, kept))
    }

    #[test]
    fn stream_cut_anywhere_gives_the_same_summary() {
        let (bytes, kvs) = stream();
        for cut in [1, 2, 3, 7, 64, 1000, bytes.len()] {
            let (summary, kept) = scan(RangeResponseScanner::stream(), &bytes, cut).unwrap();
            assert_eq!(kept, kvs, "{cut}");
            assert_eq!(summary.header().unwrap(), header());
            assert_eq!((summary.more, summary.count, summary.kvs), (true, 300, 5));
            assert_eq!(summary.last_key, b"e");
        }
    }

    #[test]
    fn adjacent_key_values_are_one_range() {
        let (bytes, _) = stream();
        let mut runs = 0;
        RangeResponseScanner::stream()
            .scan(&bytes, |_| runs += 1)
            .unwrap();
        assert_eq!(runs, 3);
    }

    #[test]
    fn unary_response_is_scanned() {
        let response = RangeResponse {
            header: Some(header()),
            kvs: vec![kv("a", 0), kv("b", 5)],
            more: false,
            count: 2,
        };
        let (summary, _) = scan(RangeResponseScanner::unary(), &framed(&response), 4).unwrap();
        assert_eq!((summary.more, summary.count, summary.kvs), (false, 2, 2));
        assert_eq!(summary.last_key, b"b");
    }

    #[test]
    fn unexpected_encodings_are_malformed() {
        let (bytes, _) = stream();
        assert_eq!(
            scan(RangeResponseScanner::stream(), &bytes[..bytes.len() - 1], 64),
            Err(MalformedResponse),
            "cut off"
        );
        assert_eq!(
            scan(RangeResponseScanner::unary(), &bytes, 64),
            Err(MalformedResponse),
            "one level too deep"
        );
        let mut compressed = bytes.clone();
        compressed[0] = 1;
        assert_eq!(
            scan(RangeResponseScanner::stream(), &compressed, 64),
            Err(MalformedResponse)
        );
        assert_eq!(
            scan(RangeResponseScanner::stream(), &[], 1),
            Err(MalformedResponse),
            "no header"
        );
        // An unknown field, a key-value longer than its message, one without a key.
        for message in [
            &[0x28, 1][..],
            &[KVS, 9, KEY, 1, b'k'],
            &[KVS, 0],
            &[KVS, 2, 0x10, 1],
        ] {
            let mut framed = vec![0, 0, 0, 0, u8::try_from(message.len()).unwrap()];
            framed.extend_from_slice(message);
            assert_eq!(
                scan(RangeResponseScanner::unary(), &framed, 1),
                Err(MalformedResponse),
                "{message:?}"
            );
        }
    }
}
