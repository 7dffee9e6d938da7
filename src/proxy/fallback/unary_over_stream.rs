//! Serves large unary Ranges by one RangeStream of etcd's (KEP-5966): etcd holds one chunk at a time instead of the whole
//! response.
//!
//! The chunks' key-values are the pieces of the unary response, unchanged, for protobuf messages merge by concatenation. They
//! are held until the last chunk is here: it carries the header, which goes first, and a gRPC message begins with its length.
//! Until then nothing has been sent to the client, so that after any failure the call can still be forwarded unchanged.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode, Uri, response};
use http_body::Frame;
use prost::encoding::{encode_varint, encoded_len_varint};
use tokio::time::Instant;

use super::reason::StreamFallback;
use crate::cache::{RangeQuery, Rope};
use crate::etcdserverpb::RangeRequest;
use crate::grpc::frame::{PREFIX_BYTES, framed, put_prefix};
use crate::grpc::metadata::grpc_content_type;
use crate::grpc::method::RANGE_STREAM;
use crate::grpc::status::{GRPC_MESSAGE, GRPC_STATUS, MAX_RESPONSE_BYTES, is_ok};
use crate::grpc::{Method, RangeResponseScanner, ResponseSummary, Status};
use crate::limits::{ByteBudget, HeldBytes};
use crate::proxy::forward::{Forward, ResponseReader};
use crate::proxy::idle::{ResponseRegistry, Watched};
use crate::proxy::response::{BodySource, Polled, ResponseBody, status_response};
use crate::upstream::{Connection, Outgoing};

/// The budget is taken in steps of this size; the unused part of the last step is released.
const BUDGET_STEP_BYTES: u64 = 256 << 10;
/// Codes with which etcd refuses a stream for the same reasons and with the same text as the unary call: invalid argument,
/// permission denied, out of range, unauthenticated. Other codes may be a stream's own (a learner serves none, for one).
const CODES_SAME_AS_UNARY: [&[u8]; 4] = [b"3", b"7", b"11", b"16"];
const UNIMPLEMENTED: &[u8] = b"12";
/// Least size of a frame, in bytes: chunks of small entries come in many pieces.
const FRAME_MIN_BYTES: usize = 128 << 10;

/// Converts Ranges to RangeStreams.
#[derive(Debug)]
pub(super) struct UnaryOverStream {
    budget: Arc<ByteBudget>,
    /// Longest pause of a stream for want of budget (`--stream-max-wait`).
    max_wait: Duration,
}

/// A whole response, or etcd's refusal.
#[derive(Debug)]
pub(super) struct Converted {
    pub(super) head: response::Parts,
    /// The unary response's bytes; empty for a refusal, which is all in the head.
    pub(super) pieces: Vec<Bytes>,
    pub(super) trailers: Option<HeaderMap>,
    pub(super) held: HeldBytes,
    /// Summary of the response, if it is not a refusal.
    pub(super) summary: Option<ResponseSummary>,
}

/// The request for a stream of the entries that `query` asks for. etcd pins a stream to one revision only where that is not negative.
pub(super) fn stream_request(query: &RangeQuery) -> RangeRequest {
    RangeRequest {
        key: query.key.clone(),
        range_end: query.range_end.clone(),
        limit: query.limit.max(0),
        revision: query.revision.max(0),
        serializable: query.serializable,
        keys_only: query.keys_only,
        ..RangeRequest::default()
    }
}

impl UnaryOverStream {
    pub(super) fn new(budget: &Arc<ByteBudget>, max_wait: Duration) -> UnaryOverStream {
        UnaryOverStream {
            budget: Arc::clone(budget),
            max_wait,
        }
    }

    /// Serves a [streamable](RangeQuery::is_streamable) Range by one RangeStream, with its client's own metadata.
    ///
    /// # Errors
    /// Why it cannot: the call is to be forwarded unchanged.
    pub(super) async fn convert(
        &self,
        forward: &Forward,
        parts: &Parts,
        query: &RangeQuery,
    ) -> Result<Converted, StreamFallback> {
        // Does not wait for an endpoint: the forwarded call does.
        let connection = forward
            .upstream
            .streaming(Instant::now())
            .await
            .map_err(|_| StreamFallback::NoEndpoint)??;
        let mut parts = parts.clone();
        parts.uri = Uri::from_static(RANGE_STREAM);
        let request = Request::from_parts(parts, Outgoing::whole(framed(&stream_request(query))));
        let (response, _in_flight) = connection
            .send(request)
            .await
            .map_err(|_| StreamFallback::Broken)?;
        let (mut head, body) = response.into_parts();
        // For the call's trace.
        head.extensions.insert(connection.url().clone());
        let mut held = self.budget.hold_in_queue();
        if head.headers.contains_key(GRPC_STATUS) {
            let trailers = HeaderMap::new();
            return convert_refusal(head, trailers, held, &connection);
        }
        let mut reader = ResponseReader::new(body, Method::RangeStream, &forward.cluster_state);
        let (mut scanner, mut pieces, mut read_bytes) =
            (RangeResponseScanner::stream(), vec![Bytes::new()], 0);
        while let Some(data) = reader.data().await.map_err(|_| StreamFallback::Broken)? {
            read_bytes += data.len() as u64;
            if read_bytes > held.bytes() {
                let step = (read_bytes - held.bytes()).max(BUDGET_STEP_BYTES);
                if held.try_grow(step).is_err() {
                    held.grow(read_bytes - held.bytes(), Instant::now() + self.max_wait)
                        .await
                        .map_err(|_| StreamFallback::Budget)?;
                }
            }
            scanner
                .scan(&data, |run| pieces.push(data.slice(run)))
                .map_err(|_| StreamFallback::Malformed)?;
        }
        let trailers = reader.into_trailers().ok_or(StreamFallback::Broken)?;
        if !is_ok(&trailers) {
            // In mid-stream, where the unary call may well succeed: it does not depend on the revision being kept.
            return if scanner.has_begun() {
                Err(StreamFallback::Broken)
            } else {
                convert_refusal(head, trailers, held, &connection)
            };
        }
        let summary = scanner.finish().map_err(|_| StreamFallback::Malformed)?;
        assemble(head, trailers, summary, pieces, held)
    }
}

