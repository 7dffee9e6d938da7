//! [`Lean`]: an HTTP/2 client for small calls.
//!
//! ```text
//!   call ── writes its request itself ──▶ socket ──▶ driver ── wakes the call once, with the whole response
//! ```
//!
//! A task drives the connection: it reads all frames, and writes what the socket did not take at once, and the requests of many calls
//! in one write. etcd's gRPC library sends a ping with most responses, by which it measures how much may be in flight: the
//! acknowledgement leaves with the next request.

use std::task::{Context, Poll};
use std::{
    collections::HashMap, convert::Infallible, future::poll_fn, io, pin::Pin, sync::Arc, time::Duration,
};

use bytes::{Buf as _, BytesMut};
use http::{HeaderMap, Uri};
use parking_lot::Mutex;
use rangecache_base::net::Stream;
use rangecache_edge::write_batching::PING_ACK_DELAY;
use tokio::io::{AsyncReadExt as _, AsyncWrite, ReadHalf, WriteHalf};
use tokio::sync::{Notify, mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::frame::{self, Frame, FrameReader, LeanError, MAX_PAYLOAD_BYTES};
use super::head;
use super::response::{Event, Incomplete, STREAM_WINDOW_BYTES, Whole};

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Time without a frame after which a peer is pinged while calls are in flight. etcd closes connections that ping more often than
/// every 5 s, and idle ones that ping at all.
pub const PING_INTERVAL: Duration = Duration::from_secs(10);
/// Largest window of HTTP/2.
const MAX_WINDOW_BYTES: u32 = (1 << 31) - 1;
/// Windows before any settings.
const DEFAULT_WINDOW_BYTES: u32 = (1 << 16) - 1;
/// Bytes of all responses after which the window of the connection is raised again.
const WINDOW_UPDATE_BYTES: u32 = 1 << 30;
/// The last stream of a connection, which ends with it: the next call is on a new one.
const LAST_STREAM: u32 = MAX_WINDOW_BYTES;
/// Bound on parts of a response that were not read.
const MAX_UNREAD_PARTS: usize = 4_096;
/// Bound on what waits to be written.
const MAX_WRITE_BYTES: usize = 1 << 20;
/// Part of it that requests may have: a socket that takes nothing must not end the connection because of them.
const MAX_REQUEST_BYTES: usize = MAX_WRITE_BYTES / 2;
/// Calls in flight up to which each writes its own request: with more, one write for several costs less.
const MAX_DIRECT_CALLS: usize = 2;
/// Calls in flight before the server has told how many it takes, which should be as many (RFC 9113, section 6.5.2).
const MIN_CALLS: u32 = 100;
/// Room for what the server sends at once for small calls.
const READ_BYTES: usize = 16 << 10;

/// A client: the connection ends once it is dropped, with the last call in flight.
#[derive(Debug)]
pub struct Lean(Arc<LeanConnection>);

/// A connection.
#[derive(Debug)]
struct LeanConnection {
    state: Mutex<LeanState>,
    /// Asks the driver to write what the socket did not take at once.
    unwritten: Notify,
    /// Asks the driver to write acknowledgements of pings, unless a request does so in time.
    pinged: Notify,
    /// Cancelled once no call can be made any more.
    closed: CancellationToken,
    /// Cancelled once there is neither a client nor a call in flight.
    unused: CancellationToken,
}

#[derive(Debug)]
struct LeanState {
    socket: WriteHalf<Stream>,
    /// Bytes that the socket has not taken yet.
    write: BytesMut,
    /// Acknowledgements of pings, which are not in `write` yet.
    ping_acks: BytesMut,
    next_stream: u32,
    /// Calls whose response has not ended.
    calls: HashMap<u32, PendingCall>,
    /// Bytes that may be sent on all streams together.
    window_bytes: i64,
    /// Bytes that may be sent on a new stream.
    stream_window_bytes: u32,
    /// Bytes that were received since the window for them was raised.
    received_bytes: u32,
    /// The server takes no calls any more, or there is no client.
    is_leaving: bool,
    /// Limits that the server has announced and this client cannot keep to, for it waits neither for windows nor for turns.
    too_tight: Option<&'static str>,
    /// Calls that the server takes at once; `None` until it has told its settings.
    max_calls: Option<usize>,
    /// When something was read last.
    last_read: Instant,
    /// When the ping left after which nothing was read.
    pinged: Option<Instant>,
    /// The driver waits for the socket, which keeps one waker: nothing else may poll it for writing then.
    is_blocked: bool,
}

/// A call whose response has not ended, for the driver.
#[derive(Debug)]
enum PendingCall {
    /// Gives the whole response to the call.
    Whole(Box<Incomplete>, oneshot::Sender<Result<Whole, LeanError>>),
    /// Gives each part to the call.
    Parts(mpsc::Sender<Result<Event, LeanError>>),
}

impl PendingCall {
    /// Ends the call, if it still waits, with `error`.
    fn fail(self, error: LeanError) {
        match self {
            PendingCall::Whole(_, sender) => drop(sender.send(Err(error))),
            PendingCall::Parts(parts) => drop(parts.try_send(Err(error))),
        }
    }
}

/// Ends all calls without a response when the connection is not driven any more.
struct CloseOnDrop(Arc<LeanConnection>);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.closed.cancel();
        self.0.state.lock().calls.clear();
    }
}

