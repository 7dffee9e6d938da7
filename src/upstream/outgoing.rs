//! Bodies of requests to etcd.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Error type of hyper's and tonic's bodies and services.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Request body: the bytes that were already read, then the rest of the client's body. Frames are forwarded unchanged,
/// trailers included.
#[derive(Debug)]
pub struct Outgoing {
    /// Bytes that were read from the client before the call was forwarded.
    kept: Option<Bytes>,
    rest: Rest,
    /// Cancelled once the response has ended: the rest of the request is not needed.
    answered: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

#[derive(Debug)]
enum Rest {
    Nothing,
    Incoming(Incoming),
    Tonic(tonic::body::Body),
}

impl Outgoing {
    /// All of the client's body, unchanged.
    #[must_use]
    pub fn incoming(body: Incoming) -> Outgoing {
        Outgoing {
            kept: None,
            rest: Rest::Incoming(body),
            answered: None,
        }
    }

    /// Ends the body with an error once `answered` is cancelled. A client may leave its side of a call open after the
    /// response has ended, and would keep etcd's call and its own connection alive.
    #[must_use]
    pub fn until(mut self, answered: CancellationToken) -> Outgoing {
        self.answered = Some(Box::pin(answered.cancelled_owned()));
        self
    }

    /// Bytes that were already read, then the rest of the client's body.
    #[must_use]
    pub fn resumed(kept: Bytes, rest: Incoming) -> Outgoing {
        Outgoing {
            kept: Some(kept).filter(|bytes| !bytes.is_empty()),
            rest: Rest::Incoming(rest),
            answered: None,
        }
    }

    /// Body of known content.
    #[must_use]
    pub fn whole(bytes: Bytes) -> Outgoing {
        Outgoing {
            kept: Some(bytes).filter(|bytes| !bytes.is_empty()),
            rest: Rest::Nothing,
            answered: None,
        }
    }

    /// Body of a call that rangecache makes itself.
    #[must_use]
    pub fn tonic(body: tonic::body::Body) -> Outgoing {
        Outgoing {
            kept: None,
            rest: Rest::Tonic(body),
            answered: None,
        }
    }
}

impl Body for Outgoing {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(answered) = &mut self.answered
            && answered.as_mut().poll(cx).is_ready()
        {
            return Poll::Ready(Some(Err("the call has ended".into())));
        }
        if let Some(bytes) = self.kept.take() {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
        match &mut self.rest {
            Rest::Nothing => Poll::Ready(None),
            Rest::Incoming(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
            Rest::Tonic(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.kept.is_none()
            && match &self.rest {
                Rest::Nothing => true,
                Rest::Incoming(body) => body.is_end_stream(),
                Rest::Tonic(body) => body.is_end_stream(),
            }
    }

    fn size_hint(&self) -> SizeHint {
        // HTTP/2 sends no content-length that the client did not send; HTTP/1 needs the exact length where it is known.
        let rest = match &self.rest {
            Rest::Nothing => SizeHint::with_exact(0),
            Rest::Incoming(body) => body.size_hint(),
            Rest::Tonic(body) => body.size_hint(),
        };
        let kept = self.kept.as_ref().map_or(0, Bytes::len) as u64;
        let mut hint = SizeHint::new();
        hint.set_lower(rest.lower() + kept);
        if let Some(upper) = rest.upper() {
            hint.set_upper(upper + kept);
        }
        hint
    }
}
