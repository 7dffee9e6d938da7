//! An incremental scanner of Range and RangeStream responses: from the messages, however they are cut, it collects what one
//! unary response needs (header, `more`, `count`) and where the key-values lie, which are not decoded.

use std::ops::Range;

use prost::Message as _;

use super::frame::{Prefix, PrefixReader};
use crate::etcdserverpb::ResponseHeader;

/// Tags of a RangeResponse: field number and wire type. A RangeStreamResponse holds one as its field 1.
const RESPONSE: u8 = 0x0a;
const HEADER: u8 = 0x0a;
const KVS: u8 = 0x12;
const MORE: u8 = 0x18;
const COUNT: u8 = 0x20;
/// A KeyValue begins with its key.
const KEY: u8 = 0x0a;
/// More than the longest header takes.
const MAX_HEADER_BYTES: u64 = 64;

/// The response is not encoded as etcd encodes it, so nothing may be concluded from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a Range response as etcd encodes it")]
pub struct MalformedResponse;

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

/// The scanner's position: always before the next byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum At {
    Prefix,
    Response,
    ResponseLength,
    Field,
    HeaderLength,
    Header { left: u64 },
    More,
    Count,
    KvLength,
    KeyTag { kv_left: u64 },
    KeyLength { kv_left: u64 },
    Key { left: u64, kv_left: u64 },
    Rest { left: u64 },
}

/// Scans the response to one Range or RangeStream, piece by piece.
#[derive(Debug)]
pub struct RangeResponseScanner {
    /// Whether the messages are RangeStreamResponses, which hold a RangeResponse each.
    wrapped: bool,
    at: At,
    prefix: PrefixReader,
    /// Bytes of the message that are still to come.
    left: u64,
    varint: u64,
    /// Bytes of the varint read so far.
    varint_bytes: u32,
    summary: ResponseSummary,
}

