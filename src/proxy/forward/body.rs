//! The body of a response that passes through unchanged.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;

use super::error::is_reset;
use super::shutdown::StopSignal;
use crate::cache::Rope;
use crate::grpc::{HeaderScanner, Method, Scanned, Status};
use crate::mirror::cluster_state::ClusterState;
use crate::net::Url;
use crate::proxy::response::{BodySource, Polled};
use crate::upstream::{BoxError, InFlight};

/// Yields etcd's frames, and records the revisions in them before they are sent to the client (I11).
#[derive(Debug)]
pub(crate) struct ForwardedBody {
    /// A frame that was read already, to see how etcd responds.
    first: Option<Frame<Bytes>>,
    body: Incoming,
    /// For gRPC methods whose responses carry etcd's header.
    scanner: Option<HeaderScanner>,
    /// Every piece may show a revision that is not read (the JSON gateway's).
    is_opaque: bool,
    cluster_state: Arc<ClusterState>,
    /// Whether trailers with a status may end the body, instead of a broken stream: for gRPC, until trailers are sent.
    may_end_with_status: bool,
    in_flight: Option<InFlight>,
    /// For calls that only their client ends.
    stop: Option<StopSignal>,
}

impl ForwardedBody {
    /// `body` is etcd's response to a call of `method`, `in_flight` counts the call at its endpoint, and `stop` ends an endless
    /// call when the process stops.
    pub(crate) fn new(
        body: Incoming,
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
            is_opaque: !is_grpc && method.may_show_revision_as_json(),
            cluster_state: Arc::clone(cluster_state),
            may_end_with_status: is_grpc,
            in_flight,
            stop,
        }
    }

    /// The same body after `first`, which was read from it already.
    pub(crate) fn with_first(self, first: Option<Frame<Bytes>>) -> ForwardedBody {
        ForwardedBody { first, ..self }
    }

    fn is_between_messages(&self) -> bool {
        self.scanner.as_ref().is_some_and(HeaderScanner::is_at_boundary)
    }

    /// The end of an endless call at a stop: `Unavailable`, and for the JSON gateway the end of its body.
    fn stopped(&mut self) -> Option<Result<Frame<Rope>, BoxError>> {
        if !self.may_end_with_status {
            return None;
        }
        self.may_end_with_status = false;
        Some(Ok(Frame::trailers(Status::StoppingReconnect.trailers())))
    }

    /// A lost connection is reported as `Unavailable`, as an etcd client does. A stream that etcd itself reset is reset for the
    /// client too, with the same reason.
    fn broken(&mut self, error: hyper::Error) -> Option<Result<Frame<Rope>, BoxError>> {
        if is_reset(&error) || !self.is_between_messages() || !self.may_end_with_status {
            return Some(Err(error.into()));
        }
        self.may_end_with_status = false;
        let status = Status::ConnectionLost(error.to_string());
        Some(Ok(Frame::trailers(status.trailers())))
    }
}

impl BodySource for ForwardedBody {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        if let Some(stop) = &mut self.stop
            && stop.is_stopping(cx)
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
                    record_revisions(scanner, &data, &self.cluster_state);
                } else if self.is_opaque {
                    self.cluster_state.note_unreadable();
                }
                Frame::data(data.into())
            }
            Err(frame) => {
                self.may_end_with_status = false;
                // A frame that is not data is trailers.
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

    fn endpoint(&self) -> Option<&Url> {
        self.in_flight.as_ref().map(InFlight::url)
    }
}

/// Records the revisions that `data` will show its client.
pub(crate) fn record_revisions(scanner: &mut HeaderScanner, data: &[u8], cluster_state: &ClusterState) {
    scanner.scan(data, |scanned| match scanned {
        Scanned::Header { cluster_id, revision } => cluster_state.record_forwarded(cluster_id, revision),
        Scanned::Unreadable => cluster_state.note_unreadable(),
    });
}
