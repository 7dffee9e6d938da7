//! Sends a RangeStream to an endpoint that has the method.

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Response, StatusCode, response};
use http_body::Frame;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::Instant;

use super::error::SendError;
use super::send::{Attempts, Forward, RequestBody, UpstreamResponse};
use crate::grpc::Method;
use crate::grpc::metadata::is_grpc;
use crate::grpc::status::{Code, GRPC_MESSAGE, GRPC_STATUS};
use crate::proxy::response::ResponseBody;
use crate::upstream::{InFlight, NoRangeStream};

impl Forward {
    /// Sends a RangeStream to an endpoint that has it. An endpoint that responds with `Unimplemented` is followed by another,
    /// until none is left.
    ///
    /// # Errors
    /// [`SendError`], or within `Ok` why no endpoint can serve the request as a stream.
    pub(crate) async fn open_stream(
        &self,
        parts: &Parts,
        framed: &Bytes,
    ) -> Result<Result<Response<ResponseBody>, NoRangeStream>, SendError> {
        let body = RequestBody::Read(framed.clone());
        let mut attempts = Attempts::new(parts.clone(), body, Instant::now() + self.connect_timeout);
        loop {
            let connection = match self.upstream.streaming(attempts.deadline()).await? {
                Ok(connection) => connection,
                Err(reason) => return Ok(Err(reason)),
            };
            let Some(answered) = attempts.send_on(&connection).await? else {
                continue;
            };
            self.avoid_if_unavailable(&connection, answered.response.headers());
            let stream = match OpenedStream::open(answered).await {
                Ok(stream) => stream,
                Err(error) => {
                    // Nothing has been sent to the client yet, so retrying is safe.
                    attempts.failed(SendError::from_hyper(error)).await?;
                    continue;
                }
            };
            let Some(message) = stream.unimplemented() else {
                return Ok(Ok(self.pass_stream_through(stream)));
            };
            let reason = connection.refused_range_stream(&message);
            if reason == NoRangeStream::Shape || Instant::now() >= attempts.deadline() {
                return Ok(Err(reason));
            }
            // Another endpoint may have it.
        }
    }

    fn pass_stream_through(&self, stream: OpenedStream) -> Response<ResponseBody> {
        let is_grpc = is_grpc(&stream.head.headers);
        let body = self
            .forwarded_body(stream.body, Method::RangeStream, is_grpc, Some(stream.in_flight))
            .with_first(stream.first);
        Response::from_parts(stream.head, ResponseBody::from_source(body))
    }
}

/// A RangeStream of etcd's whose first frame has been read.
struct OpenedStream {
    head: response::Parts,
    first: Option<Frame<Bytes>>,
    body: Incoming,
    in_flight: InFlight,
}

impl OpenedStream {
    /// Waits for the first frame: etcd sends the head of its response together with it.
    async fn open(answered: UpstreamResponse) -> Result<OpenedStream, hyper::Error> {
        let UpstreamResponse { response, in_flight } = answered;
        let (head, mut body) = response.into_parts();
        let first = if head.headers.contains_key(GRPC_STATUS) {
            None
        } else {
            body.frame().await.transpose()?
        };
        Ok(OpenedStream {
            head,
            first,
            body,
            in_flight,
        })
    }

    /// The text of status `Unimplemented`, for the method or for the request's shape; in the head or, behind another proxy, in
    /// trailers that are the first frame.
    fn unimplemented(&self) -> Option<String> {
        if self.head.status == StatusCode::NOT_FOUND {
            // A proxy that routes by path: to a gRPC client this is Unimplemented.
            return Some(String::new());
        }
        let trailers = self.first.as_ref().and_then(Frame::trailers_ref);
        unimplemented(trailers.unwrap_or(&self.head.headers))
    }
}

/// The text of status `Unimplemented` in these headers or trailers.
fn unimplemented(headers: &HeaderMap) -> Option<String> {
    let is_unimplemented =
        headers.get(GRPC_STATUS)?.as_bytes() == (Code::Unimplemented as u16).to_string().as_bytes();
    let message = headers.get(GRPC_MESSAGE).map(|text| text.as_bytes());
    is_unimplemented.then(|| String::from_utf8_lossy(message.unwrap_or_default()).into_owned())
}
