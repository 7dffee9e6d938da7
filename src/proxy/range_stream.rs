//! KV/RangeStream (KEP-5966): from memory like a Range, whatever etcd's version; else etcd's own stream; else pages.
//!
//! A client that chose streaming never sees `Unimplemented` for a request that etcd 3.7 would serve: kube-apiserver stops
//! streaming for ten minutes at one such answer.

use bytes::Bytes;
use http::request::Parts;
use http::{HeaderMap, Request, Response, StatusCode, response};
use http_body_util::BodyExt;
use hyper::body::{Frame, Incoming};
use tokio::time::Instant;
use tracing::Instrument;

use super::Proxy;
use super::body::{self, ResponseBody};
use super::forward::{self, Along, Body, Forward, NotAnswered, RETRY_PAUSE, is_reset};
use super::owner::Owner;
use super::pager::{NoPages, Pager};
use super::range::{Ended, end, refusal};
use super::record::Record;
use crate::cache::{Chunks, Dialect, RangeQuery, SortOrder, SortTarget};
use crate::grpc::frame::{PREFIX_BYTES, RequestMessage, read_message};
use crate::grpc::metadata::{BYPASS, MAX_MESSAGE_BYTES};
use crate::grpc::status::{Code, GRPC_MESSAGE, GRPC_STATUS};
use crate::grpc::{CallMetadata, Method, RangeResponseScanner, Status};
use crate::telemetry::outcome::{Kind, Read};
use crate::telemetry::{Outcome, Reason};
use crate::upstream::{InFlight, NoRangeStream, Outgoing, SendFailure};

/// Answers a RangeStream.
pub(super) async fn range_stream(proxy: &Proxy, request: Request<Incoming>) -> forward::Outcome {
    let span = tracing::debug_span!("range_stream");
    let mut record = Record::new(&proxy.telemetry, Kind::Stream, &request);
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
            let body = Body::Once(Outgoing::resumed(read, body));
            return proxy.forward.pass(parts, body, Method::RangeStream).await;
        }
        RequestMessage::Broken => {
            record.outcome = Outcome::Cancelled(Reason::BrokenRequest);
            return Ok(Response::new(ResponseBody::empty()));
        }
    };
    let (Some(call), Ok(query)) = (
        CallMetadata::from_headers(&parts.headers),
        RangeQuery::decode(framed.slice(PREFIX_BYTES..)),
    ) else {
        record.outcome = Outcome::Forwarded(Reason::Undecodable);
        record.forward(&mut parts.headers);
        return proxy
            .forward
            .pass(parts, Body::Read(framed), Method::RangeStream)
            .await;
    };
    if let Some(status) = refused(&query) {
        record.outcome = Outcome::Hit(Read::Refused);
        return Ok(body::status(&status, call.content_type));
    }
    match end(proxy, &query, &call, &parts.headers, record).await {
        Ended::Answer(header, selection, outcome) => {
            record.outcome = outcome;
            record.keys = selection.len();
            let body = ResponseBody::stream(Chunks::new(header, selection), None, &proxy.answers);
            Ok(body.response(call.content_type))
        }
        Ended::Error(status, outcome) => {
            record.outcome = outcome;
            Ok(body::status(&status, call.content_type))
        }
        Ended::Forward(reason) => from_etcd(proxy, parts, framed, &query, call, reason, record).await,
    }
}

/// What etcd 3.7 refuses before it reads anything, in its words and whatever version is behind.
fn refused(query: &RangeQuery) -> Option<Status> {
    if let Err(error) = query.check(&Dialect::of_version(3, 7)) {
        return Some(refusal(&error));
    }
    let in_key_order = query.sort_order == SortOrder::None as i32
        || (query.sort_order == SortOrder::Ascend as i32 && query.sort_target == SortTarget::Key as i32);
    let what = if !in_key_order {
        "custom sort orders"
    } else if query.has_revision_filter() {
        "revision filters"
    } else {
        return None;
    };
    Some(Status::StreamUnsupported(what))
}

/// **forward**: etcd's own stream as it comes, or pages put together.
async fn from_etcd(
    proxy: &Proxy,
    mut parts: Parts,
    framed: Bytes,
    query: &RangeQuery,
    call: CallMetadata,
    reason: Reason,
    record: &mut Record<'_>,
) -> forward::Outcome {
    record.outcome = Outcome::Forwarded(reason);
    let owner = Owner::of(proxy, &call, &parts.headers);
    record.forward(&mut parts.headers);
    if let Some(owner) = &owner
        && let Some(page) = proxy.series.page(query, owner, &parts.headers).await
    {
        record.outcome = record.outcome.streamed();
        let chunks = Chunks::new(page.header, page.selection);
        let body = ResponseBody::stream(chunks, Some(page.held), &proxy.answers);
        return Ok(body.response(call.content_type));
    }
    let along = Along {
        _permit: None,
        watch: proxy.series.watch(query, owner, RangeResponseScanner::stream()),
    };
    // etcd's stream repeats keys if it sorts chunk by chunk: that one shape is read whole, and then cut.
    let no_stream = if Pager::may_page(query) {
        match proxy.forward.open_stream(&parts, &framed).await {
            Ok(Ok(opened)) => {
                return Ok(opened.response(&proxy.forward, along));
            }
            Ok(Err(no_stream)) => no_stream,
            Err(not) => return not.outcome(call.content_type),
        }
    } else {
        NoRangeStream::Shape
    };
    proxy
        .telemetry
        .metrics
        .forwarding
        .record_stream_fallback(no_stream.as_str());
    record.outcome = Outcome::Paged(reason);
    let pager = Pager::new(
        &proxy.forward,
        &proxy.large,
        parts,
        query,
        record.deadline(call.timeout),
    );
    match pager.start().await {
        Ok(paged) => Ok(ResponseBody::paged(paged).response(call.content_type)),
        Err(NoPages::Refused(refused)) => {
            record.outcome = Outcome::Shed(refused.reason);
            Ok(body::status(&refused.status, call.content_type))
        }
        Err(NoPages::Etcd(status)) => {
            let mut response = ResponseBody::empty().response(call.content_type);
            response.headers_mut().extend(status);
            Ok(response)
        }
        Err(NoPages::Reset(error)) => Err(error.into()),
        Err(NoPages::Own(status)) => Ok(body::status(&status, call.content_type)),
    }
}

