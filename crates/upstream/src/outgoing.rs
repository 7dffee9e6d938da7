//! Bodies of requests to etcd.

use std::future::{Future, poll_fn};
use std::task::{Context, Poll, ready};
use std::{fmt, pin::Pin, time::Duration};

use bytes::Bytes;
use etcd_wire::grpc::frame::PrefixReader;
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use tokio::time::Sleep;
use tokio_util::sync::{CancellationToken, WaitForCancellationFutureOwned};

/// Error type of hyper's and tonic's bodies and services.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Request body: the bytes that were already read, then the rest of the client's body. Data is forwarded unchanged. Trailers are not:
/// etcd closes a connection, which all clients share, on which a request has some.
#[derive(Debug)]
pub struct Outgoing {
    /// Bytes that were read from the client before the call was forwarded.
    kept: Option<Bytes>,
    rest: Rest,
    /// Cancelled once the response has ended: the rest of the request is not needed.
    answered: Option<Pin<Box<WaitForCancellationFutureOwned>>>,
    /// Set for requests of clients.
    limit: Option<MessageProgress>,
    /// Awaited before the first bytes are sent.
    gate: Option<BodyGate>,
}

/// Permission to send the first bytes.
struct BodyGate(Pin<Box<dyn Future<Output = Result<(), BoxError>> + Send + Sync>>);

impl fmt::Debug for BodyGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Gate")
    }
}

/// Time limit for the messages of a client's request.
#[derive(Debug)]
pub struct MessageLimit {
    /// Time from the first wait for bytes until what is limited is complete.
    pub timeout: Duration,
    /// Part of the body that the limit covers.
    pub covers: LimitCovers,
    /// Cancelled when a message is late; the body then ends with an error.
    pub late: CancellationToken,
}

/// Part of a body that a [`MessageLimit`] covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitCovers {
    /// Each gRPC message, from its first byte on.
    BegunMessages,
    /// Each gRPC message, the first one from the start of the call on.
    Messages,
    /// The whole body, which is not gRPC.
    Body,
}

/// Progress of the message that is being received.
#[derive(Debug)]
struct MessageProgress {
    limit: MessageLimit,
    prefix: PrefixReader,
    /// Bytes of the message that are still missing.
    missing_bytes: u64,
    /// Whether a message is awaited.
    awaited: bool,
    /// Expires when the message is late; `None` until it was waited for.
    expires: Option<Pin<Box<Sleep>>>,
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
            limit: None,
            gate: None,
        }
    }

    /// Ends the body with an error once `answered` is cancelled. A client may leave its side of a call open after the
    /// response has ended, and would keep etcd's call and its own connection alive.
    #[must_use]
    pub fn until(mut self, answered: CancellationToken) -> Outgoing {
        self.answered = Some(Box::pin(answered.cancelled_owned()));
        self
    }

    /// Sends the first bytes of the client when `gate` is complete, or ends the body with its error. The gate is awaited
    /// when there are bytes to send.
    #[must_use]
    pub fn gated(
        mut self,
        gate: impl Future<Output = Result<(), BoxError>> + Send + Sync + 'static,
    ) -> Outgoing {
        self.gate = Some(BodyGate(Box::pin(gate)));
        self
    }

    /// Ends the body with an error if a message of the client is late. Waits for etcd do not count.
    #[must_use]
    pub fn limited(mut self, limit: MessageLimit) -> Outgoing {
        let mut progress = MessageProgress {
            awaited: limit.covers != LimitCovers::BegunMessages,
            limit,
            prefix: PrefixReader::default(),
            missing_bytes: 0,
            expires: None,
        };
        progress.receive(self.kept.as_deref().unwrap_or_default());
        self.limit = Some(progress);
        self
    }

    /// Bytes that were already read, then the rest of the client's body.
    #[must_use]
    pub fn resumed(kept: Bytes, rest: Incoming) -> Outgoing {
        Outgoing {
            kept: Some(kept).filter(|bytes| !bytes.is_empty()),
            rest: Rest::Incoming(rest),
            answered: None,
            limit: None,
            gate: None,
        }
    }

    /// Body of known content.
    #[must_use]
    pub fn whole(bytes: Bytes) -> Outgoing {
        Outgoing {
            kept: Some(bytes).filter(|bytes| !bytes.is_empty()),
            rest: Rest::Nothing,
            answered: None,
            limit: None,
            gate: None,
        }
    }

    /// Body of a call that rangecache makes itself.
    #[must_use]
    pub fn tonic(body: tonic::body::Body) -> Outgoing {
        Outgoing {
            kept: None,
            rest: Rest::Tonic(body),
            answered: None,
            limit: None,
            gate: None,
        }
    }
}

