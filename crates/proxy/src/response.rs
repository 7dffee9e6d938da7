//! [`ResponseBody`], the body of every response to a client, and [`Observer`]s that are attached to it.
//!
//! A small response is stored in the body itself, without an allocation. Every other body is a [`BodySource`],
//! defined by the file that produces its frames. An observer receives every frame, and is dropped with the body:
//! it records the end of a response, or holds a guard until then.
//!
//! Before a body is given to hyper, [`ResponseBody::deliver`] counts its bytes against the buffers of its client's
//! connection until they are written to the connection, and registers it to be aborted if its client stops reading.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::task::{Context, Poll};
use std::{fmt, io::IoSlice, pin::Pin, sync::Arc};

use bytes::{Buf, Bytes};
use etcd_store::cache::Rope;
use etcd_wire::grpc::Status;
use http::{HeaderMap, HeaderValue, Response, header::CONTENT_TYPE};
use http_body::{Body, Frame, SizeHint};
use rangecache_base::{net::Url, telemetry::metrics::Source};
use rangecache_edge::limits::{ByteKind, Exceeded, HeldBytes};
use rangecache_mirror::HeldView;
use rangecache_upstream::BoxError;

use super::call::CallRecord;
use super::idle::{PolledFrame, ReadProgress, ResponseRegistry, WatchedSource};

pub(super) use super::source::{BodySource, FrameBytes, Polled};

/// Response to a call, or the error with which etcd reset the HTTP/2 stream. hyper resets the client's stream with
/// the same reason.
pub(super) type CallResult = Result<Response<ResponseBody>, BoxError>;

/// Bytes that a call counts as until its response has been sent: its task and its stream, on both sides.
pub(super) const CALL_BYTES: u64 = 8 << 10;

/// Response to a read up to which it is never refused, in bytes: its call had room, and most reads are of one object.
const SHORT_READ_BYTES: u64 = 2 << 10;

/// Receives every frame of a response before it is sent to the client; dropped with the body.
pub(super) trait Observer: fmt::Debug + Send {
    /// Called with each frame of data or trailers, in order.
    fn frame(&mut self, frame: &Frame<Rope>);
}

/// Body of a response to a client.
#[derive(Debug)]
pub struct ResponseBody(BodyKind);

#[derive(Debug)]
enum BodyKind {
    Empty,
    /// A single message, then trailers.
    Whole {
        data: Option<Bytes>,
        trailers: Option<HeaderMap>,
        /// Counts the data; `None` before the body is delivered, and after the data.
        held: Option<HeldBytes>,
    },
    Source(Box<dyn BodySource>),
    Delivered(Box<Delivery>),
}

/// A source whose response is being sent to its client.
#[derive(Debug)]
struct Delivery {
    source: Arc<WatchedSource>,
    /// Counts the call, and reports it when this is dropped.
    record: CallRecord,
    /// Whether the response waits until other frames of its connection have been sent.
    waits: bool,
}

/// Data of a frame on its way to the client; counts as buffered until it is dropped, which is when the last byte was
/// written to the connection.
#[derive(Debug)]
pub struct Outbound {
    rope: Rope,
    _held: Option<HeldBytes>,
    /// Counts the data if the source has a budget of its own.
    _own: Option<Box<HeldBytes>>,
    /// Records that the client reads.
    progress: Option<Arc<ReadProgress>>,
}

impl ResponseBody {
    /// Creates a body without frames, for a response whose status is in the headers.
    pub(super) fn empty() -> ResponseBody {
        ResponseBody(BodyKind::Empty)
    }

    /// Creates a body of one framed message, then `trailers`.
    pub(super) fn whole(data: Bytes, trailers: HeaderMap) -> ResponseBody {
        let data = Some(data).filter(|data| !data.is_empty());
        ResponseBody(BodyKind::Whole {
            data,
            trailers: Some(trailers),
            held: None,
        })
    }

