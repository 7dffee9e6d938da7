//! Walks through the messages of a Range's or a RangeStream's answer as they come, however they are cut, and finds what
//! makes one answer of them: the header, `more`, `count`, and the bytes of the key-values, which are not decoded.

use bytes::Bytes;
use prost::Message as _;

use super::message::PREFIX_BYTES;
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

/// The answer is not written as etcd writes it, so nothing may be concluded from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not an answer as etcd writes it")]
pub(super) struct Malformed;

/// What an answer has come to.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Found {
    /// As it came.
    pub(super) header: Vec<u8>,
    pub(super) more: bool,
    pub(super) count: u64,
    /// How many key-values there were.
    pub(super) kvs: u64,
    pub(super) last_key: Vec<u8>,
}

impl Found {
    /// The header, decoded.
    pub(super) fn header(&self) -> Result<ResponseHeader, Malformed> {
        ResponseHeader::decode(&*self.header).map_err(|_| Malformed)
    }
}

/// Where the walk stands: always before the next byte.
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

/// See the module.
#[derive(Debug)]
pub(super) struct RangeResponseScanner {
    /// Whether the answers are a stream's.
    wrapped: bool,
    at: At,
    prefix: [u8; PREFIX_BYTES],
    prefix_have: usize,
    /// Bytes of the message that are still to come.
    left: u64,
    varint: u64,
    varint_have: u32,
    found: Found,
}

impl RangeResponseScanner {
    /// Through the one message of a Range's answer.
    pub(super) fn unary() -> RangeResponseScanner {
        RangeResponseScanner {
            wrapped: false,
            at: At::Prefix,
            prefix: [0; PREFIX_BYTES],
            prefix_have: 0,
            left: 0,
            varint: 0,
            varint_have: 0,
            found: Found::default(),
        }
    }

    /// Through the messages of a RangeStream's.
    pub(super) fn stream() -> RangeResponseScanner {
        RangeResponseScanner {
            wrapped: true,
            ..RangeResponseScanner::unary()
        }
    }

    /// Looks at the next bytes, and hands on those that are key-values with their tags and lengths.
    pub(super) fn see(&mut self, piece: &Bytes, mut keep: impl FnMut(Bytes)) -> Result<(), Malformed> {
        // Key-values that follow one another are kept as one slice.
        let mut run = self.is_in_kv().then_some(0);
        let mut index = 0;
        while index < piece.len() {
            if !self.is_in_kv() {
                let goes_on = self.at == At::Field && piece[index] == KVS;
                match (run, goes_on) {
                    (None, true) => run = Some(index),
                    (Some(start), false) => {
                        keep(piece.slice(start..index));
                        run = None;
                    }
                    _ => {}
                }
            }
            index += self.step(&piece[index..])?;
        }
        if let Some(start) = run {
            keep(piece.slice(start..));
        }
        Ok(())
    }

    /// Whether messages have come and the last one is whole; what they came to.
    pub(super) fn end(self) -> Result<Found, Malformed> {
        if self.at != At::Prefix || self.prefix_have > 0 || self.found.header.is_empty() {
            return Err(Malformed);
        }
        Ok(self.found)
    }

    /// Whether anything has come.
    pub(super) fn has_begun(&self) -> bool {
        self.at != At::Prefix || self.prefix_have > 0 || self.found.kvs > 0 || !self.found.header.is_empty()
    }

    fn is_in_kv(&self) -> bool {
        matches!(
            self.at,
            At::KvLength | At::KeyTag { .. } | At::KeyLength { .. } | At::Key { .. } | At::Rest { .. }
        )
    }

