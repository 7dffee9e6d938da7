//! KV/RangeStream (KEP-5966): answered from memory like a Range, whatever etcd's version; otherwise from etcd's
//! RangeStream or from unary pages.
//!
//! A client never gets `Unimplemented` for a request that etcd 3.7 would serve: one such response makes kube-apiserver
//! stop streaming for ten minutes.

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use tracing::Instrument;

use super::answer::Answered;
use super::body::{EntrySource, stream_body};
use super::decide::decide;
use super::fetch::{Fetch, fetch};
use super::receive::receive;
use crate::cache::{Chunks, Dialect, RangeQuery, SortOrder, SortTarget};
use crate::grpc::{Method, Status};
use crate::limits::CallBytes;
use crate::proxy::call::CallRecord;
use crate::proxy::handles::{Client, Protocol, Proxy};
use crate::proxy::response::{CallResult, ResponseBody, status_response};
use crate::telemetry::Outcome;
use crate::telemetry::outcome::{self, Kind};

/// Handles a RangeStream call. `call` counts its bytes.
pub(crate) async fn range_stream(
    client: &Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    record.begin_read(Kind::Stream);
    handle(client, request, call, record)
        .instrument(tracing::debug_span!("range_stream"))
        .await
}

async fn handle(
    client: &Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    let proxy = &*client.proxy;
    let received = match receive(proxy, request, Method::RangeStream, call, record).await {
        Ok(received) => received,
        Err(result) => return *result,
    };
    if let Some(status) = refusal(&received.query) {
        record.outcome = Outcome::Hit(outcome::Read::Refused);
        return Ok(status_response(&status, received.metadata.content_type));
    }
    let is_past = received.query.revision > 0;
    let decision = decide(
        client,
        Protocol::Grpc,
        &received.query,
        &received.metadata,
        &received.parts.headers,
        record,
    )
    .await;
    let reason = match decision.into_answered() {
        Ok(answered) => {
            return Ok(respond(
                proxy,
                answered,
                received.metadata.content_type,
                is_past,
                record,
            ));
        }
        Err(reason) => reason,
    };
    match fetch(
        proxy,
        call.account(),
        received,
        Method::RangeStream,
        reason,
        record,
    )
    .await
    {
        Fetch::Fetched(result) => result,
        Fetch::Stale(answered, content_type) => Ok(respond(proxy, answered, content_type, is_past, record)),
    }
}

/// Responds from memory.
fn respond(
    proxy: &Proxy,
    answered: Answered,
    content_type: HeaderValue,
    is_past: bool,
    record: &mut CallRecord,
) -> Response<ResponseBody> {
    match answered {
        Answered::Entries(header, selection, outcome) => {
            record.outcome = outcome;
            record.keys = selection.len();
            let entries = EntrySource::Mirror {
                mirror: record.mirror(&proxy.mirrors),
                is_past,
            };
            stream_body(Chunks::new(header, selection), entries).into_response(content_type)
        }
        Answered::Error(status, outcome) => {
            record.outcome = outcome;
            status_response(&status, content_type)
        }
    }
}

/// Returns the status with which etcd 3.7 refuses `query` before reading any key; `None` if it serves the query. The
/// texts are those of 3.7, whatever version the endpoints have.
fn refusal(query: &RangeQuery) -> Option<Status> {
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn request_that_etcd_refuses_gets_its_status() {
        let list = RangeQuery {
            key: "k".into(),
            range_end: "l".into(),
            ..RangeQuery::default()
        };
        let status_of =
            |query: RangeQuery| refusal(&query).map(|status| (status.code() as u16, status.to_string()));
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
