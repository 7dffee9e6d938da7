//! Heads of requests: the memory that they take, and copies that outlive their request.

use http::header::{CONTENT_TYPE, HeaderMap, TE};
use http::{HeaderName, HeaderValue, Request, Uri, request::Parts};

use super::metadata::{CREDENTIALS, HeadFields, INSTANCE, remove_own_metadata};

/// Header fields of a call; one with more is refused. Each takes some memory, however short it is, and HPACK sends it in
/// one byte.
pub const MAX_FIELDS: usize = 256;
/// Metadata of the trace that a call belongs to.
const TRACE: [&str; 2] = ["traceparent", "tracestate"];

/// Memory of a request's path and header list, in bytes.
#[must_use]
pub fn head_bytes(uri: &Uri, fields: &HeadFields) -> u64 {
    let path = uri.path_and_query().map_or(0, |path| path.as_str().len());
    path as u64 + fields.bytes
}

/// Returns a head for calls to etcd at `path` with the metadata of `headers`, to be kept for a long time. The fields are
/// copied: those of a received request are parts of the connection's buffers, which they would keep in memory.
#[must_use]
pub fn kept_head(path: &'static str, headers: &HeaderMap) -> Parts {
    let mut kept = HeaderMap::with_capacity(headers.keys_len());
    for (name, value) in headers {
        // Never fails for a name.
        let name = HeaderName::from_bytes(name.as_ref()).unwrap_or_else(|_| name.clone());
        kept.append(name, copied(value));
    }
    remove_own_metadata(&mut kept);
    head_of(path, kept)
}

/// Returns a head for the call to etcd at `path` by which several clients are served, one of which has sent `headers`.
#[must_use]
pub fn shared_head(path: &'static str, headers: &HeaderMap) -> Parts {
    let mut shared = shared_metadata(headers);
    shared.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    shared.insert(TE, HeaderValue::from_static("trailers"));
    head_of(path, shared)
}

/// Returns what a call by which several clients are served has of the metadata in the `headers` of one of them: whom it is for,
/// the rangecaches that it has passed, and its trace. Anything else could make etcd refuse the others.
#[must_use]
pub fn shared_metadata(headers: &HeaderMap) -> HeaderMap {
    let mut shared = HeaderMap::new();
    for name in CREDENTIALS
        .into_iter()
        .chain(TRACE)
        .map(HeaderName::from_static)
        .chain([INSTANCE])
    {
        for value in headers.get_all(&name) {
            shared.append(name.clone(), value.clone());
        }
    }
    shared
}

/// Returns the head of a call to etcd at `path`.
fn head_of(path: &'static str, headers: HeaderMap) -> Parts {
    let (mut head, ()) = Request::new(()).into_parts();
    head.method = http::Method::POST;
    head.uri = Uri::from_static(path);
    head.version = http::Version::HTTP_2;
    head.headers = headers;
    head
}

/// Returns the value with bytes of its own.
fn copied(value: &HeaderValue) -> HeaderValue {
    // Never fails for the bytes of a value.
    let mut copied = HeaderValue::from_bytes(value.as_bytes()).unwrap_or_else(|_| value.clone());
    copied.set_sensitive(value.is_sensitive());
    copied
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;

    use super::*;
    use crate::grpc::{WATCH, metadata::FIELD_BYTES, method::RANGE};

    #[test]
    fn kept_head_has_the_metadata_for_etcd_in_memory_of_its_own() {
        let buffer = Bytes::from(vec![b'v'; 64 << 10]);
        let mut headers = HeaderMap::with_capacity(512);
        let mut token = HeaderValue::from_maybe_shared(buffer.slice(..20)).unwrap();
        token.set_sensitive(true);
        headers.insert("token", token);
        for value in ["a", "b"] {
            headers.append("x-repeated", HeaderValue::from_static(value));
        }
        headers.insert("rangecache-bypass", HeaderValue::from_static("true"));
        let head = kept_head(WATCH, &headers);
        drop(headers);
        assert!(buffer.is_unique(), "the copy keeps no part of the buffer");
        assert_eq!(head.uri, WATCH);
        assert!(head.headers["token"].is_sensitive());
        let repeated: Vec<_> = head.headers.get_all("x-repeated").iter().collect();
        assert_eq!(repeated, ["a", "b"]);
        assert_eq!(head.headers.len(), 3);
        assert!(head.headers.capacity() < 8, "{}", head.headers.capacity());
        let fields = 3 * FIELD_BYTES + 5 + 20 + 2 * 11;
        let kept = HeadFields::of(&head.headers);
        assert_eq!(head_bytes(&head.uri, &kept), (25 + fields) as u64);
    }

    #[test]
    fn shared_head_has_nothing_by_which_one_client_could_make_etcd_refuse_others() {
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("content-type", "application/grpc+proto"),
            ("host", "a"),
            ("host", "b"),
            ("token", "of alice"),
            ("traceparent", "00-1-2-01"),
            ("rangecache-instance", "a"),
            ("rangecache-instance", "b"),
            ("rangecache-check", "true"),
            ("grpc-timeout", "1n"),
            ("content-length", "7"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        let head = shared_head(RANGE, &headers);
        assert_eq!((head.uri.path(), head.method), (RANGE, http::Method::POST));
        let fields = head.headers.iter();
        let fields: Vec<_> = fields
            .map(|(name, value)| (name.as_str(), value.to_str().unwrap()))
            .collect();
        let expected = [
            ("token", "of alice"),
            ("traceparent", "00-1-2-01"),
            ("rangecache-instance", "a"),
            ("rangecache-instance", "b"),
            ("content-type", "application/grpc"),
            ("te", "trailers"),
        ];
        assert_eq!(fields, expected);
    }
}
