//! Common parts of Ranges and Watches in the JSON of etcd's gateway: headers, values, errors, versions.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD, URL_SAFE, URL_SAFE_NO_PAD};
use bytes::Bytes;
use etcd_wire::grpc::{CallMetadata, metadata::OWN_PREFIX};
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, StatusCode};
use rangecache_base::telemetry::Reason;
use rangecache_upstream::Version;
use serde::Deserialize;

/// First version whose text is known.
const FIRST_VERSION: (u32, u32) = (3, 5);
/// First version that accepts all forms of base64, and whose errors have other fields.
const PROTOJSON_VERSION: (u32, u32) = (3, 6);
/// Headers that change what etcd's gateway does with a request, apart from those that begin with `grpc-`.
const UNKNOWN_EFFECT: [&str; 4] = ["upgrade", "x-http-method-override", "content-encoding", "expect"];

/// A request that only etcd can read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotUnderstood;

/// A number of 64 bits, which may be a string.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Int64 {
    Number(i64),
    Text(String),
}

/// A value of an enum, by number or by name.
#[derive(Deserialize)]
#[serde(untagged)]
pub(super) enum Enum {
    Number(i32),
    Name(String),
}

impl Default for Int64 {
    fn default() -> Int64 {
        Int64::Number(0)
    }
}

impl Default for Enum {
    fn default() -> Enum {
        Enum::Number(0)
    }
}

impl Int64 {
    pub(super) fn value(&self) -> Result<i64, NotUnderstood> {
        match self {
            Int64::Number(number) => Ok(*number),
            Int64::Text(text) => {
                let number: i64 = text.parse().map_err(|_| NotUnderstood)?;
                // Neither `+1` nor `01` nor `-0`, which etcd's versions read differently.
                (number.to_string() == *text)
                    .then_some(number)
                    .ok_or(NotUnderstood)
            }
        }
    }
}

impl Enum {
    pub(super) fn value(&self, names: &[&str]) -> Result<i32, NotUnderstood> {
        let index = match self {
            Enum::Number(number) => usize::try_from(*number).ok().filter(|index| *index < names.len()),
            Enum::Name(name) => names.iter().position(|known| known == name),
        };
        index
            .and_then(|index| i32::try_from(index).ok())
            .ok_or(NotUnderstood)
    }
}

/// Bytes of a base64 text. With `any_base64`, the forms without padding and with the characters of URLs are accepted, too:
/// etcd 3.6 and later accept them.
///
/// # Errors
/// [`NotUnderstood`] if only etcd can read it.
pub(super) fn decode(text: &str, any_base64: bool) -> Result<Bytes, NotUnderstood> {
    let is_of_urls = text.contains(['-', '_']);
    let is_padded = text.len().is_multiple_of(4);
    let engine = match (is_of_urls, is_padded) {
        (false, true) => &STANDARD,
        _ if !any_base64 => return Err(NotUnderstood),
        (false, false) => &STANDARD_NO_PAD,
        (true, true) => &URL_SAFE,
        (true, false) => &URL_SAFE_NO_PAD,
    };
    let bytes = engine.decode(text).map_err(|_| NotUnderstood)?;
    Ok(bytes.into())
}

/// Metadata of the call that the gateway makes of a request with these headers; `None` if only etcd knows.
pub(super) fn call_metadata(headers: &HeaderMap) -> Option<(CallMetadata, HeaderMap)> {
    let mut metadata = HeaderMap::new();
    metadata.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    for (name, value) in headers {
        if name == AUTHORIZATION {
            if metadata.insert(AUTHORIZATION, value.clone()).is_some() {
                return None;
            }
        } else if name.as_str().starts_with("grpc-") || UNKNOWN_EFFECT.contains(&name.as_str()) {
            return None;
        } else if name.as_str().starts_with(OWN_PREFIX) {
            metadata.append(name, value.clone());
        }
    }
    Some((CallMetadata::from_headers(&metadata)?, metadata))
}

/// The lowest version of the endpoints, if its text is known.
///
/// # Errors
/// Reason why etcd must answer.
pub(super) fn gateway_version(lowest: Option<Version>) -> Result<Version, Reason> {
    let version = lowest.ok_or(Reason::VersionUnknown)?;
    let is_known = (version.major, version.minor) >= FIRST_VERSION;
    is_known.then_some(version).ok_or(Reason::Undecodable)
}

/// Whether this version uses protobuf's own library for JSON.
pub(super) fn is_protojson(version: Version) -> bool {
    (version.major, version.minor) >= PROTOJSON_VERSION
}

/// HTTP status of the gateway for the number of a gRPC code.
pub(super) fn http_status(code: u16) -> StatusCode {
    match code {
        0 => StatusCode::OK,
        1 => StatusCode::REQUEST_TIMEOUT,
        3 | 9 | 11 => StatusCode::BAD_REQUEST,
        4 => StatusCode::GATEWAY_TIMEOUT,
        5 => StatusCode::NOT_FOUND,
        6 | 10 => StatusCode::CONFLICT,
        7 => StatusCode::FORBIDDEN,
        8 => StatusCode::TOO_MANY_REQUESTS,
        12 => StatusCode::NOT_IMPLEMENTED,
        14 => StatusCode::SERVICE_UNAVAILABLE,
        16 => StatusCode::UNAUTHORIZED,
        _ => StatusCode::INTERNAL_SERVER_ERROR,
    }
}

/// Last line of a stream that ends with the status in these trailers. The gateway removes white space from it.
pub(super) fn stream_error(trailers: &HeaderMap, is_protojson: bool) -> String {
    let status = tonic::Status::from_header_map(trailers);
    let code = status.as_ref().map_or(2, |status| status.code() as u16);
    let message = serde_json::Value::from(status.as_ref().map_or("", |status| status.message()));
    if is_protojson {
        return format!("{{\"error\":{{\"code\":{code},\"message\":{message}}}}}\n");
    }
    let http = http_status(code);
    let (http_code, reason) = (http.as_u16(), http.canonical_reason().unwrap_or_default());
    format!(
        "{{\"error\":{{\"grpc_code\":{code},\"http_code\":{http_code},\"message\":{message},\
         \"http_status\":\"{reason}\"}}}}"
    )
}
