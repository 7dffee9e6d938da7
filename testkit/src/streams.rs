//! RangeStream calls, and their chunks merged to the unary response.

use bytes::{Buf, Bytes};
use prost::Message;

use crate::grpc::{Client, Reply, Status};
use crate::kv::RANGE_STREAM;
use crate::pb::{ASCEND, BY_KEY, RangeRequest, RangeResponse, RangeStreamResponse};

/// Whether etcd refuses to stream this request: RangeStream neither sorts nor filters.
pub fn is_refused(request: &RangeRequest) -> bool {
    let filters = [
        request.min_mod_revision,
        request.max_mod_revision,
        request.min_create_revision,
        request.max_create_revision,
    ];
    let in_key_order =
        request.sort_order == 0 || (request.sort_order, request.sort_target) == (ASCEND, BY_KEY);
    !in_key_order || filters != [0; 4] || request.key.is_empty()
}

impl Client {
    /// Sends a RangeStream, and returns the reply with every byte.
    pub async fn stream_raw(&self, request: &RangeRequest) -> Result<Reply, String> {
        self.raw(RANGE_STREAM, &request.encode_to_vec()).await
    }

    /// Sends a RangeStream, and returns the merged response.
    pub async fn streamed(&self, request: &RangeRequest) -> Result<RangeResponse, Status> {
        self.range_stream(request).await.map(merged)
    }
}

/// Decodes the chunks of a reply.
pub fn chunks_of(reply: &Reply) -> Vec<RangeResponse> {
    let mut body = reply.body.clone();
    let mut chunks = Vec::new();
    while body.has_remaining() {
        assert_eq!(body.get_u8(), 0, "not compressed");
        let length = body.get_u32() as usize;
        let message: Bytes = body.split_to(length);
        let chunk = RangeStreamResponse::decode(message).expect("decodes");
        chunks.push(chunk.range_response.expect("a chunk holds an answer"));
    }
    chunks
}

/// Merges chunks by protobuf's rules. Panics unless only the last chunk carries fields other than entries, like
/// etcd's.
pub fn merged(chunks: Vec<RangeResponse>) -> RangeResponse {
    let last = chunks.len().checked_sub(1).expect("at least one chunk");
    let mut whole = RangeResponse::default();
    for (index, chunk) in chunks.into_iter().enumerate() {
        if index < last {
            assert!(!chunk.kvs.is_empty(), "an empty chunk before the last");
            assert_eq!((&chunk.header, chunk.more, chunk.count), (&None, false, 0));
        } else {
            (whole.header, whole.more, whole.count) = (chunk.header, chunk.more, chunk.count);
        }
        whole.kvs.extend(chunk.kvs);
    }
    assert!(whole.header.is_some(), "the last chunk carries the header");
    whole
}
