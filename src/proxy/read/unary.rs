//! KV/Range in gRPC.

use http::{Request, Response};
use hyper::body::Incoming;

use super::attempt::ReadRequest;
use super::body::{EntrySource, unary_body};
use super::grpc::{Original, fetch, receive};
use super::serve::{Received, TooLong, WireFormat};
use crate::cache::{Answer, ResponseHeader, Selection};
use crate::grpc::status::MAX_RESPONSE_BYTES;
use crate::grpc::{Method, Status};
use crate::limits::CallBytes;
use crate::proxy::call::CallRecord;
use crate::proxy::handles::{Protocol, Proxy};
use crate::proxy::response::{CallResult, ResponseBody, status_response};
use crate::telemetry::outcome::Kind;

/// KV/Range.
pub(in crate::proxy) struct Unary;

impl WireFormat for Unary {
    const KIND: Kind = Kind::Unary;
    const PROTOCOL: Protocol = Protocol::Grpc;
    const IS_COMPARED: bool = true;
    type Original = Original;

    async fn receive(
        proxy: &Proxy,
        request: Request<Incoming>,
        call: &mut CallBytes,
        record: &mut CallRecord,
    ) -> Result<Received<Unary>, Box<CallResult>> {
        receive(Unary, Method::Range, proxy, request, call, record).await
    }

    fn refuse(&self, request: &ReadRequest, status: &Status) -> Response<ResponseBody> {
        status_response(status, request.metadata.content_type.clone())
    }

    fn respond(
        &self,
        request: &ReadRequest,
        header: ResponseHeader,
        selection: Selection,
        entries: EntrySource<'_>,
    ) -> Result<Response<ResponseBody>, TooLong> {
        let answer = Answer::new(header, selection);
        // etcd's gRPC library refuses to send longer messages, too.
        if answer.len() > MAX_RESPONSE_BYTES {
            return Err(TooLong(answer.len()));
        }
        Ok(unary_body(answer, entries).into_response(request.metadata.content_type.clone()))
    }

    async fn fetch(
        &self,
        proxy: &Proxy,
        request: &mut ReadRequest,
        original: Original,
        call: &CallBytes,
        record: &mut CallRecord,
    ) -> CallResult {
        fetch(self, Method::Range, proxy, request, original, call, record).await
    }
}
