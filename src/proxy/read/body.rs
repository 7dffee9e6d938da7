//! Bodies of responses from memory, produced piece by piece as the client reads (I5).

use std::task::{Context, Poll};

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;

use crate::proxy::response::{BodySource, Polled, ResponseBody};
use etcd_store::cache::{Answer, Chunks, JsonAnswer, Rope, chunk_head};
use etcd_wire::grpc::frame::{PREFIX_BYTES, put_prefix};
use etcd_wire::grpc::status::ok_trailers;
use rangecache_base::faults::{self, Fault};
use rangecache_edge::limits::HeldBytes;
use rangecache_mirror::HeldView;
use rangecache_mirror::view::Mirror;

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
    /// In a page series, counted by this budget.
    Series(HeldBytes),
}

/// Guard that keeps the entries of a response in memory.
#[derive(Debug)]
enum KeptEntries {
    View(Option<HeldView>),
    Bytes { _held: HeldBytes },
}

impl EntrySource<'_> {
    fn keep(self) -> KeptEntries {
        match self {
            EntrySource::Mirror { mirror, is_past } => {
                KeptEntries::View(mirror.map(|mirror| mirror.hold_view(is_past)))
            }
            EntrySource::Series(held) => KeptEntries::Bytes { _held: held },
        }
    }
}

impl KeptEntries {
    fn view(&self) -> Option<&HeldView> {
        match self {
            KeptEntries::View(view) => view.as_ref(),
            KeptEntries::Bytes { .. } => None,
        }
    }
}

/// Returns a body with `answer` as one gRPC message, then OK trailers. The message must be shorter than 4 GiB.
/// `entries` is what keeps them in memory until the body is dropped.
pub(super) fn unary_body(answer: Answer, entries: EntrySource<'_>) -> ResponseBody {
    let mut prefix = [0; PREFIX_BYTES];
    put_prefix(&mut prefix, answer.len());
    if answer.len() <= SMALL_BYTES {
        let mut message = answer.small(PREFIX_BYTES);
        message[..PREFIX_BYTES].copy_from_slice(&prefix);
        return ResponseBody::whole(message.into(), ok_trailers());
    }
    ResponseBody::from_source(AnswerBody {
        prefix: Some(Bytes::copy_from_slice(&prefix)),
        answer,
        kept: entries.keep(),
        trailers_sent: false,
    })
}

/// Returns a body with one gRPC message per chunk, then OK trailers. `entries` is what keeps them in memory until the
/// body is dropped.
pub(super) fn stream_body(chunks: Chunks, entries: EntrySource<'_>) -> ResponseBody {
    ResponseBody::from_source(ChunksBody {
        chunks,
        current: None,
        trailers_sent: false,
        kept: entries.keep(),
    })
}

/// Returns a body with `answer` as JSON, and its length in bytes if it is short: etcd sends that length as well.
pub(super) fn json_body(mut answer: JsonAnswer, entries: EntrySource<'_>) -> (ResponseBody, Option<usize>) {
    let first = answer.next_piece(PIECE_BYTES).unwrap_or_default();
    if answer.is_done() && first.len() <= COUNTED_JSON_BYTES {
        let length = first.len();
        return (ResponseBody::whole(first.into(), HeaderMap::new()), Some(length));
    }
    let body = ResponseBody::from_source(JsonBody {
        first: Some(first),
        answer,
        kept: entries.keep(),
    });
    (body, None)
}

/// Body of a Range response in JSON.
#[derive(Debug)]
struct JsonBody {
    first: Option<String>,
    answer: JsonAnswer,
    kept: KeptEntries,
}

impl BodySource for JsonBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        faults::trip(Fault::Body);
        let piece = self.first.take().or_else(|| self.answer.next_piece(PIECE_BYTES));
        Poll::Ready(piece.map(|piece| Ok(Frame::data(Bytes::from(piece).into()))))
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
    trailers_sent: bool,
}

impl AnswerBody {
    fn next(&mut self) -> Option<Frame<Rope>> {
        faults::trip(Fault::Body);
        if let Some(prefix) = self.prefix.take() {
            return Some(Frame::data(prefix.into()));
        }
        if let Some(piece) = self.answer.next_piece(PIECE_BYTES) {
            return Some(Frame::data(piece));
        }
        if self.trailers_sent {
            return None;
        }
        self.trailers_sent = true;
        Some(Frame::trailers(ok_trailers()))
    }
}

impl BodySource for AnswerBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(self.next().map(Ok))
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
    trailers_sent: bool,
    kept: KeptEntries,
}

impl BodySource for ChunksBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(self.next().map(Ok))
    }

    fn held_view(&self) -> Option<&HeldView> {
        self.kept.view()
    }
}

impl ChunksBody {
    fn next(&mut self) -> Option<Frame<Rope>> {
        if let Some(piece) = self
            .current
            .as_mut()
            .and_then(|answer| answer.next_piece(PIECE_BYTES))
        {
            return Some(Frame::data(piece));
        }
        self.current = None;
        let Some(answer) = self.chunks.next() else {
            if self.trailers_sent {
                return None;
            }
            self.trailers_sent = true;
            return Some(Frame::trailers(ok_trailers()));
        };
        let mut head = chunk_head(PREFIX_BYTES, answer.len());
        let length = (head.len() - PREFIX_BYTES) as u64 + answer.len();
        put_prefix(&mut head, length);
        if answer.len() > SMALL_BYTES {
            self.current = Some(answer);
            return Some(Frame::data(Bytes::from(head).into()));
        }
        let mut message = answer.small(head.len());
        message[..head.len()].copy_from_slice(&head);
        Some(Frame::data(Bytes::from(message).into()))
    }
}