/// A call that was sent, whose response [`Parts`](crate::Parts) read.
#[derive(Debug)]
pub struct Begun {
    pub(super) call: InFlightCall,
    pub(super) parts: mpsc::Receiver<Result<Event, LeanError>>,
}

/// A call in flight: given up when it is dropped before its end.
#[derive(Debug)]
pub(crate) struct InFlightCall {
    shared: Arc<LeanConnection>,
    stream: u32,
}

impl Drop for InFlightCall {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        if state.calls.remove(&self.stream).is_some() {
            frame::put_cancel(&mut state.write, self.stream);
            self.shared.unwritten.notify_one();
        }
        self.shared.end_if_unused(&state);
    }
}

impl Drop for Lean {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.is_leaving = true;
        self.0.end_if_unused(&state);
    }
}

impl Lean {
    /// A client on `stream`, on which nothing was sent yet, and what drives it: that returns why the connection ended.
    pub fn new(
        stream: Stream,
        ping_timeout: Duration,
    ) -> (Lean, impl Future<Output = LeanError> + Send + use<>) {
        let (reader, socket) = tokio::io::split(stream);
        let mut write = BytesMut::from(PREFACE);
        let settings = [
            (frame::HEADER_TABLE_SIZE, 0),
            (frame::ENABLE_PUSH, 0),
            (frame::INITIAL_WINDOW_SIZE, STREAM_WINDOW_BYTES),
        ];
        frame::put_settings(&mut write, &settings);
        frame::put_window_update(&mut write, 0, MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES);
        let shared = Arc::new(LeanConnection {
            state: Mutex::new(LeanState {
                socket,
                write,
                ping_acks: BytesMut::new(),
                next_stream: 1,
                calls: HashMap::new(),
                window_bytes: i64::from(DEFAULT_WINDOW_BYTES),
                stream_window_bytes: DEFAULT_WINDOW_BYTES,
                received_bytes: 0,
                is_leaving: false,
                too_tight: None,
                max_calls: None,
                last_read: Instant::now(),
                pinged: None,
                is_blocked: false,
            }),
            unwritten: Notify::new(),
            pinged: Notify::new(),
            closed: CancellationToken::new(),
            unused: CancellationToken::new(),
        });
        // Also closed if it is dropped before it was polled.
        let driven = CloseOnDrop(Arc::clone(&shared));
        (
            Lean(shared),
            async move { driven.0.drive(reader, ping_timeout).await },
        )
    }

    /// Skips all streams but the last one.
    #[cfg(test)]
    pub(super) fn skip_streams(&self) {
        self.0.state.lock().next_stream = LAST_STREAM;
    }

