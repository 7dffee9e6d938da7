//! Reads that memory cannot answer: fetched from etcd by way of `fallback`.

use std::sync::Arc;

use super::body::{EntrySource, stream_body, unary_body};
use super::receive::Received;
use crate::cache::{Answer, Chunks};
use crate::grpc::{Method, Status};
use crate::limits::ClientAccount;
use crate::proxy::fallback::{Fetched, Read};
use crate::proxy::handles::Proxy;
use crate::proxy::recorder::Recorder;
use crate::proxy::response::{CallResult, status_response};
use crate::telemetry::{Outcome, Reason};

/// Gets the response from etcd, as a response of `method`. Memory could not answer for `reason`.
pub(super) async fn fetch_from_etcd(
    proxy: &Proxy,
    account: &Arc<ClientAccount>,
    mut received: Received,
    method: Method,
    reason: Reason,
    recorder: &mut Recorder<'_>,
) -> CallResult {
    if proxy.refuses_reads(reason) {
        recorder.outcome = Outcome::Shed(reason);
        return Ok(status_response(
            &Status::MirrorBehind,
            received.metadata.content_type,
        ));
    }
    recorder.outcome = Outcome::Forwarded(reason);
    recorder.begin_forward(&mut received.parts.headers);
    let content_type = received.metadata.content_type.clone();
    let read = Read {
        method,
        parts: received.parts,
        framed: received.framed,
        query: &received.query,
        metadata: &received.metadata,
        account,
        deadline: recorder.deadline(received.metadata.timeout),
        outcome: &mut recorder.outcome,
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
