//! KV/Range in gRPC.

use super::body::{EntrySource, unary_body};
use super::grpc::GrpcMethod;
use super::serve::Unservable;
use crate::proxy::response::ResponseBody;
use etcd_store::cache::{Answer, ResponseHeader, Selection};
use etcd_wire::grpc::Method;
use etcd_wire::grpc::status::MAX_RESPONSE_BYTES;
use rangecache_base::telemetry::outcome::Kind;

/// KV/Range.
#[derive(Default)]
pub(in crate::proxy) struct Unary;

impl GrpcMethod for Unary {
    const METHOD: Method = Method::Range;
    const KIND: Kind = Kind::Unary;
    const IS_COMPARED: bool = true;

    fn body(
        header: ResponseHeader,
        selection: Selection,
        entries: EntrySource<'_>,
    ) -> Result<ResponseBody, Unservable> {
        let answer = Answer::new(header, selection);
        // etcd's gRPC library refuses to send longer messages, too.
        if answer.len() > MAX_RESPONSE_BYTES {
            return Err(Unservable::TooLong(answer.len()));
        }
        Ok(unary_body(answer, entries)?)
    }
}
