//! Large unary Ranges as one RangeStream to etcd (KEP-5966): etcd holds a chunk at a time instead of the whole answer.
//!
//! The chunks' key-values are the pieces of the unary answer as they came, for protobuf messages merge by concatenation.
//! They are held until the last chunk has come: that one brings the header, which goes first, and a gRPC message begins
//! with its length. Until then nothing has been sent, so whatever goes wrong, the call can still be forwarded as it came.

use std::sync::Arc;
use std::time::Duration;

use bytes::{BufMut, Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode, Uri, response};
use http_body_util::BodyExt;
use prost::encoding::{encode_varint, encoded_len_varint};
use tokio::time::Instant;

use super::body::ResponseBody;
use super::budget::{Budget, Held};
use super::forward::Forward;
use super::stalled::Answers;
use crate::cache::{RangeQuery, SortOrder, SortTarget};
use crate::etcdserverpb::RangeRequest;
use crate::grpc::frame::{PREFIX_BYTES, framed, put_prefix};
use crate::grpc::metadata::grpc_content_type;
use crate::grpc::method::RANGE_STREAM;
use crate::grpc::status::{GRPC_MESSAGE, GRPC_STATUS, MAX_RESPONSE_BYTES, is_ok};
use crate::grpc::{RangeResponseScanner, ResponseSummary, Status};
use crate::telemetry::Metrics;
use crate::upstream::{Connection, NoRangeStream, Outgoing};

/// Room is taken in steps of this size; what the last step leaves is given back.
const STEP_BYTES: u64 = 256 << 10;
/// Codes in which etcd refuses a stream for the same reasons and in the same words as the unary call: invalid argument,
/// permission denied, out of range, unauthenticated. Others may be a stream's own (a learner serves none, for one).
const SAME_AS_UNARY: [&[u8]; 4] = [b"3", b"7", b"11", b"16"];
const UNIMPLEMENTED: &[u8] = b"12";

/// Makes RangeStreams of Ranges.
#[derive(Debug)]
pub(super) struct Converter {
    budget: Arc<Budget>,
    /// How long a stream may pause for room.
    max_wait: Duration,
    metrics: Arc<Metrics>,
}

/// A whole answer, or etcd's refusal.
#[derive(Debug)]
pub(super) struct Converted {
    pub(super) head: response::Parts,
    /// The unary answer's bytes; none of a refusal's, which is all in the head.
    pub(super) pieces: Vec<Bytes>,
    pub(super) trailers: Option<HeaderMap>,
    pub(super) held: Held,
    /// What the answer comes to, if it is one.
    pub(super) found: Option<ResponseSummary>,
}

