//! The bodies of responses: produced here, or passed on.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio_util::sync::DropGuard;

use super::budget::Held;
use super::drain::Stop;
use super::forward::{Along, is_reset};
use super::large::SharedAnswer;
use super::pager::Paged;
use super::record::Tail;
use super::stalled::{Answers, GivenUp, Slot};
use crate::cache::{Answer, Chunks, Rope, chunk_head};
use crate::faults::{self, Fault};
use crate::grpc::frame::{self, PREFIX_BYTES};
use crate::grpc::status::ok_trailers;
use crate::grpc::{HeaderScanner, Method, Scanned, Status};
use crate::mirror::cluster_state::ClusterState;
use crate::net::Url;
use crate::upstream::{BoxError, InFlight};

/// How much of an answer is produced at a time: what one slow reader can hold beside the connection's own buffers (I5).
const PIECE_BYTES: usize = 128 << 10;
/// Answers up to this length are produced at once.
const SMALL_BYTES: u64 = 16 << 10;

/// A response's body.
#[derive(Debug)]
pub struct ResponseBody(Kind);

#[derive(Debug)]
enum Kind {
    Empty,
    /// One piece, then trailers.
    Whole {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
    },
    /// An answer from memory, produced as the client reads.
    Lazy(Box<Lazy>),
    /// A RangeStream from memory, produced as the client reads.
    Stream(Arc<Slot<Stream>>),
    /// A RangeStream put together from pages.
    Paged(Box<Paged>),
    /// Pieces that several readers share, then trailers.
    Shared {
        answer: Arc<SharedAnswer>,
        next: usize,
        trailers: Option<HeaderMap>,
    },
    /// Pieces of one reader's, given back to the budget as they go, then trailers.
    Held(Arc<Slot<HeldAnswer>>),
    /// Passed on from etcd.
    Forwarded(Box<Forwarded>),
    /// Any of these, and who tells its end.
    Told(Box<(Kind, Tail)>),
}

#[derive(Debug)]
struct Lazy {
    prefix: Option<Bytes>,
    /// With what a page of a series counts against the budget.
    answer: Arc<Slot<(Answer, Option<Held>)>>,
    trailers_sent: bool,
}

#[derive(Debug)]
struct HeldAnswer {
    pieces: std::vec::IntoIter<Bytes>,
    trailers: Option<HeaderMap>,
    held: Held,
}

#[derive(Debug)]
struct Stream {
    chunks: Chunks,
    /// What is left of the chunk that is being sent.
    current: Option<Answer>,
    trailers_sent: bool,
    _held: Option<Held>,
}

#[derive(Debug)]
struct Forwarded {
    /// Read already, to see how etcd answers.
    first: Option<Frame<Bytes>>,
    body: Incoming,
    scanner: Option<HeaderScanner>,
    /// Every piece may show a revision that cannot be read (the JSON gateway's).
    opaque: bool,
    cluster_state: Arc<ClusterState>,
    /// Said instead of a broken stream when etcd's connection was lost; `None` once trailers have gone, and for HTTP/1.
    may_end_with_status: bool,
    in_flight: Option<InFlight>,
    along: Along,
    /// For what never ends by itself.
    stop: Option<Stop>,
    /// Ends what there is for its sake alone: a connection of its own, a request that goes on.
    _alive: Option<DropGuard>,
}

impl ResponseBody {
    /// The response to a gRPC call that it is the body of.
    pub(super) fn response(self, content_type: HeaderValue) -> Response<ResponseBody> {
        let mut response = Response::new(self);
        response.headers_mut().insert(CONTENT_TYPE, content_type);
        response
    }

    /// Nothing: the status is in the headers.
    pub(super) fn empty() -> ResponseBody {
        ResponseBody(Kind::Empty)
    }

    /// A RangeResponse as a gRPC message with trailers. It must be shorter than 4 GiB.
    pub(super) fn answer(answer: Answer, answers: &Answers) -> ResponseBody {
        ResponseBody::page(answer, None, answers)
    }

    /// The same, of entries that are held against the budget.
    pub(super) fn page(answer: Answer, held: Option<Held>, answers: &Answers) -> ResponseBody {
        let mut prefix = [0; PREFIX_BYTES];
        frame::put_prefix(&mut prefix, answer.len());
        if answer.len() <= SMALL_BYTES {
            let mut message = answer.small(PREFIX_BYTES);
            message[..PREFIX_BYTES].copy_from_slice(&prefix);
            return ResponseBody::whole(message.into(), ok_trailers());
        }
        let prefix = Some(Bytes::copy_from_slice(&prefix));
        ResponseBody(Kind::Lazy(Box::new(Lazy {
            prefix,
            answer: answers.watch((answer, held)),
            trailers_sent: false,
        })))
    }

    /// A RangeStream's chunks as gRPC messages, with trailers; and what they count against the budget.
    pub(super) fn stream(chunks: Chunks, held: Option<Held>, answers: &Answers) -> ResponseBody {
        ResponseBody(Kind::Stream(answers.watch(Stream {
            chunks,
            current: None,
            trailers_sent: false,
            _held: held,
        })))
    }