impl RangeResponseScanner {
    /// A scanner of the one message of a Range's response.
    #[must_use]
    pub fn unary() -> RangeResponseScanner {
        RangeResponseScanner {
            wrapped: false,
            at: At::Prefix,
            prefix: PrefixReader::default(),
            left: 0,
            varint: 0,
            varint_bytes: 0,
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
        let mut run = self.is_in_kv().then_some(0);
        let mut index = 0;
        while index < piece.len() {
            if !self.is_in_kv() {
                let is_kv = self.at == At::Field && piece[index] == KVS;
                match (run, is_kv) {
                    (None, true) => run = Some(index),
                    (Some(start), false) => {
                        keep(start..index);
                        run = None;
                    }
                    _ => {}
                }
            }
            index += self.step(&piece[index..])?;
        }
        if let Some(start) = run {
            keep(start..piece.len());
        }
        Ok(())
    }

    /// The summary at the end of the response.
    ///
    /// # Errors
    /// [`MalformedResponse`] if the last message is incomplete or no message had a header.
    pub fn finish(self) -> Result<ResponseSummary, MalformedResponse> {
        if self.at != At::Prefix || !self.prefix.is_empty() || self.summary.header.is_empty() {
            return Err(MalformedResponse);
        }
        Ok(self.summary)
    }

    /// Whether any byte of a message has been scanned.
    #[must_use]
    pub fn has_begun(&self) -> bool {
        self.at != At::Prefix
            || !self.prefix.is_empty()
            || self.summary.kvs > 0
            || !self.summary.header.is_empty()
    }

    fn is_in_kv(&self) -> bool {
        matches!(
            self.at,
            At::KvLength | At::KeyTag { .. } | At::KeyLength { .. } | At::Key { .. } | At::Rest { .. }
        )
    }

    /// Consumes at least one byte of `bytes`, which is not empty; returns how many.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, MalformedResponse> {
        if self.at == At::Prefix {
            return self.prefix(bytes);
        }
        // Within a message: nothing beyond its end is consumed.
        let bytes = &bytes[..bytes.len().min(usize::try_from(self.left).unwrap_or(usize::MAX))];
        let first = *bytes.first().ok_or(MalformedResponse)?;
        let mut taken = 1;
        match self.at {
            At::Prefix => {}
            At::Response => self.at = expect(first == RESPONSE, At::ResponseLength)?,
            At::Field => {
                self.at = match first {
                    HEADER => At::HeaderLength,
                    KVS => At::KvLength,
                    MORE => At::More,
                    COUNT => At::Count,
                    _ => return Err(MalformedResponse),
                };
            }
            At::ResponseLength => {
                if let Some(length) = self.varint(first)? {
                    self.at = expect(length == self.left - 1, At::Field)?;
                }
            }
            At::HeaderLength => {
                if let Some(length) = self.varint(first)? {
                    self.summary.header.clear();
                    self.at = expect(
                        (1..=MAX_HEADER_BYTES).contains(&length),
                        At::Header { left: length },
                    )?;
                }
            }
            At::More => {
                if let Some(value) = self.varint(first)? {
                    (self.summary.more, self.at) = (value != 0, At::Field);
                }
            }
            At::Count => {
                if let Some(value) = self.varint(first)? {
                    (self.summary.count, self.at) = (value, At::Field);
                }
            }
            At::KvLength => {
                if let Some(length) = self.varint(first)? {
                    self.summary.kvs += 1;
                    // Every key-value has a key, and the key comes first.
                    self.at = expect(length > 0 && length < self.left, At::KeyTag { kv_left: length })?;
                }
            }
            At::KeyTag { kv_left } => self.at = expect(first == KEY, At::KeyLength { kv_left: kv_left - 1 })?,
            At::KeyLength { kv_left } => {
                let kv_left = kv_left.checked_sub(1).ok_or(MalformedResponse)?;
                self.at = match self.varint(first)? {
                    None => At::KeyLength { kv_left },
                    Some(length) => {
                        self.summary.last_key.clear();
                        let rest = kv_left.checked_sub(length).ok_or(MalformedResponse)?;
                        expect(
                            length > 0,
                            At::Key {
                                left: length,
                                kv_left: rest,
                            },
                        )?
                    }
                };
            }
            At::Header { left } => {
                taken = at_most(bytes, left);
                self.summary.header.extend_from_slice(&bytes[..taken]);
                self.at = match left - taken as u64 {
                    0 => At::Field,
                    left => At::Header { left },
                };
            }
            At::Key { left, kv_left } => {
                taken = at_most(bytes, left);
                self.summary.last_key.extend_from_slice(&bytes[..taken]);
                self.at = match (left - taken as u64, kv_left) {
                    (0, 0) => At::Field,
                    (0, left) => At::Rest { left },
                    (left, kv_left) => At::Key { left, kv_left },
                };
            }
            At::Rest { left } => {
                taken = at_most(bytes, left);
                self.at = match left - taken as u64 {
                    0 => At::Field,
                    left => At::Rest { left },
                };
            }
        }
        self.left -= taken as u64;
        if self.left == 0 {
            self.at = expect(self.at == At::Field, At::Prefix)?;
        }
        Ok(taken)
    }

    fn prefix(&mut self, bytes: &[u8]) -> Result<usize, MalformedResponse> {
        let (taken, prefix) = self.prefix.read(bytes);
        if let Some(Prefix {
            is_compressed,
            length_bytes,
        }) = prefix
        {
            self.left = length_bytes.into();
            let begin = if self.wrapped { At::Response } else { At::Field };
            // An empty message has no fields.
            let next = if self.left == 0 { At::Prefix } else { begin };
            self.at = expect(!is_compressed, next)?;
        }
        Ok(taken)
    }

    /// Consumes a byte of a varint; returns the number after its last byte.
    fn varint(&mut self, byte: u8) -> Result<Option<u64>, MalformedResponse> {
        if self.varint_bytes >= 9 {
            return Err(MalformedResponse);
        }
        self.varint |= u64::from(byte & 0x7f) << (7 * self.varint_bytes);
        self.varint_bytes += 1;
        if byte & 0x80 != 0 {
            return Ok(None);
        }
        self.varint_bytes = 0;
        Ok(Some(std::mem::take(&mut self.varint)))
    }
}

fn expect(holds: bool, next: At) -> Result<At, MalformedResponse> {
    if holds { Ok(next) } else { Err(MalformedResponse) }
}

fn at_most(bytes: &[u8], most: u64) -> usize {
    bytes.len().min(usize::try_from(most).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::etcdserverpb::{RangeResponse, RangeStreamResponse};
    use crate::grpc::frame::framed;

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