/// It has to be forwarded as it came; why is counted.
#[derive(Debug)]
pub(super) struct NotConverted(&'static str);

impl From<NoRangeStream> for NotConverted {
    fn from(reason: NoRangeStream) -> Self {
        NotConverted(reason.as_str())
    }
}

/// Whether etcd's RangeStream gives what its Range would. Sorted ones it refuses, or sorts chunk by chunk; a count alone
/// is cheap.
pub(super) fn suits(query: &RangeQuery) -> bool {
    let by_key = query.sort_target == SortTarget::Key as i32
        && matches!(
            SortOrder::from_number(query.sort_order),
            Some(SortOrder::None | SortOrder::Ascend)
        );
    !query.range_end.is_empty() && !query.count_only && by_key && !query.has_revision_filter()
}

/// The request for a stream of what `query` asks for. etcd pins a stream to one revision only where that is not negative.
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

impl Converter {
    pub(super) fn new(budget: &Arc<Budget>, max_wait: Duration, metrics: &Arc<Metrics>) -> Converter {
        Converter {
            budget: Arc::clone(budget),
            max_wait,
            metrics: Arc::clone(metrics),
        }
    }

    /// Answers a Range that [`suits`] by one RangeStream, with its caller's own metadata.
    ///
    /// # Errors
    /// [`NotConverted`]: nothing has been sent to the caller; the call is to be forwarded as it came.
    pub(super) async fn convert(
        &self,
        forward: &Forward,
        parts: &Parts,
        query: &RangeQuery,
    ) -> Result<Converted, NotConverted> {
        let converted = self.try_convert(forward, parts, query).await;
        if let Err(NotConverted(reason)) = converted {
            tracing::debug!(reason, "a large Range could not be a RangeStream");
            self.metrics.forwarding.record_stream_fallback(reason);
        }
        converted
    }

    async fn try_convert(
        &self,
        forward: &Forward,
        parts: &Parts,
        query: &RangeQuery,
    ) -> Result<Converted, NotConverted> {
        // Who forwards the call as it came waits for a connection.
        let connection = forward
            .upstream
            .streaming(Instant::now())
            .await
            .map_err(|_| NotConverted("no_endpoint"))??;
        let mut parts = parts.clone();
        parts.uri = Uri::from_static(RANGE_STREAM);
        let request = Request::from_parts(parts, Outgoing::whole(framed(&stream_request(query))));
        let (response, _in_flight) = connection
            .send(request)
            .await
            .map_err(|_| NotConverted("broken"))?;
        let (mut head, mut body) = response.into_parts();
        // For the call's trace.
        head.extensions.insert(connection.url().clone());
        let mut held = self.budget.begin();
        if head.headers.contains_key(GRPC_STATUS) {
            let trailers = HeaderMap::new();
            return refused(head, trailers, held, &connection);
        }
        let (mut walk, mut pieces, mut came) = (RangeResponseScanner::stream(), vec![Bytes::new()], 0);
        loop {
            let frame = match body.frame().await {
                Some(Ok(frame)) => frame,
                Some(Err(_)) | None => return Err(NotConverted("broken")),
            };
            let data = match frame.into_data() {
                Ok(data) => data,
                Err(frame) => {
                    let trailers = frame.into_trailers().unwrap_or_default();
                    return self.ended(forward, &connection, head, trailers, walk, pieces, held);
                }
            };
            came += data.len() as u64;
            if came > held.bytes() {
                let step = (came - held.bytes()).max(STEP_BYTES);
                if held.try_grow(step).is_err() {
                    held.grow(came - held.bytes(), Instant::now() + self.max_wait)
                        .await
                        .map_err(|_| NotConverted("budget"))?;
                }
            }
            walk.scan(&data, |run| pieces.push(data.slice(run)))
                .map_err(|_| NotConverted("malformed"))?;
        }
    }

    /// The stream's end, by its trailers.
    #[allow(clippy::too_many_arguments, reason = "what a stream was")]
    fn ended(
        &self,
        forward: &Forward,
        connection: &Connection,
        head: response::Parts,
        trailers: HeaderMap,
        walk: RangeResponseScanner,
        mut pieces: Vec<Bytes>,
        mut held: Held,
    ) -> Result<Converted, NotConverted> {
        if !is_ok(&trailers) {
            // In mid-stream the unary call may well have an answer: it needs no revision to live on.
            return if walk.has_begun() {
                Err(NotConverted("broken"))
            } else {
                refused(head, trailers, held, connection)
            };
        }
        let found = walk.finish().map_err(|_| NotConverted("malformed"))?;
        let header = found.header().map_err(|_| NotConverted("malformed"))?;
        let kvs_bytes: u64 = pieces.iter().map(|piece| piece.len() as u64).sum();
        held.stop_growing();
        held.shrink(held.bytes().saturating_sub(kvs_bytes));
        forward
            .cluster_state
            .record_forwarded(header.cluster_id, header.revision);
        let (first, last) = (header_field(&found.header), tail(&found));
        let length = first.len() as u64 + kvs_bytes + last.len() as u64;
        let Some(length) = u32::try_from(length)
            .ok()
            .filter(|length| u64::from(*length) <= MAX_RESPONSE_BYTES)
        else {
            let content_type = grpc_content_type(&head.headers);
            let (head, _) = super::body::status(&Status::LargerThanMax(length), content_type).into_parts();
            return Ok(Converted {
                head,
                pieces: Vec::new(),
                trailers: None,
                held,
                found: None,
            });
        };
        let mut front = BytesMut::with_capacity(PREFIX_BYTES + first.len());
        front.put_bytes(0, PREFIX_BYTES);
        put_prefix(&mut front, length.into());
        front.put_slice(&first);
        pieces[0] = front.freeze();
        pieces.push(last);
        Ok(Converted {
            head,
            pieces,
            trailers: Some(trailers),
            held,
            found: Some(found),
        })
    }
}

impl Converted {
    /// The answer for its caller.
    pub(super) fn response(self, answers: &Answers) -> Response<ResponseBody> {
        let body = match self.trailers {
            Some(trailers) => ResponseBody::held(self.pieces, trailers, self.held, answers),
            None => ResponseBody::empty(),
        };
        Response::from_parts(self.head, body)
    }
}

/// etcd refused the stream before its first chunk: that is its answer to the unary call too, or else why there is none.
fn refused(
    mut head: response::Parts,
    trailers: HeaderMap,
    held: Held,
    connection: &Connection,
) -> Result<Converted, NotConverted> {
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
    if !is_grpc || !SAME_AS_UNARY.contains(&code) {
        return Err(NotConverted("refused"));
    }
    Ok(Converted {
        head,
        pieces: Vec::new(),
        trailers: None,
        held,
        found: None,
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

/// A RangeResponse's fields 3 and 4, which are left out where they are 0.
fn tail(found: &ResponseSummary) -> Bytes {
    let mut tail = BytesMut::new();
    if found.more {
        tail.put_slice(&[0x18, 1]);
    }
    if found.count > 0 {
        tail.put_u8(0x20);
        encode_varint(found.count, &mut tail);
    }
    tail.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_stream_would_answer_differently_is_not_converted() {
        let list = RangeQuery {
            key: "k".into(),
            range_end: "l".into(),
            ..RangeQuery::default()
        };
        assert!(suits(&list));
        assert!(suits(&RangeQuery {
            sort_order: 1,
            ..list.clone()
        }));
        assert!(suits(&RangeQuery {
            keys_only: true,
            limit: 5000,
            revision: 7,
            ..list.clone()
        }));
        for other in [
            RangeQuery {
                range_end: Bytes::new(),
                ..list.clone()
            },
            RangeQuery {
                count_only: true,
                ..list.clone()
            },
            RangeQuery {
                sort_order: 2,
                ..list.clone()
            },
            RangeQuery {
                sort_order: 9,
                ..list.clone()
            },
            RangeQuery {
                sort_target: 3,
                ..list.clone()
            },
            RangeQuery {
                min_mod_revision: 1,
                ..list.clone()
            },
        ] {
            assert!(!suits(&other), "{other:?}");
        }
    }

    #[test]
    fn a_stream_is_pinned_and_unbounded_where_the_range_is() {
        let request = stream_request(&RangeQuery {
            limit: -1,
            revision: -7,
            ..RangeQuery::default()
        });
        assert_eq!((request.limit, request.revision), (0, 0));
    }
}
