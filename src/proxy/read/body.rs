//! Bodies of responses from memory, produced piece by piece as the client reads (I5).

use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;

use super::scan::ScannedEntries;
use crate::proxy::response::{BodySource, Polled, ResponseBody};
use etcd_store::cache::{Answer, Chunks, CorruptBlock, JsonAnswer, Rope, chunk_head};
use etcd_wire::grpc::frame::{PREFIX_BYTES, put_prefix};
use etcd_wire::grpc::status::ok_trailers;
use rangecache_base::faults::{self, Fault};
use rangecache_edge::limits::HeldBytes;
use rangecache_mirror::HeldView;
use rangecache_mirror::view::Mirror;
use rangecache_upstream::BoxError;

/// Length of the pieces in which a response is produced, in bytes. A slow client holds at most one piece in addition to
/// its connection's buffers (I5).
const PIECE_BYTES: usize = 128 << 10;
/// Longest response or chunk that is produced as one piece, in bytes.
const SMALL_BYTES: u64 = 16 << 10;

/// Longest text that etcd sends with its length, in bytes: the buffer of Go's HTTP server.
const COUNTED_JSON_BYTES: usize = 2 << 10;

/// Location of a response's entries.
pub(in crate::proxy) enum EntrySource<'a> {
    /// In a view of this mirror; `is_past` for one at a past revision.
    Mirror {
        mirror: Option<&'a Mirror>,
        is_past: bool,
    },
    /// In the view of which they were found by a scan.
    Scanned(Box<ScannedEntries>),
    /// In a page series, counted by this budget.
    Series(HeldBytes),
}

type FrameResult = Result<Frame<Rope>, BoxError>;

/// Guard that keeps the entries of a response in memory.
#[derive(Debug)]
enum KeptEntries {
    View(Option<HeldView>),
    Scanned(Box<ScannedEntries>),
    Bytes { _held: HeldBytes },
}

impl EntrySource<'_> {
    /// Returns what was produced, and tells the mirror of a damaged value.
    fn checked<P>(&self, produced: Result<P, CorruptBlock>) -> Result<P, CorruptBlock> {
        match (&produced, self) {
            (
                Err(_),
                EntrySource::Mirror {
                    mirror: Some(mirror), ..
                },
            ) => mirror.report_damage(),
            (Err(_), EntrySource::Scanned(scanned)) => scanned.view.report_damage(),
            _ => {}
        }
        produced
    }

    fn keep(self) -> KeptEntries {
        match self {
            EntrySource::Mirror { mirror, is_past } => {
                KeptEntries::View(mirror.map(|mirror| mirror.hold_view(is_past)))
            }
            EntrySource::Scanned(scanned) => KeptEntries::Scanned(scanned),
            EntrySource::Series(held) => KeptEntries::Bytes { _held: held },
        }
    }
}

impl KeptEntries {
    fn view(&self) -> Option<&HeldView> {
        match self {
            KeptEntries::View(view) => view.as_ref(),
            KeptEntries::Scanned(scanned) => Some(&scanned.view),
            KeptEntries::Bytes { .. } => None,
        }
    }

    /// The frame of the next piece, or the end of a response that cannot be completed.
    fn framed<P>(&self, piece: Result<Option<P>, CorruptBlock>) -> Option<FrameResult>
    where
        Rope: From<P>,
    {
        match piece {
            Ok(piece) => piece.map(|piece| Ok(Frame::data(piece.into()))),
            Err(corrupt) => {
                if let Some(view) = self.view() {
                    view.report_damage();
                }
                Some(Err(corrupt.into()))
            }
        }
    }
}