impl Outgoing {
    /// Whether the whole body has been received, and has `max_bytes` at most. Waits for its first bytes, and for no others: etcd
    /// answers a message whose stream is still open.
    ///
    /// # Errors
    /// That of the client's body.
    pub async fn is_short(&mut self, max_bytes: usize) -> Result<bool, BoxError> {
        poll_fn(|cx| self.poll_short(max_bytes, cx)).await
    }

    fn poll_short(&mut self, max_bytes: usize, cx: &mut Context<'_>) -> Poll<Result<bool, BoxError>> {
        loop {
            let kept_bytes = self.kept.as_ref().map_or(0, Bytes::len);
            if kept_bytes > max_bytes {
                return Poll::Ready(Ok(false));
            }
            if self.has_no_rest() {
                return Poll::Ready(Ok(true));
            }
            match self.poll_rest(cx) {
                Poll::Pending if self.kept.is_some() => return Poll::Ready(Ok(false)),
                Poll::Pending => return Poll::Pending,
                Poll::Ready(frame) => match frame.transpose()?.and_then(|frame| frame.into_data().ok()) {
                    Some(bytes) => {
                        self.kept = Some(match self.kept.take() {
                            Some(kept) => [kept, bytes].concat().into(),
                            None => bytes,
                        });
                    }
                    None => self.rest = Rest::Nothing,
                },
            }
        }
    }

    /// Makes a body without any bytes one of an empty frame, which ends the request: to a request that ends with its head etcd does
    /// not respond at all.
    pub(crate) fn end_with_data(&mut self) {
        if self.kept.is_none() && self.has_no_rest() {
            self.kept = Some(Bytes::new());
        }
    }

    /// Takes all of the body; `None` if there may be more than has been received, or if it waits for a turn.
    pub(crate) fn take_whole(&mut self) -> Option<Bytes> {
        let is_whole = self.gate.is_none() && self.has_no_rest();
        is_whole.then(|| self.kept.take().unwrap_or_default())
    }

    /// Whether nothing comes after the kept bytes.
    fn has_no_rest(&self) -> bool {
        match &self.rest {
            Rest::Nothing => true,
            Rest::Incoming(body) => body.is_end_stream(),
            Rest::Tonic(body) => body.is_end_stream(),
        }
    }
}

impl MessageProgress {
    /// Whether the message that is being received is late; otherwise registers `cx` to be woken when it is.
    fn is_late(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.awaited {
            return false;
        }
        let timeout = self.limit.timeout;
        let expires = self
            .expires
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
        expires.as_mut().poll(cx).is_ready()
    }