    /// Prepares the body for its client: its bytes count against the buffers of the connection, and it is aborted if
    /// the client stops reading. `record` has counted the request, and reports the call at the end of the body. With
    /// `is_read`, the data of a small response is refused if it does not fit: repeating a read changes nothing.
    ///
    /// # Errors
    /// [`Exceeded::Bytes`] if the data is refused.
    pub(super) fn deliver(
        self,
        mut record: CallRecord,
        responses: &ResponseRegistry,
        is_read: bool,
    ) -> Result<ResponseBody, Exceeded> {
        Ok(ResponseBody(match self.0 {
            BodyKind::Whole { data, trailers, .. } => {
                let data_bytes = data.as_ref().map_or(0, Bytes::len) as u64;
                let bytes = CALL_BYTES + data_bytes;
                let mut held = record.bytes.account().hold(ByteKind::Sending);
                record.bytes.shrink_to(0);
                if !is_read || data_bytes <= SHORT_READ_BYTES {
                    held.force_grow(bytes);
                } else if let Err(exceeded) = held.try_grow(bytes) {
                    record.record_refused_response();
                    return Err(exceeded);
                }
                record.record_complete(data.as_ref(), trailers.as_ref());
                BodyKind::Whole {
                    data,
                    trailers,
                    held: Some(held),
                }
            }
            BodyKind::Source(source) => {
                record.bytes.shrink_to(CALL_BYTES + source.request_bytes());
                record_source(&record, source.source());
                BodyKind::Delivered(Box::new(Delivery {
                    source: responses.watch(source),
                    record,
                    waits: false,
                }))
            }
            other => {
                record.record_complete(None, None);
                other
            }
        }))
    }

    /// Creates a body that yields the frames of `source`.
    pub(super) fn from_source(source: impl BodySource + 'static) -> ResponseBody {
        ResponseBody(BodyKind::Source(Box::new(source)))
    }

