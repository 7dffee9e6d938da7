//! KV/Range: plan, prove, answer — or forward the bytes as they came.

use std::time::Duration;

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response};
use hyper::body::Incoming;
use tokio::time::Instant;
use tracing::Instrument;

use super::Proxy;
use super::authorize::Authorized;
use super::body::ResponseBody;
use super::forward::{self, Along, Body, connection_class, grpc_content_type};
use super::large::LargeRange;
use super::message::{self, Message, PREFIX_BYTES};
use super::owner::Owner;
use super::plan::{self, Facts, Plan};
use super::record::Record;
use super::status::{self, Code, MAX_ANSWER_BYTES, Status};
use super::trace::Trace;
use super::walk::RangeResponseScanner;
use crate::cache::{
    Answer, AtError, Dialect, QueryError, RangeQuery, ResponseHeader, Selected, Selection, Tree,
    names_unknown_sort_target, select,
};
use crate::mirror::cluster_state::Auth;
use crate::mirror::state::{Mirror, View};
use crate::telemetry::outcome::{Kind, Read};
use crate::telemetry::{Outcome, Reason};
use crate::upstream::{ConnectionClass, Outgoing, Version};

/// A Range's request is two keys and a few numbers. What is longer is forwarded unread.
pub(super) const MAX_MESSAGE_BYTES: usize = 256 << 10;
/// Metadata that carries credentials.
pub(super) const CREDENTIALS: [&str; 2] = ["token", "authorization"];
/// Metadata with which a caller reads around the cache, and its value.
pub(super) const BYPASS: (&str, &[u8]) = ("rangecache-bypass", b"true");

/// How a Range, or a RangeStream, ends that memory can end.
pub(super) enum Ended {
    Answer(ResponseHeader, Selection, Outcome),
    Error(Status, Outcome),
    Forward(Reason),
}

/// Answers a Range.
pub(super) async fn range(proxy: &Proxy, request: Request<Incoming>) -> forward::Outcome {
    let span = tracing::debug_span!("range");
    let mut record = Record::new(&proxy.telemetry, Kind::Unary, &request);
    // A span that nobody asked for is not carried along.
    if span.is_disabled() {
        let outcome = handle(proxy, request, &mut record).await;
        return record.answered(outcome);
    }
    let outcome = handle(proxy, request, &mut record).instrument(span.clone()).await;
    span.in_scope(|| record.answered(outcome))
}

async fn handle<'a>(
    proxy: &'a Proxy,
    request: Request<Incoming>,
    record: &mut Record<'a>,
) -> forward::Outcome {
    let (mut parts, body) = request.into_parts();
    let (framed, _body) = match message::read(body, MAX_MESSAGE_BYTES).await {
        Message::Whole { framed, body } => (framed, body),
        Message::Other { read, body } => {
            record.outcome = Outcome::Forwarded(Reason::Undecodable);
            record.forward(&mut parts.headers);
            let class = connection_class(parts.uri.path());
            return Box::pin(
                proxy
                    .forward
                    .pass(parts, Body::Once(Outgoing::resumed(read, body)), class),
            )
            .await;
        }
        Message::Broken => {
            record.outcome = Outcome::Cancelled(Reason::BrokenRequest);
            return Ok(Response::new(ResponseBody::empty()));
        }
    };
    // Before anything is forwarded: it would crash etcd 3.5, in whatever way it is encoded.
    let old = proxy
        .forward
        .upstream
        .versions()
        .lowest
        .is_none_or(|version| version < Version::new(3, 6, 0));
    if old && names_unknown_sort_target(&framed[PREFIX_BYTES..]) {
        record.outcome = Outcome::Hit(Read::Refused);
        return Ok(refusal(&QueryError::InvalidSortOption).response(grpc_content_type(&parts.headers)));
    }
    let decoded = match (
        Call::of(&parts.headers),
        RangeQuery::decode(framed.slice(PREFIX_BYTES..)),
    ) {
        (Some(call), Ok(query)) => Some((call, query)),
        _ => None,
    };
    let Some((call, query)) = decoded else {
        record.outcome = Outcome::Forwarded(Reason::Undecodable);
        return Box::pin(forward(proxy, parts, framed, None, record)).await;
    };
    match end(proxy, &query, &call, &parts.headers, record).await {
        Ended::Answer(header, selection, outcome) => {
            record.keys = selection.len();
            let answer = Answer::new(header, selection);
            record.bytes = answer.len();
            if answer.len() > MAX_ANSWER_BYTES {
                record.outcome = outcome.refused();
                return Ok(Status::larger_than_max(answer.len()).response(call.content_type));
            }
            record.outcome = outcome;
            Ok(ResponseBody::answer(answer, &proxy.answers).response(call.content_type))
        }
        Ended::Error(status, outcome) => {
            record.outcome = outcome;
            Ok(status.response(call.content_type))
        }
        Ended::Forward(reason) => {
            record.outcome = Outcome::Forwarded(reason);
            // Boxed, so that the future of a read from memory stays small.
            Box::pin(forward(proxy, parts, framed, Some((&query, &call)), record)).await
        }
    }
}

