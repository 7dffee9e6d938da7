//! The requests of the suite, and the gRPC frame around messages.

use bytes::{BufMut, Bytes, BytesMut};
use etcd_wire::etcdserverpb::{RangeRequest, RangeResponse};
use prost::Message;
use testkit::pb::{KeyValue, prefix_end};

/// A message with its gRPC prefix, not compressed.
pub(crate) fn frame(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut frame = BytesMut::with_capacity(5 + length);
    frame.put_u8(0);
    frame.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // BytesMut grows: encoding cannot fail.
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

/// A linearizable Range over a prefix, without options.
pub(crate) fn prefix_request(prefix: &str) -> RangeRequest {
    RangeRequest {
        key: Bytes::copy_from_slice(prefix.as_bytes()),
        range_end: prefix_end(prefix.as_bytes()).into(),
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

/// Revision in the header of a Range response, and the mod_revision of its first key; 0 without a key.
pub(crate) fn revisions_of_get(body: &[u8]) -> anyhow::Result<(i64, i64)> {
    let response: RangeResponse = unframe(body)?;
    let header = response.header.map_or(0, |header| header.revision);
    let key = match response.kvs.first() {
        Some(entry) => KeyValue::decode(entry.clone())?.mod_revision,
        None => 0,
    };
    Ok((header, key))
}