/// Returns a body with `answer` as one gRPC message, then OK trailers. The message must be shorter than 4 GiB.
/// `entries` is what keeps them in memory until the body is dropped.
pub(super) fn unary_body(answer: Answer, entries: EntrySource<'_>) -> Result<ResponseBody, CorruptBlock> {
    let mut prefix = [0; PREFIX_BYTES];
    put_prefix(&mut prefix, answer.len());
    if answer.len() <= SMALL_BYTES {
        let mut message = entries.checked(answer.small(PREFIX_BYTES))?;
        message[..PREFIX_BYTES].copy_from_slice(&prefix);
        return Ok(ResponseBody::whole(message.into(), ok_trailers()));
    }
    Ok(ResponseBody::from_source(AnswerBody {
        prefix: Some(Bytes::copy_from_slice(&prefix)),
        answer,
        kept: entries.keep(),
        has_ended: false,
    }))
}

/// Returns a body with one gRPC message per chunk, then OK trailers. `entries` is what keeps them in memory until the
/// body is dropped.
pub(super) fn stream_body(chunks: Chunks, entries: EntrySource<'_>) -> ResponseBody {
    ResponseBody::from_source(ChunksBody {
        chunks,
        current: None,
        has_ended: false,
        kept: entries.keep(),
    })
}

/// Returns a body with `answer` as JSON, and its length in bytes if it is short: etcd sends that length as well.
pub(super) fn json_body(
    mut answer: JsonAnswer,
    entries: EntrySource<'_>,
) -> Result<(ResponseBody, Option<usize>), CorruptBlock> {
    let first = entries
        .checked(answer.next_piece(PIECE_BYTES))?
        .unwrap_or_default();
    if answer.is_done() && first.len() <= COUNTED_JSON_BYTES {
        let length = first.len();
        let body = ResponseBody::whole(first.into(), HeaderMap::new());
        return Ok((body, Some(length)));
    }
    let body = ResponseBody::from_source(JsonBody {
        first: Some(first),
        answer,
        kept: entries.keep(),
        has_ended: false,
    });
    Ok((body, None))
}

/// Body of a Range response in JSON.
#[derive(Debug)]
struct JsonBody {
    first: Option<String>,
    answer: JsonAnswer,
    kept: KeptEntries,
    /// An error was returned.
    has_ended: bool,
}

impl BodySource for JsonBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        faults::trip(Fault::Body);
        if self.has_ended {
            return Poll::Ready(None);
        }
        let piece = match self.first.take() {
            Some(first) => Ok(Some(first)),
            None => self.answer.next_piece(PIECE_BYTES),
        };
        let piece = piece.map(|piece| piece.map(Bytes::from));
        let frame = self.kept.framed(piece);
        self.has_ended = matches!(frame, Some(Err(_)));
        Poll::Ready(frame)
    }

    fn held_view(&self) -> Option<&HeldView> {
        self.kept.view()
    }
}

/// Body of a Range response that is longer than [`SMALL_BYTES`].
#[derive(Debug)]
struct AnswerBody {
    prefix: Option<Bytes>,
    answer: Answer,
    kept: KeptEntries,
    /// The trailers were returned, or an error.
    has_ended: bool,
}

impl AnswerBody {
    fn next(&mut self) -> Option<FrameResult> {
        faults::trip(Fault::Body);
        if self.has_ended {
            return None;
        }
        if let Some(prefix) = self.prefix.take() {
            return Some(Ok(Frame::data(prefix.into())));
        }
        let piece = self.answer.next_piece(PIECE_BYTES);
        if let Some(frame) = self.kept.framed(piece) {
            self.has_ended = frame.is_err();
            return Some(frame);
        }
        self.has_ended = true;
        Some(Ok(Frame::trailers(ok_trailers())))
    }
}

impl BodySource for AnswerBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(self.next())
    }

    fn held_view(&self) -> Option<&HeldView> {
        self.kept.view()
    }
}

/// Body of a RangeStream, encoded one chunk at a time.
#[derive(Debug)]
struct ChunksBody {
    chunks: Chunks,
    /// Rest of the chunk whose head was sent already.
    current: Option<Answer>,
    /// The trailers were returned, or an error.
    has_ended: bool,
    kept: KeptEntries,
}

