//! KV/Range, and what it has in common with KV/RangeStream: reads and decodes the message and the metadata, and gets the
//! response from etcd by way of `fallback`.

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use hyper::body::Incoming;

use super::attempt::ReadRequest;
use super::body::{EntrySource, unary_body};
use super::serve::{ReceivedRead, Unservable, WireFormat};
use crate::proxy::call::CallRecord;
use crate::proxy::fallback::{Fetched, UpstreamRead};
use crate::proxy::handles::{CallProtocol, Proxy};
use crate::proxy::response::{CallResult, ResponseBody, status_response};
use etcd_store::cache::{
    Answer, QueryError, RangeQuery, ResponseHeader, Selection, names_unknown_sort_target,
};
use etcd_wire::grpc::fields::HeadFields;
use etcd_wire::grpc::frame::{PREFIX_BYTES, RequestMessage, read_message};
use etcd_wire::grpc::metadata::{MAX_MESSAGE_BYTES, grpc_content_type};
use etcd_wire::grpc::status::MAX_RESPONSE_BYTES;
use etcd_wire::grpc::{CallMetadata, Method, Status};
use rangecache_base::telemetry::outcome::{Kind, Read};
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_edge::limits::CallBytes;
use rangecache_upstream::{Outgoing, gates};

/// The request, unchanged, for etcd.
pub(in crate::proxy) struct Original {
    /// Its head without the headers.
    parts: Parts,
    /// Message with its gRPC prefix, unchanged, for forwarding.
    framed: Bytes,
    /// Kept until the call ends: dropping the body would close the client's half of the stream while the call is in
    /// flight.
    _body: Incoming,
}

/// Bytes of a message that the call has counted when it was admitted: a short read that has room is not refused later.
const SHORT_MESSAGE_BYTES: u64 = 1 << 10;

/// gRPC method of reads: KV/Range or KV/RangeStream.
pub(in crate::proxy) trait GrpcMethod: Default {
    const METHOD: Method;
    /// The kind of read that metrics count.
    const KIND: Kind;

    /// The status with which etcd refuses `query` by this method alone; `None` if it does not.
    fn refusal(_query: &RangeQuery) -> Option<Status> {
        None
    }

    /// The body of a response with the selected entries, which `entries` keeps in memory.
    ///
    /// # Errors
    /// [`Unservable`], of a response that etcd would not send or memory cannot.
    fn body(
        header: ResponseHeader,
        selection: Selection,
        entries: EntrySource<'_>,
    ) -> Result<ResponseBody, Unservable>;
}

/// KV/Range.
#[derive(Default)]
pub(in crate::proxy) struct Unary;

impl GrpcMethod for Unary {
    const METHOD: Method = Method::Range;
    const KIND: Kind = Kind::Unary;

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

impl<M: GrpcMethod> WireFormat for M {
    const KIND: Kind = <M as GrpcMethod>::KIND;
    const PROTOCOL: CallProtocol = CallProtocol::Grpc;
    type Original = Original;