    /// A RangeStream put together from pages.
    pub(super) fn paged(paged: Paged) -> ResponseBody {
        ResponseBody(Kind::Paged(Box::new(paged)))
    }

    /// One piece, then `trailers`.
    pub(super) fn whole(data: Bytes, trailers: HeaderMap) -> ResponseBody {
        let data = Some(data).filter(|data| !data.is_empty());
        ResponseBody(Kind::Whole {
            data,
            trailers: Some(trailers),
        })
    }

    /// An answer of etcd that others read too.
    pub(super) fn shared(answer: Arc<SharedAnswer>) -> ResponseBody {
        let trailers = answer.trailers.clone();
        ResponseBody(Kind::Shared {
            answer,
            next: 0,
            trailers,
        })
    }

    /// The pieces of a whole answer, then `trailers`.
    pub(super) fn held(
        pieces: Vec<Bytes>,
        trailers: HeaderMap,
        held: Held,
        answers: &Answers,
    ) -> ResponseBody {
        ResponseBody(Kind::Held(answers.watch(HeldAnswer {
            pieces: pieces.into_iter(),
            trailers: Some(trailers),
            held,
        })))
    }

    /// What etcd answers to the call of `method`, as it comes.
    pub(super) fn forwarded(
        body: Incoming,
        method: Method,
        cluster_state: &Arc<ClusterState>,
        in_flight: Option<InFlight>,
        along: Along,
        stop: Option<Stop>,
        is_grpc: bool,
    ) -> ResponseBody {
        ResponseBody(Kind::Forwarded(Box::new(Forwarded {
            first: None,
            body,
            scanner: if is_grpc { HeaderScanner::new(method) } else { None },
            opaque: !is_grpc && method.may_show_revision_as_json(),
            cluster_state: Arc::clone(cluster_state),
            may_end_with_status: is_grpc,
            in_flight,
            along,
            stop,
            _alive: None,
        })))
    }

    /// Whose answer it is, if it passes through.
    pub(super) fn endpoint(&self) -> Option<&Url> {
        match &self.0 {
            Kind::Forwarded(forwarded) => forwarded.in_flight.as_ref().map(InFlight::url),
            _ => None,
        }
    }

    /// Whether there is more to come of it than what is here.
    pub(super) fn is_under_way(&self) -> bool {
        !matches!(self.0, Kind::Empty | Kind::Whole { .. })
    }

    /// The same body, whose end `tail` tells.
    pub(super) fn told_by(self, tail: Tail) -> ResponseBody {
        ResponseBody(Kind::Told(Box::new((self.0, tail))))
    }

    /// The same behind `first`, which was read already. For a forwarded body alone.
    pub(super) fn behind(mut self, first: Frame<Bytes>) -> ResponseBody {
        if let Kind::Forwarded(forwarded) = &mut self.0 {
            forwarded.first = Some(first);
        }
        self
    }

    /// The same body, which ends what there is for its sake alone when it is dropped.
    pub(super) fn keeping(mut self, alive: Option<DropGuard>) -> ResponseBody {
        if let Kind::Forwarded(forwarded) = &mut self.0 {
            forwarded._alive = alive;
        }
        self
    }
}

impl Stream {
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
        frame::put_prefix(&mut head, length);
        if answer.len() > SMALL_BYTES {
            self.current = Some(answer);
            return Some(Frame::data(Bytes::from(head).into()));
        }
        let mut message = answer.small(head.len());
        message[..head.len()].copy_from_slice(&head);
        Some(Frame::data(Bytes::from(message).into()))
    }
}

impl Lazy {
    fn next(&mut self) -> Result<Option<Frame<Rope>>, GivenUp> {
        faults::trip(Fault::Body);
        if let Some(prefix) = self.prefix.take() {
            return Ok(Some(Frame::data(prefix.into())));
        }
        if let Some(piece) = self.answer.take(|(answer, _)| answer.next_piece(PIECE_BYTES))? {
            return Ok(Some(Frame::data(piece)));
        }
        if self.trailers_sent {
            return Ok(None);
        }
        self.trailers_sent = true;
        Ok(Some(Frame::trailers(ok_trailers())))
    }
}

impl HeldAnswer {
    fn next(&mut self) -> Option<Frame<Rope>> {
        let mut rope = Rope::default();
        while rope.remaining() < PIECE_BYTES
            && let Some(piece) = self.pieces.next()
        {
            rope.push_shared(piece);
        }
        if rope.has_remaining() {
            self.held.shrink(rope.remaining() as u64);
            return Some(Frame::data(rope));
        }
        self.trailers.take().map(Frame::trailers)
    }
}