/// What the request's metadata says.
#[derive(Debug)]
pub(super) struct Call {
    pub(super) timeout: Option<Duration>,
    pub(super) credentials: bool,
    pub(super) require_leader: bool,
    pub(super) bypass: bool,
    pub(super) content_type: HeaderValue,
}

impl Call {
    /// `None` where there is anything that etcd might treat in a way of its own.
    pub(super) fn of(headers: &HeaderMap) -> Option<Call> {
        let content_type = headers.get(CONTENT_TYPE)?;
        if !matches!(
            content_type.as_bytes(),
            b"application/grpc" | b"application/grpc+proto"
        ) {
            return None;
        }
        if headers
            .get("grpc-encoding")
            .is_some_and(|encoding| encoding.as_bytes() != b"identity")
        {
            return None;
        }
        let mut bypass = false;
        for (name, value) in headers {
            if name.as_str().ends_with("-bin") && !is_base64(value.as_bytes()) {
                return None;
            }
            bypass |= (name.as_str(), value.as_bytes()) == BYPASS;
        }
        // etcd refuses a version that is no text.
        if headers
            .get("client-api-version")
            .is_some_and(|version| version.to_str().is_err())
        {
            return None;
        }
        Some(Call {
            timeout: status::timeout(headers).ok()?,
            credentials: CREDENTIALS.iter().any(|name| headers.contains_key(*name)),
            require_leader: headers.contains_key("hasleader"),
            bypass,
            content_type: content_type.clone(),
        })
    }
}

/// Whether etcd's gRPC library decodes this as binary metadata; if not, it words the error.
fn is_base64(value: &[u8]) -> bool {
    let padded = value.len().is_multiple_of(4);
    let data = match value {
        [data @ .., b'=', b'='] | [data @ .., b'='] if padded => data,
        data => data,
    };
    data.len() % 4 != 1
        && data
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/'))
}

/// **plan**, **prove** and the decision about the answer.
pub(super) async fn end<'a>(
    proxy: &'a Proxy,
    query: &RangeQuery,
    call: &Call,
    metadata: &HeaderMap,
    record: &mut Record<'a>,
) -> Ended {
    record.revisions.asked = query.revision;
    if call.bypass {
        return Ended::Forward(Reason::Bypass);
    }
    let caller_deadline = record.deadline(call);
    if caller_deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        return Ended::Error(Status::deadline(), Outcome::Cancelled(Reason::Deadline));
    }
    let cluster_state = &proxy.mirrors.cluster_state;
    let mirror = proxy.mirrors.holding(&query.interval());
    record.mirror = mirror;
    let auth = cluster_state.auth();
    let facts = Facts {
        mirror: mirror.map(Mirror::revision),
        versions: proxy.forward.upstream.versions(),
        auth,
        own_identity: auth == Auth::On && proxy.forward.upstream.credentials().are_valid(),
        floor: cluster_state.min_served_revision(),
        credentials: call.credentials,
        require_leader: call.require_leader,
    };
    let plan = plan::plan(query, &facts);
    tracing::debug!(?plan, "planned");
    record.planned();
    let own_deadline = record.arrived() + proxy.freshness_timeout;
    let deadline = caller_deadline.map_or(own_deadline, |caller| caller.min(own_deadline));
    // A wait that the caller's own timeout ended is the caller's; any other is forwarded.
    let not_proven = |reason: Reason, record: &mut Record<'_>| {
        record.not_proven(reason);
        match caller_deadline {
            Some(caller) if Instant::now() >= caller => {
                Ended::Error(Status::deadline(), Outcome::Cancelled(Reason::Deadline))
            }
            _ => Ended::Forward(reason),
        }
    };
    let not_below = match plan {
        Plan::Refuse(error) => return Ended::Error(refusal(&error), Outcome::Hit(Read::Refused)),
        Plan::Forward(reason) => return Ended::Forward(reason),
        Plan::AtOrAbove(floor) => floor,
        Plan::Prove => {
            let link = record.trace.as_deref_mut().map(Trace::link);
            let proving = proxy.mirrors.freshness.prove_for(link);
            // It keeps to its own deadline; only a shorter one takes a timer.
            let proven = if deadline < own_deadline {
                match Box::pin(tokio::time::timeout_at(deadline, proving)).await {
                    Ok(proven) => proven,
                    Err(_) => Err(Reason::CheckFailed),
                }
            } else {
                proving.await
            };
            match proven {
                Ok(proof) => proof.header.revision,
                Err(reason) => return not_proven(reason, record),
            }
        }
        Plan::Authorize { serializable, floor } => {
            let authorized = Authorized {
                query,
                metadata,
                facts: &facts,
                serializable,
                floor,
                deadline,
            };
            // Boxed, so that the future of a read that needs none stays small.
            return match Box::pin(authorized.end(proxy, mirror, record)).await {
                Ok(ended) => ended,
                Err(reason) => not_proven(reason, record),
            };
        }
    };
    // The plan says that there is one.
    let Some(mirror) = mirror else {
        return Ended::Forward(Reason::NotMirrored);
    };
    record.checked(not_below);
    let (view, waited) = match mirror.reach(not_below, deadline).await {
        Ok(reached) => reached,
        Err(reason) => return not_proven(reason, record),
    };
    record.proven(mirror, view.revision, waited);
    tracing::debug!(not_below, revision = view.revision, waited, "proven");
    // The header is that of the last check: cluster, member and raft term; and auth was off then.
    let Some(identity) = cluster_state
        .identity()
        .filter(|_| cluster_state.auth() == Auth::Off)
    else {
        return Ended::Forward(Reason::Auth);
    };
    let header = ResponseHeader {
        revision: view.revision,
        ..*identity
    };
    answer(query, mirror, &view, header, &facts, waited, proxy)
}

