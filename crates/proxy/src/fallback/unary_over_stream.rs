//! Serves large unary Ranges by one RangeStream of etcd (KEP-5966), for which etcd buffers one chunk at a time
//! instead of the whole response.
//!
//! The encoded key-values of the chunks become the unary response without being decoded: concatenated protobuf
//! messages are merged. They are buffered until the last chunk, because the response begins with its length and the
//! header, and both are known only then. Nothing is sent to the client before that, so that after any failure the
//! call can be forwarded unchanged.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::{Buf, BufMut, Bytes, BytesMut};
use etcd_store::cache::{RangeQuery, Rope};
use etcd_wire::grpc::frame::{PREFIX_BYTES, framed, put_prefix};
use etcd_wire::grpc::metadata::{grpc_content_type, remove_own_metadata};
use etcd_wire::grpc::status::{GRPC_MESSAGE, GRPC_STATUS, MAX_RESPONSE_BYTES, is_ok};
use etcd_wire::grpc::{Method, RangeResponseScanner, ResponseSummary, Status};
use etcd_wire::{etcdserverpb::RangeRequest, grpc::method::RANGE_STREAM};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, Request, Response, StatusCode, Uri, request::Parts, response};
use http_body::Frame;
use prost::encoding::{encode_varint, encoded_len_varint};
use rangecache_edge::limits::{ByteKind, ClientAccount, HeldBytes};
use rangecache_upstream::{Connection, Outgoing};
use tokio::time::Instant;

use super::reason::StreamFallback;
use crate::forward::{Forward, ResponseReader};
use crate::response::{BodySource, Polled, ResponseBody, status_response};

/// Step, in bytes, by which a response takes bytes from the budget. The unused rest is released when it is complete.
const BUDGET_STEP_BYTES: u64 = 256 << 10;
/// Codes with which etcd refuses a stream for the same reasons and with the same text as a unary call: invalid
/// argument, permission denied, out of range, unauthenticated. Other codes may apply to streams only; learners, for
/// example, refuse streams but serve some unary calls.
const CODES_SAME_AS_UNARY: [&[u8]; 4] = [b"3", b"7", b"11", b"16"];
/// Code of an etcd without RangeStream.
const UNIMPLEMENTED: &[u8] = b"12";
/// Minimum size of a frame to the client, in bytes. Small entries arrive in many pieces, which are joined up to this
/// size.
const FRAME_MIN_BYTES: usize = 128 << 10;

/// Complete response of a converted call: a success, or a refusal by etcd.
#[derive(Debug)]
pub(super) struct Converted {
    pub(super) head: response::Parts,
    /// Pieces of the framed unary response. Empty for a refusal, whose status is in the head.
    pub(super) pieces: Vec<Bytes>,
    pub(super) trailers: Option<HeaderMap>,
    /// Budget for the pieces.
    pub(super) held: HeldBytes,
    /// Header, count and last key of the response; `None` for a refusal.
    pub(super) summary: Option<ResponseSummary>,
}

/// Returns the request for a stream of the entries that `query` requests. Negative limits and revisions become 0:
/// etcd reads all chunks at the same revision only if the requested one is not negative.
pub(super) fn stream_request(query: &RangeQuery) -> RangeRequest {
    RangeRequest {
        limit: query.limit.max(0),
        revision: query.revision.max(0),
        ..query.to_request()
    }
}

/// Serves a [streamable](RangeQuery::is_streamable) Range by one RangeStream with the metadata in `parts`
/// of the connection with this `account`. Waits for bytes for `--stream-max-wait` at most; HTTP/2 flow control stops etcd
/// meanwhile.
///
/// # Errors
/// [`StreamFallback`] if that is impossible or fails; the call must then be forwarded unchanged.
pub(super) async fn convert(
    forward: &Forward,
    parts: &Parts,
    query: &RangeQuery,
    account: &Arc<ClientAccount>,
) -> Result<Converted, StreamFallback> {
    // The deadline is now: if no endpoint is connected, the forwarded call waits for one.
    let connection = forward
        .upstream
        .streaming(Instant::now())
        .await
        .map_err(|_| StreamFallback::NoEndpoint)??;
    let mut parts = parts.clone();
    parts.uri = Uri::from_static(RANGE_STREAM);
    remove_own_metadata(&mut parts.headers);
    // That of the client's message, which is encoded in another way here.
    parts.headers.remove(CONTENT_LENGTH);
    let request = Request::from_parts(parts, Outgoing::whole(framed(&stream_request(query))));
    let (response, _in_flight) = connection
        .send(request)
        .await
        .map_err(|_| StreamFallback::Broken)?;
    forward.cluster_state.note_answered(connection.opened());
    let (mut head, body) = response.into_parts();
    // Read by the trace of the call.
    head.extensions.insert(connection.url().clone());
    let mut held = account.hold(ByteKind::Converted);
    if head.headers.contains_key(GRPC_STATUS) {
        let trailers = HeaderMap::new();
        return convert_refusal(head, trailers, held, &connection);
    }
    let mut reader = ResponseReader::new(body, Method::RangeStream, &forward.cluster_state);
    let (mut scanner, mut pieces, mut read_bytes) = (RangeResponseScanner::stream(), vec![Bytes::new()], 0);
    while let Some(data) = reader.data().await.map_err(|_| StreamFallback::Broken)? {
        read_bytes += data.len() as u64;
        if read_bytes > held.bytes() {
            let step = (read_bytes - held.bytes()).max(BUDGET_STEP_BYTES);
            // A full step if it fits; otherwise wait for the bytes that are already in memory.
            if !held.grow_if_free(step) {
                let grown = held
                    .grow(read_bytes - held.bytes(), Instant::now() + forward.max_wait)
                    .await;
                if grown.is_err() {
                    return Err(if held.is_most(read_bytes) {
                        StreamFallback::TooLarge
                    } else {
                        StreamFallback::Budget
                    });
                }
            }
        }
        scanner
            .scan(&data, |run| pieces.push(data.slice(run)))
            .map_err(|_| StreamFallback::Malformed)?;
    }
    let trailers = reader.into_trailers().ok_or(StreamFallback::Broken)?;
    if !is_ok(&trailers) {
        // An error in mid-stream may be specific to streams: etcd reads their later chunks at a past revision,
        // which may be compacted meanwhile. The unary call reads everything at once.
        return if scanner.has_begun() {
            Err(StreamFallback::Broken)
        } else {
            convert_refusal(head, trailers, held, &connection)
        };
    }
    let summary = scanner.finish().map_err(|_| StreamFallback::Malformed)?;
    assemble(head, trailers, summary, pieces, held)
}