/// The unary response from the whole stream: header, key-values, then `more` and `count`. The first of `pieces` is empty.
fn assemble(
    head: response::Parts,
    trailers: HeaderMap,
    summary: ResponseSummary,
    mut pieces: Vec<Bytes>,
    mut held: HeldBytes,
) -> Result<Converted, StreamFallback> {
    summary.header().map_err(|_| StreamFallback::Malformed)?;
    let kvs_bytes: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
    held.leave_queue();
    held.shrink(held.bytes().saturating_sub(kvs_bytes));
    let (first, last) = (header_field(&summary.header), more_and_count_fields(&summary));
    let length = first.len() as u64 + kvs_bytes + last.len() as u64;
    if length > MAX_RESPONSE_BYTES {
        let content_type = grpc_content_type(&head.headers);
        let (head, _) = status_response(&Status::LargerThanMax(length), content_type).into_parts();
        return Ok(Converted {
            head,
            pieces: Vec::new(),
            trailers: None,
            held,
            summary: None,
        });
    }
    let mut front = BytesMut::with_capacity(PREFIX_BYTES + first.len());
    front.put_bytes(0, PREFIX_BYTES);
    put_prefix(&mut front, length);
    front.put_slice(&first);
    pieces[0] = front.freeze();
    pieces.push(last);
    Ok(Converted {
        head,
        pieces,
        trailers: Some(trailers),
        held,
        summary: Some(summary),
    })
}

impl Converted {
    /// The response for its client.
    pub(super) fn into_response(self, responses: &ResponseRegistry) -> Response<ResponseBody> {
        let body = match self.trailers {
            Some(trailers) => ResponseBody::from_source(HeldBody(responses.watch(HeldFrames {
                pieces: self.pieces.into_iter(),
                trailers: Some(trailers),
                held: self.held,
            }))),
            None => ResponseBody::empty(),
        };
        Response::from_parts(self.head, body)
    }
}

/// The pieces of one client's response, released from the budget as they are sent.
#[derive(Debug)]
struct HeldBody(Arc<Watched<HeldFrames>>);

impl BodySource for HeldBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(
            self.0
                .read(HeldFrames::next_frame)
                .map_err(Into::into)
                .transpose(),
        )
    }
}

#[derive(Debug)]
struct HeldFrames {
    pieces: std::vec::IntoIter<Bytes>,
    trailers: Option<HeaderMap>,
    held: HeldBytes,
}

impl HeldFrames {
    fn next_frame(&mut self) -> Option<Frame<Rope>> {
        let mut rope = Rope::default();
        while rope.remaining() < FRAME_MIN_BYTES
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

/// etcd refused the stream before its first chunk. Where it would refuse the unary call too, that is the response.
fn convert_refusal(
    mut head: response::Parts,
    trailers: HeaderMap,
    held: HeldBytes,
    connection: &Connection,
) -> Result<Converted, StreamFallback> {
    head.headers.extend(trailers);
    let code = head
        .headers
        .get(GRPC_STATUS)
        .map_or(&b""[..], |status| status.as_bytes());
    if code == UNIMPLEMENTED {
        let message = head.headers.get(GRPC_MESSAGE).and_then(|text| text.to_str().ok());
        return Err(connection
            .refused_range_stream(message.unwrap_or_default())
            .into());
    }
    let is_grpc = head.status == StatusCode::OK && head.headers.contains_key(CONTENT_TYPE);
    if !is_grpc || !CODES_SAME_AS_UNARY.contains(&code) {
        return Err(StreamFallback::Refused);
    }
    Ok(Converted {
        head,
        pieces: Vec::new(),
        trailers: None,
        held,
        summary: None,
    })
}

/// A RangeResponse's field 1.
fn header_field(header: &[u8]) -> Bytes {
    let length = header.len() as u64;
    let mut field = BytesMut::with_capacity(1 + encoded_len_varint(length) + header.len());
    field.put_u8(0x0a);
    encode_varint(length, &mut field);
    field.put_slice(header);
    field.freeze()
}

/// A RangeResponse's fields 3 and 4, which are omitted where they are 0.
fn more_and_count_fields(summary: &ResponseSummary) -> Bytes {
    let mut tail = BytesMut::new();
    if summary.more {
        tail.put_slice(&[0x18, 1]);
    }
    if summary.count > 0 {
        tail.put_u8(0x20);
        encode_varint(summary.count, &mut tail);
    }
    tail.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn negative_limit_and_revision_become_zero() {
        let request = stream_request(&RangeQuery {
            limit: -1,
            revision: -7,
            ..RangeQuery::default()
        });
        assert_eq!((request.limit, request.revision), (0, 0));
    }
}
