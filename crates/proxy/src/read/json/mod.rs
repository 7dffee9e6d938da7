//! `/v3/kv/range` of etcd's JSON gateway: answered from memory like a Range, with etcd's own text, but for the white space
//! that some builds of etcd write. A request that is not understood is forwarded as it is.
//!
//! The JSON of a RangeRequest is read as far as every version of etcd understands it in the same way. Not everything that etcd accepts is
//! accepted here: what is rarely sent, or differs between etcd's libraries (unknown and repeated fields, `null`, numbers with a fraction
//! or an exponent), is left to etcd.

#[cfg(any(test, fuzzing, feature = "testing"))]
pub(crate) mod fuzzing;

use bytes::{Bytes, BytesMut};
use etcd_store::cache::{
    Answer, JsonAnswer, QueryError, RangeQuery, ResponseHeader, Selection, SortOrder, SortTarget,
};
use etcd_wire::grpc::{Method, Status, is_json_of, metadata::HeadFields, status::MAX_RESPONSE_BYTES};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Request, Response, request::Parts};
use http_body::Body as _;
use http_body_util::BodyExt;
use hyper::body::Incoming;
use rangecache_base::telemetry::outcome::{Kind, Read};
use rangecache_base::telemetry::{Outcome, Reason};
use rangecache_edge::limits::Gate;
use rangecache_upstream::{ConnectionClass, Outgoing, Version};
use serde::Deserialize;
use serde_json::Value;
use tokio::time::Instant;

use super::body::{EntrySource, json_body};
use super::serve::{ReceivedRead, Unservable, WireFormat};
use super::{attempt::ReadRequest, grpc::sort_targets_are_unchecked};
use crate::{
    call::CallRecord,
    forward::{forward_http1_body, outcome_of},
    gateway::{
        Enum, Int64, NotUnderstood, call_metadata, decode, gateway_version, http_status, is_protojson,
    },
    handles::{CallProtocol, Proxy},
    response::{CallResult, ResponseBody},
};

/// Longest body that is read, in bytes. Longer ones are forwarded.
const MAX_BODY_BYTES: usize = 128 << 10;

/// Whether the request is a Range in JSON that may be understood.
pub(crate) fn is_json_range<B>(request: &Request<B>) -> bool {
    let uri = request.uri();
    request.method() == http::Method::POST && uri.query().is_none() && is_json_of(uri.path(), Method::Range)
}

/// A Range of the gateway, in the words of etcd's lowest version.
pub(crate) struct Json {
    version: Version,
}

impl WireFormat for Json {
    const KIND: Kind = Kind::Unary;
    const PROTOCOL: CallProtocol = CallProtocol::Json;
    /// The gateway's request.
    type Original = Request<Outgoing>;

    async fn receive(
        proxy: &Proxy,
        _fields: &HeadFields,
        request: Request<Incoming>,
        record: &mut CallRecord,
    ) -> Result<ReceivedRead<Json>, Box<CallResult>> {
        let (parts, body) = request.into_parts();
        let body = match read_body(proxy, &parts, body, record).await {
            Ok(body) => body,
            Err(UnreadBody::Long(body)) => {
                let request = Request::from_parts(parts, body);
                return Err(not_understood(proxy, request, Reason::Undecodable, record).await);
            }
            Err(UnreadBody::Refused(status, outcome)) => {
                record.outcome = outcome;
                return Err(Box::new(Ok(error_response(&status, None))));
            }
        };
        // Such a number crashes etcd before 3.6.
        if sort_targets_are_unchecked(proxy) && names_unknown_sort_target(&body) {
            record.outcome = Outcome::Hit(Read::Refused);
            let status = Status::InvalidArgument(QueryError::InvalidSortOption.to_string());
            let version = proxy.forward.upstream.lowest_version();
            return Err(Box::new(Ok(error_response(&status, version))));
        }
        let understood = understand(proxy, &parts, &body);
        let original = Request::from_parts(parts, Outgoing::whole(body));
        match understood {
            Ok((request, format)) => Ok(ReceivedRead {
                request,
                format,
                original,
            }),
            Err(reason) => Err(not_understood(proxy, original, reason, record).await),
        }
    }

    fn refuse(&self, _request: &ReadRequest, status: &Status) -> Response<ResponseBody> {
        error_response(status, Some(self.version))
    }

