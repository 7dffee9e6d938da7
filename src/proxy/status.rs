//! gRPC statuses that rangecache answers itself, and the caller's timeout.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue, Response};

use super::body::ResponseBody;

/// Metadata that carries a status.
pub(super) const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// Metadata that carries its text.
pub(super) const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_TIMEOUT: HeaderName = HeaderName::from_static("grpc-timeout");

/// etcd's gRPC server refuses to send a longer message.
pub(super) const MAX_ANSWER_BYTES: u64 = i32::MAX as u64;

/// The codes used here, as gRPC numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Code {
    InvalidArgument = 3,
    DeadlineExceeded = 4,
    ResourceExhausted = 8,
    OutOfRange = 11,
    Unimplemented = 12,
    Internal = 13,
    Unavailable = 14,
}

/// A status with its text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) code: Code,
    pub(super) message: String,
}

impl Status {
    pub(super) fn new(code: Code, message: impl Into<String>) -> Status {
        Status {
            code,
            message: message.into(),
        }
    }

    /// The revision has not come yet, in etcd's words.
    pub(super) fn future_revision() -> Status {
        Status::new(
            Code::OutOfRange,
            "etcdserver: mvcc: required revision is a future revision",
        )
    }

    /// The revision is gone, in etcd's words.
    pub(super) fn compacted() -> Status {
        Status::new(
            Code::OutOfRange,
            "etcdserver: mvcc: required revision has been compacted",
        )
    }

    /// The caller's timeout passed, in the words of etcd's gRPC library.
    pub(super) fn deadline() -> Status {
        Status::new(Code::DeadlineExceeded, "context deadline exceeded")
    }

    /// The answer is longer than a message may be, in the words of etcd's gRPC library.
    pub(super) fn larger_than_max(length_bytes: u64) -> Status {
        Status::new(
            Code::ResourceExhausted,
            format!("grpc: trying to send message larger than max ({length_bytes} vs. {MAX_ANSWER_BYTES})"),
        )
    }

    /// The trailers that end a stream with this status.
    pub(super) fn trailers(&self) -> HeaderMap {
        let mut trailers = HeaderMap::with_capacity(2);
        self.write(&mut trailers);
        trailers
    }

    fn write(&self, headers: &mut HeaderMap) {
        headers.insert(GRPC_STATUS, HeaderValue::from(self.code as u16));
        headers.insert(GRPC_MESSAGE, percent_encode(&self.message));
    }

    /// A response of this status and nothing else ("trailers only").
    pub(super) fn response(&self, content_type: HeaderValue) -> Response<ResponseBody> {
        let mut response = ResponseBody::empty().response(content_type);
        self.write(response.headers_mut());
        response
    }
}

/// Whether these headers or trailers carry the status of success.
pub(super) fn succeeded(headers: &HeaderMap) -> bool {
    headers
        .get(GRPC_STATUS)
        .is_some_and(|status| status.as_bytes() == b"0")
}

/// The trailers of success. etcd's gRPC library sends an empty message along.
pub(super) fn ok_trailers() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
    trailers.insert(GRPC_MESSAGE, HeaderValue::from_static(""));
    trailers
}

/// Bytes outside of printable ASCII, and `%`, as `%XX` (gRPC over HTTP/2).
fn percent_encode(message: &str) -> HeaderValue {
    let mut out = String::with_capacity(message.len());
    for byte in message.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => out.push(char::from(byte)),
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    HeaderValue::from_str(&out).unwrap_or(HeaderValue::from_static(""))
}

/// `grpc-timeout` is there but cannot be read.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct MalformedTimeout;

/// How long the caller waits, if it says so.
pub(super) fn timeout(headers: &HeaderMap) -> Result<Option<Duration>, MalformedTimeout> {
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

#[cfg(test)]
mod tests {
    use super::*;

    fn with_timeout(text: &'static str) -> Result<Option<Duration>, MalformedTimeout> {
        let mut headers = HeaderMap::new();
        headers.insert(GRPC_TIMEOUT, HeaderValue::from_static(text));
        timeout(&headers)
    }

    #[test]
    fn timeouts() {
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
    fn messages_are_percent_encoded() {
        assert_eq!(percent_encode("50% of\nä"), "50%25 of%0A%C3%A4");
    }
}
