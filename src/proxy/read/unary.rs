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
use crate::proxy::access::AccessCall;
use crate::proxy::handles::{Client, Protocol, Proxy};
use crate::proxy::recorder::Recorder;
use crate::proxy::response::{CallResult, ResponseBody, status_response};
use crate::telemetry::Reason;
use crate::telemetry::outcome::Kind;

/// Handles a Range call, and records it. `call` counts its bytes.
pub(crate) async fn range(
    client: &Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    access: Option<&mut AccessCall>,
) -> CallResult {
    let span = tracing::debug_span!("range");
    let mut recorder = Recorder::new(&client.proxy.telemetry, Kind::Unary, &request, access);
    recorder.record_peer(client.peer);
    // An instrumented future enters its span on every poll, so a disabled span is left out.
    if span.is_disabled() {
        let result = handle(client, request, call, &mut recorder).await;
        return recorder.finish(result, call);
    }
    let result = handle(client, request, call, &mut recorder)
        .instrument(span.clone())
        .await;
    span.in_scope(|| recorder.finish(result, call))
}

async fn handle<'a>(
    client: &'a Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    recorder: &mut Recorder<'a>,
) -> CallResult {
    let proxy = &*client.proxy;
    let received = match receive(proxy, request, Method::Range, call, recorder).await {
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
        recorder,
    )
    .await;
    let (reason, shadow) = match decision.into_answered() {
        Ok(answered) => match turn_to_compare(proxy, &answered, recorder) {
            None => {
                return Ok(respond(
                    answered,
                    received.metadata.content_type,
                    is_past,
                    recorder,
                ));
            }
            Some(turn) => (Reason::Shadow, Some((received.query.clone(), turn))),
        },
        Err(reason) => (reason, None),
    };
    // Boxed, so that the future of a read from memory stays small.
    let fetching = fetch(proxy, call.account(), received, Method::Range, reason, recorder);
    match Box::pin(fetching).await {
        Fetch::Fetched(result) => match shadow {
            None => result,
            Some((query, turn)) => result.map(|response| shadow::observe(proxy, query, turn, response)),
        },
        Fetch::Stale(answered, content_type) => Ok(respond(answered, content_type, is_past, recorder)),
    }
}

/// A turn for the comparison, if the read is one that etcd is to answer although memory could (`--shadow`).
fn turn_to_compare(
    proxy: &Proxy,
    answered: &Answered,
    recorder: &Recorder<'_>,
) -> Option<OwnedSemaphorePermit> {
    let is_comparable = matches!(answered, Answered::Entries(..)) && recorder.stale_age.is_none();
    is_comparable.then(|| proxy.shadow.choose())?
}

/// Responds from memory.
fn respond(
    answered: Answered,
    content_type: HeaderValue,
    is_past: bool,
    recorder: &mut Recorder<'_>,
) -> Response<ResponseBody> {
    match answered {
        Answered::Entries(header, selection, outcome) => {
            recorder.keys = selection.len();
            let answer = Answer::new(header, selection);
            recorder.bytes = answer.len();
            // etcd's gRPC library refuses to send longer messages, too.
            if answer.len() > MAX_RESPONSE_BYTES {
                recorder.outcome = outcome.refused();
                return status_response(&Status::LargerThanMax(answer.len()), content_type);
            }
            recorder.outcome = outcome;
            let entries = EntrySource::Mirror {
                mirror: recorder.mirror,
                is_past,
            };
            unary_body(answer, entries).into_response(content_type)
        }
        Answered::Error(status, outcome) => {
            recorder.outcome = outcome;
            status_response(&status, content_type)
        }
    }
}
