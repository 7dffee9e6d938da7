//! [`Lean`]: an HTTP/2 connection for one small call at a time, without a task of its own: a call costs one write and one read.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Weak;
use std::task::Poll;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response, Uri};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWriteExt as _, ReadBuf};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

use super::error::LeanError;
use super::frame::{self, Frame, MAX_PAYLOAD_BYTES, next_frame};
use super::head::{self, Head};
use rangecache_base::net::Stream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bound on a response: the window of its stream, which is never raised.
const MAX_RESPONSE_BYTES: u32 = 4 << 20;
/// Largest window of HTTP/2.
const MAX_WINDOW_BYTES: u32 = (1 << 31) - 1;
/// Windows before any settings.
const DEFAULT_WINDOW_BYTES: u32 = (1 << 16) - 1;
/// Bytes of all responses after which the window of the connection is raised again.
const WINDOW_UPDATE_BYTES: u32 = 1 << 30;
/// Stream ids are never used again: the connection is opened anew after this one.
const LAST_STREAM: u32 = MAX_WINDOW_BYTES;
/// Interval at which an idle connection is read: a server that pings waits for at least as long, and one that has closed the
/// connection is known by then.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
/// Room for what the server sends at once for a small call.
const READ_BYTES: usize = 4 << 10;

/// The whole of a response: the body's bytes, and its trailers.
pub(crate) type Whole = Response<(Bytes, Option<HeaderMap>)>;

/// A connection that serves one call after the other. After a call that failed or was given up it is closed: what that left on
/// it cannot be told from the next response.
#[derive(Debug)]
pub(crate) struct Lean {
    /// `None` during a call, and once it is closed.
    idle: Mutex<Option<Box<Open>>>,
    turn: Semaphore,
    closed: CancellationToken,
}

/// Both directions of an open connection.
#[derive(Debug)]
struct Open {
    stream: Stream,
    read: BytesMut,
    /// What is sent with the next request.
    write: BytesMut,
    next_stream: u32,
    /// Bytes that may be sent on all streams together.
    window_bytes: i64,
    /// Bytes that may be sent on a new stream.
    stream_window_bytes: u32,
    /// Bytes that were received since the window for them was raised.
    received_bytes: u32,
}

/// Closes the connection unless the call has ended well.
struct CloseOnDrop<'a>(Option<&'a Lean>);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(lean) = self.0 {
            lean.closed.cancel();
        }
    }
}

impl Drop for Lean {
    fn drop(&mut self) {
        self.closed.cancel();
    }
}

impl Lean {
    /// A connection on `stream`, on which nothing was sent yet.
    pub(crate) fn new(stream: Stream) -> Lean {
        Lean {
            idle: Mutex::new(Some(Box::new(Open::new(stream)))),
            turn: Semaphore::new(1),
            closed: CancellationToken::new(),
        }
    }

    /// Cancelled once no call can be made any more.
    pub(crate) fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    /// Whether a call would begin at once.
    pub(crate) fn is_idle(&self) -> bool {
        self.turn.available_permits() > 0 && !self.closed.is_cancelled()
    }

    /// Reads the connection while no call uses it; completes when it is closed.
    pub(crate) async fn tend(lean: &Weak<Lean>, closed: &CancellationToken) {
        loop {
            let pause = tokio::time::sleep(IDLE_INTERVAL);
            if closed.run_until_cancelled(pause).await.is_none() {
                return;
            }
            let Some(lean) = lean.upgrade() else {
                return;
            };
            let Ok(_turn) = lean.turn.try_acquire() else {
                continue;
            };
            let Some(mut open) = lean.idle.lock().take() else {
                return;
            };
            let mut close = CloseOnDrop(Some(&lean));
            if open.acknowledge().await.is_ok() {
                *lean.idle.lock() = Some(open);
                close.0 = None;
            }
        }
    }

    /// Sends a POST with a `body` of at most [`MAX_PAYLOAD_BYTES`], and waits for the whole response, after the calls that wait already.
    ///
    /// # Errors
    /// [`LeanError`]; the connection is closed then.
    pub(crate) async fn call(&self, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Result<Whole, LeanError> {
        let block = head::encode(uri, headers);
        let _turn = self.turn.acquire().await.map_err(|_| LeanError::Closed)?;
        let mut open = self.idle.lock().take().ok_or(LeanError::Closed)?;
        let mut close = CloseOnDrop(Some(self));
        let response = open.exchange(&block, body).await?;
        *self.idle.lock() = Some(open);
        close.0 = None;
        Ok(response)
    }
}

impl Open {
    fn new(stream: Stream) -> Open {
        let mut write = BytesMut::from(PREFACE);
        let settings = [
            (frame::HEADER_TABLE_SIZE, 0),
            (frame::ENABLE_PUSH, 0),
            (frame::INITIAL_WINDOW_SIZE, MAX_RESPONSE_BYTES),
        ];
        frame::put_settings(&mut write, &settings);
        frame::put_window_update(&mut write, 0, MAX_WINDOW_BYTES - DEFAULT_WINDOW_BYTES);
        Open {
            stream,
            read: BytesMut::new(),
            write,
            next_stream: 1,
            window_bytes: i64::from(DEFAULT_WINDOW_BYTES),
            stream_window_bytes: DEFAULT_WINDOW_BYTES,
            received_bytes: 0,
        }
    }

