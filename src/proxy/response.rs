//! [`ResponseBody`], the body of every response to a client, and [`Observer`]s that are attached to it.
//!
//! A small response is stored in the body itself, without an allocation. Every other body is a [`BodySource`],
//! defined by the file that produces its frames. An observer receives every frame, and is dropped with the body:
//! it records the end of a response, or holds a guard until then.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response};
use http_body::{Body, Frame, SizeHint};

use crate::cache::Rope;
use crate::grpc::Status;
use crate::net::Url;
use crate::upstream::BoxError;

/// Response to a call, or the error with which etcd reset the HTTP/2 stream. hyper resets the client's stream with
/// the same reason.
pub(super) type CallResult = Result<Response<ResponseBody>, BoxError>;

/// Result of polling a body for its next frame.
pub(super) type Polled = Poll<Option<Result<Frame<Rope>, BoxError>>>;

/// Produces the frames of one response.
pub(super) trait BodySource: fmt::Debug + Send {
    /// Returns the next frame, like [`Body::poll_frame`].
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled;

    /// Whether all frames have been returned. `false` is always allowed.
    fn is_end_stream(&self) -> bool {
        false
    }

    /// Length of the remaining data, if known: HTTP/1 then sends it as content-length.
    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }

    /// Whether the whole response is in memory, so that it needs no observer to record its length and end.
    fn is_complete(&self) -> bool {
        false
    }

    /// URL of the endpoint, for a response that is forwarded.
    fn endpoint(&self) -> Option<&Url> {
        None
    }
}

/// Receives every frame of a response before it is sent to the client; dropped with the body.
pub(super) trait Observer: fmt::Debug + Send {
    /// Called with each frame of data or trailers, in order.
    fn frame(&mut self, frame: &Frame<Rope>);
}

/// Body of a response to a client.
#[derive(Debug)]
pub struct ResponseBody(Kind);

#[derive(Debug)]
enum Kind {
    Empty,
    /// One message, then trailers.
    Whole {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
    },
    Source(Box<dyn BodySource>),
}

impl ResponseBody {
    /// Creates a body without frames, for a response whose status is in the headers.
    pub(super) fn empty() -> ResponseBody {
        ResponseBody(Kind::Empty)
    }

    /// Creates a body of one framed message, then `trailers`.
    pub(super) fn whole(data: Bytes, trailers: HeaderMap) -> ResponseBody {
        let data = Some(data).filter(|data| !data.is_empty());
        ResponseBody(Kind::Whole {
            data,
            trailers: Some(trailers),
        })
    }

    /// Creates a body that yields the frames of `source`.
    pub(super) fn from_source(source: impl BodySource + 'static) -> ResponseBody {
        ResponseBody(Kind::Source(Box::new(source)))
    }

    /// Adds an observer, which receives every frame first.
    pub(super) fn observed_by(self, observer: impl Observer + 'static) -> ResponseBody {
        ResponseBody::from_source(Observed {
            body: self.0,
            observer,
        })
    }

    /// Keeps `guard` until the body is dropped.
    pub(super) fn holding(self, guard: impl fmt::Debug + Send + 'static) -> ResponseBody {
        self.observed_by(Guard { _held: guard })
    }

    /// Creates the response to a gRPC call, with HTTP status 200.
    pub(super) fn into_response(self, content_type: HeaderValue) -> Response<ResponseBody> {
        let mut response = Response::new(self);
        response.headers_mut().insert(CONTENT_TYPE, content_type);
        response
    }

    /// Whether the whole response is in memory, so that it needs no observer to record its length and end.
    pub(super) fn is_complete(&self) -> bool {
        match &self.0 {
            Kind::Empty | Kind::Whole { .. } => true,
            Kind::Source(source) => source.is_complete(),
        }
    }

    /// URL of the endpoint, for a response that is forwarded.
    pub(super) fn endpoint(&self) -> Option<&Url> {
        match &self.0 {
            Kind::Empty | Kind::Whole { .. } => None,
            Kind::Source(source) => source.endpoint(),
        }
    }
}

/// Creates a response to a gRPC call that has only a status, in the headers ("trailers only").
pub(super) fn status_response(status: &Status, content_type: HeaderValue) -> Response<ResponseBody> {
    let mut response = ResponseBody::empty().into_response(content_type);
    status.write_to(response.headers_mut());
    response
}

