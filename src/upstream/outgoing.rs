//! The body of a request to etcd.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Any error, as hyper and tonic want it.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A request's body: what was kept of it, then what is still to come from the caller. Frames, trailers included, pass
/// as they are.
#[derive(Debug)]
pub struct Outgoing {
    kept: Option<Bytes>,
    rest: Rest,
    /// The answer has ended: nobody waits for the rest of the request.
    answered: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
}

#[derive(Debug)]
enum Rest {
    Nothing,
    Incoming(Incoming),
    Tonic(tonic::body::Body),
}

impl Outgoing {
    /// All of the caller's body, untouched.
    #[must_use]
    pub fn incoming(body: Incoming) -> Outgoing {
        Outgoing {
            kept: None,
            rest: Rest::Incoming(body),
            answered: None,
        }
    }

    /// The same body, which ends once `answered` is cancelled: a client may leave its side of a call open when the other side
    /// has ended, and would keep etcd's call and its own connection alive with it.
    #[must_use]
    pub fn until(mut self, answered: CancellationToken) -> Outgoing {
        self.answered = Some(Box::pin(answered.cancelled_owned()));
        self
    }

    /// What was already read, then the rest of the caller's body.
    #[must_use]
    pub fn resumed(kept: Bytes, rest: Incoming) -> Outgoing {
        Outgoing {
            kept: Some(kept).filter(|bytes| !bytes.is_empty()),
            rest: Rest::Incoming(rest),
            answered: None,
        }
    }

    /// A whole body.
    #[must_use]
    pub fn whole(bytes: Bytes) -> Outgoing {
        Outgoing {
            kept: Some(bytes).filter(|bytes| !bytes.is_empty()),
            rest: Rest::Nothing,
            answered: None,
        }
    }

    /// A body that tonic made, for calls that originate here.
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
        // HTTP/2 sends no content-length that the caller did not send; HTTP/1 needs the exact one where it is known.
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