/// A stream of etcd's whose first frame is here.
struct Opened {
    head: response::Parts,
    first: Option<Frame<Bytes>>,
    body: Incoming,
    in_flight: InFlight,
}

impl Opened {
    fn response(self, forward: &Forward, along: Along) -> Response<ResponseBody> {
        let Opened {
            head,
            first,
            body,
            in_flight,
        } = self;
        let answered = forward::Answered {
            response: Response::from_parts(head, body),
            in_flight,
        };
        let response = forward.wrap(answered, Method::RangeStream, along);
        match first {
            Some(first) => response.map(|body| body.behind(first)),
            None => response,
        }
    }

    /// The text with which it says that there is no such method, or no such shape: in its head or, from another proxy's
    /// hand, in trailers that are its first frame.
    fn unimplemented(&self) -> Option<String> {
        let trailers = self.first.as_ref().and_then(Frame::trailers_ref);
        let said = |headers: &HeaderMap| {
            let is_unimplemented =
                headers.get(GRPC_STATUS)?.as_bytes() == (Code::Unimplemented as u16).to_string().as_bytes();
            let message = headers.get(GRPC_MESSAGE).map(|text| text.as_bytes());
            is_unimplemented.then(|| String::from_utf8_lossy(message.unwrap_or_default()).into_owned())
        };
        if self.head.status == StatusCode::NOT_FOUND {
            // A proxy that knows paths: to a gRPC client that is Unimplemented.
            return Some(String::new());
        }
        said(trailers.unwrap_or(&self.head.headers))
    }
}

impl Forward {
    /// Sends a RangeStream to an endpoint that has it; if one after the other answers that it has not, none is left, and
    /// that is the answer.
    async fn open_stream(
        &self,
        parts: &Parts,
        framed: &Bytes,
    ) -> Result<Result<Opened, NoRangeStream>, NotAnswered> {
        let mut parts = parts.clone();
        parts.headers.remove(BYPASS.0);
        let deadline = Instant::now() + self.connect_timeout;
        loop {
            let connection = match self.upstream.streaming(deadline).await? {
                Ok(connection) => connection,
                Err(reason) => return Ok(Err(reason)),
            };
            let request = Request::from_parts(parts.clone(), Outgoing::whole(framed.clone()));
            let error = match connection.send(request).await {
                Ok((response, in_flight)) => {
                    self.judge(&connection, response.headers());
                    match opened(response, in_flight).await {
                        Ok(opened) => match opened.unimplemented() {
                            None => return Ok(Ok(opened)),
                            Some(message) => {
                                let reason = connection.refused_range_stream(&message);
                                if reason == NoRangeStream::Shape || Instant::now() >= deadline {
                                    return Ok(Err(reason));
                                }
                                // Is there another that has it?
                                continue;
                            }
                        },
                        // Nothing has been shown of it.
                        Err(error) => error,
                    }
                }
                Err(SendFailure::NotSent(_, error) | SendFailure::Lost(error)) => error,
            };
            if is_reset(&error) {
                return Err(NotAnswered::Reset(error));
            }
            if Instant::now() >= deadline {
                return Err(NotAnswered::Lost(error));
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }
}

/// Waits for the first frame: etcd sends its head together with it.
async fn opened(response: Response<Incoming>, in_flight: InFlight) -> Result<Opened, hyper::Error> {
    let (head, mut body) = response.into_parts();
    let first = if head.headers.contains_key(GRPC_STATUS) {
        None
    } else {
        body.frame().await.transpose()?
    };
    Ok(Opened {
        head,
        first,
        body,
        in_flight,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_etcd_refuses_is_refused_in_its_words() {
        let list = RangeQuery {
            key: "k".into(),
            range_end: "l".into(),
            ..RangeQuery::default()
        };
        let said =
            |query: RangeQuery| refused(&query).map(|status| (status.code() as u16, status.to_string()));
        assert_eq!(said(list.clone()), None);
        for (sort_order, sort_target) in [(0, 1), (0, 4), (1, 0), (0, 0)] {
            let query = RangeQuery {
                sort_order,
                sort_target,
                ..list.clone()
            };
            assert_eq!(said(query), None, "{sort_order} {sort_target}");
        }
        let sorted = "RangeStream does not support custom sort orders".to_owned();
        for (sort_order, sort_target) in [(2, 0), (1, 1), (2, 4)] {
            let query = RangeQuery {
                sort_order,
                sort_target,
                min_mod_revision: 1,
                ..list.clone()
            };
            assert_eq!(said(query), Some((12, sorted.clone())));
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
            assert_eq!(said(query), Some((12, filtered.clone())));
        }
        assert_eq!(
            said(RangeQuery {
                sort_order: 7,
                ..list
            }),
            Some((3, "etcdserver: invalid sort option".to_owned()))
        );
        assert_eq!(
            said(RangeQuery::default()),
            Some((3, "etcdserver: key is not provided".to_owned()))
        );
    }
}
