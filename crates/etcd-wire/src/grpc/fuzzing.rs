//! Fuzz target of the scanners: what they find in a response is what a decoder finds, wherever the response is cut.

use arbitrary::{Arbitrary, Unstructured};
use bytes::Bytes;
use prost::Message;

use super::frame::{PREFIX_BYTES, Prefix, framed};
use super::{
    EventScanner, HeaderScanner, MalformedResponse, Method, RangeResponseScanner, ResponseSummary, Scanned,
};
use crate::etcdserverpb::{Event, RangeResponse, RangeStreamResponse, ResponseHeader, WatchResponse};

#[derive(Arbitrary, Debug)]
struct Response {
    kind: Kind,
    messages: Vec<Content>,
    /// Bytes that are replaced, by position.
    damage: Vec<(u16, u8)>,
    cuts: Vec<u8>,
}

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq)]
enum Kind {
    Range,
    RangeStream,
    Watch,
}

#[derive(Arbitrary, Debug)]
struct Content {
    header: Option<[u64; 4]>,
    kvs: Vec<(u8, Vec<u8>)>,
    more: bool,
    count: u32,
}

impl Content {
    fn header(&self) -> Option<ResponseHeader> {
        let [cluster_id, member_id, revision, raft_term] = self.header?;
        Some(ResponseHeader {
            cluster_id,
            member_id,
            revision: revision.cast_signed(),
            raft_term,
            leader_id: raft_term,
        })
    }

    /// Key-values as etcd encodes them: a key, then the rest, whose bytes no scanner looks at.
    fn kvs(&self) -> impl Iterator<Item = (Vec<u8>, Bytes)> {
        self.kvs.iter().map(|(length, rest)| {
            let key = vec![b'k'; usize::from(*length) + 1];
            let mut kv = vec![0x0a];
            prost::encoding::encode_varint(key.len() as u64, &mut kv);
            kv.extend(&key);
            kv.extend(rest);
            (key, kv.into())
        })
    }

    fn range(&self) -> RangeResponse {
        RangeResponse {
            header: self.header(),
            kvs: self.kvs().map(|(_, kv)| kv).collect(),
            more: self.more,
            count: self.count.into(),
        }
    }

    fn watch(&self) -> WatchResponse {
        let event = |(_, kv)| Event {
            kv,
            ..Event::default()
        };
        WatchResponse {
            header: self.header(),
            watch_id: self.count.into(),
            created: self.more,
            events: self.kvs().map(event).collect(),
            ..WatchResponse::default()
        }
    }

    fn framed(&self, kind: Kind) -> Bytes {
        match kind {
            Kind::Range => framed(&self.range()),
            Kind::RangeStream => framed(&RangeStreamResponse {
                range_response: Some(self.range()),
            }),
            Kind::Watch => framed(&self.watch()),
        }
    }
}

/// A response of etcd, or a damaged one, through the scanners.
pub fn scanners(data: &[u8]) {
    let Ok(response) = Response::arbitrary_take_rest(Unstructured::new(data)) else {
        return;
    };
    let frames: Vec<Bytes> = response
        .messages
        .iter()
        .map(|content| content.framed(response.kind))
        .collect();
    let mut stream = frames.concat();
    for (at, byte) in &response.damage {
        if let Some(damaged) = stream.get_mut(usize::from(*at)) {
            *damaged = *byte;
        }
    }
    let is_whole = stream == frames.concat();
    let pieces = pieces(&stream, &response.cuts);
    if response.kind == Kind::Watch {
        check_events(&response, &stream, &pieces, is_whole);
    } else {
        check_range(&response, &stream, &pieces, is_whole);
    }
    check_headers(&response, &stream, &pieces, is_whole);
}

/// The stream cut into pieces of these lengths, and a rest.
fn pieces<'a>(stream: &'a [u8], cuts: &[u8]) -> Vec<&'a [u8]> {
    let (mut rest, mut pieces) = (stream, Vec::new());
    for length in cuts {
        let (piece, after) = rest.split_at(usize::from(*length).min(rest.len()));
        pieces.push(piece);
        rest = after;
    }
    pieces.push(rest);
    pieces
}

/// Findings of a scanner of Ranges, and the key-values that it keeps.
fn scanned(kind: Kind, pieces: &[&[u8]]) -> Result<(ResponseSummary, Vec<u8>), MalformedResponse> {
    let mut scanner = match kind {
        Kind::RangeStream => RangeResponseScanner::stream(),
        Kind::Range | Kind::Watch => RangeResponseScanner::unary(),
    };
    let mut kept = Vec::new();
    for piece in pieces {
        scanner.scan(piece, |range| kept.extend_from_slice(&piece[range]))?;
    }
    Ok((scanner.finish()?, kept))
}

