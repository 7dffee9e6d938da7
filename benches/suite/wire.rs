//! The few messages that the suite writes or reads, and the gRPC frame around them.

use bytes::{BufMut, Bytes, BytesMut};
use prost::Message;
use rangecache::etcdserverpb::{RangeRequest, RangeResponse, ResponseHeader};

/// A `PutRequest`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PutRequest {
    /// The key.
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) key: Bytes,
    /// The value.
    #[prost(bytes = "bytes", tag = "2")]
    pub(crate) value: Bytes,
}

/// A `PutResponse`; only the header is read.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PutResponse {
    /// Carries the revision of the write.
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<ResponseHeader>,
}

/// A `RequestOp` that holds a put.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RequestOp {
    /// The put.
    #[prost(message, optional, tag = "2")]
    pub(crate) request_put: Option<PutRequest>,
}

/// A `TxnRequest` without conditions.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct TxnRequest {
    /// What is done, the comparisons being none.
    #[prost(message, repeated, tag = "2")]
    pub(crate) success: Vec<RequestOp>,
}

/// A `KeyValue` without its value and lease.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct KeyValueHead {
    /// The key.
    #[prost(bytes = "bytes", tag = "1")]
    pub(crate) key: Bytes,
    /// The revision of its last write.
    #[prost(int64, tag = "3")]
    pub(crate) mod_revision: i64,
}

/// A message in its gRPC frame: not compressed, length, bytes.
pub(crate) fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(5 + length);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // BytesMut grows, so encoding cannot run out of room.
    let _ = message.encode(&mut frame);
    frame.freeze()
}

/// The message inside one gRPC frame.
pub(crate) fn unframe<M: Message + Default>(body: &[u8]) -> anyhow::Result<M> {
    let message = body
        .get(5..)
        .ok_or_else(|| anyhow::anyhow!("a response of {} bytes", body.len()))?;
    Ok(M::decode(message)?)
}

/// The range end that makes a range of every key with this prefix.
pub(crate) fn prefix_end(prefix: &[u8]) -> Bytes {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < 0xff {
            end.push(last + 1);
            return end.into();
        }
    }
    Bytes::from_static(b"\0")
}

/// A linearizable Range over a prefix, without options.
pub(crate) fn prefix_request(prefix: &str) -> RangeRequest {
    RangeRequest {
        key: Bytes::copy_from_slice(prefix.as_bytes()),
        range_end: prefix_end(prefix.as_bytes()),
        ..RangeRequest::default()
    }
}

/// A linearizable Range of one key.
pub(crate) fn get_request(key: String) -> RangeRequest {
    RangeRequest {
        key: key.into(),
        ..RangeRequest::default()
    }
}

/// The revision in a Range answer's header, and the key's own if it holds one.
pub(crate) fn revisions_of_get(body: &[u8]) -> anyhow::Result<(i64, i64)> {
    let response: RangeResponse = unframe(body)?;
    let header = response.header.map_or(0, |header| header.revision);
    let key = match response.kvs.first() {
        Some(entry) => KeyValueHead::decode(entry.clone())?.mod_revision,
        None => 0,
    };
    Ok((header, key))
}
