//! Receives the messages of a client's Watch stream, as they arrive.

use std::task::{Context, Poll, ready};
use std::{pin::Pin, time::Duration};

use bytes::{Bytes, BytesMut};
use etcd_wire::grpc::frame::{PREFIX_BYTES, Prefix};
use http_body::{Body as _, Frame};
use hyper::body::Incoming;
use rangecache_base::wake_gated::WakeGated;
use rangecache_upstream::Outgoing;
use tokio::time::Sleep;

use super::request::{MAX_MESSAGE_BYTES, UnknownRequest, WatchRequest};

/// Bytes up to which messages are received before they are handled. What stays with the HTTP/2 library counts against
/// its connection: it closes one with about two thousand small frames that were not taken, as clients cause that create
/// many watchers, or ask for progress, without waiting for each response.
const READ_AHEAD_BYTES: usize = 16 << 10;

/// Progress requests in a row that are answered together, and that are kept if the buffer is full. The responses to those
/// tell everything that the responses to more of them would: etcd, too, does not answer each of many.
pub(super) const MAX_PROGRESS_RUN: usize = 64;

/// A progress request as every client encodes it: field 3 of the union, without fields of its own.
const PROGRESS_REQUEST: [u8; 2] = [3 << 3 | 2, 0];

/// Client's half of a Watch stream. Holds at most one message, or [`READ_AHEAD_BYTES`], and one frame.
#[derive(Debug)]
pub(super) struct Requests {
    /// `None` if there is nothing behind `buffer`.
    body: Option<Incoming>,
    /// Whether `body` may have something.
    arrival: WakeGated,
    /// Bytes that have arrived and were not taken.
    buffer: BytesMut,
    /// Time limit for a message that has begun (`--request-timeout`).
    timeout: Duration,
    /// Expires when the message that has begun is late; `None` until it was waited for.
    late: Option<Pin<Box<Sleep>>>,
}

/// Next item that a client has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Received {
    /// A message, or one that only etcd can answer.
    Message(Result<WatchRequest, UnknownRequest>),
    /// The end of its half of the stream.
    End,
    /// A message that was not complete in time.
    Late,
}

impl Requests {
    pub(super) fn new(body: Incoming, timeout: Duration) -> Requests {
        Requests {
            body: Some(body),
            ..Requests::of_message(Bytes::new(), timeout)
        }
    }

    /// Requests of a client that sends a single message, which has its gRPC prefix.
    pub(super) fn of_message(framed: Bytes, timeout: Duration) -> Requests {
        Requests {
            body: None,
            arrival: WakeGated::new(),
            buffer: framed.into(),
            timeout,
            late: None,
        }
    }

    /// Receives what has arrived, while the stream handles an earlier message.
    pub(super) fn read_ahead(&mut self, cx: &mut Context<'_>) {
        while self.body.is_some()
            && (self.buffer.len() < READ_AHEAD_BYTES || self.shorten_progress_runs())
            && let Poll::Ready(frame) = self.poll_body(cx)
        {
            self.received(frame);
        }
    }

    /// Removes what long runs of progress requests have too many; returns whether the buffer has room then.
    fn shorten_progress_runs(&mut self) -> bool {
        let (mut at, mut kept, mut run) = (0, 0, 0);
        while let Some((length, message)) = first_message(&self.buffer[at..]) {
            run = match message {
                Ok(WatchRequest::Progress) => run + 1,
                _ => 0,
            };
            let end = at + length;
            if run <= MAX_PROGRESS_RUN {
                self.buffer.copy_within(at..end, kept);
                kept += length;
            }
            at = end;
        }
        self.buffer.copy_within(at.., kept);
        self.buffer.truncate(self.buffer.len() - (at - kept));
        self.buffer.len() < READ_AHEAD_BYTES
    }

