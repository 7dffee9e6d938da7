//! Bodies of etcd's responses: those that pass through unchanged, and those that are read to their end, for callers that need all of it
//! before they respond.

use std::task::{Context, Poll};
use std::{pin::Pin, sync::Arc};

use bytes::Bytes;
use etcd_store::cache::Rope;
use etcd_wire::grpc::{HeaderScanner, JsonHeaderScanner, Method, Scanned, Status};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt;
use rangecache_base::{net::Url, telemetry::metrics::Source};
use rangecache_edge::limits::{Exceeded, HeldBytes};
use rangecache_mirror::Unreadable;
use rangecache_mirror::lineage::{ClusterState, History};
use rangecache_upstream::{BoxError, InFlight, UpstreamBody, is_reset};

use super::shutdown::StopSignal;
use crate::response::{BodySource, Polled};

/// Yields etcd's frames unchanged, and records the revisions in them before they are sent to the client (I11).
#[derive(Debug)]
pub(crate) struct ForwardedBody {
    /// Frame that was read from `body` already, to learn etcd's status before the response was passed through.
    first: Option<Frame<Bytes>>,
    body: UpstreamBody,
    /// Finds the revisions in the data; `None` unless the method is gRPC and its responses carry etcd's header.
    scanner: Option<HeaderScanner>,
    /// Finds the revisions in JSON; `None` unless the responses of the method may contain some.
    json_scanner: Option<JsonHeaderScanner>,
    cluster_state: Arc<ClusterState>,
    /// etcd's history when the response began.
    history: Arc<History>,
    /// Whether rangecache may end the body with a status of its own: for gRPC, until trailers have been sent.
    may_send_status: bool,
    /// The connection was lost before the response ended.
    has_failed: bool,
    /// Counts the call as in flight at its endpoint until the body is dropped.
    in_flight: Option<InFlight>,
    /// Set for endless calls.
    stop: Option<StopSignal>,
    /// Counts what etcd has sent, or may send, and the client has not read.
    held: Option<HeldBytes>,
    /// Bytes that etcd may send on an endless call before its flow control stops it. They count while the client does
    /// not read: most endless calls are open and have nothing to send. 0 for other calls.
    window_bytes: u64,
}

impl ForwardedBody {
    /// Creates the body for etcd's response to a call of `method`. `in_flight` counts the call at its endpoint; `stop`
    /// ends endless calls when the process stops.
    pub(crate) fn new(
        body: UpstreamBody,
        method: Method,
        is_grpc: bool,
        cluster_state: &Arc<ClusterState>,
        in_flight: Option<InFlight>,
        stop: Option<StopSignal>,
    ) -> ForwardedBody {
        ForwardedBody {
            first: None,
            body,
            scanner: if is_grpc { HeaderScanner::new(method) } else { None },
            json_scanner: (!is_grpc && method.may_show_revision_as_json()).then(JsonHeaderScanner::default),
            cluster_state: Arc::clone(cluster_state),
            history: cluster_state.current(),
            may_send_status: is_grpc,
            has_failed: false,
            in_flight,
            stop,
            held: None,
            window_bytes: 0,
        }
    }

    /// Returns the body with `first` put back in front, after it was read separately.
    pub(crate) fn with_first(self, first: Option<Frame<Bytes>>) -> ForwardedBody {
        ForwardedBody { first, ..self }
    }

    /// Keeps `held` as long as the body.
    pub(crate) fn with_held(self, held: HeldBytes) -> ForwardedBody {
        let held = Some(held);
        ForwardedBody { held, ..self }
    }

    /// Counts `window_bytes` by `held`, which has them, whenever the client does not read.
    pub(crate) fn with_window(self, held: HeldBytes, window_bytes: u64) -> ForwardedBody {
        ForwardedBody {
            window_bytes,
            ..self.with_held(held)
        }
    }

    /// Counts the window of an endless call, until the client reads again.
    fn count_window(&mut self) -> Result<(), Exceeded> {
        match &mut self.held {
            Some(held) if self.window_bytes > 0 => held.try_grow(self.window_bytes),
            _ => Ok(()),
        }
    }

