//! Complete response of etcd that several reads share.

use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use etcd_wire::grpc::{Method, Status, status::GRPC_STATUS};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Response, StatusCode, response};
use http_body::Frame;
use rangecache_edge::limits::{ByteKind, ClientAccount, Exceeded, HeldBytes};
use rangecache_mirror::lineage::ClusterState;

use super::unary_over_stream::Converted;
use crate::forward::{ResponseReader, SendError, UpstreamResponse, status_of};
use crate::response::{BodySource, Polled, ResponseBody};

/// Codes that etcd, or a proxy before it, has for what all of the reads ask, or for its own state: `Ok`, `DeadlineExceeded` (a
/// shared call has no deadline that a client has set), `ResourceExhausted`, `OutOfRange`, `Unavailable`.
const CODES_FOR_ALL: [&[u8]; 5] = [b"0", b"4", b"8", b"11", b"14"];

/// Why identical reads have no response in common.
#[derive(Clone, Debug)]
pub(super) enum NotShared {
    /// None of them is served, but ends with this status.
    Refused(Status),
    /// Its bytes do not fit: each read is served by a call of its own.
    DoesNotFit {
        /// They would not fit either if others needed less.
        is_too_large: bool,
    },
    /// etcd has refused the call, perhaps for its metadata: each read is served by a call of its own.
    OfTheCall,
}

impl From<Exceeded> for NotShared {
    fn from(cause: Exceeded) -> NotShared {
        NotShared::Refused(status_of(cause))
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

impl From<SendError> for NotShared {
    fn from(error: SendError) -> NotShared {
        match error {
            SendError::Reset(_) => NotShared::OfTheCall,
            error => NotShared::Refused(error.status()),
        }
    }
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
    /// Reads etcd's whole response to a Range into memory, for the client of this `account` and others.
    ///
    /// # Errors
    /// [`NotShared`] if the connection is lost, or there is no room for the response.
    pub(super) async fn collect(
        upstream_response: UpstreamResponse,
        cluster_state: &ClusterState,
        account: &Arc<ClientAccount>,
    ) -> Result<SharedResponse, NotShared> {
        let UpstreamResponse {
            response,
            in_flight: _in_flight,
        } = upstream_response;
        let (mut head, body) = response.into_parts();
        // A response that is merged from pieces has a length of its own.
        head.headers.remove(CONTENT_LENGTH);
        let mut reader = ResponseReader::new(body, Method::Range, cluster_state);
        let mut held = account.hold(ByteKind::Shared);
        let mut pieces = Vec::new();
        while let Some(data) = reader.data().await.map_err(SendError::of_connection)? {
            let bytes = data.len() as u64;
            if held.try_grow(bytes).is_err() {
                let is_too_large = held.is_most(held.bytes() + bytes);
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

    /// Returns the response, unless another call of one of the reads might have a better one.
    ///
    /// # Errors
    /// [`NotShared::OfTheCall`].
    pub(super) fn for_all(self) -> Result<Arc<SharedResponse>, NotShared> {
        let fields = self.trailers.as_ref().unwrap_or(&self.head.headers);
        let code = fields.get(GRPC_STATUS).map(HeaderValue::as_bytes);
        let is_for_all =
            self.head.status == StatusCode::OK && code.is_some_and(|code| CODES_FOR_ALL.contains(&code));
        is_for_all.then(|| Arc::new(self)).ok_or(NotShared::OfTheCall)
    }

    /// Creates the response for one of the reads, which has this content type; shares the bytes.
    pub(super) fn response(self: &Arc<Self>, content_type: &HeaderValue) -> Response<ResponseBody> {
        let body = SharedBody {
            response: Arc::clone(self),
            next: 0,
            trailers: self.trailers.clone(),
        };
        let mut response = Response::new(ResponseBody::from_source(body));
        *response.status_mut() = self.head.status;
        let headers = response.headers_mut();
        headers.clone_from(&self.head.headers);
        headers.insert(CONTENT_TYPE, content_type.clone());
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
    use etcd_wire::grpc::status::ok_trailers;
    use http_body_util::BodyExt;

    use super::*;
    use crate::call::testing::account;

    #[tokio::test]
    async fn shared_response_is_complete_for_every_read_and_held_until_the_last() {
        let account = account(800);
        let used = || account.ledger().used_bytes(ByteKind::Shared);
        let mut held = account.hold(ByteKind::Shared);
        held.try_grow(6).unwrap();
        let shared = SharedResponse {
            head: Response::new(()).into_parts().0,
            pieces: vec![Bytes::from_static(b"one"), Bytes::from_static(b"two")],
            trailers: Some(ok_trailers()),
            is_streamed: false,
            _held: held,
        };
        let shared = shared.for_all().unwrap();
        let types = ["application/grpc", "application/grpc+proto"];
        let responses = types.map(|of| (of, shared.response(&HeaderValue::from_static(of))));
        drop(shared);
        for (content_type, response) in responses {
            assert_eq!(used(), 6);
            assert_eq!(response.headers()["content-type"], content_type);
            let body = response.into_body().collect().await.unwrap();
            assert_eq!(body.trailers(), Some(&ok_trailers()));
            assert_eq!(body.to_bytes(), "onetwo");
        }
        assert_eq!(used(), 0);
    }

    #[test]
    fn error_that_metadata_may_cause_is_not_shared() {
        for (http_status, code, is_for_all) in [
            (200, Some("0"), true),
            (200, Some("11"), true),
            (200, Some("14"), true),
            (200, Some("4"), true),
            (200, Some("3"), false),
            (200, Some("9"), false),
            (200, Some("13"), false),
            (200, None, false),
            (400, Some("0"), false),
        ] {
            let fields = HeaderMap::from_iter(code.map(|code| (GRPC_STATUS, HeaderValue::from_static(code))));
            // In trailers, and in a response of nothing else.
            for is_trailer in [true, false] {
                let mut head = Response::new(()).into_parts().0;
                head.status = StatusCode::from_u16(http_status).unwrap();
                if !is_trailer {
                    head.headers.clone_from(&fields);
                }
                let shared = SharedResponse {
                    head,
                    pieces: Vec::new(),
                    trailers: is_trailer.then(|| fields.clone()),
                    is_streamed: false,
                    _held: account(800).hold(ByteKind::Shared),
                };
                assert_eq!(shared.for_all().is_ok(), is_for_all, "{http_status}, {code:?}");
            }
        }
    }
}
