//! Sends a RangeStream to an endpoint that implements it.

use bytes::Bytes;
use etcd_wire::grpc::status::{Code, GRPC_MESSAGE, GRPC_STATUS};
use etcd_wire::grpc::{Method, metadata::is_grpc};
use http::{HeaderMap, Response, StatusCode, request::Parts, response};
use http_body::Frame;
use http_body_util::BodyExt;
use rangecache_edge::limits::{ByteKind, Gate};
use rangecache_upstream::{BoxError, ConnectionClass, InFlight, NoRangeStream, ReceiveWindow, UpstreamBody};
use tokio::time::Instant;

use super::error::SendError;
use super::send::{Attempts, Forward, RequestBody, UpstreamResponse};
use crate::response::ResponseBody;

impl Forward {
    /// Sends a RangeStream to an endpoint that implements it, and returns the client's response. After `Unimplemented`
    /// the next endpoint is tried, until none is left or `--connect-timeout` has expired. Waits for room for
    /// what etcd may send before its flow control stops it, and has a slot of `gate` until the first frame arrives.
    ///
    /// # Errors
    /// [`SendError`]; or, within `Ok`, the reason for which no endpoint can serve the request as a stream.
    pub(crate) async fn open_stream(
        &self,
        parts: &Parts,
        framed: &Bytes,
        gate: Gate<'_>,
    ) -> Result<Result<Response<ResponseBody>, NoRangeStream>, SendError> {
        let mut held = gate.account.hold(ByteKind::Forwarded);
        let latest = gate.deadline.at_most(Instant::now() + self.max_wait);
        held.grow(ReceiveWindow::SHARED.stream.into(), latest).await?;
        let _slot = self.slot(ConnectionClass::Stream, Some(gate)).await?;
        let body = RequestBody::Read(framed.clone());
        let mut attempts = Attempts::new(parts.clone(), body, Instant::now() + self.connect_timeout);
        loop {
            let connection = match self.upstream.streaming(attempts.deadline()).await? {
                Ok(connection) => connection,
                Err(reason) => return Ok(Err(reason)),
            };
            let Some(upstream_response) = attempts.send_on(&connection).await? else {
                continue;
            };
            self.cluster_state.note_answered(connection.opened());
            let stream = match OpenedStream::open(upstream_response).await {
                Ok(stream) => stream,
                Err(error) => {
                    // Nothing has been sent to the client yet, so retrying is safe.
                    attempts.pause_after(SendError::of_connection(error)).await?;
                    continue;
                }
            };
            self.avoid_if_unavailable(&connection, stream.status());
            let Some(message) = stream.unimplemented_message() else {
                let is_grpc = is_grpc(&stream.head.headers);
                let in_flight = Some(stream.in_flight);
                let body = self
                    .forwarded_body(stream.body, Method::RangeStream, is_grpc, in_flight)
                    .with_first(stream.first)
                    .with_held(held);
                let body = ResponseBody::from_source(body);
                return Ok(Ok(Response::from_parts(stream.head, body)));
            };
            let reason = connection.refused_range_stream(&message);
            if reason == NoRangeStream::Shape || Instant::now() >= attempts.deadline() {
                return Ok(Err(reason));
            }
            // `refused_range_stream` has marked the endpoint, so the next turn of the loop chooses another.
        }
    }
}

/// Response of etcd to a RangeStream, whose first frame has been read.
struct OpenedStream {
    head: response::Parts,
    first: Option<Frame<Bytes>>,
    body: UpstreamBody,
    in_flight: InFlight,
}

impl OpenedStream {
    /// Waits for the first frame. This delays no client: etcd sends the head of the response together with that frame.
    async fn open(upstream_response: UpstreamResponse) -> Result<OpenedStream, BoxError> {
        let UpstreamResponse { response, in_flight } = upstream_response;
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

    /// Headers with the status of a response that has nothing else: its head or, behind another proxy, trailers that are the first
    /// frame.
    fn status(&self) -> &HeaderMap {
        let trailers = self.first.as_ref().and_then(Frame::trailers_ref);
        trailers.unwrap_or(&self.head.headers)
    }

    /// Returns the message of status `Unimplemented`, if that is the response.
    fn unimplemented_message(&self) -> Option<String> {
        if self.head.status == StatusCode::NOT_FOUND {
            // From a proxy that routes by path. gRPC clients take HTTP status 404 for `Unimplemented`.
            return Some(String::new());
        }
        unimplemented_message(self.status())
    }
}

/// Returns the message of status `Unimplemented` in headers or trailers; `None` for any other status.
fn unimplemented_message(headers: &HeaderMap) -> Option<String> {
    let is_unimplemented =
        headers.get(GRPC_STATUS)?.as_bytes() == (Code::Unimplemented as u16).to_string().as_bytes();
    let message = headers.get(GRPC_MESSAGE).map(|text| text.as_bytes());
    is_unimplemented.then(|| String::from_utf8_lossy(message.unwrap_or_default()).into_owned())
}
