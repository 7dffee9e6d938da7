//! Bodies of responses from memory, produced piece by piece as the client reads (I5).

use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;

use crate::cache::{Answer, Chunks, Rope, chunk_head};
use crate::faults::{self, Fault};
use crate::grpc::frame::{PREFIX_BYTES, put_prefix};
use crate::grpc::status::ok_trailers;
use crate::limits::HeldBytes;
use crate::proxy::response::{BodySource, Polled, ResponseBody};

/// Length of the pieces in which a response is produced, in bytes. A slow client holds at most one piece in addition to
/// its connection's buffers (I5).
const PIECE_BYTES: usize = 128 << 10;
/// Longest response or chunk that is produced as one piece, in bytes.
const SMALL_BYTES: u64 = 16 << 10;

/// Returns a body with `answer` as one gRPC message, then OK trailers. The message must be shorter than 4 GiB.
/// `held_bytes` counts the entries against a byte budget until the body is dropped; `None` for entries of a mirror.
pub(super) fn unary_body(answer: Answer, held_bytes: Option<HeldBytes>) -> ResponseBody {
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
        _held_bytes: held_bytes,
        trailers_sent: false,
    })
}

/// Returns a body with one gRPC message per chunk, then OK trailers. `held_bytes` counts the entries against a byte
/// budget until the body is dropped; `None` for entries of a mirror.
pub(super) fn stream_body(chunks: Chunks, held_bytes: Option<HeldBytes>) -> ResponseBody {
    ResponseBody::from_source(ChunksBody {
        chunks,
        current: None,
        trailers_sent: false,
        _held_bytes: held_bytes,
    })
}

/// Body of a Range response that is longer than [`SMALL_BYTES`].
#[derive(Debug)]
struct AnswerBody {
    prefix: Option<Bytes>,
    answer: Answer,
    _held_bytes: Option<HeldBytes>,
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
}

/// Body of a RangeStream, encoded one chunk at a time.
#[derive(Debug)]
struct ChunksBody {
    chunks: Chunks,
    /// Rest of the chunk whose head was sent already.
    current: Option<Answer>,
    trailers_sent: bool,
    _held_bytes: Option<HeldBytes>,
}

impl BodySource for ChunksBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(self.next().map(Ok))
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
