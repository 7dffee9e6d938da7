//! Bodies of etcd's responses, from either client.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::Either;
use hyper::body::Incoming;

use super::outgoing::BoxError;
use lean_h2::{LeanError, Parts};

/// Body of a response.
#[derive(Debug)]
pub struct UpstreamBody(Either<Incoming, Parts>);

impl From<Incoming> for UpstreamBody {
    fn from(body: Incoming) -> UpstreamBody {
        UpstreamBody(Either::Left(body))
    }
}

impl From<Parts> for UpstreamBody {
    fn from(body: Parts) -> UpstreamBody {
        UpstreamBody(Either::Right(body))
    }
}

/// Whether etcd itself has ended a call with this error: it has reset the stream, and the connection was not lost.
#[must_use]
pub fn is_reset(error: &BoxError) -> bool {
    if let Some(error) = error.downcast_ref::<LeanError>() {
        return matches!(error, LeanError::Reset(_));
    }
    std::error::Error::source(&**error)
        .and_then(|source| source.downcast_ref::<h2::Error>())
        .is_some_and(|h2| h2.is_reset() && h2.is_remote())
}

impl Body for UpstreamBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        Pin::new(&mut self.0).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}