    /// Ends an endless call whose client reads too slowly for the buffers: etcd's clients connect again, and resume
    /// where they were.
    fn end_unread(&mut self) -> Result<Frame<Rope>, BoxError> {
        if !self.may_send_status || !self.is_between_messages() {
            return Err(Exceeded::Bytes.into());
        }
        self.may_send_status = false;
        Ok(Frame::trailers(Status::UnreadStream.trailers()))
    }

    fn is_between_messages(&self) -> bool {
        self.scanner.as_ref().is_some_and(HeaderScanner::is_at_boundary)
    }

    /// Ends an endless call because the process stops: with status `Unavailable`, or without trailers for the JSON
    /// gateway.
    fn end_at_stop(&mut self) -> Option<Result<Frame<Rope>, BoxError>> {
        if !self.may_send_status {
            return None;
        }
        self.may_send_status = false;
        Some(Ok(Frame::trailers(Status::StoppingReconnect.trailers())))
    }

    /// Ends the body after `error`. A lost connection becomes status `Unavailable`, as in etcd's own clients; a stream
    /// that etcd reset is reset for the client with the same reason.
    fn end_with_error(&mut self, error: BoxError) -> Option<Result<Frame<Rope>, BoxError>> {
        self.has_failed = !is_reset(&error);
        // A status may follow a complete message only. In mid-message the client's stream is reset.
        if is_reset(&error) || !self.is_between_messages() || !self.may_send_status {
            return Some(Err(error));
        }
        self.may_send_status = false;
        let status = Status::ConnectionLost(error.to_string());
        Some(Ok(Frame::trailers(status.trailers())))
    }
}

impl BodySource for ForwardedBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        // Without a scanner the boundaries of messages are not known, and the call is ended at once.
        if let Some(stop) = &mut self.stop
            && stop.is_stopping(cx)
            && self.scanner.as_ref().is_none_or(HeaderScanner::is_at_boundary)
        {
            return Poll::Ready(self.end_at_stop());
        }
        // The client has room, so that nothing stays unread.
        if self.window_bytes > 0
            && let Some(held) = &mut self.held
        {
            held.shrink_to(0);
        }
        let frame = match self.first.take() {
            Some(first) => first,
            None => match Pin::new(&mut self.body).poll_frame(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(None) => return Poll::Ready(None),
                Poll::Ready(Some(Ok(frame))) => frame,
                Poll::Ready(Some(Err(error))) => return Poll::Ready(self.end_with_error(error)),
            },
        };
        Poll::Ready(Some(Ok(match frame.into_data() {
            Ok(data) => {
                if self.count_window().is_err() {
                    return Poll::Ready(Some(self.end_unread()));
                }
                if let Some(scanner) = &mut self.scanner {
                    record_revisions(scanner, &data, &self.cluster_state, &self.history);
                } else if let Some(scanner) = &mut self.json_scanner {
                    scanner.scan(&data, |scanned| {
                        record_scanned(scanned, Unreadable::Json, &self.cluster_state, &self.history);
                    });
                }
                Frame::data(data.into())
            }
            Err(frame) => {
                self.may_send_status = false;
                self.held = None;
                // A frame without data has trailers.
                Frame::trailers(frame.into_trailers().unwrap_or_default())
            }
        })))
    }

    fn is_end_stream(&self) -> bool {
        self.first.is_none() && self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    fn may_be_idle(&self) -> bool {
        self.stop.is_some()
    }

    fn source(&self) -> Option<Source> {
        self.has_failed.then_some(Source::Failed)
    }

    fn endpoint(&self) -> Option<&Url> {
        self.in_flight.as_ref().map(InFlight::url)
    }
}

/// Records the revisions in `data`, which belongs to a response that began in `history`, before it is sent to the
/// client.
pub(crate) fn record_revisions(
    scanner: &mut HeaderScanner,
    data: &[u8],
    cluster_state: &ClusterState,
    history: &Arc<History>,
) {
    scanner.scan(data, |scanned| {
        record_scanned(scanned, Unreadable::Header, cluster_state, history)
    });
}

/// Records what a message shows; `malformed` is the cause if it cannot be read.
fn record_scanned(
    scanned: Scanned,
    malformed: Unreadable,
    cluster_state: &ClusterState,
    history: &Arc<History>,
) {
    match scanned {
        Scanned::Header { cluster_id, revision } => {
            cluster_state.record_forwarded(history, cluster_id, revision);
        }
        Scanned::Compressed => cluster_state.note_unreadable(Unreadable::Compressed),
        Scanned::Malformed => cluster_state.note_unreadable(malformed),
    }
}

