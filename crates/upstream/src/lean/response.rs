//! Responses: whole ones, and those whose parts are read as they arrive.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response};
use http_body::{Body, Frame};
use tokio::sync::mpsc;

use super::client::{InFlightCall, STREAM_WINDOW_BYTES};
use super::error::LeanError;
use super::head::Head;
use crate::outgoing::BoxError;

/// Bound on a response that is read as a whole.
const MAX_WHOLE_BYTES: usize = 64 << 20;

/// The whole of a response: the body's bytes, and its trailers.
pub(crate) type Whole = Response<(Bytes, Option<HeaderMap>)>;

/// A part of a response.
#[derive(Debug)]
pub(crate) enum Event {
    /// The head or the trailers, and whether the response ends with them.
    Head(Head, bool),
    /// Bytes of the body.
    Data {
        bytes: Bytes,
        /// Bytes that count for the window: with padding.
        window_bytes: u32,
        is_last: bool,
    },
}

impl Event {
    /// Whether the response ends with it.
    pub(super) fn is_last(&self) -> bool {
        match self {
            Event::Head(_, is_last) | Event::Data { is_last, .. } => *is_last,
        }
    }
}

/// Bytes of a stream's window that were read, and that the server may not send again yet.
#[derive(Debug, Default)]
struct ReadBytes(u32);

impl ReadBytes {
    /// Counts `bytes`; returns those by which the window is to be raised, once they are half of it.
    fn add(&mut self, bytes: u32) -> Option<u32> {
        self.0 += bytes;
        (self.0 >= STREAM_WINDOW_BYTES / 2).then(|| std::mem::take(&mut self.0))
    }
}

/// Parts of a response that have arrived.
#[derive(Debug, Default)]
pub(super) struct Incomplete {
    read: ReadBytes,
    head: Option<Head>,
    body: BytesMut,
    trailers: Option<HeaderMap>,
}

impl Incomplete {
    /// Takes the next part; returns the bytes by which the window of the stream is to be raised.
    pub(super) fn take(&mut self, event: Event) -> Result<Option<u32>, LeanError> {
        match event {
            Event::Head(head, is_last) => match (&self.head, head.status) {
                (None, Some(status)) if !status.is_informational() => self.head = Some(head),
                (None, Some(_)) if !is_last => {}
                (Some(_), None) if is_last => self.trailers = Some(head.headers),
                _ => return Err(LeanError::Unexpected("headers in the wrong place")),
            },
            Event::Data {
                bytes, window_bytes, ..
            } => {
                if self.head.is_none() {
                    return Err(LeanError::Unexpected("a body without a head"));
                }
                if self.body.len() + bytes.len() > MAX_WHOLE_BYTES {
                    return Err(LeanError::Unexpected("a response that is too long"));
                }
                self.body.extend_from_slice(&bytes);
                return Ok(self.read.add(window_bytes));
            }
        }
        Ok(None)
    }

    pub(super) fn whole(self) -> Result<Whole, LeanError> {
        let head = self
            .head
            .ok_or(LeanError::Unexpected("a response without a head"))?;
        Ok(head.response((self.body.freeze(), self.trailers)))
    }
}

impl Head {
    fn response<B>(self, body: B) -> Response<B> {
        let mut response = Response::new(body);
        *response.status_mut() = self.status.unwrap_or_default();
        *response.headers_mut() = self.headers;
        response
    }
}

/// The body of a response that is read as it arrives, while the request's body may still be sent.
pub(crate) struct Parts {
    call: InFlightCall,
    parts: mpsc::Receiver<Event>,
    /// The rest of the request's body.
    request: Option<tonic::body::Body>,
    read: ReadBytes,
    has_ended: bool,
}

impl std::fmt::Debug for Parts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Parts")
            .field("call", &self.call)
            .finish_non_exhaustive()
    }
}

impl Parts {
    /// Waits for the head of the response to `call`, whose request has `rest` to send.
    ///
    /// # Errors
    /// [`LeanError`], and those of `rest`.
    pub(crate) async fn response(
        call: InFlightCall,
        parts: mpsc::Receiver<Event>,
        rest: Option<tonic::body::Body>,
    ) -> Result<Response<Parts>, BoxError> {
        let mut parts = Parts {
            call,
            parts,
            request: rest,
            read: ReadBytes::default(),
            has_ended: false,
        };
        loop {
            match std::future::poll_fn(|context| parts.poll_event(context)).await? {
                Some(Event::Head(head, is_last)) if head.status.is_some() => {
                    if head.status.is_some_and(|status| status.is_informational()) {
                        continue;
                    }
                    parts.has_ended = is_last;
                    return Ok(head.response(parts));
                }
                Some(_) => return Err(LeanError::Unexpected("a response without a head").into()),
                None => return Err(LeanError::Closed.into()),
            }
        }
    }

    /// Sends what there is of the request, and returns the next part of the response; `None` once the connection is closed.
    fn poll_event(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Event>, BoxError>> {
        while let Some(request) = &mut self.request {
            match Pin::new(request).poll_frame(context) {
                Poll::Ready(Some(frame)) => {
                    if let Ok(data) = frame?.into_data() {
                        self.call.send(&data, false)?;
                    }
                }
                Poll::Ready(None) => {
                    self.call.send(&[], true)?;
                    self.request = None;
                }
                Poll::Pending => break,
            }
        }
        self.parts.poll_recv(context).map(Ok)
    }
}

impl Body for Parts {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.has_ended {
            return Poll::Ready(None);
        }
        let event = ready!(self.poll_event(context));
        Poll::Ready(Some(match event {
            Ok(Some(event)) => {
                self.has_ended = event.is_last();
                match event {
                    Event::Head(head, _) => Ok(Frame::trailers(head.headers)),
                    Event::Data {
                        bytes, window_bytes, ..
                    } => {
                        if let Some(bytes) = self.read.add(window_bytes) {
                            self.call.raise_window(bytes);
                        }
                        Ok(Frame::data(bytes))
                    }
                }
            }
            Ok(None) => {
                self.has_ended = true;
                Err(LeanError::Closed.into())
            }
            Err(error) => {
                self.has_ended = true;
                Err(error)
            }
        }))
    }
}