    /// Takes one byte or more of `bytes`, which is not empty; returns how many.
    fn step(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        if self.at == At::Prefix {
            return self.prefix(bytes);
        }
        // Within a message: whatever is taken must be in it.
        let bytes = &bytes[..bytes.len().min(usize::try_from(self.left).unwrap_or(usize::MAX))];
        let first = *bytes.first().ok_or(Malformed)?;
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
                    _ => return Err(Malformed),
                };
            }
            At::ResponseLength => {
                if let Some(length) = self.varint(first)? {
                    self.at = expect(length == self.left - 1, At::Field)?;
                }
            }
            At::HeaderLength => {
                if let Some(length) = self.varint(first)? {
                    self.found.header.clear();
                    self.at = expect(
                        (1..=MAX_HEADER_BYTES).contains(&length),
                        At::Header { left: length },
                    )?;
                }
            }
            At::More => {
                if let Some(value) = self.varint(first)? {
                    (self.found.more, self.at) = (value != 0, At::Field);
                }
            }
            At::Count => {
                if let Some(value) = self.varint(first)? {
                    (self.found.count, self.at) = (value, At::Field);
                }
            }
            At::KvLength => {
                if let Some(length) = self.varint(first)? {
                    self.found.kvs += 1;
                    // Every key-value has a key, and the key comes first.
                    self.at = expect(length > 0 && length < self.left, At::KeyTag { kv_left: length })?;
                }
            }
            At::KeyTag { kv_left } => self.at = expect(first == KEY, At::KeyLength { kv_left: kv_left - 1 })?,
            At::KeyLength { kv_left } => {
                let kv_left = kv_left.checked_sub(1).ok_or(Malformed)?;
                self.at = match self.varint(first)? {
                    None => At::KeyLength { kv_left },
                    Some(length) => {
                        self.found.last_key.clear();
                        let rest = kv_left.checked_sub(length).ok_or(Malformed)?;
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
                self.found.header.extend_from_slice(&bytes[..taken]);
                self.at = match left - taken as u64 {
                    0 => At::Field,
                    left => At::Header { left },
                };
            }
            At::Key { left, kv_left } => {
                taken = at_most(bytes, left);
                self.found.last_key.extend_from_slice(&bytes[..taken]);
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

    fn prefix(&mut self, bytes: &[u8]) -> Result<usize, Malformed> {
        let taken = at_most(bytes, (PREFIX_BYTES - self.prefix_have) as u64);
        self.prefix[self.prefix_have..self.prefix_have + taken].copy_from_slice(&bytes[..taken]);
        self.prefix_have += taken;
        if self.prefix_have == PREFIX_BYTES {
            let [compressed, length @ ..] = self.prefix;
            self.prefix_have = 0;
            self.left = u32::from_be_bytes(length).into();
            let begin = if self.wrapped { At::Response } else { At::Field };
            // An empty message says nothing.
            let next = if self.left == 0 { At::Prefix } else { begin };
            self.at = expect(compressed == 0, next)?;
        }
        Ok(taken)
    }

    /// Takes a byte of a varint; the number, if that was its last one.
    fn varint(&mut self, byte: u8) -> Result<Option<u64>, Malformed> {
        if self.varint_have >= 9 {
            return Err(Malformed);
        }
        self.varint |= u64::from(byte & 0x7f) << (7 * self.varint_have);
        self.varint_have += 1;
        if byte & 0x80 != 0 {
            return Ok(None);
        }
        self.varint_have = 0;
        Ok(Some(std::mem::take(&mut self.varint)))
    }
}

fn expect(holds: bool, next: At) -> Result<At, Malformed> {
    if holds { Ok(next) } else { Err(Malformed) }
}

fn at_most(bytes: &[u8], most: u64) -> usize {
    bytes.len().min(usize::try_from(most).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::etcdserverpb::{RangeResponse, RangeStreamResponse};
    use crate::proxy::message::framed;

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

    fn walk(mut walk: RangeResponseScanner, bytes: &[u8], cut: usize) -> Result<(Found, Vec<u8>), Malformed> {
        let mut kept = Vec::new();
        for piece in bytes.chunks(cut) {
            walk.see(&Bytes::copy_from_slice(piece), |run| kept.extend_from_slice(&run))?;
        }
        Ok((walk.end()?, kept))
    }

    #[test]
    fn a_stream_is_one_answer_however_it_is_cut() {
        let (bytes, kvs) = stream();
        for cut in [1, 2, 3, 7, 64, 1000, bytes.len()] {
            let (found, kept) = walk(RangeResponseScanner::stream(), &bytes, cut).unwrap();
            assert_eq!(kept, kvs, "{cut}");
            assert_eq!(found.header().unwrap(), header());
            assert_eq!((found.more, found.count, found.kvs), (true, 300, 5));
            assert_eq!(found.last_key, b"e");
        }
    }

    #[test]
    fn runs_of_key_values_are_kept_in_one_slice() {
        let (bytes, _) = stream();
        let mut runs = 0;
        RangeResponseScanner::stream()
            .see(&Bytes::from(bytes), |_| runs += 1)
            .unwrap();
        assert_eq!(runs, 3);
    }

    #[test]
    fn a_unary_answer_is_walked_too() {
        let response = RangeResponse {
            header: Some(header()),
            kvs: vec![kv("a", 0), kv("b", 5)],
            more: false,
            count: 2,
        };
        let (found, _) = walk(RangeResponseScanner::unary(), &framed(&response), 4).unwrap();
        assert_eq!((found.more, found.count, found.kvs), (false, 2, 2));
        assert_eq!(found.last_key, b"b");
    }

    #[test]
    fn what_etcd_would_not_write_is_malformed() {
        let (bytes, _) = stream();
        assert_eq!(
            walk(RangeResponseScanner::stream(), &bytes[..bytes.len() - 1], 64),
            Err(Malformed),
            "cut off"
        );
        assert_eq!(
            walk(RangeResponseScanner::unary(), &bytes, 64),
            Err(Malformed),
            "one level too deep"
        );
        let mut compressed = bytes.clone();
        compressed[0] = 1;
        assert_eq!(
            walk(RangeResponseScanner::stream(), &compressed, 64),
            Err(Malformed)
        );
        assert_eq!(
            walk(RangeResponseScanner::stream(), &[], 1),
            Err(Malformed),
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
                walk(RangeResponseScanner::unary(), &framed, 1),
                Err(Malformed),
                "{message:?}"
            );
        }
    }
}
