//! Bodies of responses from memory, produced piece by piece as the client reads (I5).

use std::task::{Context, Poll};

use bytes::Bytes;
use etcd_store::cache::{Answer, Chunks, JsonAnswer, MemoryError, Rope, chunk_head};
use etcd_wire::grpc::frame::{PREFIX_BYTES, put_prefix};
use etcd_wire::grpc::status::ok_trailers;
use http::HeaderMap;
use http_body::Frame;
use rangecache_base::faults::{self, Fault};
use rangecache_base::telemetry::Reason;
use rangecache_edge::limits::HeldBytes;
use rangecache_mirror::{HeldView, view::Mirror};
use rangecache_upstream::BoxError;

use super::scan::ScannedEntries;
use crate::response::{BodySource, Polled, ResponseBody};

/// Length of the pieces in which a response is produced, in bytes. A slow client holds at most one piece in addition to
/// its connection's buffers (I5).
const PIECE_BYTES: usize = 128 << 10;
/// Longest response or chunk that is produced as one piece, in bytes.
const SMALL_BYTES: u64 = 16 << 10;

/// Longest text that etcd sends with its length, in bytes: the buffer of Go's HTTP server.
const COUNTED_JSON_BYTES: usize = 2 << 10;

/// Location of a response's entries.
pub(crate) enum EntrySource<'a> {
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
    /// Returns what was produced, and tells the mirror if its memory is damaged.
    fn checked<P>(&self, produced: Result<P, MemoryError>) -> Result<P, Reason> {
        produced.map_err(|_| {
            match self {
                EntrySource::Mirror { mirror, .. } => mirror.iter().for_each(|mirror| mirror.report_damage()),
                EntrySource::Scanned(scanned) => scanned.view.report_damage(),
                EntrySource::Series(_) => {}
            }
            Reason::Damaged
        })
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

/// Returns a body with `answer` as one gRPC message, then OK trailers. The message must be shorter than 4 GiB.
/// `entries` is what keeps them in memory until the body is dropped.
pub(super) fn unary_body(answer: Answer, entries: EntrySource<'_>) -> Result<ResponseBody, Reason> {
    let mut prefix = [0; PREFIX_BYTES];
    put_prefix(&mut prefix, answer.len());
    if answer.len() <= SMALL_BYTES {
        let mut message = entries.checked(answer.small(PREFIX_BYTES))?;
        message[..PREFIX_BYTES].copy_from_slice(&prefix);
        return Ok(ResponseBody::whole(message.into(), ok_trailers()));
    }
    let prefix = Bytes::copy_from_slice(&prefix).into();
    let pieces = Pieces::Message(answer);
    Ok(body_of(Some(prefix), pieces, Some(ok_trailers()), entries))
}

/// Returns a body with one gRPC message per chunk, then OK trailers. `entries` is what keeps them in memory until the
/// body is dropped.
pub(super) fn stream_body(chunks: Chunks, entries: EntrySource<'_>) -> ResponseBody {
    let pieces = Pieces::Chunks {
        chunks,
        current: None,
    };
    body_of(None, pieces, Some(ok_trailers()), entries)
}

/// Returns a body with `answer` as JSON, and its length in bytes if it is short: etcd sends that length as well.
pub(super) fn json_body(
    mut answer: JsonAnswer,
    entries: EntrySource<'_>,
) -> Result<(ResponseBody, Option<usize>), Reason> {
    let first = entries.checked(answer.next_piece(PIECE_BYTES))?;
    let first = Bytes::from(first.unwrap_or_default());
    if answer.is_done() && first.len() <= COUNTED_JSON_BYTES {
        let length = first.len();
        return Ok((ResponseBody::whole(first, HeaderMap::new()), Some(length)));
    }
    let body = body_of(Some(first.into()), Pieces::Json(answer), None, entries);
    Ok((body, None))
}

/// Returns a body of what is sent before the pieces, these, and the trailers.
fn body_of(
    first: Option<Rope>,
    pieces: Pieces,
    trailers: Option<HeaderMap>,
    entries: EntrySource<'_>,
) -> ResponseBody {
    ResponseBody::from_source(MemoryBody {
        first,
        pieces: Some(pieces),
        trailers,
        kept: entries.keep(),
    })
}

/// Body of a response that is produced while it is sent.
#[derive(Debug)]
struct MemoryBody {
    /// Sent before the pieces.
    first: Option<Rope>,
    /// `None` after the last one, and after an error.
    pieces: Option<Pieces>,
    trailers: Option<HeaderMap>,
    kept: KeptEntries,
}

/// Rest of a response that is still to be produced.
#[derive(Debug)]
enum Pieces {
    Message(Answer),
    Json(JsonAnswer),
    Chunks {
        chunks: Chunks,
        /// Rest of the chunk whose head was sent already.
        current: Option<Box<Answer>>,
    },
}

impl MemoryBody {
    fn next(&mut self) -> Option<FrameResult> {
        faults::trip(Fault::Body);
        if let Some(first) = self.first.take() {
            return Some(Ok(Frame::data(first)));
        }
        match self.pieces.as_mut()?.next() {
            Ok(Some(piece)) => Some(Ok(Frame::data(piece))),
            Ok(None) => {
                self.pieces = None;
                self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers)))
            }
            // The response cannot be completed.
            Err(error) => {
                self.pieces = None;
                if let Some(view) = self.held_view() {
                    view.report_damage();
                }
                Some(Err(error.into()))
            }
        }
    }
}

impl BodySource for MemoryBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(self.next())
    }

    fn held_view(&self) -> Option<&HeldView> {
        match &self.kept {
            KeptEntries::View(view) => view.as_ref(),
            KeptEntries::Scanned(scanned) => Some(&scanned.view),
            KeptEntries::Bytes { .. } => None,
        }
    }
}

impl Pieces {
    fn next(&mut self) -> Result<Option<Rope>, MemoryError> {
        let (chunks, current) = match self {
            Pieces::Message(answer) => return answer.next_piece(PIECE_BYTES),
            Pieces::Json(answer) => {
                let text = answer.next_piece(PIECE_BYTES)?;
                return Ok(text.map(|text| Bytes::from(text).into()));
            }
            Pieces::Chunks { chunks, current } => (chunks, current),
        };
        if let Some(answer) = current
            && let Some(piece) = answer.next_piece(PIECE_BYTES)?
        {
            return Ok(Some(piece));
        }
        *current = None;
        let Some(answer) = chunks.next() else {
            return Ok(None);
        };
        let mut head = chunk_head(PREFIX_BYTES, answer.len());
        let length = (head.len() - PREFIX_BYTES) as u64 + answer.len();
        put_prefix(&mut head, length);
        if answer.len() > SMALL_BYTES {
            *current = Some(Box::new(answer));
            return Ok(Some(Bytes::from(head).into()));
        }
        let mut message = answer.small(head.len())?;
        message[..head.len()].copy_from_slice(&head);
        Ok(Some(Bytes::from(message).into()))
    }
}

#[cfg(test)]
mod tests {
    use etcd_store::cache::testing::KeyValue;
    use etcd_store::cache::{
        Dialect, Packing, RangeQuery, ResponseHeader, Selected, Selection, Tree, select,
    };
    use etcd_wire::etcdserverpb::{RangeResponse, RangeStreamResponse};
    use etcd_wire::grpc::frame::Prefix;
    use http_body_util::BodyExt as _;
    use prost::Message as _;

    use super::*;

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
                small.unwrap_or_else(|_| ResponseBody::empty()),
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
            assert_eq!(text.err(), Some(Reason::Damaged));
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
