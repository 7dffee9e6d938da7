//! Frames of HTTP/2 (RFC 9113, section 4), as far as a client of small calls needs them, and why a connection cannot be used any more ([`LeanError`]).

use std::io;

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

/// Bytes in front of the payload of each frame.
const PREFIX_BYTES: usize = 9;
/// Bound on a payload: the default of HTTP/2, which this client does not raise.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 10;
/// Bound on a block of headers that takes several frames: that of the other client.
const MAX_BLOCK_BYTES: usize = 1 << 20;

const DATA: u8 = 0;
const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const CONTINUATION: u8 = 9;
const PUSH_PROMISE: u8 = 5;

const END_STREAM: u8 = 0x1;
const ACK: u8 = 0x1;
const END_HEADERS: u8 = 0x4;
const PADDED: u8 = 0x8;
const WITH_PRIORITY: u8 = 0x20;

/// Error code of a call that was given up.
const CANCEL: u32 = 8;

/// `SETTINGS_HEADER_TABLE_SIZE`
pub(super) const HEADER_TABLE_SIZE: u16 = 1;
/// `SETTINGS_ENABLE_PUSH`
pub(super) const ENABLE_PUSH: u16 = 2;
/// `SETTINGS_MAX_CONCURRENT_STREAMS`
pub(super) const MAX_CONCURRENT_STREAMS: u16 = 3;
/// `SETTINGS_INITIAL_WINDOW_SIZE`
pub(super) const INITIAL_WINDOW_SIZE: u16 = 4;

/// A frame that a server may send.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Frame {
    Data {
        stream: u32,
        bytes: Bytes,
        /// Bytes that count for the windows: with padding.
        window_bytes: u32,
        is_last: bool,
    },
    /// A whole block of headers.
    Headers {
        stream: u32,
        block: Bytes,
        is_last: bool,
    },
    Settings(Vec<(u16, u32)>),
    Ping([u8; 8]),
    WindowUpdate {
        stream: u32,
        increment: u32,
    },
    /// The end of a call without a response.
    Reset {
        stream: u32,
        /// The server's error code.
        reason: u32,
    },
    /// The server takes no calls any more, and answers those up to this one.
    GoAway {
        last_stream: u32,
    },
    /// An acknowledgement, or a frame without meaning for this client.
    Ignored,
}

/// A block of headers that other frames continue.
#[derive(Debug)]
struct BegunBlock {
    stream: u32,
    block: BytesMut,
    is_last: bool,
}

/// Reads frames, and makes one of those that a block of headers takes.
#[derive(Debug, Default)]
pub(super) struct FrameReader {
    begun: Option<BegunBlock>,
}

impl FrameReader {
    /// Takes the first frame off `read`; `None` if it is not complete yet.
    ///
    /// # Errors
    /// [`LeanError`] for what the server of an endpoint does not send: the connection must not be used any more.
    pub(super) fn next(&mut self, read: &mut BytesMut) -> Result<Option<Frame>, LeanError> {
        loop {
            let frame = match next_piece(read)? {
                None => return Ok(None),
                Some(Piece::Frame(frame)) if self.begun.is_none() => frame,
                Some(Piece::BlockBegins {
                    stream,
                    block,
                    is_last,
                }) if self.begun.is_none() => {
                    let block = BytesMut::from(&block[..]);
                    self.begun = Some(BegunBlock {
                        stream,
                        block,
                        is_last,
                    });
                    continue;
                }
                Some(Piece::BlockContinues {
                    stream,
                    block,
                    is_whole,
                }) => match self.begun.take() {
                    Some(mut begun) if begun.stream == stream => {
                        begun.block.extend_from_slice(&block);
                        if begun.block.len() > MAX_BLOCK_BYTES {
                            return Err(LeanError::Unexpected("headers that are too long"));
                        }
                        if !is_whole {
                            self.begun = Some(begun);
                            continue;
                        }
                        Frame::Headers {
                            stream,
                            block: begun.block.freeze(),
                            is_last: begun.is_last,
                        }
                    }
                    _ => return Err(LeanError::Unexpected("the rest of headers that have not begun")),
                },
                Some(Piece::Frame(_) | Piece::BlockBegins { .. }) => {
                    return Err(LeanError::Unexpected("another frame within headers"));
                }
            };
            return Ok(Some(frame));
        }
    }
}

/// A frame, or a part of a block of headers that takes several.
enum Piece {
    Frame(Frame),
    BlockBegins {
        stream: u32,
        block: Bytes,
        is_last: bool,
    },
    BlockContinues {
        stream: u32,
        block: Bytes,
        is_whole: bool,
    },
}

