//! Complete response of etcd that several reads share.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_LENGTH;
use http::{HeaderMap, Response, response};
use http_body::Frame;

use super::refused::Refused;
use super::too_large::is_too_large;
use super::unary_over_stream::Converted;
use crate::proxy::forward::{ResponseReader, SendError, UpstreamResponse};
use crate::proxy::response::{BodySource, Polled, ResponseBody};
use etcd_wire::grpc::Method;
use rangecache_edge::limits::{ByteBudget, HeldBytes};
use rangecache_mirror::history::ClusterState;
use rangecache_upstream::BoxError;

/// Why identical reads have no response in common.
#[derive(Clone, Debug)]
pub(super) enum NotShared {
    /// None of them is served.
    Refused(Refused),
    /// Its bytes do not fit: each read is served by a call of its own.
    DoesNotFit {
        /// They would not fit either if others needed less.
        is_too_large: bool,
    },
}

impl<R: Into<Refused>> From<R> for NotShared {
    fn from(refused: R) -> NotShared {
        NotShared::Refused(refused.into())
    }
}

/// Complete response, held once in memory for all reads that share it.
#[derive(Debug)]
pub(super) struct SharedResponse {
    head: response::Parts,
    pieces: Vec<Bytes>,
    trailers: Option<HeaderMap>,
    /// Whether etcd sent it as a RangeStream.
    pub(super) is_streamed: bool,
    _held: HeldBytes,
}

impl From<Converted> for SharedResponse {
    fn from(converted: Converted) -> SharedResponse {
        SharedResponse {
            head: converted.head,
            pieces: converted.pieces,
            trailers: converted.trailers,
            is_streamed: true,
            _held: converted.held,
        }
    }
}

impl SharedResponse {
    /// Reads etcd's whole response to a Range into memory, for the client with this number and others.
    ///
    /// # Errors
    /// [`NotShared`] if the connection is lost or `budget` is used up, or has no more for this client.
    pub(super) async fn collect(
        upstream_response: UpstreamResponse,
        cluster_state: &ClusterState,
        budget: &Arc<ByteBudget>,
        client: u64,
    ) -> Result<SharedResponse, NotShared> {
        let UpstreamResponse {
            response,
            in_flight: _in_flight,
        } = upstream_response;
        let (mut head, body) = response.into_parts();
        // A response that is merged from pieces has a length of its own.
        head.headers.remove(CONTENT_LENGTH);
        let mut reader = ResponseReader::new(body, Method::Range, cluster_state);
        let mut held = budget.hold_for(client);
        let mut pieces = Vec::new();
        let lost = |error: BoxError| Refused::shared_call(SendError::Lost(error).status());
        while let Some(data) = reader.data().await.map_err(lost)? {
            let bytes = data.len() as u64;
            if held.try_grow(bytes).is_err() {
                held.record_refusal();
                let is_too_large = is_too_large(held.bytes() + bytes, budget);
                return Err(NotShared::DoesNotFit { is_too_large });
            }
            pieces.push(data);
        }
        Ok(SharedResponse {
            head,
            pieces,
            trailers: reader.into_trailers(),
            is_streamed: false,
            _held: held,
        })
    }

    /// Creates the response for one of the reads; shares the bytes.
    pub(super) fn response(self: &Arc<Self>) -> Response<ResponseBody> {
        let body = SharedBody {
            response: Arc::clone(self),
            next: 0,
            trailers: self.trailers.clone(),
        };
        let mut response = Response::new(ResponseBody::from_source(body));
        *response.status_mut() = self.head.status;
        response.headers_mut().clone_from(&self.head.headers);
        response
    }
}

/// Body that yields the pieces of a shared response, then its trailers.
#[derive(Debug)]
struct SharedBody {
    response: Arc<SharedResponse>,
    /// Index of the next piece.
    next: usize,
    trailers: Option<HeaderMap>,
}

impl BodySource for SharedBody {
    fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
        let frame = match self.response.pieces.get(self.next) {
            Some(piece) => {
                self.next += 1;
                Some(Frame::data(piece.clone().into()))
            }
            None => self.trailers.take().map(Frame::trailers),
        };
        Poll::Ready(frame.map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.next >= self.response.pieces.len() && self.trailers.is_none()
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::BodyExt;

    use super::*;
    use etcd_wire::grpc::status::ok_trailers;
    use rangecache_edge::limits::BufferKindMetrics;

    #[tokio::test]
    async fn shared_response_is_complete_for_every_read_and_held_until_the_last() {
        let metrics = BufferKindMetrics::default();
        let gauge = metrics.used.clone();
        let budget = ByteBudget::first_come(100, metrics);
        let mut held = budget.hold();
        held.try_grow(6).unwrap();
        let (head, ()) = Response::builder()
            .header("content-type", "application/grpc")
            .body(())
            .unwrap()
            .into_parts();
        let shared = Arc::new(SharedResponse {
            head,
            pieces: vec![Bytes::from_static(b"one"), Bytes::from_static(b"two")],
            trailers: Some(ok_trailers()),
            is_streamed: false,
            _held: held,
        });
        let responses = [shared.response(), shared.response()];
        drop(shared);
        for response in responses {
            assert_eq!(gauge.get(), 6);
            assert_eq!(response.headers()["content-type"], "application/grpc");
            let body = response.into_body().collect().await.unwrap();
            assert_eq!(body.trailers(), Some(&ok_trailers()));
            assert_eq!(body.to_bytes(), "onetwo");
        }
        assert_eq!(gauge.get(), 0);
    }
}