impl Body for ResponseBody {
    type Data = Rope;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Polled {
        match catch_unwind(AssertUnwindSafe(|| self.0.poll_frame(cx))) {
            Ok(polled) => polled,
            Err(_) => {
                // The source may be inconsistent after a panic, so it is dropped. hyper resets the stream, which gRPC
                // clients report as Internal. The panic hook has logged the panic.
                self.0 = Kind::Empty;
                Poll::Ready(Some(Err("the body of a response panicked".into())))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.0.size_hint()
    }
}

impl Kind {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        match self {
            Kind::Empty => Poll::Ready(None),
            Kind::Whole { data, trailers } => {
                let frame = match data.take() {
                    Some(data) => Some(Frame::data(data.into())),
                    None => trailers.take().map(Frame::trailers),
                };
                Poll::Ready(frame.map(Ok))
            }
            Kind::Source(source) => source.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Kind::Empty => true,
            Kind::Whole { data, trailers } => data.is_none() && trailers.is_none(),
            Kind::Source(source) => source.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Kind::Empty => SizeHint::with_exact(0),
            // gRPC does not use content-length: messages are length-prefixed.
            Kind::Whole { .. } => SizeHint::default(),
            Kind::Source(source) => source.size_hint(),
        }
    }
}

/// Body with its observer, in one allocation.
#[derive(Debug)]
struct Observed<O> {
    body: Kind,
    observer: O,
}

impl<O: Observer> BodySource for Observed<O> {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        let polled = self.body.poll_frame(cx);
        if let Poll::Ready(Some(Ok(frame))) = &polled {
            self.observer.frame(frame);
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }

    fn is_complete(&self) -> bool {
        match &self.body {
            Kind::Empty | Kind::Whole { .. } => true,
            Kind::Source(source) => source.is_complete(),
        }
    }

    fn endpoint(&self) -> Option<&Url> {
        match &self.body {
            Kind::Empty | Kind::Whole { .. } => None,
            Kind::Source(source) => source.endpoint(),
        }
    }
}

/// Observer that ignores frames; holds a value until the body is dropped.
#[derive(Debug)]
struct Guard<T> {
    _held: T,
}

impl<T: fmt::Debug + Send> Observer for Guard<T> {
    fn frame(&mut self, _: &Frame<Rope>) {}
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use bytes::Buf;
    use http_body_util::BodyExt;
    use parking_lot::Mutex;

    use super::*;

    /// Source that yields its pieces and panics when polled again.
    #[derive(Debug)]
    struct Pieces(Vec<&'static str>);

    impl BodySource for Pieces {
        fn poll_frame(&mut self, _: &mut Context<'_>) -> Polled {
            assert!(!self.0.is_empty(), "polled after the last piece");
            let piece = Bytes::from_static(self.0.remove(0).as_bytes());
            Poll::Ready(Some(Ok(Frame::data(piece.into()))))
        }

        fn is_end_stream(&self) -> bool {
            self.0.is_empty()
        }
    }

    #[derive(Debug, Default)]
    struct Seen {
        bytes: usize,
        trailers: usize,
    }

    #[derive(Debug)]
    struct Counter(Arc<Mutex<Seen>>);

    impl Observer for Counter {
        fn frame(&mut self, frame: &Frame<Rope>) {
            let mut seen = self.0.lock();
            seen.bytes += frame.data_ref().map_or(0, Buf::remaining);
            seen.trailers += usize::from(frame.is_trailers());
        }
    }

    #[tokio::test]
    async fn observer_receives_every_frame_and_is_dropped_with_the_body() {
        let seen = Arc::new(Mutex::new(Seen::default()));
        let body = ResponseBody::whole(Bytes::from_static(b"message"), HeaderMap::new())
            .observed_by(Counter(Arc::clone(&seen)));
        assert!(body.is_complete());
        let collected = body.collect().await.unwrap();
        assert!(collected.trailers().is_some());
        assert_eq!(collected.to_bytes(), "message");
        assert_eq!(Arc::strong_count(&seen), 1);
        let seen = seen.lock();
        assert_eq!((seen.bytes, seen.trailers), (7, 1));
    }

    #[tokio::test]
    async fn guard_is_held_until_the_body_is_dropped() {
        let guard = Arc::new(());
        let mut body = ResponseBody::from_source(Pieces(vec!["a", "b"])).holding(Arc::clone(&guard));
        assert!(!body.is_complete());
        assert!(body.frame().await.unwrap().is_ok());
        assert_eq!(Arc::strong_count(&guard), 2);
        drop(body);
        assert_eq!(Arc::strong_count(&guard), 1);
    }

    #[tokio::test]
    async fn panic_in_a_source_fails_the_body_and_drops_it() {
        let guard = Arc::new(());
        let mut body = ResponseBody::from_source(Pieces(vec!["a"])).holding(Arc::clone(&guard));
        assert!(body.frame().await.unwrap().is_ok());
        assert!(body.frame().await.unwrap().is_err());
        assert_eq!(
            Arc::strong_count(&guard),
            1,
            "the guard is dropped with the source"
        );
        assert!(body.frame().await.is_none());
    }

    #[test]
    fn status_is_in_the_headers() {
        let response = status_response(
            &Status::DeadlineExceeded,
            HeaderValue::from_static("application/grpc"),
        );
        assert_eq!(response.headers()["grpc-status"], "4");
        assert!(response.body().is_end_stream());
    }
}
