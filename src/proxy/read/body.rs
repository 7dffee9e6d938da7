//! Responses from memory, produced as the client reads (I5).

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::Frame;

use crate::cache::{Answer, Chunks, Rope, chunk_head};
use crate::faults::{self, Fault};
use crate::grpc::frame::{PREFIX_BYTES, put_prefix};
use crate::grpc::status::ok_trailers;
use crate::limits::HeldBytes;
use crate::proxy::idle::{IdleError, ResponseRegistry, Watched};
use crate::proxy::response::{BodySource, Polled, ResponseBody};

/// Bytes of a response produced at a time: what one slow client can hold in addition to the connection's own buffers (I5).
const PIECE_BYTES: usize = 128 << 10;
/// Responses and chunks up to this length are produced at once.
const SMALL_BYTES: u64 = 16 << 10;

/// A RangeResponse as a gRPC message with trailers. It must be shorter than 4 GiB. `held` is what its entries count against a
/// byte budget, if they are not a mirror's.
pub(super) fn unary_body(
    answer: Answer,
    held: Option<HeldBytes>,
    responses: &ResponseRegistry,
) -> ResponseBody {
    let mut prefix = [0; PREFIX_BYTES];
    put_prefix(&mut prefix, answer.len());
    if answer.len() <= SMALL_BYTES {
        let mut message = answer.small(PREFIX_BYTES);
        message[..PREFIX_BYTES].copy_from_slice(&prefix);
        return ResponseBody::whole(message.into(), ok_trailers());
    }
    ResponseBody::from_source(AnswerBody {
        prefix: Some(Bytes::copy_from_slice(&prefix)),
        answer: responses.watch((answer, held)),
        trailers_sent: false,
    })
}

/// A RangeStream's chunks as gRPC messages, with trailers; `held` as for [`unary_body`].
pub(super) fn stream_body(
    chunks: Chunks,
    held: Option<HeldBytes>,
    responses: &ResponseRegistry,
) -> ResponseBody {
    ResponseBody::from_source(ChunksBody(responses.watch(ChunkFrames {
        chunks,
        current: None,
        trailers_sent: false,
        _held: held,
    })))
}

/// One long message.
#[derive(Debug)]
struct AnswerBody {
    prefix: Option<Bytes>,
    answer: Arc<Watched<(Answer, Option<HeldBytes>)>>,
    trailers_sent: bool,
}

impl AnswerBody {
    fn next(&mut self) -> Result<Option<Frame<Rope>>, IdleError> {
        faults::trip(Fault::Body);
        if let Some(prefix) = self.prefix.take() {
            return Ok(Some(Frame::data(prefix.into())));
        }
        if let Some(piece) = self.answer.read(|(answer, _)| answer.next_piece(PIECE_BYTES))? {
            return Ok(Some(Frame::data(piece)));
        }
        if self.trailers_sent {
            return Ok(None);
        }
        self.trailers_sent = true;
        Ok(Some(Frame::trailers(ok_trailers())))
    }
}

impl BodySource for AnswerBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(self.next().map_err(Into::into).transpose())
    }
}

/// The messages of a stream.
#[derive(Debug)]
struct ChunksBody(Arc<Watched<ChunkFrames>>);

impl BodySource for ChunksBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(self.0.read(ChunkFrames::next).map_err(Into::into).transpose())
    }
}

#[derive(Debug)]
struct ChunkFrames {
    chunks: Chunks,
    /// The rest of the chunk that is being sent.
    current: Option<Answer>,
    trailers_sent: bool,
    _held: Option<HeldBytes>,
}

impl ChunkFrames {
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
