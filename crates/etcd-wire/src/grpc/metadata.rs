//! Metadata of a call: what a request's headers say about how it must be handled.

use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue};

use super::bounds::{InvalidBounds, ReadBounds};
use super::fields::{BYPASS, ContentType, HeadFields, Marks, OWN_METADATA};

/// Longest request message of a Range that is decoded, in bytes: two keys and a few numbers. Longer requests are forwarded
/// unread.
pub const MAX_MESSAGE_BYTES: usize = 256 << 10;
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
    /// Another rangecache has sent or forwarded the call.
    pub is_of_rangecache: bool,
    /// Meaning of a call that another rangecache makes itself.
    pub marks: Marks,
    /// The bounds within which a linearizable read needs no quorum check.
    pub bounds: Result<ReadBounds, InvalidBounds>,
    /// Content type of the request, and so of its response.
    pub content_type: HeaderValue,
}

impl CallMetadata {
    /// Reads the metadata; `None` where it contains anything that etcd might treat in a way of its own.
    #[must_use]
    pub fn from_headers(headers: &HeaderMap) -> Option<CallMetadata> {
        CallMetadata::from_fields(&HeadFields::of(headers), headers)
    }

    /// The metadata of a call with these `fields`, those of `headers`; `None` where they contain anything that etcd might treat
    /// in a way of its own.
    #[must_use]
    pub fn from_fields(fields: &HeadFields, headers: &HeaderMap) -> Option<CallMetadata> {
        let ContentType::Known(content_type) = fields.content_type else {
            return None;
        };
        if fields.is_unusual {
            return None;
        }
        Some(CallMetadata {
            timeout: fields.timeout.ok()?,
            has_credentials: fields.has_credentials,
            require_leader: fields.require_leader,
            bypass: fields.bypass,
            is_of_rangecache: fields.is_of_rangecache,
            marks: fields.marks,
            bounds: if fields.is_addressed {
                ReadBounds::from_headers(headers)
            } else {
                Ok(ReadBounds::default())
            },
            content_type: HeaderValue::from_static(content_type),
        })
    }
}

/// Whether a request with these headers reads around the cache.
#[must_use]
pub fn is_bypassing(headers: &HeaderMap) -> bool {
    headers
        .get(BYPASS.0)
        .is_some_and(|value| value.as_bytes() == BYPASS.1)
}

/// Makes a request with these headers read around the cache of the rangecache that it is sent to, or not.
pub fn set_bypass(headers: &mut HeaderMap, bypasses: bool) {
    if bypasses {
        headers.insert(BYPASS.0, HeaderValue::from_static("true"));
    } else {
        headers.remove(BYPASS.0);
    }
}

/// Removes the metadata that addresses rangecache: etcd does not know it.
pub fn remove_own_metadata(headers: &mut HeaderMap) {
    for name in OWN_METADATA {
        headers.remove(name);
    }
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
