//! Statuses that rangecache itself returns: the one mapping from a cause to gRPC's code and text.

use std::time::Duration;

use base64::{Engine, engine::general_purpose::STANDARD_NO_PAD};
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tonic_types::{ErrorDetails, StatusExt as _};

use super::metadata::MAX_FIELDS;

/// Metadata that carries the status code.
pub const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
/// Metadata that carries the status text, percent-encoded.
pub const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");

/// Metadata that carries the status with its details, encoded as `google.rpc.Status`.
const GRPC_STATUS_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");
/// Time after which a call may be tried again: a mirror has been resumed by then, calls that waited for a turn have had one,
/// and buffers are free again.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// ASCII that gRPC over HTTP/2 percent-encodes in the status text. All that is not ASCII is encoded, too.
const ENCODED: &AsciiSet = &CONTROLS.add(b'%');

/// Longest response message that etcd's gRPC server sends, in bytes.
pub const MAX_RESPONSE_BYTES: u64 = i32::MAX as u64;

/// The codes used here, as gRPC numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// The request is malformed.
    InvalidArgument = 3,
    /// The client's timeout expired.
    DeadlineExceeded = 4,
    /// The client may not make this call.
    PermissionDenied = 7,
    /// A bound on size or memory was reached.
    ResourceExhausted = 8,
    /// The call cannot succeed until the configuration is changed.
    FailedPrecondition = 9,
    /// The revision is compacted or in the future.
    OutOfRange = 11,
    /// The method does not support the request.
    Unimplemented = 12,
    /// A bug, or a response that cannot be decoded.
    Internal = 13,
    /// The call may be tried again.
    Unavailable = 14,
}

/// Why rangecache ends a call itself. The text is what the client gets.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Status {
    /// etcd refuses the request before it reads anything; the text is etcd's.
    #[error("{0}")]
    InvalidArgument(String),
    /// The revision does not exist yet; etcd's text.
    #[error("etcdserver: mvcc: required revision is a future revision")]
    FutureRevision,
    /// The revision has been compacted; etcd's text.
    #[error("etcdserver: mvcc: required revision has been compacted")]
    Compacted,
    /// etcd's RangeStream refuses this kind of request; etcd's text.
    #[error("RangeStream does not support {0}")]
    StreamUnsupported(&'static str),
    /// The client's timeout expired; the text of etcd's gRPC library.
    #[error("context deadline exceeded")]
    DeadlineExceeded,
    /// The response has this many bytes, more than a message may; the text of etcd's gRPC library.
    #[error("grpc: trying to send message larger than max ({0} vs. {MAX_RESPONSE_BYTES})")]
    LargerThanMax(u64),
    /// The request was sent by this rangecache.
    #[error(
        "rangecache: this request has come back to the rangecache that sent it; point its --endpoints at etcd"
    )]
    Loop,
    /// More than `--max-calls` are in flight.
    #[error("rangecache: too many calls are in flight; try again")]
    TooManyCalls,
    /// More than `--forward-max-waiting` reads wait for etcd, or etcd is too busy to get to this one; or too many filtered and
    /// sorted reads wait for memory.
    #[error("rangecache: too many reads wait; try again")]
    TooManyWaiting,
    /// The mirror is behind etcd, and `--when-behind=fail`.
    #[error("rangecache: the mirror is behind etcd; try again")]
    MirrorBehind,
    /// The bytes of the call do not fit `--buffer-max-bytes`.
    #[error("rangecache: requests and responses in flight take too much memory; try again")]
    BufferBytes,
    /// The call has more than [`MAX_FIELDS`] header fields.
    #[error("rangecache: the call has more than {MAX_FIELDS} header fields")]
    TooManyFields,
    /// The call may write, and its listener is one of `--read-only-listen-client-urls`.
    #[error("rangecache: this listener is read-only; send writes and administrative calls to another URL")]
    ReadOnly,
    /// The client of a watch reads so slowly that its bytes do not fit `--buffer-max-bytes`.
    #[error("rangecache: the stream is read too slowly; connect again")]
    UnreadStream,
    /// The client has not completed a request message within `--request-timeout`.
    #[error("rangecache: the request message was not complete in time")]
    RequestTimeout,
    /// The call that was made for several reads ended without a result.
    #[error("rangecache: the shared read was cancelled; try again")]
    SharedCallCancelled,
    /// A sorted response of this many bytes must be read whole before it can be streamed.
    #[error("rangecache: a sorted response of {0} bytes is too long to be streamed")]
    SortedTooLong(u64),
    /// Pages of one stream come from different histories.
    #[error("rangecache: etcd's history was replaced in the middle of the stream; try again")]
    HistoryReplaced,
    /// etcd's response to a Range cannot be decoded.
    #[error("rangecache: etcd's response to a Range could not be decoded")]
    UndecodableResponse,
    /// No endpoint could be reached in time.
    #[error("rangecache: {0}")]
    NoEndpoint(String),
    /// The connection was lost before or in mid-response.
    #[error("rangecache: the connection to etcd was lost: {0}")]
    ConnectionLost(String),
    /// etcd reset the stream, and the client's stream cannot be reset any more.
    #[error("etcd reset the stream: {0}")]
    StreamReset(String),
    /// An endless call is ended because the process stops.
    #[error("rangecache: stopping; connect again")]
    StoppingReconnect,
    /// Memory cannot continue a watch. etcd's clients connect again and resume where they were.
    #[error("rangecache: the watch cannot be continued from memory; connect again")]
    WatchInterrupted,
    /// etcd has no leader, and the client asked for one; etcd's text.
    #[error("etcdserver: no leader")]
    NoLeader,
    /// A bug: the call panicked.
    #[error("rangecache: internal error; see its log")]
    Internal,
}

