//! gRPC's message framing: a prefix of five bytes (a flag and a length) before each message. The only place that writes or
//! parses it.

use bytes::{Buf, Bytes, BytesMut};
use http_body::Body;
use http_body_util::BodyExt;

/// Length of the prefix: a compression flag and the message's length.
pub const PREFIX_BYTES: usize = 5;

/// A message's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Prefix {
    /// The message is compressed.
    pub is_compressed: bool,
    /// Length of the message, without the prefix.
    pub length_bytes: u32,
}

impl Prefix {
    /// The prefix at the start of `framed`; `None` if fewer than [`PREFIX_BYTES`] bytes are there.
    #[must_use]
    pub fn parse(framed: &[u8]) -> Option<Prefix> {
        framed.first_chunk::<PREFIX_BYTES>().map(Prefix::from_bytes)
    }

    fn from_bytes(&[flag, ref length @ ..]: &[u8; PREFIX_BYTES]) -> Prefix {
        Prefix {
            is_compressed: flag != 0,
            length_bytes: u32::from_be_bytes(*length),
        }
    }
}

/// Collects the bytes of a prefix that may be cut anywhere.
#[derive(Debug, Default)]
pub struct PrefixReader {
    bytes: [u8; PREFIX_BYTES],
    have: usize,
}

impl PrefixReader {
    /// Consumes bytes from the front of `data`; returns how many, and the prefix once it is complete. The reader is then
    /// ready for the next prefix.
    pub fn read(&mut self, data: &[u8]) -> (usize, Option<Prefix>) {
        let taken = (PREFIX_BYTES - self.have).min(data.len());
        self.bytes[self.have..self.have + taken].copy_from_slice(&data[..taken]);
        self.have += taken;
        if self.have < PREFIX_BYTES {
            return (taken, None);
        }
        self.have = 0;
        (taken, Some(Prefix::from_bytes(&self.bytes)))
    }

    /// Whether no byte of the next prefix has been read.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.have == 0
    }
}

/// Divides a stream of messages that arrives in pieces.
#[derive(Debug, Default)]
pub struct MessageReader {
    prefix: PrefixReader,
    /// Bytes of the current message that are still to come.
    left: usize,
}

/// Next part of a stream of messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part<'a> {
    /// A message begins.
    Prefix(Prefix),
    /// Bytes of the message; never empty.
    Message(&'a [u8]),
}

impl MessageReader {
    /// Takes the next part off the front of `data`; `None` if `data` has no more.
    pub fn next<'a>(&mut self, data: &mut &'a [u8]) -> Option<Part<'a>> {
        if data.is_empty() {
            return None;
        }
        if self.left > 0 {
            let (part, rest) = data.split_at(self.left.min(data.len()));
            (*data, self.left) = (rest, self.left - part.len());
            return Some(Part::Message(part));
        }
        let (taken, prefix) = self.prefix.read(data);
        *data = &data[taken..];
        let prefix = prefix?;
        self.left = prefix.length_bytes as usize;
        Some(Part::Prefix(prefix))
    }

    /// Bytes of the current message that are still to come.
    #[must_use]
    pub fn left(&self) -> usize {
        self.left
    }

    /// Whether the bytes so far end between two messages.
    #[must_use]
    pub fn is_at_boundary(&self) -> bool {
        self.prefix.is_empty() && self.left == 0
    }
}

/// A request's body after [`read_message`].
#[derive(Debug)]
pub enum RequestMessage<B> {
    /// A single complete, uncompressed message and nothing after it.
    Whole {
        /// The message with its prefix, unchanged.
        framed: Bytes,
        /// The rest of the body, which has ended or will.
        body: B,
    },
    /// Anything else: compressed, longer than the bound, more than one message, or incomplete.
    Other {
        /// The bytes read so far.
        read: Bytes,
        /// The rest of the body.
        body: B,
    },
    /// The client closed the stream in mid-message.
    Broken,
    /// The next bytes were refused.
    Refused,
    /// The message was not complete in time. For callers with a deadline.
    Late,
}