fn check_range(response: &Response, stream: &[u8], pieces: &[&[u8]], is_whole: bool) {
    let found = scanned(response.kind, &[stream]);
    assert_eq!(found, scanned(response.kind, pieces), "it depends on the cuts");
    if is_whole {
        let contents = &response.messages;
        // etcd sends no empty header: its fields are never all zero.
        let is_empty = |content: &Content| content.header == Some([0; 4]);
        if contents.iter().any(is_empty) || contents.iter().all(|content| content.header.is_none()) {
            assert_eq!(found, Err(MalformedResponse));
            return;
        }
        let expected = expected(contents);
        assert_eq!(found.as_ref().map(|(summary, _)| summary), Ok(&expected));
    }
    // However damaged: what is kept are the key-values that a decoder finds.
    let (Ok((summary, kept)), Some(messages)) = (found, messages(stream)) else {
        return;
    };
    let decoded = messages.into_iter().map(|message| match response.kind {
        Kind::RangeStream => Some(
            RangeStreamResponse::decode(message)
                .ok()?
                .range_response
                .unwrap_or_default(),
        ),
        Kind::Range | Kind::Watch => RangeResponse::decode(message).ok(),
    });
    if let Some(decoded) = decoded.collect::<Option<Vec<_>>>() {
        let kvs: Vec<Bytes> = decoded.into_iter().flat_map(|response| response.kvs).collect();
        assert_eq!(summary.kvs, kvs.len() as u64);
        assert_eq!(RangeResponse::decode(&*kept).map(|kept| kept.kvs), Ok(kvs));
    }
}

fn expected(contents: &[Content]) -> ResponseSummary {
    let mut expected = ResponseSummary::default();
    for content in contents {
        if let Some(header) = content.header() {
            expected.header = header.encode_to_vec();
        }
        expected.more |= content.more;
        if content.count != 0 {
            expected.count = content.count.into();
        }
        for (key, _) in content.kvs() {
            expected.kvs += 1;
            expected.last_key = key;
        }
    }
    expected
}

/// The messages in `stream`; `None` if one is compressed or incomplete.
fn messages(mut stream: &[u8]) -> Option<Vec<&[u8]>> {
    let mut messages = Vec::new();
    while !stream.is_empty() {
        let prefix = Prefix::parse(stream).filter(|prefix| !prefix.is_compressed)?;
        let (message, rest) = stream[PREFIX_BYTES..].split_at_checked(prefix.length_bytes as usize)?;
        messages.push(message);
        stream = rest;
    }
    Some(messages)
}

fn check_events(response: &Response, stream: &[u8], pieces: &[&[u8]], is_whole: bool) {
    let count = |pieces: &[&[u8]]| {
        let mut scanner = EventScanner::default();
        pieces.iter().for_each(|piece| scanner.scan(piece));
        scanner.events()
    };
    let found = count(&[stream]);
    assert_eq!(found, count(pieces), "it depends on the cuts");
    if is_whole {
        let events: usize = response.messages.iter().map(|content| content.kvs.len()).sum();
        assert_eq!(found, events as u64);
    }
    let decoded = messages(stream).map(|messages| messages.into_iter().map(WatchResponse::decode).collect());
    if let Some(Ok::<Vec<_>, _>(decoded)) = decoded {
        let events: usize = decoded.iter().map(|response| response.events.len()).sum();
        // Fewer if a message has fields of a kind that no WatchResponse has.
        assert!(found <= events as u64, "{found} of {events}");
    }
}

fn check_headers(response: &Response, stream: &[u8], pieces: &[&[u8]], is_whole: bool) {
    let method = match response.kind {
        Kind::Range => Method::Range,
        Kind::RangeStream => Method::RangeStream,
        Kind::Watch => Method::Watch,
    };
    let scan = |pieces: &[&[u8]]| {
        let mut scanner = HeaderScanner::new(method)?;
        let mut found = Vec::new();
        for piece in pieces {
            scanner.scan(piece, |scanned| found.push(scanned));
        }
        Some((found, scanner.is_at_boundary()))
    };
    let found = scan(&[stream]);
    assert_eq!(found, scan(pieces), "it depends on the cuts");
    if is_whole {
        let headers = response.messages.iter().filter_map(Content::header);
        let shown = headers.filter(|header| header.revision > 0);
        let expected = shown.map(|header| Scanned::Header {
            cluster_id: header.cluster_id,
            revision: header.revision,
        });
        assert_eq!(found, Some((expected.collect(), true)));
    }
}