    /// Whether no call can be made any more.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.0.is_closed()
    }

    /// Limits that the server has announced, if they take a client that waits: then no call can be made any more.
    #[must_use]
    pub fn too_tight(&self) -> Option<&'static str> {
        self.0.state.lock().too_tight
    }

    /// Resolves once no call can be made any more. Those in flight may continue.
    pub async fn until_closed(&self) {
        self.0.closed.cancelled().await;
    }

    /// Sends a POST with a `body` of at most [`MAX_PAYLOAD_BYTES`], and waits for the whole response.
    ///
    /// # Errors
    /// [`LeanError`]
    pub async fn call(&self, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Result<Whole, LeanError> {
        let (sender, response) = oneshot::channel();
        let call = PendingCall::Whole(Box::default(), sender);
        let _in_flight = self.0.send(call, uri, headers, body, true).await?;
        response.await.unwrap_or(Err(LeanError::Closed))
    }

    /// Sends a POST whose body begins with `body`, and returns the parts of its response. More of the body may follow, unless it
    /// `is_whole`.
    ///
    /// # Errors
    /// [`LeanError`]; nothing was sent then.
    pub async fn begin(
        &self,
        uri: &Uri,
        headers: &HeaderMap,
        body: &[u8],
        is_whole: bool,
    ) -> Result<Begun, LeanError> {
        let (sender, parts) = mpsc::channel(MAX_UNREAD_PARTS);
        let sent = self
            .0
            .send(PendingCall::Parts(sender), uri, headers, body, is_whole);
        let call = sent.await?;
        Ok(Begun { call, parts })
    }
}

impl LeanConnection {
    fn is_closed(&self) -> bool {
        self.closed.is_cancelled()
    }

    /// Ends the connection if nothing uses it, as its `state` shows.
    fn end_if_unused(&self, state: &LeanState) {
        if state.is_leaving && state.calls.is_empty() {
            self.unused.cancel();
        }
    }

    async fn send(
        self: &Arc<Self>,
        call: PendingCall,
        uri: &Uri,
        headers: &HeaderMap,
        body: &[u8],
        is_whole: bool,
    ) -> Result<InFlightCall, LeanError> {
        let block = head::encode(uri, headers);
        let (in_flight, is_direct) = {
            let mut state = self.state.lock();
            if self.is_closed() {
                return Err(LeanError::Closed);
            }
            let max_calls = state.max_calls.unwrap_or(MIN_CALLS as usize);
            if block.len() > MAX_PAYLOAD_BYTES || state.calls.len() >= max_calls {
                return Err(LeanError::Full);
            }
            let stream = state.next_stream;
            state.reserve_window(body.len())?;
            state.next_stream = stream + 2;
            if stream == LAST_STREAM {
                state.is_leaving = true;
                self.closed.cancel();
            }
            frame::put_headers(&mut state.write, stream, &block);
            frame::put_data(&mut state.write, stream, body, is_whole);
            state.calls.insert(stream, call);
            let in_flight = InFlightCall {
                shared: Arc::clone(self),
                stream,
            };
            (in_flight, state.calls.len() <= MAX_DIRECT_CALLS)
        };
        if is_direct {
            self.write_now().await;
        } else {
            self.unwritten.notify_one();
        }
        Ok(in_flight)
    }

    /// Writes what the socket takes at once, and leaves the rest to the driver.
    async fn write_now(&self) {
        let written = poll_fn(|context| {
            let mut state = self.state.lock();
            // A driver that waits for the socket writes everything once it is woken, which it would not be if this call waited in its
            // place.
            Poll::Ready(state.is_blocked || matches!(state.poll_write(context), Poll::Ready(Ok(()))))
        });
        if !written.await {
            self.unwritten.notify_one();
        }
    }

    async fn drive(&self, mut reader: ReadHalf<Stream>, ping_timeout: Duration) -> LeanError {
        tokio::select! {
            // In this order: an answer that has arrived is read before a write that fails ends the connection.
            biased;
            () = self.unused.cancelled() => LeanError::Closed,
            result = self.read(&mut reader) => match result {
                Ok(never) => match never {},
                Err(error) => error,
            },
            result = self.write() => match result {
                Ok(never) => match never {},
                Err(error) => error.into(),
            },
            never = self.write_ping_acks() => match never {},
            error = self.until_unresponsive(ping_timeout) => error,
        }
    }

