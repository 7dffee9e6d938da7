//! Reading one gRPC message off a request, keeping every byte so that it can be forwarded as it came.

use bytes::{Buf, Bytes, BytesMut};
use http_body_util::BodyExt;
use hyper::body::Incoming;

/// The flag and the length before each message.
pub(super) const PREFIX_BYTES: usize = 5;

/// What came of a request's body.
#[derive(Debug)]
pub(super) enum Message {
    /// One whole, uncompressed message and nothing behind it. `framed` is all of it as it came.
    Whole { framed: Bytes, body: Incoming },
    /// Anything else: compressed, too long to be looked at, more than one message, or broken off. What was read, and
    /// the rest.
    Other { read: Bytes, body: Incoming },
    /// The caller went away in mid-message.
    Broken,
}

/// Reads until one message is whole, or until it is clear that there is none of at most `max_bytes`.
pub(super) async fn read(mut body: Incoming, max_bytes: usize) -> Message {
    let mut first = Bytes::new();
    let mut more: Option<BytesMut> = None;
    loop {
        let have: &[u8] = more.as_deref().unwrap_or(&first);
        if let Some(prefix) = have.first_chunk::<PREFIX_BYTES>() {
            let compressed = prefix[0] != 0;
            let length = u32::from_be_bytes([prefix[1], prefix[2], prefix[3], prefix[4]]) as usize;
            let whole = PREFIX_BYTES + length;
            if compressed || length > max_bytes || have.len() > whole {
                return Message::Other {
                    read: more.map_or(first, BytesMut::freeze),
                    body,
                };
            }
            if have.len() == whole {
                return Message::Whole {
                    framed: more.map_or(first, BytesMut::freeze),
                    body,
                };
            }
        }
        match body.frame().await {
            Some(Ok(frame)) => {
                let Ok(data) = frame.into_data() else {
                    // Trailers on a request: not for us to understand.
                    return Message::Other {
                        read: more.map_or(first, BytesMut::freeze),
                        body,
                    };
                };
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
            Some(Err(_)) => return Message::Broken,
            // The end, too early: etcd words the error.
            None => {
                return Message::Other {
                    read: more.map_or(first, BytesMut::freeze),
                    body,
                };
            }
        }
    }
}

/// `message` as gRPC sends it, uncompressed.
pub(super) fn framed(message: &impl prost::Message) -> Bytes {
    let length = message.encoded_len();
    let mut framed = Vec::with_capacity(PREFIX_BYTES + length);
    framed.resize(PREFIX_BYTES, 0);
    put_prefix(&mut framed, length as u64);
    // A vector takes whatever is written to it.
    let _ = message.encode(&mut framed);
    framed.into()
}

/// Writes the prefix of an uncompressed message of `length_bytes`, which must be below 4 GiB, over the first bytes of
/// `framed`.
pub(super) fn put_prefix(framed: &mut [u8], length_bytes: u64) {
    let length = u32::try_from(length_bytes).unwrap_or(u32::MAX);
    if let Some(prefix) = framed.first_chunk_mut::<PREFIX_BYTES>() {
        prefix[0] = 0;
        prefix[1..].copy_from_slice(&length.to_be_bytes());
    }
}