    /// Follows the boundaries of messages in `data`.
    fn receive(&mut self, mut data: &[u8]) {
        if self.limit.covers == LimitCovers::Body {
            return;
        }
        while !data.is_empty() {
            // One step each: a message that ends resets the time limit, also if the next one begins in the same piece.
            if self.missing_bytes > 0 {
                let missing = usize::try_from(self.missing_bytes).unwrap_or(usize::MAX);
                let skipped = missing.min(data.len());
                self.missing_bytes -= skipped as u64;
                data = &data[skipped..];
            } else {
                let (read, prefix) = self.prefix.read(data);
                data = &data[read..];
                self.missing_bytes = prefix.map_or(0, |prefix| prefix.length_bytes.into());
            }
            if self.missing_bytes == 0 && self.prefix.is_empty() {
                (self.awaited, self.expires) = (false, None);
            } else {
                self.awaited = true;
            }
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
        if self.gate.is_some() && self.kept.is_none() {
            match ready!(self.poll_rest(cx)).transpose()?.map(Frame::into_data) {
                Some(Ok(bytes)) => self.kept = Some(bytes),
                Some(Err(_)) | None => return Poll::Ready(None),
            }
        }
        if let Some(gate) = &mut self.gate {
            let opened = ready!(gate.0.as_mut().poll(cx));
            self.gate = None;
            if let Err(error) = opened {
                return Poll::Ready(Some(Err(error)));
            }
        }
        match self.kept.take() {
            Some(bytes) => Poll::Ready(Some(Ok(Frame::data(bytes)))),
            None => self.poll_rest(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        self.kept.is_none() && self.has_no_rest()
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

impl Outgoing {
    /// Polls what was not read from the client before, without its trailers.
    fn poll_rest(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = self.poll_rest_with_trailers(cx);
        if matches!(&polled, Poll::Ready(Some(Ok(frame))) if frame.is_trailers()) {
            self.rest = Rest::Nothing;
            return Poll::Ready(None);
        }
        polled
    }

    fn poll_rest_with_trailers(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut self.rest {
            Rest::Nothing => Poll::Ready(None),
            Rest::Incoming(body) => {
                let polled = Pin::new(body).poll_frame(cx).map_err(Into::into);
                if let Some(limit) = &mut self.limit {
                    match &polled {
                        Poll::Pending if limit.is_late(cx) => {
                            limit.limit.late.cancel();
                            return Poll::Ready(Some(Err(
                                "a request message was not complete in time".into()
                            )));
                        }
                        Poll::Ready(Some(Ok(frame))) => {
                            limit.receive(frame.data_ref().map_or(&[], |data| data))
                        }
                        _ => {}
                    }
                }
                polled
            }
            Rest::Tonic(body) => Pin::new(body).poll_frame(cx).map_err(Into::into),
        }
    }
}

#[cfg(test)]
mod tests {
    use http_body_util::{BodyExt as _, StreamBody};
    use tonic::codegen::tokio_stream::wrappers::ReceiverStream;

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(5);

    fn progress(covers: LimitCovers) -> MessageProgress {
        let outgoing = Outgoing::whole(Bytes::new()).limited(MessageLimit {
            timeout: TIMEOUT,
            covers,
            late: CancellationToken::new(),
        });
        outgoing.limit.expect("a limit")
    }

    /// Whether the message is late now; begins to wait for it.
    async fn is_late(progress: &mut MessageProgress) -> bool {
        poll_fn(|cx| Poll::Ready(progress.is_late(cx))).await
    }

    /// A message with this many bytes after its prefix.
    fn message(bytes: u8) -> Vec<u8> {
        let mut message = vec![0, 0, 0, 0, bytes];
        message.extend(std::iter::repeat_n(b'm', bytes.into()));
        message
    }

    #[tokio::test(start_paused = true)]
    async fn message_that_begins_in_the_piece_that_ends_another_has_a_time_limit_of_its_own() {
        for (begun, rest) in [
            (
                message(4)[..7].to_vec(),
                [&message(4)[7..], &message(4)[..6]].concat(),
            ),
            (
                message(4)[..7].to_vec(),
                [&message(4)[7..], &message(4)[..3]].concat(),
            ),
            (
                message(0)[..2].to_vec(),
                [&message(0)[2..], &message(4)[..6]].concat(),
            ),
        ] {
            let mut progress = progress(LimitCovers::BegunMessages);
            assert!(!is_late(&mut progress).await, "no message has begun");
            progress.receive(&begun);
            assert!(!is_late(&mut progress).await);
            tokio::time::advance(TIMEOUT - Duration::from_millis(10)).await;
            progress.receive(&rest);
            assert!(!is_late(&mut progress).await);
            tokio::time::advance(Duration::from_millis(20)).await;
            assert!(
                !is_late(&mut progress).await,
                "{rest:?}: the first one's limit has passed"
            );
            tokio::time::advance(TIMEOUT).await;
            assert!(is_late(&mut progress).await, "{rest:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn limit_counts_the_wait_for_the_first_message_only_if_it_covers_it() {
        for (covers, expected) in [(LimitCovers::BegunMessages, false), (LimitCovers::Messages, true)] {
            let mut progress = progress(covers);
            assert!(!is_late(&mut progress).await);
            tokio::time::advance(TIMEOUT * 2).await;
            assert_eq!(is_late(&mut progress).await, expected, "{covers:?}");
            progress.receive(&[message(3), message(0)].concat());
            tokio::time::advance(TIMEOUT * 2).await;
            assert!(!is_late(&mut progress).await, "both are complete");
        }
    }

    /// A body of these pieces, whose end the client sends at once, or never.
    fn in_pieces(pieces: &[&'static str], ends: bool) -> Outgoing {
        let (sender, receiver) = tokio::sync::mpsc::channel(8);
        for piece in pieces {
            let frame = Frame::data(Bytes::from_static(piece.as_bytes()));
            sender.try_send(Ok::<_, std::convert::Infallible>(frame)).unwrap();
        }
        if !ends {
            std::mem::forget(sender);
        }
        let pieces = ReceiverStream::new(receiver);
        Outgoing::tonic(tonic::body::Body::new(StreamBody::new(pieces)))
    }

    #[tokio::test]
    async fn body_is_short_once_all_of_it_has_been_received() {
        for (pieces, ends, max_bytes, expected) in [
            (&["ab", "c"][..], true, 3, true),
            (&["ab", "c"][..], true, 2, false),
            // A whole message, perhaps: etcd may answer it.
            (&["ab"][..], false, 3, false),
            (&[][..], true, 3, true),
            (&[""][..], true, 0, true),
        ] {
            let mut body = in_pieces(pieces, ends);
            assert_eq!(body.is_short(max_bytes).await.unwrap(), expected, "{pieces:?}");
            match body.take_whole() {
                Some(whole) => assert!(ends && whole == pieces.concat()),
                None => {
                    // Nothing is lost.
                    let mut received = Vec::new();
                    while received.len() < pieces.concat().len() {
                        let frame = body.frame().await.unwrap().unwrap();
                        received.extend_from_slice(&frame.into_data().unwrap());
                    }
                    assert!(!expected && received == pieces.concat().as_bytes());
                }
            }
        }
        let (mut whole, waiting) = (Outgoing::whole(Bytes::from_static(b"abc")), in_pieces(&[], false));
        assert!(whole.is_short(3).await.unwrap() && !whole.is_short(2).await.unwrap());
        assert!(
            Outgoing::whole(Bytes::new()).is_short(0).await.unwrap(),
            "no body at all"
        );
        let mut waiting = Box::pin(async move { { waiting }.is_short(3).await });
        assert!(poll_fn(|cx| Poll::Ready(waiting.as_mut().poll(cx).is_pending())).await);
    }

    /// A body of `abc`, then trailers.
    fn with_trailers() -> Outgoing {
        let frames = [
            Frame::data(Bytes::from_static(b"abc")),
            Frame::trailers(http::HeaderMap::from_iter([(http::header::AGE, 7.into())])),
        ];
        let frames = frames.map(Ok::<_, std::convert::Infallible>);
        let body = StreamBody::new(tonic::codegen::tokio_stream::iter(frames));
        Outgoing::tonic(tonic::body::Body::new(body))
    }

    #[tokio::test]
    async fn trailers_of_a_request_are_left_out() {
        let mut short = with_trailers();
        assert!(short.is_short(3).await.unwrap());
        assert_eq!(short.take_whole().unwrap(), "abc");
        let collected = with_trailers().collect().await.unwrap();
        assert!(collected.trailers().is_none());
        assert_eq!(collected.to_bytes(), "abc");
    }

    #[tokio::test]
    async fn body_without_bytes_is_an_empty_frame() {
        let mut body = Outgoing::whole(Bytes::new());
        assert!(body.is_end_stream());
        body.end_with_data();
        assert!(!body.is_end_stream());
        let frame = body.frame().await.unwrap().unwrap();
        assert_eq!(frame.into_data().unwrap(), "");
        assert!(body.is_end_stream());
    }

    #[tokio::test]
    async fn body_that_waits_for_a_turn_is_not_taken_as_a_whole() {
        let mut gated = Outgoing::whole(Bytes::from_static(b"abc")).gated(std::future::pending());
        assert!(gated.take_whole().is_none());
    }
}