    /// Writes acknowledgements of pings that have not left with a request in time.
    async fn write_ping_acks(&self) -> Infallible {
        loop {
            self.pinged.notified().await;
            // Runs until it ends, whether they have left or not: setting a timer can cost a system call.
            tokio::time::sleep(PING_ACK_DELAY).await;
            self.unwritten.notify_one();
        }
    }

    /// Pings a peer that has sent nothing for [`PING_INTERVAL`] while calls are in flight; completes when it sends nothing after a
    /// ping for `ping_timeout`.
    async fn until_unresponsive(&self, ping_timeout: Duration) -> LeanError {
        let mut next = Instant::now() + PING_INTERVAL;
        loop {
            tokio::time::sleep_until(next).await;
            // What has arrived is read first: this process itself may have had no processor.
            tokio::task::yield_now().await;
            let mut state = self.state.lock();
            let now = Instant::now();
            if state.pinged.is_none() {
                let due = state.last_read + PING_INTERVAL;
                if due > now || state.calls.is_empty() {
                    next = if due > now { due } else { now + PING_INTERVAL };
                    continue;
                }
                frame::put_ping(&mut state.write);
                state.pinged = Some(now);
                self.unwritten.notify_one();
            }
            let given_up = state.pinged.map_or(now, |pinged| pinged + ping_timeout);
            if given_up <= now {
                return LeanError::Unresponsive;
            }
            next = given_up.min(now + PING_INTERVAL);
        }
    }

    async fn write(&self) -> io::Result<Infallible> {
        loop {
            let writing = poll_fn(|context| {
                let mut state = self.state.lock();
                let polled = state.poll_write(context);
                state.is_blocked = polled.is_pending();
                polled
            });
            writing.await?;
            self.unwritten.notified().await;
            // What other tasks are about to send leaves in the same write.
            tokio::task::yield_now().await;
        }
    }

    async fn read(&self, reader: &mut ReadHalf<Stream>) -> Result<Infallible, LeanError> {
        let (mut read, mut frames) = (BytesMut::new(), FrameReader::default());
        loop {
            read.reserve(READ_BYTES);
            if reader.read_buf(&mut read).await? == 0 {
                return Err(LeanError::Closed);
            }
            let mut state = self.state.lock();
            (state.last_read, state.pinged) = (Instant::now(), None);
            let unwritten = state.write.len();
            while let Some(frame) = frames.next(&mut read)? {
                state.apply(frame)?;
            }
            if state.write.len() > unwritten {
                self.unwritten.notify_one();
            }
            if !state.ping_acks.is_empty() {
                self.pinged.notify_one();
            }
            if state.is_leaving {
                self.closed.cancel();
                if state.calls.is_empty() {
                    return Err(LeanError::Closed);
                }
            }
        }
    }
}

impl InFlightCall {
    /// Sends more of the body.
    ///
    /// # Errors
    /// [`LeanError`]
    pub(crate) fn send(&self, body: &[u8], is_last: bool) -> Result<(), LeanError> {
        let mut state = self.shared.state.lock();
        // A call in flight continues while the server leaves.
        if self.shared.is_closed() && !state.calls.contains_key(&self.stream) {
            return Err(LeanError::Closed);
        }
        // The window of a stream is never waited for: what is sent on one is far smaller.
        state.reserve_window(body.len())?;
        frame::put_data(&mut state.write, self.stream, body, is_last);
        self.shared.unwritten.notify_one();
        Ok(())
    }

    /// Lets the server send as many bytes again as were read of the response.
    pub(super) fn raise_window(&self, bytes: u32) {
        let mut state = self.shared.state.lock();
        if state.calls.contains_key(&self.stream) {
            frame::put_window_update(&mut state.write, self.stream, bytes);
            self.shared.unwritten.notify_one();
        }
    }
}