    /// A request that cannot be decoded is forwarded from here; an unknown sort target, and a message that does not fit
    /// the buffers or is not complete in time, are refused; a request that its client aborted gets an empty response.
    async fn receive(
        proxy: &Proxy,
        fields: &HeadFields,
        request: Request<Incoming>,
        call: &mut CallBytes,
        record: &mut CallRecord,
    ) -> Result<ReceivedRead<M>, Box<CallResult>> {
        let method = M::METHOD;
        let (mut parts, body) = request.into_parts();
        let deadline = record.begun() + proxy.request_timeout;
        let mut uncounted = SHORT_MESSAGE_BYTES;
        let reading = read_message(body, MAX_MESSAGE_BYTES, |bytes| {
            let counted = take_counted(&mut uncounted, bytes);
            counted == 0 || call.try_grow(counted).is_ok()
        });
        let refused = |parts: &Parts, status: &Status| {
            let response = status_response(status, grpc_content_type(&parts.headers));
            Err(Box::new(Ok(response)))
        };
        let message = tokio::time::timeout_at(deadline, reading).await;
        let (framed, body) = match message.unwrap_or(RequestMessage::Late) {
            RequestMessage::Whole { framed, body } => (framed, body),
            RequestMessage::Other { read, body } => {
                record.outcome = Outcome::Forwarded(Reason::Undecodable);
                record.begin_forward(&mut parts.headers);
                let body = Outgoing::resumed(read, body);
                let forwarding = proxy
                    .forward
                    .forward_incoming(parts, body, method, call.account());
                let result = Box::pin(forwarding).await;
                return Err(Box::new(result));
            }
            RequestMessage::Late => {
                record.outcome = Outcome::Cancelled(Reason::BrokenRequest);
                return refused(&parts, &Status::RequestTimeout);
            }
            RequestMessage::Refused => {
                record.outcome = Outcome::Shed(Reason::BufferBytes);
                return refused(&parts, &Status::BufferBytes);
            }
            RequestMessage::Broken => {
                record.outcome = Outcome::Cancelled(Reason::BrokenRequest);
                return Err(Box::new(Ok(Response::new(ResponseBody::empty()))));
            }
        };
        // An unknown sort target crashes etcd before 3.6. The raw message is checked, before anything is forwarded, because
        // a message that `RangeQuery::decode` refuses is forwarded unread.
        if method == Method::Range
            && sort_targets_are_unchecked(proxy)
            && names_unknown_sort_target(&framed[PREFIX_BYTES..])
        {
            record.outcome = Outcome::Hit(Read::Refused);
            let status = Status::InvalidArgument(QueryError::InvalidSortOption.to_string());
            return refused(&parts, &status);
        }
        let metadata = CallMetadata::from_fields(fields, &parts.headers);
        let query = RangeQuery::decode(framed.slice(PREFIX_BYTES..));
        let (Some(metadata), Ok(query)) = (metadata, query) else {
            record.outcome = Outcome::Forwarded(Reason::Undecodable);
            record.begin_forward(&mut parts.headers);
            let forwarding = proxy
                .fallback
                .forward_undecoded(parts, framed, method, call.account());
            let result = Box::pin(forwarding).await;
            return Err(Box::new(result));
        };
        Ok(ReceivedRead {
            request: ReadRequest {
                query,
                metadata,
                headers: std::mem::take(&mut parts.headers),
            },
            format: M::default(),
            original: Original {
                parts,
                framed,
                _body: body,
            },
        })
    }

    fn refusal(query: &RangeQuery) -> Option<Status> {
        <M as GrpcMethod>::refusal(query)
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
    ) -> Result<Response<ResponseBody>, Unservable> {
        let body = M::body(header, selection, entries)?;
        Ok(body.into_response(request.metadata.content_type.clone()))
    }

    async fn fetch(
        &self,
        proxy: &Proxy,
        request: &mut ReadRequest,
        original: Original,
        call: &CallBytes,
        record: &mut CallRecord,
    ) -> CallResult {
        let Original {
            mut parts,
            framed,
            _body,
        } = original;
        parts.headers = std::mem::take(&mut request.headers);
        record.begin_forward(&mut parts.headers);
        let read = UpstreamRead {
            method: M::METHOD,
            parts,
            framed,
            query: &request.query,
            metadata: &request.metadata,
            account: call.account(),
            deadline: record.deadline(request.metadata.timeout),
            outcome: &mut record.outcome,
        };
        let page = match proxy.fallback.fetch(read).await {
            Fetched::Result(result) => return result,
            Fetched::Page(page) => page,
        };
        let entries = EntrySource::Series(page.held);
        let response = self.respond(request, page.header, page.selection, entries);
        Ok(response.unwrap_or_else(|unservable| {
            let status = match unservable {
                Unservable::TooLong(bytes) => Status::LargerThanMax(bytes),
                Unservable::Damaged => Status::MirrorBehind,
            };
            self.refuse(request, &status)
        }))
    }
}

/// Returns how many of the `bytes` that have arrived are to be counted. Up to `uncounted` are not, and are deducted from it.
fn take_counted(uncounted: &mut u64, bytes: u64) -> u64 {
    let counted = bytes.saturating_sub(*uncounted);
    *uncounted -= bytes - counted;
    counted
}

/// Whether an endpoint may run an etcd that does not check sort targets; true while versions are unknown.
pub(super) fn sort_targets_are_unchecked(proxy: &Proxy) -> bool {
    proxy
        .forward
        .upstream
        .lowest_version()
        .is_none_or(|version| !gates::UNKNOWN_SORT_TARGETS.is_open(version))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_message_count_beyond_the_first_in_whatever_pieces_they_arrive() {
        for (pieces, expected) in [
            (&[10, 20][..], &[0, 0][..]),
            (&[1024, 1], &[0, 1]),
            (&[1000, 1000, 7], &[0, 976, 7]),
            (&[5000, 5000], &[3976, 5000]),
        ] {
            let mut uncounted = SHORT_MESSAGE_BYTES;
            let counted: Vec<_> = pieces
                .iter()
                .map(|bytes| take_counted(&mut uncounted, *bytes))
                .collect();
            assert_eq!(counted, expected, "{pieces:?}");
        }
    }
}