    /// Next frame of the body; `None` at its end.
    fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let Some(body) = &mut self.body else {
            return Poll::Ready(None);
        };
        self.arrival.poll_if_woken(cx, |cx| Pin::new(body).poll_frame(cx))
    }

    /// Takes in what the body has yielded.
    fn received(&mut self, frame: Option<Result<Frame<Bytes>, hyper::Error>>) {
        match frame.map(|frame| frame.map(Frame::into_data)) {
            Some(Ok(Ok(data))) => self.buffer.extend_from_slice(&data),
            // After a reset hyper drops the response, too.
            None | Some(Err(_) | Ok(Err(_))) => self.body = None,
        }
    }

    /// Polls for the next message, and leaves its bytes in the buffer, so that the stream can still be forwarded.
    pub(super) fn poll_peek(&mut self, cx: &mut Context<'_>) -> Poll<Received> {
        loop {
            if let Some(message) = self.buffered() {
                self.late = None;
                return Poll::Ready(Received::Message(message));
            }
            if self.body.is_none() {
                return Poll::Ready(Received::End);
            }
            match self.poll_body(cx) {
                Poll::Ready(frame) => self.received(frame),
                Poll::Pending if self.buffer.is_empty() => return Poll::Pending,
                Poll::Pending => {
                    let timeout = self.timeout;
                    let late = self
                        .late
                        .get_or_insert_with(|| Box::pin(tokio::time::sleep(timeout)));
                    return late.as_mut().poll(cx).map(|()| Received::Late);
                }
            }
        }
    }

    /// The next message, if it is in the buffer.
    fn buffered(&self) -> Option<Result<WatchRequest, UnknownRequest>> {
        match first_message(&self.buffer) {
            Some((_, message)) => Some(message),
            None => is_unusual(&self.buffer).then_some(Err(UnknownRequest)),
        }
    }

    /// Removes the message that [`Requests::poll_peek`] has returned.
    pub(super) fn consume(&mut self) {
        if let Some(prefix) = Prefix::parse(&self.buffer) {
            let length = PREFIX_BYTES + prefix.length_bytes as usize;
            let _ = self.buffer.split_to(length.min(self.buffer.len()));
        }
        if self.buffer.is_empty() {
            self.buffer = BytesMut::new();
        }
    }

    /// Polls for the next message and removes it.
    pub(super) fn poll_next(&mut self, cx: &mut Context<'_>) -> Poll<Received> {
        let received = self.poll_peek(cx);
        if let Poll::Ready(Received::Message(Ok(_))) = received {
            self.consume();
        }
        received
    }

    /// Polls for the first create request without removing it, and removes the requests before it: on a stream without watchers, etcd
    /// does not answer them either.
    pub(super) fn poll_first(&mut self, cx: &mut Context<'_>) -> Poll<Received> {
        loop {
            let received = ready!(self.poll_peek(cx));
            match received {
                Received::Message(Ok(WatchRequest::Create(_)) | Err(_)) | Received::Late | Received::End => {
                    return Poll::Ready(received);
                }
                Received::Message(Ok(_)) => self.consume(),
            }
        }
    }

    /// Removes the progress requests that follow, of those in the buffer and at most `limit`; returns their number.
    pub(super) fn take_progress(&mut self, limit: usize) -> usize {
        let mut taken = 0;
        while taken < limit
            && let Some(Ok(WatchRequest::Progress)) = self.buffered()
        {
            self.consume();
            taken += 1;
        }
        taken
    }

    /// Polls for bytes of messages that only etcd understands; `None` after the last.
    pub(super) fn poll_bytes(&mut self, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        loop {
            if !self.buffer.is_empty() {
                return Poll::Ready(Some(std::mem::take(&mut self.buffer).freeze()));
            }
            if self.body.is_none() {
                return Poll::Ready(None);
            }
            let frame = ready!(self.poll_body(cx));
            self.received(frame);
        }
    }

    /// The whole stream for etcd: what was not consumed, then the rest.
    pub(super) fn into_outgoing(self) -> Outgoing {
        let received = self.buffer.freeze();
        match self.body {
            Some(rest) => Outgoing::resumed(received, rest),
            None => Outgoing::whole(received),
        }
    }
}

/// The first message of `buffer` with its length, prefix included. `None` if it is not complete, or unusual.
fn first_message(buffer: &[u8]) -> Option<(usize, Result<WatchRequest, UnknownRequest>)> {
    if is_unusual(buffer) {
        return None;
    }
    let length = PREFIX_BYTES + Prefix::parse(buffer)?.length_bytes as usize;
    let message = buffer.get(PREFIX_BYTES..length)?;
    // Clients may send a great many of these.
    if message == PROGRESS_REQUEST {
        return Some((length, Ok(WatchRequest::Progress)));
    }
    // Copied: a key must not keep the buffer of its connection in memory.
    Some((length, WatchRequest::decode(&Bytes::copy_from_slice(message))))
}

/// Whether the first message of `buffer` is one that is not read: compressed, or too long.
fn is_unusual(buffer: &[u8]) -> bool {
    Prefix::parse(buffer)
        .is_some_and(|prefix| prefix.is_compressed || prefix.length_bytes as usize > MAX_MESSAGE_BYTES)
}

#[cfg(test)]
mod tests {
    use etcd_wire::etcdserverpb::{WatchCancelRequest, WatchProgressRequest, WatchRequest as Wire};
    use etcd_wire::{etcdserverpb::watch_request::RequestUnion, grpc::frame::framed};

    use super::*;

    fn request(union: RequestUnion) -> Vec<u8> {
        let message = Wire {
            request_union: Some(union),
        };
        framed(&message).to_vec()
    }

    #[test]
    fn long_runs_of_progress_requests_are_shortened_and_nothing_else() {
        let progress = request(RequestUnion::ProgressRequest(WatchProgressRequest {}));
        assert_eq!(progress[PREFIX_BYTES..], PROGRESS_REQUEST);
        let cancel = request(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 7 }));
        let of_run = |length: usize| progress.repeat(length);
        let incomplete = &cancel[..cancel.len() - 1];
        let received = [
            &of_run(500)[..],
            &cancel,
            &of_run(3),
            &cancel,
            &of_run(70),
            incomplete,
        ]
        .concat();
        let mut requests = Requests::of_message(received.into(), Duration::ZERO);
        assert!(requests.shorten_progress_runs());
        let full = of_run(MAX_PROGRESS_RUN);
        let kept = [&full[..], &cancel, &of_run(3), &cancel, &full, incomplete].concat();
        assert_eq!(requests.buffer, kept);
    }
}
