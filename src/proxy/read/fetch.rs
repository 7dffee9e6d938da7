//! Reads that memory cannot answer: fetched from etcd by way of `fallback`.

use std::sync::Arc;

use http::HeaderValue;

use super::answer::Answered;
use super::body::{EntrySource, stream_body, unary_body};
use super::receive::Received;
use super::stale::StaleRead;
use crate::cache::{Answer, Chunks};
use crate::grpc::{Method, Status};
use crate::limits::ClientAccount;
use crate::proxy::call::CallRecord;
use crate::proxy::fallback::{Fetched, Read};
use crate::proxy::handles::Proxy;
use crate::proxy::response::{CallResult, status_response};
use crate::telemetry::{Outcome, Reason};

/// A read that memory could not answer at first, and its result.
pub(super) enum Fetch {
    /// Response of etcd, or a refusal.
    Fetched(CallResult),
    /// No member of etcd answers, and the response may be stale.
    Stale(Answered, HeaderValue),
}

/// Gets the response from etcd, as a response of `method`, or a stale one from memory once no member of etcd answers.
/// Memory could not answer for `reason`.
pub(super) async fn fetch(
    proxy: &Proxy,
    account: &Arc<ClientAccount>,
    received: Received,
    method: Method,
    reason: Reason,
    record: &mut CallRecord,
) -> Fetch {
    let Some(stale) = StaleRead::of(proxy, &received.query, &received.metadata) else {
        return Fetch::Fetched(fetch_from_etcd(proxy, account, received, method, reason, record).await);
    };
    let content_type = received.metadata.content_type.clone();
    let answer = tokio::select! {
        biased;
        result = fetch_from_etcd(proxy, account, received, method, reason, record) => return Fetch::Fetched(result),
        answer = stale.answer_once_silent() => answer,
    };
    Fetch::Stale(answer.recorded(record), content_type)
}

/// Gets the response from etcd, as a response of `method`. Memory could not answer for `reason`.
async fn fetch_from_etcd(
    proxy: &Proxy,
    account: &Arc<ClientAccount>,
    mut received: Received,
    method: Method,
    reason: Reason,
    record: &mut CallRecord,
) -> CallResult {
    if proxy.refuses_reads(reason) {
        record.outcome = Outcome::Shed(reason);
        return Ok(status_response(
            &Status::MirrorBehind,
            received.metadata.content_type,
        ));
    }
    record.outcome = Outcome::Forwarded(reason);
    record.begin_forward(&mut received.parts.headers);
    let content_type = received.metadata.content_type.clone();
    let read = Read {
        method,
        parts: received.parts,
        framed: received.framed,
        query: &received.query,
        metadata: &received.metadata,
        account,
        deadline: record.deadline(received.metadata.timeout),
        outcome: &mut record.outcome,
    };
    let page = match proxy.fallback.fetch(read).await {
        Fetched::Result(result) => return result,
        Fetched::Page(page) => page,
    };
    let body = if method == Method::RangeStream {
        let chunks = Chunks::new(page.header, page.selection);
        stream_body(chunks, EntrySource::Series(page.held))
    } else {
        let answer = Answer::new(page.header, page.selection);
        unary_body(answer, EntrySource::Series(page.held))
    };
    Ok(body.into_response(content_type))
}