    fn respond(
        &self,
        _request: &ReadRequest,
        header: ResponseHeader,
        selection: Selection,
        entries: EntrySource<'_>,
    ) -> Result<Response<ResponseBody>, Unservable> {
        // The gateway has the response from etcd in gRPC.
        let answer = Answer::new(header, selection);
        if answer.len() > MAX_RESPONSE_BYTES {
            return Err(Unservable::TooLong(answer.len()));
        }
        let answer = JsonAnswer::new(header, answer.into_selection());
        let (body, length) = json_body(answer, entries)?;
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
        Ok(response)
    }

    async fn fetch(
        &self,
        proxy: &Proxy,
        _request: &mut ReadRequest,
        original: Request<Outgoing>,
        record: &mut CallRecord,
    ) -> CallResult {
        forward(proxy, original, record).await
    }
}

/// The read that every etcd reads in the same way from this request, and the words of its response.
///
/// # Errors
/// Reason for which the request must be forwarded.
fn understand(proxy: &Proxy, parts: &Parts, body: &[u8]) -> Result<(ReadRequest, Json), Reason> {
    let (metadata, headers) = call_metadata(&parts.headers).ok_or(Reason::Undecodable)?;
    let version = gateway_version(proxy.forward.upstream.lowest_version())?;
    let query = parse(body, is_protojson(version)).map_err(|_| Reason::Undecodable)?;
    let request = ReadRequest {
        query,
        metadata,
        headers,
    };
    Ok((request, Json { version }))
}

/// Forwards a request that is not understood, for `reason`.
async fn not_understood(
    proxy: &Proxy,
    request: Request<Outgoing>,
    reason: Reason,
    record: &mut CallRecord,
) -> Box<CallResult> {
    record.outcome = Outcome::Forwarded(reason);
    Box::new(forward(proxy, request, record).await)
}

/// Why a body was not read.
enum UnreadBody {
    /// The body is longer than the bound: the part that was read, and the rest.
    Long(Outgoing),
    Refused(Status, Outcome),
}

/// Reads the body. `record` counts its bytes as they arrive.
async fn read_body(
    proxy: &Proxy,
    parts: &Parts,
    mut body: Incoming,
    record: &mut CallRecord,
) -> Result<Bytes, UnreadBody> {
    let is_long = body.size_hint().lower() > MAX_BODY_BYTES as u64;
    if is_long || parts.headers.contains_key("upgrade") {
        return Err(UnreadBody::Long(Outgoing::incoming(body)));
    }
    let deadline: Instant = record.begun() + proxy.request_timeout;
    let mut read = BytesMut::new();
    loop {
        let Ok(frame) = tokio::time::timeout_at(deadline, body.frame()).await else {
            let outcome = Outcome::Cancelled(Reason::BrokenRequest);
            return Err(UnreadBody::Refused(Status::RequestTimeout, outcome));
        };
        let data = match frame {
            None => return Ok(read.freeze()),
            Some(Err(error)) => {
                let outcome = Outcome::Cancelled(Reason::BrokenRequest);
                return Err(UnreadBody::Refused(
                    Status::InvalidArgument(error.to_string()),
                    outcome,
                ));
            }
            Some(Ok(frame)) => frame.into_data().unwrap_or_default(),
        };
        read.extend_from_slice(&data);
        if read.len() > MAX_BODY_BYTES {
            return Err(UnreadBody::Long(Outgoing::resumed(read.freeze(), body)));
        }
        if record.bytes.try_grow(data.len() as u64).is_err() {
            let outcome = Outcome::Shed(Reason::BufferBytes);
            return Err(UnreadBody::Refused(Status::BufferBytes, outcome));
        }
    }
}