/// Reads until one message is complete, or until it is clear that there is none of at most `max_bytes`. Every byte is kept, so
/// that the request can be forwarded unchanged. `take` is called with the number of bytes of each frame, and refuses them by
/// returning false.
pub async fn read_message<B>(
    mut body: B,
    max_bytes: usize,
    mut take: impl FnMut(u64) -> bool,
) -> RequestMessage<B>
where
    B: Body<Data = Bytes> + Unpin,
{
    let mut first = Bytes::new();
    let mut more: Option<BytesMut> = None;
    loop {
        let have: &[u8] = more.as_deref().unwrap_or(&first);
        if let Some(prefix) = Prefix::parse(have) {
            let length_bytes = prefix.length_bytes as usize;
            let whole = PREFIX_BYTES + length_bytes;
            if prefix.is_compressed || length_bytes > max_bytes || have.len() > whole {
                return RequestMessage::Other {
                    read: more.map_or(first, BytesMut::freeze),
                    body,
                };
            }
            if have.len() == whole {
                return RequestMessage::Whole {
                    framed: more.map_or(first, BytesMut::freeze),
                    body,
                };
            }
        }
        match body.frame().await {
            Some(Ok(frame)) => {
                let Ok(data) = frame.into_data() else {
                    // The body ends with trailers, which are not forwarded.
                    return RequestMessage::Other {
                        read: more.map_or(first, BytesMut::freeze),
                        body,
                    };
                };
                if !take(data.len() as u64) {
                    return RequestMessage::Refused;
                }
                match &mut more {
                    Some(more) => more.extend_from_slice(&data),
                    None if first.is_empty() => first = data,
                    None => {
                        let mut joined = BytesMut::with_capacity(first.len() + data.remaining());
                        joined.extend_from_slice(&first);
                        joined.extend_from_slice(&data);
                        more = Some(joined);
                    }
                }
            }
            Some(Err(_)) => return RequestMessage::Broken,
            // The body ended too early: etcd words the error.
            None => {
                return RequestMessage::Other {
                    read: more.map_or(first, BytesMut::freeze),
                    body,
                };
            }
        }
    }
}

/// Encodes `message` with its prefix, uncompressed.
#[must_use]
pub fn framed(message: &impl prost::Message) -> Bytes {
    let length = message.encoded_len();
    let mut framed = Vec::with_capacity(PREFIX_BYTES + length);
    framed.resize(PREFIX_BYTES, 0);
    put_prefix(&mut framed, length as u64);
    // Encoding into a vector cannot fail.
    let _ = message.encode(&mut framed);
    framed.into()
}

/// Overwrites the first [`PREFIX_BYTES`] of `framed` with the prefix of an uncompressed message of `length_bytes`, which must
/// be below 4 GiB.
pub fn put_prefix(framed: &mut [u8], length_bytes: u64) {
    let length = u32::try_from(length_bytes).unwrap_or(u32::MAX);
    if let Some(prefix) = framed.first_chunk_mut::<PREFIX_BYTES>() {
        prefix[0] = 0;
        prefix[1..].copy_from_slice(&length.to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body::Frame;
    use http_body_util::StreamBody;

    use super::*;

    /// A body that yields `bytes` in pieces of `size`.
    fn body(bytes: &[u8], size: usize) -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        let pieces: Vec<_> = bytes
            .chunks(size)
            .map(|piece| Ok(Frame::data(Bytes::copy_from_slice(piece))))
            .collect();
        StreamBody::new(futures_util::stream::iter(pieces))
    }

    #[tokio::test]
    async fn whole_message_is_read_however_it_is_cut() {
        let message = [&[0, 0, 0, 0, 10][..], &[7; 10]].concat();
        for size in 1..=message.len() {
            match read_message(body(&message, size), 10, |_| true).await {
                RequestMessage::Whole { framed, .. } => assert_eq!(framed, message),
                _ => panic!("{size}"),
            }
        }
    }

    #[tokio::test]
    async fn other_bodies_are_kept_for_forwarding() {
        for other in [
            &[1, 0, 0, 0, 1, 7][..],
            &[0, 0, 0, 0, 11, 7],
            &[0, 0, 0, 0, 1, 7, 0],
            &[0, 0, 0, 0, 2, 7],
            &[],
        ] {
            match read_message(body(other, 100), 10, |_| true).await {
                RequestMessage::Other { read, .. } => assert_eq!(read, other),
                _ => panic!("{other:?}"),
            }
        }
    }

    #[tokio::test]
    async fn refused_bytes_end_the_message() {
        let message = [&[0, 0, 0, 0, 10][..], &[7; 10]].concat();
        let mut left = 8;
        let take = |bytes| {
            left -= i64::try_from(bytes).unwrap();
            left >= 0
        };
        let read = read_message(body(&message, 1), 10, take).await;
        assert!(matches!(read, RequestMessage::Refused));
        assert_eq!(left, -1, "no byte is read after the refused one");
    }

    #[test]
    fn prefix_is_read_however_it_is_cut() {
        for size in 1..=PREFIX_BYTES {
            let mut reader = PrefixReader::default();
            let mut found = None;
            for piece in [1, 0, 1, 0, 2].chunks(size) {
                assert!(found.is_none());
                found = reader.read(piece).1;
            }
            let expected = Prefix {
                is_compressed: true,
                length_bytes: (1 << 16) + 2,
            };
            assert_eq!(found, Some(expected));
            assert!(reader.is_empty());
        }
    }
}