impl Status {
    /// gRPC's code.
    #[must_use]
    pub fn code(&self) -> Code {
        match self {
            Status::InvalidArgument(_) => Code::InvalidArgument,
            Status::FutureRevision | Status::Compacted => Code::OutOfRange,
            Status::StreamUnsupported(_) => Code::Unimplemented,
            Status::DeadlineExceeded | Status::RequestTimeout => Code::DeadlineExceeded,
            Status::LargerThanMax(_)
            | Status::BufferBytes
            | Status::TooManyFields
            | Status::SortedTooLong(_) => Code::ResourceExhausted,
            Status::ReadOnly => Code::PermissionDenied,
            Status::Loop => Code::FailedPrecondition,
            Status::UndecodableResponse | Status::Internal => Code::Internal,
            Status::TooManyCalls
            | Status::TooManyWaiting
            | Status::MirrorBehind
            | Status::SharedCallCancelled
            | Status::HistoryReplaced
            | Status::NoEndpoint(_)
            | Status::ConnectionLost(_)
            | Status::StreamReset(_)
            | Status::UnreadStream
            | Status::WatchInterrupted
            | Status::NoLeader
            | Status::StoppingReconnect => Code::Unavailable,
        }
    }

    /// The trailers that end a stream with this status.
    #[must_use]
    pub fn trailers(&self) -> HeaderMap {
        let mut trailers = HeaderMap::with_capacity(2);
        self.write_to(&mut trailers);
        trailers
    }

    /// Adds the status to headers or trailers.
    pub fn write_to(&self, headers: &mut HeaderMap) {
        headers.insert(GRPC_STATUS, HeaderValue::from(self.code() as u16));
        headers.insert(GRPC_MESSAGE, percent_encode(&self.to_string()));
        if self.is_passing() {
            headers.insert(GRPC_STATUS_DETAILS, self.retry_details());
        }
    }

    /// Whether the same call may succeed a little later: it was refused because a bound was reached, or memory was behind.
    fn is_passing(&self) -> bool {
        matches!(
            self,
            Status::TooManyCalls | Status::TooManyWaiting | Status::MirrorBehind | Status::BufferBytes
        )
    }