impl Forwarded {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Rope>, BoxError>>> {
        if let Some(stop) = &mut self.stop
            && stop.has_come(cx)
            && self.scanner.as_ref().is_none_or(HeaderScanner::is_at_boundary)
        {
            return Poll::Ready(self.stopped());
        }
        let frame = match self.first.take() {
            Some(first) => first,
            None => match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(self.broken(error)),
            },
        };
        Poll::Ready(Some(Ok(match frame.into_data() {
            Ok(data) => {
                if let Some(scanner) = &mut self.scanner {
                    record(scanner, &data, &self.cluster_state);
                } else if self.opaque {
                    self.cluster_state.note_unreadable();
                }
                if let Some(watch) = &mut self.along.watch {
                    watch.see(&data);
                }
                Frame::data(data.into())
            }
            Err(frame) => {
                self.may_end_with_status = false;
                // A frame is data or trailers.
                let trailers = frame.into_trailers().unwrap_or_default();
                if let Some(watch) = &mut self.along.watch {
                    watch.ended(&trailers);
                }
                Frame::trailers(trailers)
            }
        })))
    }

    /// The end of what never ends by itself: `Unavailable`, and for the JSON gateway the end of its body.
    fn stopped(&mut self) -> Option<Result<Frame<Rope>, BoxError>> {
        if !self.may_end_with_status {
            return None;
        }
        self.may_end_with_status = false;
        Some(Ok(Frame::trailers(Status::StoppingReconnect.trailers())))
    }

    /// A lost connection shows as Unavailable, as it does to a client of etcd. A stream that etcd itself reset is reset
    /// for the client too, with the same reason.
    fn broken(&mut self, error: hyper::Error) -> Option<Result<Frame<Rope>, BoxError>> {
        let between_messages = self.scanner.as_ref().is_some_and(HeaderScanner::is_at_boundary);
        if is_reset(&error) || !between_messages || !self.may_end_with_status {
            return Some(Err(error.into()));
        }
        self.may_end_with_status = false;
        let status = Status::ConnectionLost(error.to_string());
        Some(Ok(Frame::trailers(status.trailers())))
    }
}

/// A response to a gRPC call of `status` and nothing else ("trailers only").
pub(super) fn status(status: &Status, content_type: HeaderValue) -> Response<ResponseBody> {
    let mut response = ResponseBody::empty().response(content_type);
    status.write_to(response.headers_mut());
    response
}

/// Records the revisions that `data` will show its client.
pub(super) fn record(scanner: &mut HeaderScanner, data: &[u8], cluster_state: &ClusterState) {
    scanner.scan(data, |scanned| match scanned {
        Scanned::Header { cluster_id, revision } => cluster_state.record_forwarded(cluster_id, revision),
        Scanned::Unreadable => cluster_state.note_unreadable(),
    });
}

impl Body for ResponseBody {
    type Data = Rope;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Rope>, BoxError>>> {
        match catch_unwind(AssertUnwindSafe(|| self.0.poll(cx))) {
            Ok(polled) => polled,
            Err(_) => {
                // What is left of it is not to be trusted: hyper resets the stream, which clients take for Internal.
                self.0 = Kind::Empty;
                Poll::Ready(Some(Err("the body of an answer panicked".into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

impl Kind {
    fn is_end_stream(&self) -> bool {
        match self {
            Kind::Empty => true,
            Kind::Whole { data, trailers } => data.is_none() && trailers.is_none(),
            Kind::Lazy(_) | Kind::Stream(_) | Kind::Paged(_) | Kind::Held(_) => false,
            Kind::Shared {
                answer,
                next,
                trailers,
            } => *next >= answer.pieces.len() && trailers.is_none(),
            Kind::Forwarded(forwarded) => forwarded.first.is_none() && forwarded.body.is_end_stream(),
            Kind::Told(told) => told.0.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Kind::Empty => SizeHint::with_exact(0),
            // HTTP/1 frames a body by it; gRPC has no use for a content-length.
            Kind::Forwarded(forwarded) => forwarded.body.size_hint(),
            Kind::Told(told) => told.0.size_hint(),
            _ => SizeHint::default(),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Rope>, BoxError>>> {
        match self {
            Kind::Empty => Poll::Ready(None),
            Kind::Whole { data, trailers } => {
                let frame = match data.take() {
                    Some(data) => Some(Frame::data(data.into())),
                    None => trailers.take().map(Frame::trailers),
                };
                Poll::Ready(frame.map(Ok))
            }
            Kind::Lazy(lazy) => Poll::Ready(lazy.next().map_err(Into::into).transpose()),
            Kind::Stream(stream) => Poll::Ready(stream.take(Stream::next).map_err(Into::into).transpose()),
            Kind::Paged(paged) => paged.poll(cx).map(|frame| frame.map(Ok)),
            Kind::Shared {
                answer,
                next,
                trailers,
            } => {
                let frame = match answer.pieces.get(*next) {
                    Some(piece) => {
                        *next += 1;
                        Some(Frame::data(piece.clone().into()))
                    }
                    None => trailers.take().map(Frame::trailers),
                };
                Poll::Ready(frame.map(Ok))
            }
            Kind::Held(held) => Poll::Ready(held.take(HeldAnswer::next).map_err(Into::into).transpose()),
            Kind::Forwarded(forwarded) => forwarded.poll(cx),
            Kind::Told(told) => {
                let (kind, tail) = &mut **told;
                let polled = kind.poll(cx);
                if let Poll::Ready(Some(Ok(frame))) = &polled {
                    tail.see(frame);
                }
                polled
            }
        }
    }
}