    /// Acknowledges what has arrived since the last call.
    async fn acknowledge(&mut self) -> Result<(), LeanError> {
        self.take_arrived().await?;
        if !self.write.is_empty() {
            self.stream.write_all_buf(&mut self.write).await?;
            self.stream.flush().await?;
        }
        Ok(())
    }

    async fn exchange(&mut self, block: &[u8], body: &[u8]) -> Result<Whole, LeanError> {
        self.take_arrived().await?;
        if self.received_bytes >= WINDOW_UPDATE_BYTES {
            frame::put_window_update(&mut self.write, 0, self.received_bytes);
            self.received_bytes = 0;
        }
        let body_bytes = u32::try_from(body.len()).map_err(|_| LeanError::TooLong)?;
        let fits = block.len() <= MAX_PAYLOAD_BYTES
            && body.len() <= MAX_PAYLOAD_BYTES
            && body_bytes <= self.stream_window_bytes
            && i64::from(body_bytes) <= self.window_bytes;
        if !fits {
            return Err(LeanError::TooLong);
        }
        if self.next_stream >= LAST_STREAM {
            return Err(LeanError::Closed);
        }
        let stream = self.next_stream;
        self.next_stream += 2;
        self.window_bytes -= i64::from(body_bytes);
        frame::put_request(&mut self.write, stream, block, body);
        self.stream.write_all_buf(&mut self.write).await?;
        self.stream.flush().await?;
        let mut response = Incomplete::default();
        loop {
            while let Some(frame) = next_frame(&mut self.read)? {
                if let Frame::Data { window_bytes, .. } = &frame {
                    self.received_bytes += window_bytes;
                }
                if let Some(frame) = response.take(stream, frame)? {
                    self.apply(frame)?;
                }
                if response.is_whole {
                    return response.whole();
                }
            }
            self.read.reserve(READ_BYTES);
            if self.stream.read_buf(&mut self.read).await? == 0 {
                return Err(LeanError::Closed);
            }
        }
    }

    /// Takes what has arrived since the last call, without waiting: it may be the end of the connection.
    async fn take_arrived(&mut self) -> Result<(), LeanError> {
        let mut bytes = [0; 1 << 10];
        loop {
            let mut buffer = ReadBuf::new(&mut bytes);
            let stream = &mut self.stream;
            let polled = poll_fn(|cx| Poll::Ready(Pin::new(&mut *stream).poll_read(cx, &mut buffer))).await;
            match polled {
                Poll::Pending => break,
                Poll::Ready(read) => read?,
            }
            if buffer.filled().is_empty() || self.read.len() > MAX_PAYLOAD_BYTES {
                return Err(LeanError::Closed);
            }
            self.read.extend_from_slice(buffer.filled());
        }
        while let Some(frame) = next_frame(&mut self.read)? {
            self.apply(frame)?;
        }
        Ok(())
    }

    /// Applies a frame of the connection.
    fn apply(&mut self, frame: Frame) -> Result<(), LeanError> {
        match frame {
            Frame::Settings(settings) => {
                for (name, value) in settings {
                    if name == frame::INITIAL_WINDOW_SIZE {
                        self.stream_window_bytes = value;
                    }
                }
                frame::put_settings_ack(&mut self.write);
            }
            Frame::Ping(data) => frame::put_ping_ack(&mut self.write, &data),
            // Streams of earlier calls have ended; one that is open has sent all of its body.
            Frame::WindowUpdate { stream: 0, increment } => self.window_bytes += i64::from(increment),
            Frame::WindowUpdate { .. } | Frame::Ignored => {}
            Frame::Data { .. } | Frame::Headers { .. } => {
                return Err(LeanError::Unexpected("a frame of another stream"));
            }
        }
        // What is acknowledged goes with the next request.
        if self.write.len() > MAX_PAYLOAD_BYTES {
            return Err(LeanError::Unexpected("too many settings or pings"));
        }
        Ok(())
    }
}

/// Parts of a response that have arrived.
#[derive(Debug, Default)]
struct Incomplete {
    head: Option<Head>,
    body: BytesMut,
    trailers: Option<HeaderMap>,
    is_whole: bool,
}

impl Incomplete {
    /// Takes a frame of `stream`; returns a frame of the connection.
    fn take(&mut self, stream: u32, frame: Frame) -> Result<Option<Frame>, LeanError> {
        match frame {
            Frame::Headers {
                stream: of,
                block,
                is_last,
            } if of == stream => {
                let head = head::decode(block)?;
                match (&self.head, head.status) {
                    (None, Some(status)) if !status.is_informational() => self.head = Some(head),
                    (None, Some(_)) if !is_last => {}
                    (Some(_), None) if is_last => self.trailers = Some(head.headers),
                    _ => return Err(LeanError::Unexpected("headers in the wrong place")),
                }
                self.is_whole = is_last;
                Ok(None)
            }
            Frame::Data {
                stream: of,
                bytes,
                is_last,
                ..
            } if of == stream && self.head.is_some() => {
                if self.body.len() + bytes.len() > MAX_RESPONSE_BYTES as usize {
                    return Err(LeanError::Unexpected("a response that is too long"));
                }
                self.body.extend_from_slice(&bytes);
                self.is_whole = is_last;
                Ok(None)
            }
            other => Ok(Some(other)),
        }
    }

    fn whole(self) -> Result<Whole, LeanError> {
        let head = self.head.ok_or(LeanError::Closed)?;
        let mut response = Response::new((self.body.freeze(), self.trailers));
        *response.status_mut() = head.status.unwrap_or_default();
        *response.headers_mut() = head.headers;
        Ok(response)
    }
}