    /// The status with the time after which the call may be tried again.
    fn retry_details(&self) -> HeaderValue {
        let details = ErrorDetails::with_retry_info(Some(RETRY_DELAY));
        let code = tonic::Code::from(self.code() as i32);
        let status = tonic::Status::with_error_details(code, self.to_string(), details);
        let text = STANDARD_NO_PAD.encode(status.details());
        HeaderValue::try_from(text).unwrap_or(HeaderValue::from_static(""))
    }
}

/// The code in these headers or trailers, if they have one.
#[must_use]
pub fn grpc_code(headers: &HeaderMap) -> Option<u16> {
    let status = headers.get(GRPC_STATUS)?;
    status.to_str().ok()?.parse().ok()
}

/// Whether these headers or trailers carry the status of success.
#[must_use]
pub fn is_ok(headers: &HeaderMap) -> bool {
    headers
        .get(GRPC_STATUS)
        .is_some_and(|status| status.as_bytes() == b"0")
}

/// Whether the status of a response shows that the server has refused the call, and so not carried it out:
/// `InvalidArgument`, `PermissionDenied`, `FailedPrecondition` or `Unauthenticated`.
#[must_use]
pub fn is_refused(headers: &HeaderMap) -> bool {
    let status = headers.get(GRPC_STATUS).map(HeaderValue::as_bytes);
    matches!(status, Some(b"3" | b"7" | b"9" | b"16"))
}

/// The trailers of success. etcd's gRPC library sends an empty message along.
#[must_use]
pub fn ok_trailers() -> HeaderMap {
    let mut trailers = HeaderMap::with_capacity(2);
    trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
    trailers.insert(GRPC_MESSAGE, HeaderValue::from_static(""));
    trailers
}

/// The value of [`GRPC_MESSAGE`] for `message`.
fn percent_encode(message: &str) -> HeaderValue {
    let encoded = utf8_percent_encode(message, ENCODED).to_string();
    HeaderValue::try_from(encoded).unwrap_or(HeaderValue::from_static(""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_percent_encoded() {
        assert_eq!(percent_encode("50% of\nä"), "50%25 of%0A%C3%A4");
    }

    #[test]
    fn retryable_causes_are_unavailable() {
        for status in [
            Status::TooManyCalls,
            Status::TooManyWaiting,
            Status::ConnectionLost("x".to_owned()),
            Status::StoppingReconnect,
        ] {
            let trailers = status.trailers();
            assert_eq!(trailers[GRPC_STATUS], "14", "{status}");
            assert_eq!(trailers[GRPC_MESSAGE], status.to_string());
        }
        assert_eq!(Status::BufferBytes.trailers()[GRPC_STATUS], "8");
    }

    #[test]
    fn status_that_names_a_time_for_the_next_try_carries_retry_info() {
        let lasting = [
            Status::LargerThanMax(9),
            Status::SortedTooLong(9),
            Status::ConnectionLost("x".to_owned()),
            Status::ReadOnly,
        ];
        for status in lasting {
            assert!(!status.trailers().contains_key(GRPC_STATUS_DETAILS), "{status}");
        }
        for status in [Status::TooManyCalls, Status::TooManyWaiting, Status::BufferBytes] {
            assert!(status.trailers().contains_key(GRPC_STATUS_DETAILS), "{status}");
        }
        let trailers = Status::MirrorBehind.trailers();
        assert_eq!(
            trailers[GRPC_STATUS_DETAILS],
            "CA4SMHJhbmdlY2FjaGU6IHRoZSBtaXJyb3IgaXMgYmVoaW5kIGV0Y2Q7IHRyeSBhZ2FpbhowCih0eXBlLmdvb2ds\
             ZWFwaXMuY29tL2dvb2dsZS5ycGMuUmV0cnlJbmZvEgQKAggB"
        );
        let status = tonic::Status::from_header_map(&trailers).unwrap();
        assert_eq!(
            (status.code(), status.message()),
            (tonic::Code::Unavailable, &*Status::MirrorBehind.to_string())
        );
        assert_eq!(
            status.get_details_retry_info().unwrap().retry_delay,
            Some(Duration::from_secs(1))
        );
    }
}
