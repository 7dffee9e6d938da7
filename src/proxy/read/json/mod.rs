//! `/v3/kv/range` of etcd's JSON gateway: answered from memory like a Range, with etcd's own text, but for the white space
//! that some builds of etcd write. A request that is not understood is forwarded as it is.

#[cfg(any(test, fuzzing))]
pub(in crate::proxy) mod fuzzing;
mod request;

use bytes::{Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use tokio::time::Instant;

use super::answer::Answered;
use super::body::{EntrySource, json_body};
use super::decide::decide;
use super::receive::sort_targets_are_unchecked;
use super::stale::StaleRead;
use crate::cache::{Answer, JsonAnswer, QueryError, RangeQuery};
use crate::grpc::status::MAX_RESPONSE_BYTES;
use crate::grpc::{CallMetadata, Method, Status};
use crate::limits::CallBytes;
use crate::proxy::call::CallRecord;
use crate::proxy::forward::{Gate, forward_http1_body, outcome_of};
use crate::proxy::gateway::{call_metadata, gateway_version, http_status, is_protojson};
use crate::proxy::handles::{Client, Protocol, Proxy};
use crate::proxy::response::{CallResult, ResponseBody};
use crate::telemetry::outcome::{Kind, Read};
use crate::telemetry::{Outcome, Reason};
use crate::upstream::{ConnectionClass, Outgoing, Version};

/// Paths of a Range. Every version from [`FIRST_VERSION`] on has both.
const PATHS: [&str; 2] = ["/v3/kv/range", "/v3beta/kv/range"];
/// Longest body that is read, in bytes. Longer ones are forwarded.
const MAX_BODY_BYTES: usize = 128 << 10;

/// Whether the request is a Range in JSON that may be understood.
pub(crate) fn is_json_range<B>(request: &Request<B>) -> bool {
    let uri = request.uri();
    request.method() == http::Method::POST && uri.query().is_none() && PATHS.contains(&uri.path())
}

/// Handles a Range in JSON. `call` counts its bytes.
pub(crate) async fn json_range(
    client: &Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    record.begin_read(Kind::Unary);
    handle(client, request, call, record).await
}

async fn handle(
    client: &Client,
    request: Request<Incoming>,
    call: &mut CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    let proxy = &*client.proxy;
    let (parts, body) = request.into_parts();
    let body = match read_body(proxy, &parts, body, call, record).await {
        Ok(body) => body,
        Err(Unread::Long(body)) => {
            let request = Request::from_parts(parts, body);
            return forward(proxy, request, Reason::Undecodable, call, record).await;
        }
        Err(Unread::Refused(status, outcome)) => {
            record.outcome = outcome;
            return Ok(error_response(&status, None));
        }
    };
    // Such a number crashes etcd before 3.6.
    if sort_targets_are_unchecked(proxy) && request::names_unknown_sort_target(&body) {
        record.outcome = Outcome::Hit(Read::Refused);
        let status = Status::InvalidArgument(QueryError::InvalidSortOption.to_string());
        let version = proxy.forward.upstream.lowest_version();
        return Ok(error_response(&status, version));
    }
    let understood = Understood::of(proxy, &parts, &body, record);
    let answered = match &understood {
        Ok(understood) => understood.answer(client, record).await,
        Err(reason) => Err(*reason),
    };
    let reason = match answered {
        Ok(response) => return Ok(response),
        Err(reason) => reason,
    };
    if proxy.refuses_reads(reason) {
        record.outcome = Outcome::Shed(reason);
        let version = proxy.forward.upstream.lowest_version();
        return Ok(error_response(&Status::MirrorBehind, version));
    }
    let request = Request::from_parts(parts, Outgoing::whole(body));
    let stale = understood.ok().and_then(|understood| {
        let read = StaleRead::of(proxy, &understood.query, &understood.metadata)?;
        Some((read, understood))
    });
    let Some((read, understood)) = stale else {
        return forward(proxy, request, reason, call, record).await;
    };
    tokio::select! {
        biased;
        result = forward(proxy, request, reason, call, record) => result,
        answer = read.answer_once_silent() => {
            let responded = understood.respond(proxy, answer.recorded(record), record);
            Ok(responded.unwrap_or_else(|TooLong(bytes)| {
                error_response(&Status::LargerThanMax(bytes), Some(understood.version))
            }))
        }
    }
}

/// The response has this many bytes in gRPC, more than etcd's library permits.
#[derive(Debug)]
struct TooLong(u64);

/// Request that every etcd reads in the same way, and what its text depends on.
struct Understood {
    query: RangeQuery,
    metadata: CallMetadata,
    /// Metadata of the gRPC call that the gateway makes.
    headers: HeaderMap,
    version: Version,
}

impl Understood {
    /// # Errors
    /// Reason for which the request must be forwarded.
    fn of(proxy: &Proxy, parts: &Parts, body: &[u8], record: &mut CallRecord) -> Result<Understood, Reason> {
        let (mut metadata, headers) = call_metadata(&parts.headers).ok_or(Reason::Undecodable)?;
        metadata.bypass |= proxy.mirrors.forwards_all();
        let version = gateway_version(proxy.forward.upstream.lowest_version())?;
        let query = request::parse(body, is_protojson(version)).map_err(|_| Reason::Undecodable)?;
        record.record_query(&query);
        Ok(Understood {
            query,
            metadata,
            headers,
            version,
        })
    }

    /// Answers from memory.
    ///
    /// # Errors
    /// Reason for which the request must be forwarded.
    async fn answer(
        &self,
        client: &Client,
        record: &mut CallRecord,
    ) -> Result<Response<ResponseBody>, Reason> {
        if self.query.is_large() {
            record.is_list = true;
        }
        let (query, metadata) = (&self.query, &self.metadata);
        let decision = decide(client, Protocol::Json, query, metadata, &self.headers, record).await;
        let responded = self.respond(&client.proxy, decision.into_answered()?, record);
        responded.map_err(|TooLong(_)| Reason::Undecodable)
    }

    /// Responds from memory.
    ///
    /// # Errors
    /// [`TooLong`]: etcd words the error.
    fn respond(
        &self,
        proxy: &Proxy,
        answered: Answered,
        record: &mut CallRecord,
    ) -> Result<Response<ResponseBody>, TooLong> {
        match answered {
            Answered::Error(status, outcome) => {
                record.outcome = outcome;
                Ok(error_response(&status, Some(self.version)))
            }
            Answered::Entries(header, selection, outcome) => {
                record.keys = selection.len();
                let answer = Answer::new(header, selection);
                if answer.len() > MAX_RESPONSE_BYTES {
                    return Err(TooLong(answer.len()));
                }
                record.outcome = outcome;
                let answer = JsonAnswer::new(header, answer.into_selection());
                Ok(success(proxy, answer, &self.query, record))
            }
        }
    }
}

fn success(
    proxy: &Proxy,
    answer: JsonAnswer,
    query: &RangeQuery,
    record: &CallRecord,
) -> Response<ResponseBody> {
    let entries = EntrySource::Mirror {
        mirror: record.mirror(&proxy.mirrors),
        is_past: query.revision > 0,
    };
    let (body, length) = json_body(answer, entries);
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(
        "grpc-metadata-content-type",
        HeaderValue::from_static("application/grpc"),
    );
    if let Some(length) = length {
        headers.insert(CONTENT_LENGTH, length.into());
    }
    response
}

/// Why a body was not read.
enum Unread {
    /// It is longer than the bound: what was read, and the rest.
    Long(Outgoing),
    Refused(Status, Outcome),
}

/// Reads the body. `call` counts its bytes as they arrive.
async fn read_body(
    proxy: &Proxy,
    parts: &Parts,
    mut body: Incoming,
    call: &mut CallBytes,
    record: &CallRecord,
) -> Result<Bytes, Unread> {
    let is_long = body.size_hint().lower() > MAX_BODY_BYTES as u64;
    if is_long || parts.headers.contains_key("upgrade") {
        return Err(Unread::Long(Outgoing::incoming(body)));
    }
    let deadline: Instant = record.begun() + proxy.request_timeout;
    let mut read = BytesMut::new();
    loop {
        let Ok(frame) = tokio::time::timeout_at(deadline, body.frame()).await else {
            let outcome = Outcome::Cancelled(Reason::BrokenRequest);
            return Err(Unread::Refused(Status::RequestTimeout, outcome));
        };
        let data = match frame {
            None => return Ok(read.freeze()),
            Some(Err(error)) => {
                let outcome = Outcome::Cancelled(Reason::BrokenRequest);
                return Err(Unread::Refused(
                    Status::InvalidArgument(error.to_string()),
                    outcome,
                ));
            }
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
        };
        read.extend_from_slice(&data);
        if read.len() > MAX_BODY_BYTES {
            return Err(Unread::Long(Outgoing::resumed(read.freeze(), body)));
        }
        if call.try_grow(data.len() as u64).is_err() {
            let outcome = Outcome::Shed(Reason::BufferBytes);
            return Err(Unread::Refused(Status::BufferBytes, outcome));
        }
    }
}

/// Forwards the request as it is, in turn with other small reads.
async fn forward(
    proxy: &Proxy,
    mut request: Request<Outgoing>,
    reason: Reason,
    call: &CallBytes,
    record: &mut CallRecord,
) -> CallResult {
    record.outcome = Outcome::Forwarded(reason);
    record.begin_forward(request.headers_mut());
    let forward = &proxy.forward;
    let gate = Gate {
        turns: &forward.small_turns,
        account: call.account(),
        deadline: None,
    };
    let version = forward.upstream.lowest_version();
    let _turn = match forward.turn(ConnectionClass::Check, Some(gate)).await {
        Ok(turn) => turn,
        Err(error) => {
            let status = error.status();
            record.outcome = outcome_of(&status).unwrap_or(record.outcome);
            return Ok(error_response(&status, version));
        }
    };
    Ok(Box::pin(forward_http1_body(forward, request, Method::Json, call.account())).await)
}

/// A status as etcd's gateway writes it.
fn error_response(status: &Status, version: Option<Version>) -> Response<ResponseBody> {
    let code = status.code() as u16;
    let message = serde_json::Value::from(status.to_string());
    let error = match version {
        Some(version) if !is_protojson(version) => format!("\"error\":{message},"),
        _ => String::new(),
    };
    let text = format!("{{{error}\"code\":{code},\"message\":{message}}}");
    let length = text.len();
    let mut response = Response::new(ResponseBody::whole(text.into(), HeaderMap::new()));
    *response.status_mut() = http_status(code);
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert(CONTENT_LENGTH, length.into());
    response
}
