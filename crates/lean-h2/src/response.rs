//! Parts of a response, and whole ones.

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, Response};

use super::{frame::LeanError, head::Head};

/// Window of each stream: bytes that a response may have before it is read, as budgets count them.
pub const STREAM_WINDOW_BYTES: u32 = 64 << 10;
/// Bound on a response that is read as a whole.
const MAX_WHOLE_BYTES: usize = 64 << 20;

/// The whole of a response: the body's bytes, and its trailers.
pub type Whole = Response<(Bytes, Option<HeaderMap>)>;

/// A part of a response.
#[derive(Debug)]
pub(crate) enum Event {
    /// The head or the trailers, and whether the response ends with them.
    Head(Head, bool),
    /// Bytes of the body.
    Data {
        bytes: Bytes,
        /// Bytes that count for the window: with padding.
        window_bytes: u32,
        is_last: bool,
    },
}

impl Event {
    /// Whether the response ends with it.
    pub(super) fn is_last(&self) -> bool {
        match self {
            Event::Head(_, is_last) | Event::Data { is_last, .. } => *is_last,
        }
    }
}

/// Bytes of a stream's window that were read, and that the server may not send again yet.
#[derive(Debug, Default)]
pub(super) struct ReadBytes(u32);

impl ReadBytes {
    /// Counts `bytes`; returns those by which the window is to be raised, once they are half of it.
    pub(super) fn add(&mut self, bytes: u32) -> Option<u32> {
        self.0 += bytes;
        (self.0 >= STREAM_WINDOW_BYTES / 2).then(|| std::mem::take(&mut self.0))
    }
}

/// Parts of a response that have arrived.
#[derive(Debug, Default)]
pub(super) struct Incomplete {
    read: ReadBytes,
    head: Option<Head>,
    body: BytesMut,
    trailers: Option<HeaderMap>,
}

impl Incomplete {
    /// Takes the next part; returns the bytes by which the window of the stream is to be raised.
    pub(super) fn take(&mut self, event: Event) -> Result<Option<u32>, LeanError> {
        match event {
            Event::Head(head, is_last) => match (&self.head, head.status) {
                (None, Some(status)) if !status.is_informational() => self.head = Some(head),
                (None, Some(_)) if !is_last => {}
                (Some(_), None) if is_last => self.trailers = Some(head.headers),
                _ => return Err(LeanError::Unexpected("headers in the wrong place")),
            },
            Event::Data {
                bytes, window_bytes, ..
            } => {
                if self.head.is_none() {
                    return Err(LeanError::Unexpected("a body without a head"));
                }
                if self.body.len() + bytes.len() > MAX_WHOLE_BYTES {
                    return Err(LeanError::Unexpected("a response that is too long"));
                }
                self.body.extend_from_slice(&bytes);
                return Ok(self.read.add(window_bytes));
            }
        }
        Ok(None)
    }

    pub(super) fn whole(self) -> Result<Whole, LeanError> {
        let head = self
            .head
            .ok_or(LeanError::Unexpected("a response without a head"))?;
        Ok(head.response((self.body.freeze(), self.trailers)))
    }
}

impl Head {
    pub(super) fn response<B>(self, body: B) -> Response<B> {
        let mut response = Response::new(body);
        *response.status_mut() = self.status.unwrap_or_default();
        *response.headers_mut() = self.headers;
        response
    }
}