/// Takes the first piece off `read`; `None` if it is not complete yet.
fn next_piece(read: &mut BytesMut) -> Result<Option<Piece>, LeanError> {
    let Some(prefix) = read.first_chunk::<PREFIX_BYTES>() else {
        return Ok(None);
    };
    let [a, b, c, kind, flags, s0, s1, s2, s3] = *prefix;
    let length = u32::from_be_bytes([0, a, b, c]) as usize;
    let stream = u32::from_be_bytes([s0, s1, s2, s3]) & (u32::MAX >> 1);
    if length > MAX_PAYLOAD_BYTES {
        return Err(LeanError::Unexpected("a frame that is too long"));
    }
    if read.len() < PREFIX_BYTES + length {
        return Ok(None);
    }
    read.advance(PREFIX_BYTES);
    let mut payload = read.split_to(length).freeze();
    let has = |flag: u8| flags & flag != 0;
    Ok(Some(Piece::Frame(match kind {
        DATA => Frame::Data {
            stream,
            bytes: unpadded(&mut payload, has(PADDED), 0)?,
            window_bytes: u32::try_from(length).unwrap_or(u32::MAX),
            is_last: has(END_STREAM),
        },
        HEADERS => {
            let block = unpadded(&mut payload, has(PADDED), if has(WITH_PRIORITY) { 5 } else { 0 })?;
            let is_last = has(END_STREAM);
            if !has(END_HEADERS) {
                return Ok(Some(Piece::BlockBegins {
                    stream,
                    block,
                    is_last,
                }));
            }
            Frame::Headers {
                stream,
                block,
                is_last,
            }
        }
        CONTINUATION => {
            return Ok(Some(Piece::BlockContinues {
                stream,
                block: payload,
                is_whole: has(END_HEADERS),
            }));
        }
        SETTINGS | PING if stream != 0 => {
            return Err(LeanError::Unexpected("settings or a ping of a stream"));
        }
        SETTINGS | PING if has(ACK) => Frame::Ignored,
        SETTINGS if length.is_multiple_of(6) => {
            let settings = payload
                .chunks_exact(6)
                .map(|mut setting| (setting.get_u16(), setting.get_u32()));
            Frame::Settings(settings.collect())
        }
        PING if length == 8 => {
            let mut data = [0; 8];
            payload.copy_to_slice(&mut data);
            Frame::Ping(data)
        }
        WINDOW_UPDATE if length == 4 => Frame::WindowUpdate {
            stream,
            increment: payload.get_u32() & (u32::MAX >> 1),
        },
        RST_STREAM if length == 4 => Frame::Reset {
            stream,
            reason: payload.get_u32(),
        },
        GOAWAY if length >= 8 => Frame::GoAway {
            last_stream: payload.get_u32() & (u32::MAX >> 1),
        },
        PUSH_PROMISE => return Err(LeanError::Unexpected("a push")),
        SETTINGS | PING | WINDOW_UPDATE | RST_STREAM | GOAWAY => {
            return Err(LeanError::Unexpected("a frame of the wrong length"));
        }
        // RFC 9113, section 5.5: frames of other kinds have to be ignored.
        _ => Frame::Ignored,
    })))
}

/// `payload` without its padding, and without `skipped` bytes that come before its contents.
fn unpadded(payload: &mut Bytes, is_padded: bool, skipped: usize) -> Result<Bytes, LeanError> {
    const WRONG: LeanError = LeanError::Unexpected("padding that is longer than its frame");
    let padding = match is_padded {
        true => usize::from(payload.try_get_u8().map_err(|_| WRONG)?),
        false => 0,
    };
    let end = payload.len().checked_sub(padding).filter(|end| *end >= skipped);
    Ok(payload.slice(skipped..end.ok_or(WRONG)?))
}

fn put_prefix(write: &mut BytesMut, length: usize, kind: u8, flags: u8, stream: u32) {
    write.put_uint(length as u64, 3);
    write.put_u8(kind);
    write.put_u8(flags);
    write.put_u32(stream);
}

/// Adds the settings of this client.
pub(super) fn put_settings(write: &mut BytesMut, settings: &[(u16, u32)]) {
    put_prefix(write, settings.len() * 6, SETTINGS, 0, 0);
    for (name, value) in settings {
        write.put_u16(*name);
        write.put_u32(*value);
    }
}

/// Acknowledges the server's settings.
pub(super) fn put_settings_ack(write: &mut BytesMut) {
    put_prefix(write, 0, SETTINGS, ACK, 0);
}

/// Adds a ping.
pub(super) fn put_ping(write: &mut BytesMut) {
    put_prefix(write, 8, PING, 0, 0);
    write.put_u64(0);
}

/// Acknowledges a ping.
pub(super) fn put_ping_ack(write: &mut BytesMut, data: &[u8; 8]) {
    put_prefix(write, data.len(), PING, ACK, 0);
    write.put_slice(data);
}

/// Lets the server send `increment` more bytes, on `stream`, or on all streams together if that is 0.
pub(super) fn put_window_update(write: &mut BytesMut, stream: u32, increment: u32) {
    put_prefix(write, 4, WINDOW_UPDATE, 0, stream);
    write.put_u32(increment);
}

/// Adds the head of a request.
pub(super) fn put_headers(write: &mut BytesMut, stream: u32, block: &[u8]) {
    put_prefix(write, block.len(), HEADERS, END_HEADERS, stream);
    write.put_slice(block);
}

/// Adds bytes of a request's body.
pub(super) fn put_data(write: &mut BytesMut, stream: u32, body: &[u8], is_last: bool) {
    put_prefix(
        write,
        body.len(),
        DATA,
        if is_last { END_STREAM } else { 0 },
        stream,
    );
    write.put_slice(body);
}

/// Gives up a call.
pub(super) fn put_cancel(write: &mut BytesMut, stream: u32) {
    put_prefix(write, 4, RST_STREAM, 0, stream);
    write.put_u32(CANCEL);
}

/// Why a call failed, and its connection with it.
#[derive(Debug, thiserror::Error)]
pub enum LeanError {
    /// The connection is closed.
    #[error("the connection is closed")]
    Closed,
    /// A write, too, may be sent again (RFC 9113, section 6.8).
    #[error("the server leaves, and has not processed the call")]
    NotProcessed,
    /// With the server's reason, as hyper has it.
    #[error("reset by the server: {0}")]
    Reset(#[source] h2::Error),
    /// The peer does not answer a ping.
    #[error("the peer does not respond")]
    Unresponsive,
    /// The socket failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// Nothing was sent: a call that another client may take.
    #[error("the request is too long, or too many are in flight")]
    Full,
    /// The peer has sent what this client does not know.
    #[error("the peer has sent {0}")]
    Unexpected(&'static str),
}