/// **answer**: what the keys at the view's revision, or at the revision asked for, say.
pub(super) fn answer(
    query: &RangeQuery,
    mirror: &Mirror,
    view: &View,
    header: ResponseHeader,
    facts: &Facts,
    waited: bool,
    proxy: &Proxy,
) -> Ended {
    let outcome = |read: Read| {
        if waited {
            Outcome::Waited(read)
        } else {
            Outcome::Hit(read)
        }
    };
    if query.revision > view.revision {
        // The view is at or past the proven revision, so this is etcd's future, too.
        return Ended::Error(Status::future_revision(), outcome(Read::Refused));
    }
    let at: Tree;
    let (tree, read) = if query.revision > 0 {
        at = match mirror.view_at(query.revision) {
            Ok(Ok(tree)) => tree,
            Ok(Err(AtError::Compacted { .. })) => {
                return Ended::Error(Status::compacted(), outcome(Read::Refused));
            }
            Ok(Err(AtError::Future { .. })) => return Ended::Forward(Reason::NotFresh),
            Ok(Err(AtError::Gone { .. })) => return Ended::Forward(Reason::HistoryGone),
            Err(reason) => return Ended::Forward(reason),
        };
        (&at, Read::Pinned)
    } else {
        (
            &view.tree,
            if query.serializable {
                Read::Serializable
            } else {
                Read::Linearizable
            },
        )
    };
    let Some(version) = facts.versions.lowest else {
        return Ended::Forward(Reason::VersionUnknown);
    };
    let selection = match select(tree, query, &Dialect::of_version(version.major, version.minor)) {
        Selected::Answer(selection) => selection,
        Selected::TiesAreEtcds => return Ended::Forward(Reason::SortTies),
    };
    proxy.mirrors.cluster_state.record_served(header.revision);
    Ended::Answer(header, selection, outcome(read))
}

/// **forward**: the bytes as they came.
async fn forward(
    proxy: &Proxy,
    mut parts: Parts,
    framed: Bytes,
    understood: Option<(&RangeQuery, &Call)>,
    record: &mut Record<'_>,
) -> forward::Outcome {
    record.forward(&mut parts.headers);
    if understood.is_some_and(|(_, call)| call.bypass) {
        // Of whatever length, and with no other read's call.
        return proxy
            .forward
            .pass(parts, Body::Read(framed), ConnectionClass::Stream)
            .await;
    }
    let content_type = grpc_content_type(&parts.headers);
    let class = connection_class(parts.uri.path());
    let Some((query, call)) = understood else {
        return proxy.forward.pass(parts, Body::Read(framed), class).await;
    };
    let owner = Owner::of(proxy, call, &parts.headers);
    if let Some(owner) = &owner
        && let Some(page) = proxy.series.page(query, owner, &parts.headers).await
    {
        record.outcome = record.outcome.streamed();
        let answer = Answer::new(page.header, page.selection);
        let body = ResponseBody::page(answer, Some(page.held), &proxy.answers);
        return Ok(body.response(call.content_type.clone()));
    }
    if !plan::is_large(query) {
        let along = Along {
            _permit: None,
            watch: proxy.series.watch(query, owner, RangeResponseScanner::unary()),
        };
        return proxy
            .forward
            .pass_with(parts, Body::Read(framed), class, along)
            .await;
    }
    let range = LargeRange {
        parts,
        request: framed,
        query,
        owner,
        answers: &proxy.answers,
    };
    match proxy.large.pass(&proxy.forward, range).await {
        Ok(passed) => {
            if passed.streamed {
                record.outcome = record.outcome.streamed();
            }
            passed.outcome
        }
        Err(refused) => {
            record.outcome = Outcome::Shed(refused.reason);
            Ok(refused.status.response(content_type))
        }
    }
}

pub(super) fn refusal(error: &QueryError) -> Status {
    Status::new(Code::InvalidArgument, error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_metadata_is_base64_with_or_without_padding() {
        for value in ["", "AAAA", "AAA=", "AA==", "AAA", "AA", "a+/9"] {
            assert!(is_base64(value.as_bytes()), "{value}");
        }
        for value in ["***", "A", "AAAAA", "A===", "AA=", "=AAA", "AA-_"] {
            assert!(!is_base64(value.as_bytes()), "{value}");
        }
    }
}