/// Reads a response piece by piece, and records the revisions in each piece before returning it (I11).
#[derive(Debug)]
pub(crate) struct ResponseReader<'a, B> {
    body: B,
    scanner: Option<HeaderScanner>,
    cluster_state: &'a ClusterState,
    /// etcd's history when the response began.
    history: Arc<History>,
    trailers: Option<HeaderMap>,
}

impl<'a, B: Body<Data = Bytes> + Unpin> ResponseReader<'a, B> {
    /// Creates a reader of `body`, the response to a call of `method`.
    pub(crate) fn new(body: B, method: Method, cluster_state: &'a ClusterState) -> ResponseReader<'a, B> {
        ResponseReader {
            body,
            scanner: HeaderScanner::new(method),
            cluster_state,
            history: cluster_state.current(),
            trailers: None,
        }
    }

    /// Returns the next piece of data; `None` at the end of the body, after the trailers have been read.
    ///
    /// # Errors
    /// Error of the body: the connection was lost, or etcd reset the stream.
    pub(crate) async fn data(&mut self) -> Result<Option<Bytes>, B::Error> {
        while let Some(frame) = self.body.frame().await.transpose()? {
            match frame.into_data() {
                Ok(data) => {
                    if let Some(scanner) = &mut self.scanner {
                        record_revisions(scanner, &data, self.cluster_state, &self.history);
                    }
                    return Ok(Some(data));
                }
                Err(frame) => self.trailers = frame.into_trailers().ok().or(self.trailers.take()),
            }
        }
        Ok(None)
    }

    /// Returns the trailers that have been read, if any.
    pub(crate) fn into_trailers(self) -> Option<HeaderMap> {
        self.trailers
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use etcd_wire::etcdserverpb::{RangeResponse, ResponseHeader};
    use etcd_wire::grpc::{frame::framed, status::ok_trailers};
    use http_body::Frame;
    use http_body_util::StreamBody;

    use super::*;

    type Frames = Vec<Result<Frame<Bytes>, &'static str>>;

    fn message(revision: i64) -> Bytes {
        framed(&RangeResponse {
            header: Some(ResponseHeader {
                cluster_id: 1,
                revision,
                ..ResponseHeader::default()
            }),
            ..RangeResponse::default()
        })
    }

    fn body(frames: Frames) -> impl Body<Data = Bytes, Error = &'static str> + Unpin {
        StreamBody::new(futures_util::stream::iter(frames))
    }

    #[tokio::test]
    async fn reader_returns_data_and_trailers_and_records_the_revision_at_once() {
        let cluster_state = ClusterState::default();
        let message = message(7);
        let frames = vec![
            Ok(Frame::data(message.slice(..3))),
            Ok(Frame::data(message.slice(3..))),
            Ok(Frame::trailers(ok_trailers())),
        ];
        let mut reader = ResponseReader::new(body(frames), Method::Range, &cluster_state);
        assert_eq!(reader.data().await.unwrap().unwrap(), message.slice(..3));
        assert_eq!(reader.data().await.unwrap().unwrap(), message.slice(3..));
        assert_eq!(cluster_state.min_served_revision(), Some(7));
        assert_eq!(reader.data().await, Ok(None));
        assert_eq!(reader.into_trailers(), Some(ok_trailers()));
    }

    #[tokio::test]
    async fn lost_connection_is_an_error() {
        let cluster_state = ClusterState::default();
        let frames = vec![Ok(Frame::data(message(7))), Err("lost")];
        let mut reader = ResponseReader::new(body(frames), Method::Range, &cluster_state);
        assert!(reader.data().await.unwrap().is_some());
        assert_eq!(reader.data().await, Err("lost"));
    }

    #[tokio::test]
    async fn response_without_trailers_returns_none() {
        let cluster_state = ClusterState::default();
        let mut reader = ResponseReader::new(
            http_body_util::Empty::<Bytes>::new(),
            Method::Range,
            &cluster_state,
        );
        let ended: Result<_, Infallible> = reader.data().await;
        assert_eq!(ended, Ok(None));
        assert_eq!(reader.into_trailers(), None);
    }
}