    /// Adds an observer, which receives every frame first.
    pub(super) fn observed_by(self, observer: impl Observer + 'static) -> ResponseBody {
        ResponseBody::from_source(ObservedBody {
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

    /// URL of the endpoint, for a response that is forwarded.
    pub(super) fn endpoint(&self) -> Option<&Url> {
        match &self.0 {
            BodyKind::Empty | BodyKind::Whole { .. } | BodyKind::Delivered(_) => None,
            BodyKind::Source(source) => source.endpoint(),
        }
    }
}

/// Records what produces the frames of a response, if its source knows that.
fn record_source(record: &CallRecord, source: Option<Source>) {
    if let Some(source) = source {
        record.set_source(source);
    }
}

/// Creates a response to a gRPC call that has only a status, in the headers ("trailers only").
pub(super) fn status_response(status: &Status, content_type: HeaderValue) -> Response<ResponseBody> {
    let mut response = ResponseBody::empty().into_response(content_type);
    status.write_to(response.headers_mut());
    response
}

impl Body for ResponseBody {
    type Data = Outbound;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Outbound>, BoxError>>> {
        match catch_unwind(AssertUnwindSafe(|| self.0.poll_outbound(cx))) {
            Ok(polled) => polled,
            Err(_) => {
                // The source may be inconsistent after a panic, so it is dropped. hyper resets the stream, which gRPC
                // clients report as Internal. The panic hook has logged the panic.
                self.0 = BodyKind::Empty;
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

impl BodyKind {
    /// Polls for the next frame to the client.
    fn poll_outbound(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Outbound>, BoxError>>> {
        if let BodyKind::Delivered(delivery) = self {
            return delivery.poll_frame(cx);
        }
        let held = match self {
            BodyKind::Whole { held, .. } => held.take(),
            _ => None,
        };
        let frame = |frame: Frame<Rope>| {
            frame.map_data(|rope| Outbound {
                rope,
                _held: held,
                _own: None,
                progress: None,
            })
        };
        self.poll_frame(cx)
            .map(|polled| polled.map(|polled| polled.map(frame)))
    }

    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Polled {
        match self {
            BodyKind::Empty => Poll::Ready(None),
            BodyKind::Whole { data, trailers, .. } => {
                let frame = match data.take() {
                    Some(data) => Some(Frame::data(data.into())),
                    None => trailers.take().map(Frame::trailers),
                };
                Poll::Ready(frame.map(Ok))
            }
            BodyKind::Source(source) => source.poll_frame(cx),
            BodyKind::Delivered(delivery) => delivery.source.poll_frame(cx).polled,
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            BodyKind::Empty => true,
            BodyKind::Whole { data, trailers, .. } => data.is_none() && trailers.is_none(),
            BodyKind::Source(source) => source.is_end_stream(),
            BodyKind::Delivered(delivery) => delivery.source.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            BodyKind::Empty => SizeHint::with_exact(0),
            // gRPC does not use content-length: messages are length-prefixed.
            BodyKind::Whole { .. } => SizeHint::default(),
            BodyKind::Source(source) => source.size_hint(),
            BodyKind::Delivered(delivery) => delivery.source.size_hint(),
        }
    }
}

impl Delivery {
    fn poll_frame(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Outbound>, BoxError>>> {
        let may_send = self.record.bytes.account().may_send(cx.waker());
        self.set_waits(!may_send);
        if !may_send {
            return Poll::Pending;
        }
        let PolledFrame {
            polled,
            bytes,
            source,
        } = self.source.poll_frame(cx);
        record_source(&self.record, source);
        match &polled {
            Poll::Ready(Some(Ok(frame))) => {
                if let Some(data) = frame.data_ref() {
                    self.record.record_data(data);
                }
                if let Some(trailers) = frame.trailers_ref() {
                    self.record.record_end(Some(trailers));
                }
            }
            // A response without a status, or that etcd has reset.
            Poll::Ready(None | Some(Err(_))) => self.record.record_end(None),
            Poll::Pending => {}
        }
        let frame = |frame: Frame<Rope>| {
            frame.map_data(|rope| {
                let (held, own) = match bytes {
                    FrameBytes::Connection => {
                        let mut held = self.record.bytes.account().hold(ByteKind::Sending);
                        held.force_grow(rope.remaining() as u64);
                        (Some(held), None)
                    }
                    FrameBytes::Own(own) => (None, own),
                };
                Outbound {
                    rope,
                    _held: held,
                    _own: own,
                    progress: Some(Arc::clone(self.source.progress())),
                }
            })
        };
        polled.map(|polled| polled.map(|polled| polled.map(frame)))
    }

    /// Counts the response as waiting, or not.
    fn set_waits(&mut self, waits: bool) {
        if self.waits != waits {
            self.waits = waits;
            let waiting = &self.record.bytes.account().sending_metrics().waiting;
            waiting.inc_by(if waits { 1 } else { -1 });
        }
    }
}

impl Drop for Delivery {
    fn drop(&mut self) {
        self.set_waits(false);
    }
}

impl Buf for Outbound {
    fn remaining(&self) -> usize {
        self.rope.remaining()
    }

    fn chunk(&self) -> &[u8] {
        self.rope.chunk()
    }

    fn chunks_vectored<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        self.rope.chunks_vectored(slices)
    }

    /// # Panics
    /// Panics beyond the end, as [`Buf`] requires.
    fn advance(&mut self, count: usize) {
        if let Some(progress) = &self.progress {
            progress.record();
        }
        self.rope.advance(count);
    }
}

/// Body with its observer, in one allocation.
#[derive(Debug)]
struct ObservedBody<O> {
    body: BodyKind,
    observer: O,
}

impl<O: Observer> BodySource for ObservedBody<O> {
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

    fn held_view(&self) -> Option<&HeldView> {
        match &self.body {
            BodyKind::Source(source) => source.held_view(),
            _ => None,
        }
    }

    fn may_be_idle(&self) -> bool {
        match &self.body {
            BodyKind::Source(source) => source.may_be_idle(),
            _ => false,
        }
    }

    fn may_stay_unread(&self) -> bool {
        match &self.body {
            BodyKind::Source(source) => source.may_stay_unread(),
            _ => false,
        }
    }

    fn frame_bytes(&mut self) -> FrameBytes {
        match &mut self.body {
            BodyKind::Source(source) => source.frame_bytes(),
            _ => FrameBytes::Connection,
        }
    }

    fn unread_bytes(&self) -> u64 {
        match &self.body {
            BodyKind::Source(source) => source.unread_bytes(),
            _ => 0,
        }
    }

    fn request_bytes(&self) -> u64 {
        match &self.body {
            BodyKind::Source(source) => source.request_bytes(),
            _ => 0,
        }
    }

    fn source(&self) -> Option<Source> {
        match &self.body {
            BodyKind::Source(source) => source.source(),
            _ => None,
        }
    }

    fn endpoint(&self) -> Option<&Url> {
        match &self.body {
            BodyKind::Empty | BodyKind::Whole { .. } | BodyKind::Delivered(_) => None,
            BodyKind::Source(source) => source.endpoint(),
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
    use http_body_util::BodyExt;
    use parking_lot::Mutex;
    use rangecache_edge::limits::BufferKindMetrics;

    use super::*;
    use crate::call::testing::{account, record};
    use crate::idle::IDLE_TICKS;

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

    /// The record of a call on a connection that may have so many bytes of calls, and the metrics of what is being sent.
    fn call(max_bytes: u64) -> (CallRecord, BufferKindMetrics) {
        let (account, mut record) = (account(2 * max_bytes), record());
        record.bytes = account.hold(ByteKind::Request);
        (record, account.sending_metrics().clone())
    }

    #[tokio::test]
    async fn frames_count_until_they_are_written() {
        let responses = ResponseRegistry::default();
        let (call, sending) = call(1 << 20);
        let body = ResponseBody::from_source(Pieces(vec!["first", "second"]));
        let mut body = body.deliver(call, &responses, true).unwrap();
        let mut first = body.frame().await.unwrap().unwrap().into_data().unwrap();
        let second = body.frame().await.unwrap().unwrap();
        assert_eq!(sending.used.get(), 11, "both frames wait in the connection");
        first.advance(5);
        drop(first);
        assert_eq!(sending.used.get(), 6);
        drop((body, second));
        assert_eq!(sending.used.get(), 0);
    }

    #[tokio::test]
    async fn small_response_counts_until_it_is_written_and_is_refused_over_the_bound() {
        let responses = ResponseRegistry::default();
        let message = || ResponseBody::whole(Bytes::from_static(b"message"), HeaderMap::new());
        let (held, sending) = call(1 << 20);
        let mut body = message().deliver(held, &responses, true).unwrap();
        let unread = sending.used.get();
        assert!(unread > 7, "{unread}");
        let frame = body.frame().await.unwrap().unwrap();
        drop(body);
        assert_eq!(sending.used.get(), unread);
        drop(frame);
        assert_eq!(sending.used.get(), 0);
        let (full, _) = call(100);
        let longer = ResponseBody::whole(vec![0; 3 << 10].into(), HeaderMap::new());
        assert!(longer.deliver(full, &responses, true).is_err());
        let (full, _) = call(100);
        assert!(
            message().deliver(full, &responses, true).is_ok(),
            "the call had room"
        );
        let (full, _) = call(100);
        let written = message().deliver(full, &responses, false);
        assert!(written.is_ok(), "the response to a write is kept");
    }

    #[tokio::test]
    async fn unread_response_gives_up_its_turn_and_its_stream() {
        let responses = ResponseRegistry::default();
        let (call, _) = call(1 << 20);
        let turn = Arc::new(());
        let body = ResponseBody::from_source(Pieces(vec!["a", "b"])).holding(Arc::clone(&turn));
        let mut body = body.deliver(call, &responses, true).unwrap();
        let _unwritten = body.frame().await.unwrap().unwrap();
        for _ in 0..IDLE_TICKS {
            assert_eq!(responses.abort_idle(), 0);
        }
        assert_eq!(Arc::strong_count(&turn), 2);
        assert_eq!(responses.abort_idle(), 1);
        assert_eq!(Arc::strong_count(&turn), 1, "the turn is free");
        assert!(body.frame().await.unwrap().is_err(), "the stream is reset");
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