/// Forwards the request as it is, in turn with other small reads.
async fn forward(proxy: &Proxy, mut request: Request<Outgoing>, record: &mut CallRecord) -> CallResult {
    record.begin_forward(request.headers_mut());
    let forward = &proxy.forward;
    let gate = Gate {
        slots: &forward.small,
        account: record.bytes.account(),
        deadline: record.deadline(),
    };
    let version = forward.upstream.lowest_version();
    let _slot = match forward.slot(ConnectionClass::Check, Some(gate)).await {
        Ok(slot) => slot,
        Err(error) => {
            let status = error.status();
            record.outcome = outcome_of(&status).unwrap_or(record.outcome);
            return Ok(error_response(&status, version));
        }
    };
    Ok(Box::pin(forward_http1_body(
        forward,
        request,
        Method::Json,
        record.bytes.account(),
    ))
    .await)
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

/// The fields under both of their names.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
#[derive(Default)]
struct RangeFields {
    key: String,
    #[serde(alias = "rangeEnd")]
    range_end: String,
    limit: Int64,
    revision: Int64,
    #[serde(alias = "sortOrder")]
    sort_order: Enum,
    #[serde(alias = "sortTarget")]
    sort_target: Enum,
    serializable: bool,
    #[serde(alias = "keysOnly")]
    keys_only: bool,
    #[serde(alias = "countOnly")]
    count_only: bool,
    #[serde(alias = "minModRevision")]
    min_mod_revision: Int64,
    #[serde(alias = "maxModRevision")]
    max_mod_revision: Int64,
    #[serde(alias = "minCreateRevision")]
    min_create_revision: Int64,
    #[serde(alias = "maxCreateRevision")]
    max_create_revision: Int64,
}

/// Reads the body of a request. With `any_base64`, the forms without padding and with the characters of URLs are accepted,
/// too: etcd 3.6 and later accept them.
///
/// # Errors
/// [`NotUnderstood`] if only etcd can read it.
pub(super) fn parse(body: &[u8], any_base64: bool) -> Result<RangeQuery, NotUnderstood> {
    // serde reads a list as the fields in their order, too.
    if body.trim_ascii_start().first() != Some(&b'{') {
        return Err(NotUnderstood);
    }
    let fields: RangeFields = serde_json::from_slice(body).map_err(|_| NotUnderstood)?;
    Ok(RangeQuery {
        key: decode(&fields.key, any_base64)?,
        range_end: decode(&fields.range_end, any_base64)?,
        limit: fields.limit.value()?,
        revision: fields.revision.value()?,
        sort_order: fields.sort_order.value(&SortOrder::NAMES)?,
        sort_target: fields.sort_target.value(&SortTarget::NAMES)?,
        serializable: fields.serializable,
        keys_only: fields.keys_only,
        count_only: fields.count_only,
        min_mod_revision: fields.min_mod_revision.value()?,
        max_mod_revision: fields.max_mod_revision.value()?,
        min_create_revision: fields.min_create_revision.value()?,
        max_create_revision: fields.max_create_revision.value()?,
    })
}

/// Whether the body names a sort target by a number that etcd does not know, in whatever text is around it.
pub(super) fn names_unknown_sort_target(body: &[u8]) -> bool {
    let mut values = serde_json::Deserializer::from_slice(body).into_iter::<Value>();
    let Some(Ok(Value::Object(fields))) = values.next() else {
        return false;
    };
    let known = 0..i64::try_from(SortTarget::NAMES.len()).unwrap_or(0);
    ["sort_target", "sortTarget"]
        .iter()
        .filter_map(|name| fields.get(*name)?.as_i64())
        .any(|number| !known.contains(&number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_post_to_the_path_alone_is_a_range() {
        let is_range = |method: &str, uri: &str| {
            let request = Request::builder().method(method).uri(uri);
            is_json_range(&request.body(()).unwrap())
        };
        assert!(is_range("POST", "/v3/kv/range"));
        for (method, uri) in [
            ("GET", "/v3/kv/range"),
            ("POST", "/v3/kv/range?key=a"),
            ("POST", "/v3/kv/put"),
            ("POST", "/v3/kv/range/"),
        ] {
            assert!(!is_range(method, uri), "{method} {uri}");
        }
    }

    #[tokio::test]
    async fn status_is_written_as_the_gateway_of_the_version_does() {
        let text = async |version| {
            let status = Status::InvalidArgument("a \"key\"".to_owned());
            let response = error_response(&status, version);
            assert_eq!(response.status(), http::StatusCode::BAD_REQUEST);
            let length = response.headers()[CONTENT_LENGTH].to_str().unwrap().to_owned();
            let body = response.into_body().collect().await.unwrap().to_bytes();
            assert_eq!(length, body.len().to_string());
            String::from_utf8(body.to_vec()).unwrap()
        };
        let new = r#"{"code":3,"message":"a \"key\""}"#;
        assert_eq!(text(None).await, new);
        assert_eq!(text(Some(Version::new(3, 7, 0))).await, new);
        let old = r#"{"error":"a \"key\"","code":3,"message":"a \"key\""}"#;
        assert_eq!(text(Some(Version::new(3, 5, 0))).await, old);
    }

    fn parsed(body: &str) -> Result<RangeQuery, NotUnderstood> {
        parse(body.as_bytes(), true)
    }

    #[test]
    fn fields_are_read_under_both_names_and_in_all_forms() {
        let query = RangeQuery {
            key: "a".into(),
            range_end: "\0".into(),
            limit: -1,
            revision: i64::MAX,
            sort_order: 2,
            sort_target: 3,
            serializable: true,
            keys_only: true,
            count_only: true,
            min_mod_revision: 1,
            max_mod_revision: 2,
            min_create_revision: 3,
            max_create_revision: 4,
        };
        for body in [
            r#"{"key":"YQ==","range_end":"AA==","limit":-1,"revision":"9223372036854775807","sort_order":"DESCEND",
                "sort_target":"MOD","serializable":true,"keys_only":true,"count_only":true,"min_mod_revision":1,
                "max_mod_revision":"2","min_create_revision":3,"max_create_revision":4}"#,
            r#" {"rangeEnd":"AA==","key":"YQ\u003d=","limit":"-1","revision":9223372036854775807,"sortOrder":2,
                "sortTarget":3,"serializable":true,"keysOnly":true,"countOnly":true,"minModRevision":"1",
                "maxModRevision":2,"minCreateRevision":"3","maxCreateRevision":"4"} "#,
        ] {
            assert_eq!(parsed(body), Ok(query.clone()), "{body}");
        }
        assert_eq!(parsed("{}"), Ok(RangeQuery::default()));
    }

    #[test]
    fn base64_without_padding_or_for_urls_is_read_only_where_etcd_reads_it() {
        for (text, bytes) in [
            ("_-8=", &b"\xff\xef"[..]),
            ("_-8", b"\xff\xef"),
            ("/+8", b"\xff\xef"),
        ] {
            let body = format!(r#"{{"key":"{text}"}}"#);
            assert_eq!(parsed(&body).unwrap().key, bytes, "{text}");
            assert_eq!(parse(body.as_bytes(), false), Err(NotUnderstood), "{text}");
        }
        assert_eq!(parse(br#"{"key":"/+8="}"#, false).unwrap().key, &b"\xff\xef"[..]);
    }

    #[test]
    fn unknown_numbers_of_sort_targets_are_found_in_any_text() {
        for body in [
            r#"{"sort_target":5}"#,
            r#"{"a":null,"sortTarget":-1}{}"#,
            r#"{"sort_target":1,"sort_target":9} x"#,
        ] {
            assert!(names_unknown_sort_target(body.as_bytes()), "{body}");
        }
        for body in ["", "[5]", "{}", r#"{"sort_target":4}"#, r#"{"sort_target":"9"}"#] {
            assert!(!names_unknown_sort_target(body.as_bytes()), "{body}");
        }
    }

    #[test]
    fn what_versions_read_differently_is_left_to_etcd() {
        for body in [
            "",
            "{",
            "[]",
            r#" ["YQ=="]"#,
            "null",
            "{} x",
            "{}{}",
            r#"{"key":null}"#,
            r#"{"key":"YQ==","key":"YQ=="}"#,
            r#"{"range_end":"YQ==","rangeEnd":"YQ=="}"#,
            r#"{"other":1}"#,
            r#"{"Key":"YQ=="}"#,
            r#"{"key":"!"}"#,
            r#"{"key":"YR=="}"#,
            r#"{"key":"+_8="}"#,
            r#"{"limit":1.0}"#,
            r#"{"limit":1e2}"#,
            r#"{"limit":"01"}"#,
            r#"{"limit":"+1"}"#,
            r#"{"limit":" 1"}"#,
            r#"{"limit":""}"#,
            r#"{"limit":9223372036854775808}"#,
            r#"{"serializable":"true"}"#,
            r#"{"serializable":1}"#,
            r#"{"sort_order":"descend"}"#,
            r#"{"sort_order":"2"}"#,
            r#"{"sort_order":3}"#,
            r#"{"sort_order":-1}"#,
            r#"{"sort_target":5}"#,
        ] {
            assert_eq!(parsed(body), Err(NotUnderstood), "{body}");
        }
    }
}
