//! Responses that are read as they arrive, while the request may still be sent.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::Response;
use http_body::{Body, Frame};
use tokio::sync::mpsc;

use super::client::{Begun, InFlightCall};
use super::frame::LeanError;
use super::response::{Event, ReadBytes};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body of a response that is read as it arrives, while the request's body may still be sent.
pub struct Parts {
    call: InFlightCall,
    parts: mpsc::Receiver<Result<Event, LeanError>>,
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
    /// Waits for the head of the response to a call, whose request has `rest` to send.
    ///
    /// # Errors
    /// [`LeanError`], and those of `rest`.
    pub async fn response(
        begun: Begun,
        rest: Option<tonic::body::Body>,
    ) -> Result<Response<Parts>, BoxError> {
        let mut parts = Parts {
            call: begun.call,
            parts: begun.parts,
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
        let event = ready!(self.parts.poll_recv(context)).transpose();
        Poll::Ready(event.map_err(Into::into))
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

    fn is_end_stream(&self) -> bool {
        self.has_ended
    }
}
