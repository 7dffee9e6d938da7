//! KV/Range and KV/RangeStream: reads and decodes the message and the metadata, and gets the response from etcd by way of
//! `fallback`. A RangeStream (KEP-5966) is answered from memory like a Range, whatever etcd's version; otherwise from etcd's
//! RangeStream or from unary pages. A client never gets `Unimplemented` for a request that etcd 3.7 would serve: one such
//! response makes kube-apiserver stop streaming for ten minutes.

use bytes::Bytes;
use etcd_store::cache::{
    Answer, Chunks, Dialect, QueryError, RangeQuery, ResponseHeader, Selection, SortOrder, SortTarget,
    names_unknown_sort_target,
};
use etcd_wire::grpc::frame::{PREFIX_BYTES, RequestMessage, read_message};
use etcd_wire::grpc::metadata::{HeadFields, MAX_MESSAGE_BYTES, grpc_content_type};
use etcd_wire::grpc::status::MAX_RESPONSE_BYTES;
use etcd_wire::grpc::{CallMetadata, Method, Status};
use http::{Request, Response, request::Parts};
use hyper::body::Incoming;
use rangecache_base::telemetry::outcome::{Kind, Read};
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_upstream::{Outgoing, gates};

use super::attempt::ReadRequest;
use super::body::{EntrySource, stream_body, unary_body};
use super::serve::{ReceivedRead, Unservable, WireFormat};
use crate::call::CallRecord;
use crate::fallback::{Fetched, UpstreamRead};
use crate::handles::{CallProtocol, Proxy};
use crate::response::{CallResult, ResponseBody, status_response};

/// The request, unchanged, for etcd.
pub(crate) struct Original {
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

/// KV/Range, or KV/RangeStream if `STREAMS`.
pub(crate) struct Grpc<const STREAMS: bool>;

/// KV/Range.
pub(crate) type Unary = Grpc<false>;
/// KV/RangeStream.
pub(crate) type Streaming = Grpc<true>;

impl<const STREAMS: bool> Grpc<STREAMS> {
    const METHOD: Method = if STREAMS {
        Method::RangeStream
    } else {
        Method::Range
    };
}

impl<const STREAMS: bool> WireFormat for Grpc<STREAMS> {
    const KIND: Kind = if STREAMS { Kind::Stream } else { Kind::Unary };
    const PROTOCOL: CallProtocol = CallProtocol::Grpc;
    type Original = Original;

    /// A request that cannot be decoded is forwarded from here; an unknown sort target, and a message that does not fit
    /// the buffers or is not complete in time, are refused; a request that its client aborted gets an empty response.
    async fn receive(
        proxy: &Proxy,
        fields: &HeadFields,
        request: Request<Incoming>,
        record: &mut CallRecord,
    ) -> Result<ReceivedRead<Self>, Box<CallResult>> {
        let method = Self::METHOD;
        let (mut parts, body) = request.into_parts();
        let deadline = record.begun() + proxy.request_timeout;
        let mut uncounted = SHORT_MESSAGE_BYTES;
        let reading = read_message(body, MAX_MESSAGE_BYTES, |bytes| {
            let counted = take_counted(&mut uncounted, bytes);
            counted == 0 || record.bytes.try_grow(counted).is_ok()
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
                let account = record.bytes.account();
                let forwarding = proxy.forward.forward_incoming(parts, body, method, account);
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
            let (account, deadline) = (record.bytes.account(), record.deadline());
            let forwarding = proxy
                .fallback
                .forward_undecoded(parts, framed, method, account, deadline);
            let result = Box::pin(forwarding).await;
            return Err(Box::new(result));
        };
        Ok(ReceivedRead {
            request: ReadRequest {
                query,
                metadata,
                headers: std::mem::take(&mut parts.headers),
            },
            format: Grpc,
            original: Original {
                parts,
                framed,
                _body: body,
            },
        })
    }

    /// Returns the status with which etcd 3.7 refuses a RangeStream before reading any key; `None` if it serves the query. The
    /// texts are those of 3.7, whatever version the endpoints have.
    fn refusal(query: &RangeQuery) -> Option<Status> {
        if !STREAMS {
            return None;
        }
        if let Err(error) = query.check(&Dialect::of_version(3, 7)) {
            return Some(Status::InvalidArgument(error.to_string()));
        }
        let in_key_order = query.sort_order == SortOrder::None as i32
            || (query.sort_order == SortOrder::Ascend as i32 && query.sort_target == SortTarget::Key as i32);
        if !in_key_order {
            Some(Status::StreamUnsupported("custom sort orders"))
        } else if query.has_revision_filter() {
            Some(Status::StreamUnsupported("revision filters"))
        } else {
            None
        }
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
        let body = if STREAMS {
            stream_body(Chunks::new(header, selection), entries)
        } else {
            let answer = Answer::new(header, selection);
            // etcd's gRPC library refuses to send longer messages, too.
            if answer.len() > MAX_RESPONSE_BYTES {
                return Err(Unservable::TooLong(answer.len()));
            }
            unary_body(answer, entries)?
        };
        Ok(body.into_response(request.metadata.content_type.clone()))
    }

    async fn fetch(
        &self,
        proxy: &Proxy,
        request: &mut ReadRequest,
        original: Original,
        record: &mut CallRecord,
    ) -> CallResult {
        let Original {
            mut parts,
            framed,
            _body,
        } = original;
        parts.headers = std::mem::take(&mut request.headers);
        record.begin_forward(&mut parts.headers);
        let deadline = record.deadline();
        let read = UpstreamRead {
            method: Self::METHOD,
            parts,
            framed,
            query: &request.query,
            metadata: &request.metadata,
            account: record.bytes.account(),
            deadline,
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
                Unservable::For(_) => Status::MirrorBehind,
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

    #[test]
    fn request_that_etcd_refuses_gets_its_status() {
        let list = RangeQuery {
            key: "k".into(),
            range_end: "l".into(),
            ..RangeQuery::default()
        };
        let status_of = |query: RangeQuery| {
            Streaming::refusal(&query).map(|status| (status.code() as u16, status.to_string()))
        };
        assert_eq!(status_of(list.clone()), None);
        for (sort_order, sort_target) in [(0, 1), (0, 4), (1, 0), (0, 0)] {
            let query = RangeQuery {
                sort_order,
                sort_target,
                ..list.clone()
            };
            assert_eq!(status_of(query), None, "{sort_order} {sort_target}");
        }
        let sorted = "RangeStream does not support custom sort orders".to_owned();
        for (sort_order, sort_target) in [(2, 0), (1, 1), (2, 4)] {
            let query = RangeQuery {
                sort_order,
                sort_target,
                min_mod_revision: 1,
                ..list.clone()
            };
            assert_eq!(status_of(query), Some((12, sorted.clone())));
        }
        let filtered = "RangeStream does not support revision filters".to_owned();
        for query in [
            RangeQuery {
                max_create_revision: -1,
                ..list.clone()
            },
            RangeQuery {
                min_mod_revision: 5,
                ..list.clone()
            },
        ] {
            assert_eq!(status_of(query), Some((12, filtered.clone())));
        }
        assert_eq!(
            status_of(RangeQuery {
                sort_order: 7,
                ..list
            }),
            Some((3, "etcdserver: invalid sort option".to_owned()))
        );
        assert_eq!(
            status_of(RangeQuery::default()),
            Some((3, "etcdserver: key is not provided".to_owned()))
        );
    }
}
