//! etcd on the wire: gRPC's methods, framing, metadata and statuses, etcd's messages, and strict readers of protobuf: what etcd
//! would not have written is refused.
//!
//! | module | what it is for |
//! |---|---|
//! | [`grpc`] | gRPC on the wire: methods, framing, metadata, statuses, scanners of responses |
//! | [`protobuf`] | fields of messages, as far as generated code does not serve |
//! | [`etcdserverpb`], [`grpc_health`] | messages and client stubs, generated |
//!
//! A response is scanned while its bytes pass through. Key-values are counted, not decoded:
//!
//! ```
//! use etcd_wire::etcdserverpb::{RangeResponse, ResponseHeader};
//! use etcd_wire::grpc::RangeResponseScanner;
//! use prost::Message;
//!
//! let header = ResponseHeader { revision: 7, ..Default::default() };
//! let response = RangeResponse { header: Some(header), count: 3, more: true, ..Default::default() };
//! let message = response.encode_to_vec();
//! // As a gRPC body: a flag, four bytes of length, the message.
//! let mut body = vec![0, 0, 0, 0, u8::try_from(message.len())?];
//! body.extend(message);
//!
//! let mut scanner = RangeResponseScanner::unary();
//! for piece in body.chunks(3) {
//!     scanner.scan(piece, |_key_values| {})?;
//! }
//! let summary = scanner.finish()?;
//! assert_eq!((summary.header()?.revision, summary.count, summary.more), (7, 3, true));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![cfg_attr(not(test), deny(clippy::disallowed_methods, clippy::disallowed_types))]

pub mod grpc;
pub mod protobuf;

/// The etcd messages that rangecache writes or reads itself, generated from `proto/etcd.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod etcdserverpb {
    tonic::include_proto!("etcdserverpb");
}

/// gRPC's health service, generated from `proto/health.proto`.
#[allow(missing_docs, unreachable_pub, clippy::all)]
pub mod grpc_health {
    tonic::include_proto!("grpc.health.v1");
}