impl BodySource for ChunksBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(self.next())
    }

    fn held_view(&self) -> Option<&HeldView> {
        self.kept.view()
    }
}

impl ChunksBody {
    fn next(&mut self) -> Option<FrameResult> {
        if self.has_ended {
            return None;
        }
        if let Some(answer) = &mut self.current {
            let piece = answer.next_piece(PIECE_BYTES);
            if let Some(frame) = self.kept.framed(piece) {
                self.has_ended = frame.is_err();
                return Some(frame);
            }
        }
        self.current = None;
        let Some(answer) = self.chunks.next() else {
            self.has_ended = true;
            return Some(Ok(Frame::trailers(ok_trailers())));
        };
        let mut head = chunk_head(PREFIX_BYTES, answer.len());
        let length = (head.len() - PREFIX_BYTES) as u64 + answer.len();
        put_prefix(&mut head, length);
        if answer.len() > SMALL_BYTES {
            self.current = Some(answer);
            return Some(Ok(Frame::data(Bytes::from(head).into())));
        }
        let message = answer.small(head.len()).map(|mut message| {
            message[..head.len()].copy_from_slice(&head);
            Some(Bytes::from(message))
        });
        let frame = self.kept.framed(message);
        self.has_ended = matches!(frame, Some(Err(_)));
        frame
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt as _;
    use prost::Message as _;

    use super::*;
    use etcd_store::cache::testing::KeyValue;
    use etcd_store::cache::{
        Dialect, Packing, RangeQuery, ResponseHeader, Selected, Selection, Tree, select,
    };
    use etcd_wire::etcdserverpb::{RangeResponse, RangeStreamResponse};
    use etcd_wire::grpc::frame::Prefix;

    const HEADER: ResponseHeader = ResponseHeader {
        cluster_id: 7,
        member_id: 1,
        revision: 9,
        raft_term: 2,
        leader_id: 0,
    };

    fn selection(entries: usize, value_bytes: usize) -> Selection {
        let entry = |n| KeyValue::new(format!("k{n:04}"), 9, vec![b'v'; value_bytes]).entry();
        Selection::of_page((0..entries).map(entry).collect(), entries as u64, false)
    }

    fn source() -> EntrySource<'static> {
        EntrySource::Mirror {
            mirror: None,
            is_past: false,
        }
    }

    /// The lengths of the pieces of data, all data, and the trailers.
    async fn read(mut body: ResponseBody) -> (Vec<usize>, Vec<u8>, Option<HeaderMap>) {
        let (mut lengths, mut data, mut trailers) = (Vec::new(), Vec::new(), None);
        while let Some(frame) = body.frame().await {
            assert!(trailers.is_none(), "nothing follows the trailers");
            match frame.unwrap().into_data() {
                Ok(piece) => {
                    let piece = Full(piece).bytes();
                    lengths.push(piece.len());
                    data.extend(piece);
                }
                Err(frame) => trailers = frame.into_trailers().ok(),
            }
        }
        (lengths, data, trailers)
    }

    struct Full<B>(B);

    impl<B: bytes::Buf> Full<B> {
        fn bytes(mut self) -> Bytes {
            self.0.copy_to_bytes(self.0.remaining())
        }
    }

    /// The messages in `data`, without their prefixes.
    fn messages(mut data: &[u8]) -> Vec<&[u8]> {
        let mut messages = Vec::new();
        while let Some(prefix) = Prefix::parse(data) {
            let (message, rest) = data[PREFIX_BYTES..].split_at(prefix.length_bytes as usize);
            messages.push(message);
            data = rest;
        }
        messages
    }

