//! KV/Range: plan, prove, answer — or forward the bytes as they came.

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Request, Response};
use hyper::body::Incoming;
use tokio::time::Instant;
use tracing::Instrument;

use super::Proxy;
use super::authorize::Authorized;
use super::body::{self, ResponseBody};
use super::forward::{self, Along, Body};
use super::large::LargeRange;
use super::owner::Owner;
use super::plan::{self, Facts, Plan};
use super::record::Record;
use super::trace::Trace;
use crate::cache::{
    Answer, AtError, Dialect, QueryError, RangeQuery, ResponseHeader, Selected, Selection, Tree,
    names_unknown_sort_target, select,
};
use crate::grpc::frame::{PREFIX_BYTES, RequestMessage, read_message};
use crate::grpc::metadata::{MAX_MESSAGE_BYTES, grpc_content_type};
use crate::grpc::status::MAX_RESPONSE_BYTES;
use crate::grpc::{CallMetadata, Method, RangeResponseScanner, Status};
use crate::mirror::cluster_state::Auth;
use crate::mirror::state::{Mirror, View};
use crate::telemetry::outcome::{Kind, Read};
use crate::telemetry::{Outcome, Reason};
use crate::upstream::{ConnectionClass, Outgoing, gates};

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
    let (framed, _body) = match read_message(body, MAX_MESSAGE_BYTES).await {
        RequestMessage::Whole { framed, body } => (framed, body),
        RequestMessage::Other { read, body } => {
            record.outcome = Outcome::Forwarded(Reason::Undecodable);
            record.forward(&mut parts.headers);
            return Box::pin(proxy.forward.pass(
                parts,
                Body::Once(Outgoing::resumed(read, body)),
                Method::Range,
            ))
            .await;
        }
        RequestMessage::Broken => {
            record.outcome = Outcome::Cancelled(Reason::BrokenRequest);
            return Ok(Response::new(ResponseBody::empty()));
        }
    };
    // Before anything is forwarded: it would crash etcd 3.5, in whatever way it is encoded.
    let old = proxy
        .forward
        .upstream
        .lowest_version()
        .is_none_or(|version| !gates::UNKNOWN_SORT_TARGETS.is_open(version));
    if old && names_unknown_sort_target(&framed[PREFIX_BYTES..]) {
        record.outcome = Outcome::Hit(Read::Refused);
        return Ok(body::status(
            &refusal(&QueryError::InvalidSortOption),
            grpc_content_type(&parts.headers),
        ));
    }
    let decoded = match (
        CallMetadata::from_headers(&parts.headers),
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
            if answer.len() > MAX_RESPONSE_BYTES {
                record.outcome = outcome.refused();
                return Ok(body::status(
                    &Status::LargerThanMax(answer.len()),
                    call.content_type,
                ));
            }
            record.outcome = outcome;
            Ok(ResponseBody::answer(answer, &proxy.answers).response(call.content_type))
        }
        Ended::Error(status, outcome) => {
            record.outcome = outcome;
            Ok(body::status(&status, call.content_type))
        }
        Ended::Forward(reason) => {
            record.outcome = Outcome::Forwarded(reason);
            // Boxed, so that the future of a read from memory stays small.
            Box::pin(forward(proxy, parts, framed, Some((&query, &call)), record)).await
        }
    }
}

/// **plan**, **prove** and the decision about the answer.
pub(super) async fn end<'a>(
    proxy: &'a Proxy,
    query: &RangeQuery,
    call: &CallMetadata,
    metadata: &HeaderMap,
    record: &mut Record<'a>,
) -> Ended {
    record.revisions.asked = query.revision;
    if call.bypass {
        return Ended::Forward(Reason::Bypass);
    }
    let caller_deadline = record.deadline(call.timeout);
    if caller_deadline.is_some_and(|deadline| deadline <= Instant::now()) {
        return Ended::Error(Status::DeadlineExceeded, Outcome::Cancelled(Reason::Deadline));
    }
    let cluster_state = &proxy.mirrors.cluster_state;
    let mirror = proxy.mirrors.holding(&query.interval());
    record.mirror = mirror;
    let auth = cluster_state.auth();
    let facts = Facts {
        mirror: mirror.map(Mirror::revision),
        version: proxy.forward.upstream.lowest_version(),
        auth,
        own_identity: auth == Auth::On && proxy.forward.upstream.credentials().are_valid(),
        floor: cluster_state.min_served_revision(),
        credentials: call.has_credentials,
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
                Ended::Error(Status::DeadlineExceeded, Outcome::Cancelled(Reason::Deadline))
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
        return Ended::Error(Status::FutureRevision, outcome(Read::Refused));
    }
    let at: Tree;
    let (tree, read) = if query.revision > 0 {
        at = match mirror.view_at(query.revision) {
            Ok(Ok(tree)) => tree,
            Ok(Err(AtError::Compacted { .. })) => {
                return Ended::Error(Status::Compacted, outcome(Read::Refused));
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
    let Some(version) = facts.version else {
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
    understood: Option<(&RangeQuery, &CallMetadata)>,
    record: &mut Record<'_>,
) -> forward::Outcome {
    record.forward(&mut parts.headers);
    if understood.is_some_and(|(_, call)| call.bypass) {
        // Of whatever length, and with no other read's call.
        return proxy
            .forward
            .pass_with(
                parts,
                Body::Read(framed),
                Method::Range,
                ConnectionClass::Stream,
                Along::default(),
            )
            .await;
    }
    let content_type = grpc_content_type(&parts.headers);
    let Some((query, call)) = understood else {
        return proxy.forward.pass(parts, Body::Read(framed), Method::Range).await;
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
            .pass_with(
                parts,
                Body::Read(framed),
                Method::Range,
                forward::connection_class(Method::Range),
                along,
            )
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
            Ok(body::status(&refused.status, content_type))
        }
    }
}

pub(super) fn refusal(error: &QueryError) -> Status {
    Status::InvalidArgument(error.to_string())
}