impl LeanState {
    fn poll_write(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if !self.ping_acks.is_empty() {
            self.write.extend_from_slice(&self.ping_acks);
            self.ping_acks.clear();
        }
        while !self.write.is_empty() {
            match Pin::new(&mut self.socket).poll_write(context, &self.write) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(written)) => self.write.advance(written),
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                Poll::Pending => return Poll::Pending,
            }
        }
        Pin::new(&mut self.socket).poll_flush(context)
    }

    /// Takes `bytes` from the windows.
    fn reserve_window(&mut self, bytes: usize) -> Result<(), LeanError> {
        let counted = i64::try_from(bytes).map_err(|_| LeanError::Full)?;
        let fits = bytes <= MAX_PAYLOAD_BYTES
            && counted <= i64::from(self.stream_window_bytes)
            && counted <= self.window_bytes
            && self.write.len() <= MAX_REQUEST_BYTES;
        if !fits {
            return Err(LeanError::Full);
        }
        self.window_bytes -= counted;
        Ok(())
    }

    fn apply(&mut self, frame: Frame) -> Result<(), LeanError> {
        match frame {
            Frame::Settings(settings) => {
                let mut max_calls = self.max_calls.unwrap_or(usize::MAX);
                for (name, value) in settings {
                    match name {
                        frame::INITIAL_WINDOW_SIZE => {
                            self.stream_window_bytes = value;
                            if (value as usize) < MAX_PAYLOAD_BYTES {
                                self.too_tight = Some("windows below 16 KiB");
                            }
                        }
                        frame::MAX_CONCURRENT_STREAMS => {
                            max_calls = value as usize;
                            if value < MIN_CALLS {
                                self.too_tight = Some("fewer than 100 calls at once");
                            }
                        }
                        _ => {}
                    }
                }
                self.max_calls = Some(max_calls);
                // Calls in flight may have been processed: they continue.
                self.is_leaving |= self.too_tight.is_some();
                frame::put_settings_ack(&mut self.write);
            }
            Frame::Ping(data) => frame::put_ping_ack(&mut self.ping_acks, &data),
            Frame::WindowUpdate { stream: 0, increment } => self.window_bytes += i64::from(increment),
            Frame::WindowUpdate { .. } | Frame::Ignored => {}
            Frame::Reset { stream, reason } => {
                if let Some(call) = self.calls.remove(&stream) {
                    call.fail(LeanError::Reset(h2::Reason::from(reason).into()));
                }
            }
            Frame::GoAway { last_stream } => {
                self.is_leaving = true;
                for (_, call) in self.calls.extract_if(|stream, _| *stream > last_stream) {
                    call.fail(LeanError::NotProcessed);
                }
            }
            Frame::Headers {
                stream,
                block,
                is_last,
            } => {
                let head = head::decode(block)?;
                self.give(stream, Event::Head(head, is_last))?;
            }
            Frame::Data {
                stream,
                bytes,
                window_bytes,
                is_last,
            } => {
                self.received_bytes += window_bytes;
                if self.received_bytes >= WINDOW_UPDATE_BYTES {
                    frame::put_window_update(&mut self.write, 0, self.received_bytes);
                    self.received_bytes = 0;
                }
                self.give(
                    stream,
                    Event::Data {
                        bytes,
                        window_bytes,
                        is_last,
                    },
                )?;
            }
        }
        if self.write.len() + self.ping_acks.len() > MAX_WRITE_BYTES {
            return Err(LeanError::Unexpected("more than it reads answers to"));
        }
        Ok(())
    }

    /// Gives a part of a response to its call; that of a call that was given up is dropped.
    fn give(&mut self, stream: u32, event: Event) -> Result<(), LeanError> {
        if stream.is_multiple_of(2) || stream >= self.next_stream {
            return Err(LeanError::Unexpected("a frame of a stream that was not opened"));
        }
        let is_last = event.is_last();
        match self.calls.get_mut(&stream) {
            None => return Ok(()),
            Some(PendingCall::Parts(parts)) => {
                if parts.try_send(Ok(event)).is_err() {
                    // Its reader is too slow, or has given up.
                    self.calls.remove(&stream);
                    frame::put_cancel(&mut self.write, stream);
                    return Ok(());
                }
            }
            Some(PendingCall::Whole(incomplete, _)) => {
                if let Some(bytes) = incomplete.take(event)? {
                    frame::put_window_update(&mut self.write, stream, bytes);
                }
            }
        }
        if is_last && let Some(PendingCall::Whole(incomplete, sender)) = self.calls.remove(&stream) {
            let _ = sender.send(Ok(incomplete.whole()?));
        }
        Ok(())
    }
}
