//! Metadata of a call: what a request's headers say about how it must be handled.

use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::bounds::{InvalidBounds, MAX_STALENESS, MIN_REVISION, ReadBounds};

const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// Longest request message of a Range that is decoded, in bytes: two keys and a few numbers. Longer requests are forwarded
/// unread.
pub const MAX_MESSAGE_BYTES: usize = 256 << 10;
/// Metadata that carries credentials.
pub const CREDENTIALS: [&str; 2] = ["token", "authorization"];
/// Beginning of the names of metadata that address rangecache.
pub const OWN_PREFIX: &str = "rangecache-";
/// Metadata with which a client reads around the cache, and its value.
pub const BYPASS: (&str, &[u8]) = ("rangecache-bypass", b"true");
/// Metadata with which a client asks what answered its read, and its value.
const EXPLAIN: (&str, &[u8]) = ("rangecache-explain", b"true");

/// Names of metadata that address rangecache, and are not forwarded.
const OWN_METADATA: [&str; 4] = [BYPASS.0, EXPLAIN.0, MIN_REVISION, MAX_STALENESS];
/// Metadata of a response to a read that asked for it: its outcome and reason, such as `hit; linearizable`.
pub const OUTCOME: HeaderName = HeaderName::from_static("rangecache-outcome");
/// Metadata of a stale response: its age in milliseconds.
pub const AGE_MILLIS: HeaderName = HeaderName::from_static("rangecache-age-ms");

/// Metadata of a Range or RangeStream, as far as it decides how the call is handled.
#[derive(Debug)]
pub struct CallMetadata {
    /// From `grpc-timeout`.
    pub timeout: Option<Duration>,
    /// The client sent a token or other credentials.
    pub has_credentials: bool,
    /// The client asked for a member that has a leader.
    pub require_leader: bool,
    /// The client asked to read around the cache.
    pub bypass: bool,
    /// The bounds within which a linearizable read needs no quorum check.
    pub bounds: Result<ReadBounds, InvalidBounds>,
    /// Content type of the request, and so of its response.
    pub content_type: HeaderValue,
}

impl CallMetadata {
    /// Reads the metadata; `None` where it contains anything that etcd might treat in a way of its own.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Option<CallMetadata> {
        let content_type = match headers.get(CONTENT_TYPE)?.as_bytes() {
            b"application/grpc" => "application/grpc",
            b"application/grpc+proto" => "application/grpc+proto",
            _ => return None,
        };
        if headers
            .get("grpc-encoding")
            .is_some_and(|encoding| encoding.as_bytes() != b"identity")
        {
            return None;
        }
        let (mut bypass, mut bounds) = (false, Ok(ReadBounds::default()));
        for (name, value) in headers {
            if name.as_str().ends_with("-bin") && !is_base64(value.as_bytes()) {
                return None;
            }
            if name.as_str().starts_with(OWN_PREFIX) {
                bypass |= (name.as_str(), value.as_bytes()) == BYPASS;
                bounds = ReadBounds::from_headers(headers);
            }
        }
        // etcd refuses a version that is not text.
        if headers
            .get("client-api-version")
            .is_some_and(|version| version.to_str().is_err())
        {
            return None;
        }
        Some(CallMetadata {
            timeout: timeout(headers).ok()?,
            has_credentials: CREDENTIALS.iter().any(|name| headers.contains_key(*name)),
            require_leader: headers.contains_key("hasleader"),
            bypass,
            bounds,
            content_type: HeaderValue::from_static(content_type),
        })
    }
}

/// Whether a client asks in these headers what answers its read.
#[must_use]
pub fn asks_for_outcome(headers: &HeaderMap) -> bool {
    let asked = headers.get(EXPLAIN.0);
    asked.is_some_and(|value| value.as_bytes() == EXPLAIN.1)
}

/// Removes the metadata that addresses rangecache: etcd does not know it.
pub fn remove_own_metadata(headers: &mut HeaderMap) {
    for name in OWN_METADATA {
        headers.remove(name);
    }
}

/// The client's timeout in these headers; `None` without one, and for one that cannot be parsed.
#[must_use]
pub fn timeout_of(headers: &HeaderMap) -> Option<Duration> {
    timeout(headers).ok().flatten()
}

/// The content type of a gRPC response to a request with these headers.
#[must_use]
pub fn grpc_content_type(headers: &HeaderMap) -> HeaderValue {
    headers
        .get(CONTENT_TYPE)
        .filter(|value| value.as_bytes().starts_with(b"application/grpc"))
        .cloned()
        .unwrap_or(HeaderValue::from_static("application/grpc"))
}

/// Whether a request or response with these headers is gRPC.
#[must_use]
pub fn is_grpc(headers: &HeaderMap) -> bool {
    let content_type = headers.get(CONTENT_TYPE);
    content_type.is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"))
}

/// `grpc-timeout` is present but cannot be parsed.
#[derive(Debug, PartialEq, Eq)]
struct MalformedTimeout;

/// The client's timeout, if it sent one.
fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, MalformedTimeout> {
    let Some(value) = headers.get(GRPC_TIMEOUT) else {
        return Ok(None);
    };
    let text = value.to_str().map_err(|_| MalformedTimeout)?;
    let (digits, unit) = text.split_at(text.len().saturating_sub(1));
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(MalformedTimeout);
    }
    let number: u64 = digits.parse().map_err(|_| MalformedTimeout)?;
    Ok(Some(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return Err(MalformedTimeout),
    }))
}

/// Whether etcd's gRPC library decodes `value` as binary metadata. If not, etcd words the error.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn with_timeout(text: &'static str) -> Result<Option<Duration>, MalformedTimeout> {
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_TIMEOUT, HeaderValue::from_static(text));
        timeout(&headers)
    }

    #[test]
    fn timeouts_are_parsed_by_unit_and_malformed_ones_rejected() {
        assert_eq!(timeout(&HeaderMap::new()), Ok(None));
        assert_eq!(with_timeout("5S"), Ok(Some(Duration::from_secs(5))));
        assert_eq!(
            with_timeout("99999999H"),
            Ok(Some(Duration::from_secs(99_999_999 * 3600)))
        );
        assert_eq!(with_timeout("250m"), Ok(Some(Duration::from_millis(250))));
        assert_eq!(with_timeout("1n"), Ok(Some(Duration::from_nanos(1))));
        for text in ["", "S", "5", "5x", "-5S", "123456789S", "5 S"] {
            assert_eq!(with_timeout(text), Err(MalformedTimeout), "{text}");
        }
    }

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
