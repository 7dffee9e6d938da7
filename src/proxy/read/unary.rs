//! KV/Range: answered from memory, or fetched from etcd.

use http::{HeaderValue, Request, Response};
use hyper::body::Incoming;
use tokio::sync::OwnedSemaphorePermit;
use tracing::Instrument;

use super::answer::Answered;
use super::body::{EntrySource, unary_body};
use super::decide::decide;
use super::fetch::{Fetch, fetch};
use super::receive::receive;
use super::shadow;
use crate::cache::Answer;
use crate::grpc::status::MAX_RESPONSE_BYTES;
use crate::grpc::{Method, Status};
use crate::limits::CallBytes;
use crate::proxy::call::CallRecord;
use crate::proxy::handles::{Client, Protocol, Proxy};
use crate::proxy::response::{CallResult, ResponseBody, status_response};
use crate::telemetry::Reason;
use crate::telemetry::outcome::Kind;

/// Handles a Range call. `call` counts its bytes.
pub(crate) async fn range(
    client: &Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    record.begin_read(Kind::Unary);
    let span = tracing::debug_span!("range");
    // An instrumented future enters its span on every poll, so a disabled span is left out.
    if span.is_disabled() {
        return handle(client, request, call, record).await;
    }
    handle(client, request, call, record).instrument(span).await
}

async fn handle(
    client: &Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    let proxy = &*client.proxy;
    let received = match receive(proxy, request, Method::Range, call, record).await {
        Ok(received) => received,
        Err(result) => return *result,
    };
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
    let (reason, shadow) = match decision.into_answered() {
        Ok(answered) => match turn_to_compare(proxy, &answered, record) {
            None => {
                return Ok(respond(
                    proxy,
                    answered,
                    received.metadata.content_type,
                    is_past,
                    record,
                ));
            }
            Some(turn) => (Reason::Shadow, Some((received.query.clone(), turn))),
        },
        Err(reason) => (reason, None),
    };
    // Boxed, so that the future of a read from memory stays small.
    let fetching = fetch(proxy, call.account(), received, Method::Range, reason, record);
    match Box::pin(fetching).await {
        Fetch::Fetched(result) => match shadow {
            None => result,
            Some((query, turn)) => result.map(|response| shadow::observe(proxy, query, turn, response)),
        },
        Fetch::Stale(answered, content_type) => Ok(respond(proxy, answered, content_type, is_past, record)),
    }
}

/// A turn for the comparison, if the read is one that etcd is to answer although memory could (`--shadow`).
fn turn_to_compare(proxy: &Proxy, answered: &Answered, record: &CallRecord) -> Option<OwnedSemaphorePermit> {
    let is_comparable = matches!(answered, Answered::Entries(..)) && record.stale_age.is_none();
    is_comparable.then(|| proxy.shadow.choose())?
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
            record.keys = selection.len();
            let answer = Answer::new(header, selection);
            // etcd's gRPC library refuses to send longer messages, too.
            if answer.len() > MAX_RESPONSE_BYTES {
                record.outcome = outcome.refused();
                return status_response(&Status::LargerThanMax(answer.len()), content_type);
            }
            record.outcome = outcome;
            let entries = EntrySource::Mirror {
                mirror: record.mirror(&proxy.mirrors),
                is_past,
            };
            unary_body(answer, entries).into_response(content_type)
        }
        Answered::Error(status, outcome) => {
            record.outcome = outcome;
            status_response(&status, content_type)
        }
    }
}