    #[tokio::test]
    async fn unary_response_is_one_message_of_pieces_that_a_slow_client_holds_singly() {
        for (entries, value_bytes) in [(0, 0), (3, 100), (160, 100), (400, 4000)] {
            let body = unary_body(Answer::new(HEADER, selection(entries, value_bytes)), source()).unwrap();
            let (lengths, data, trailers) = read(body).await;
            let messages = messages(&data);
            assert_eq!(messages.len(), 1);
            let response = RangeResponse::decode(messages[0]).unwrap();
            assert_eq!((response.kvs.len(), response.count), (entries, entries as i64));
            assert_eq!(response.header.unwrap().revision, 9);
            assert_eq!(trailers, Some(ok_trailers()));
            let longest = lengths.iter().max().copied().unwrap_or_default();
            assert!(longest < PIECE_BYTES + 2 * 4100, "a piece of {longest} bytes");
            let is_small = (data.len() - PREFIX_BYTES) as u64 <= SMALL_BYTES;
            assert_eq!(is_small, lengths.len() == 1, "{lengths:?}");
        }
    }

    #[tokio::test]
    async fn chunks_of_a_stream_are_messages_that_hold_every_entry_once() {
        for (entries, value_bytes) in [(0, 0), (3, 100), (400, 4000)] {
            let chunks = Chunks::new(HEADER, selection(entries, value_bytes));
            let (_, data, trailers) = read(stream_body(chunks, source())).await;
            let mut keys = Vec::new();
            for message in messages(&data) {
                let chunk = RangeStreamResponse::decode(message).unwrap();
                for kv in chunk.range_response.unwrap().kvs {
                    keys.push(KeyValue::decode(&kv[..]).unwrap().key);
                }
            }
            let expected: Vec<_> = (0..entries).map(|n| format!("k{n:04}").into_bytes()).collect();
            assert_eq!(keys, expected);
            assert_eq!(trailers, Some(ok_trailers()));
        }
    }

    #[tokio::test]
    async fn damaged_value_is_never_part_of_a_response() {
        let entry = |n| KeyValue::new(format!("k{n:04}"), 9, vec![b'v'; 1000]).entry();
        let selection = |entries| {
            let mut tree = Tree::load((0..entries).map(entry), Packing::Always);
            tree.damage();
            let query = RangeQuery {
                key: "k".into(),
                range_end: "l".into(),
                ..RangeQuery::default()
            };
            match select(&tree, &query, &Dialect::of_version(3, 7)) {
                Selected::Answer(selection) => selection,
                _ => panic!("nothing is sorted"),
            }
        };
        for entries in [2, 100] {
            let small = unary_body(Answer::new(HEADER, selection(entries)), source());
            let bodies = [
                small.unwrap_or_else(|CorruptBlock| ResponseBody::empty()),
                stream_body(Chunks::new(HEADER, selection(entries)), source()),
            ];
            for mut body in bodies {
                let mut last = None;
                while let Some(frame) = body.frame().await {
                    assert!(last != Some(false), "nothing follows the error");
                    let is_sent = frame.is_ok();
                    if let Some(trailers) = frame.ok().and_then(|frame| frame.into_trailers().ok()) {
                        assert_ne!(trailers, ok_trailers(), "the response is not whole");
                    }
                    last = Some(is_sent);
                }
                assert!(last != Some(true), "{entries} entries");
            }
            let text = json_body(JsonAnswer::new(HEADER, selection(entries)), source());
            assert_eq!(text.err(), Some(CorruptBlock));
        }
        assert!(unary_body(Answer::new(HEADER, selection(2)), source()).is_err());
    }

    #[tokio::test]
    async fn only_short_json_has_its_length_in_the_head() {
        for (entries, is_short) in [(0, true), (2, true), (40, false), (4000, false)] {
            let answer = JsonAnswer::new(HEADER, selection(entries, 50));
            let (body, length) = json_body(answer, source()).unwrap();
            let (_, data, trailers) = read(body).await;
            assert_eq!(length, is_short.then_some(data.len()), "{entries} entries");
            let json: serde_json::Value = serde_json::from_slice(&data).unwrap();
            let kvs = json["kvs"].as_array().map_or(0, Vec::len);
            assert_eq!(kvs, entries);
            assert!(trailers.is_none_or(|trailers| trailers.is_empty()));
        }
    }
}