/// Builds the unary response from a complete stream: header, key-values, then `more` and `count`. The first of
/// `pieces` is empty, and is replaced by the gRPC prefix and the header.
fn assemble(
    mut head: response::Parts,
    trailers: HeaderMap,
    summary: ResponseSummary,
    mut pieces: Vec<Bytes>,
    mut held: HeldBytes,
) -> Result<Converted, StreamFallback> {
    summary.header().map_err(|_| StreamFallback::Malformed)?;
    // The length of the stream, which is not that of the unary response.
    head.headers.remove(CONTENT_LENGTH);
    let kvs_bytes: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
    held.leave_line();
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
    /// Creates the response for the client.
    pub(super) fn into_response(self) -> Response<ResponseBody> {
        let body = match self.trailers {
            Some(trailers) => ResponseBody::from_source(HeldBody {
                pieces: self.pieces.into_iter(),
                trailers: Some(trailers),
                held: self.held,
            }),
            None => ResponseBody::empty(),
        };
        Response::from_parts(self.head, body)
    }
}

/// Body of a converted response; releases each piece from the budget when it is sent.
#[derive(Debug)]
struct HeldBody {
    /// Pieces that have not been sent.
    pieces: std::vec::IntoIter<Bytes>,
    trailers: Option<HeaderMap>,
    held: HeldBytes,
}

impl BodySource for HeldBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        Poll::Ready(self.next_frame().map(Ok))
    }
}

impl HeldBody {
    /// Joins the next pieces to a frame of at least [`FRAME_MIN_BYTES`], if there are enough.
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

/// Decides about a stream that etcd refused before its first chunk: the refusal is the response if etcd would refuse
/// the unary call alike; otherwise the call must be forwarded.
fn convert_refusal(
    mut head: response::Parts,
    trailers: HeaderMap,
    held: HeldBytes,
    connection: &Connection,
) -> Result<Converted, StreamFallback> {
    head.headers.extend(trailers);
    head.headers.remove(CONTENT_LENGTH);
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

/// Encodes field 1 of a RangeResponse.
fn header_field(header: &[u8]) -> Bytes {
    let length = header.len() as u64;
    let mut field = BytesMut::with_capacity(1 + encoded_len_varint(length) + header.len());
    field.put_u8(0x0a);
    encode_varint(length, &mut field);
    field.put_slice(header);
    field.freeze()
}

/// Encodes fields 3 (`more`) and 4 (`count`) of a RangeResponse; zero values are omitted, as etcd does.
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
    use etcd_wire::etcdserverpb::{RangeResponse, RangeStreamResponse, ResponseHeader};

    use super::*;
    use crate::call::testing::account;

    #[test]
    fn negative_limit_and_revision_become_zero() {
        let request = stream_request(&RangeQuery {
            limit: -1,
            revision: -7,
            ..RangeQuery::default()
        });
        assert_eq!((request.limit, request.revision), (0, 0));
    }

    #[test]
    fn unary_response_does_not_keep_the_length_of_the_stream() {
        let chunk = RangeStreamResponse {
            range_response: Some(RangeResponse {
                header: Some(ResponseHeader {
                    revision: 1,
                    ..ResponseHeader::default()
                }),
                ..RangeResponse::default()
            }),
        };
        let mut scanner = RangeResponseScanner::stream();
        scanner.scan(&framed(&chunk), |_| {}).unwrap();
        let head = Response::builder().header(CONTENT_LENGTH, 7).body(()).unwrap();
        let held = account(1 << 20).hold(ByteKind::Converted);
        let summary = scanner.finish().unwrap();
        let (head, ()) = head.into_parts();
        let converted = assemble(head, HeaderMap::new(), summary, vec![Bytes::new()], held).unwrap();
        assert!(!converted.head.headers.contains_key(CONTENT_LENGTH));
    }
}
