//! Metadata of a call: what a request's header fields say about how it must be handled, the bounds that a client sets on the age
//! of a linearizable read, the memory that the fields take, and copies of them that outlive their request. The fields are read in
//! one pass: a call is decided by a dozen of them, and each look-up by name costs more than the field.

use std::time::Duration;

use http::header::{CONTENT_TYPE, HeaderMap, TE};
use http::{HeaderName, HeaderValue, Request, Uri, request::Parts};

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

/// Metadata that carries credentials.
pub const CREDENTIALS: [&str; 2] = ["token", "authorization"];
/// Beginning of the names of metadata that address rangecache.
pub const OWN_PREFIX: &str = "rangecache-";
/// Metadata with the identities of the rangecaches that a request has passed, one value each.
pub const INSTANCE: HeaderName = HeaderName::from_static("rangecache-instance");
/// Metadata with which a client reads around the cache, and its value.
pub const BYPASS: (&str, &[u8]) = ("rangecache-bypass", b"true");
/// Metadata of the watch with which a rangecache follows its endpoint, and its value: another rangecache ends it as soon as it has
/// lost its own.
pub const FEED: (&str, &[u8]) = ("rangecache-feed", b"true");
/// Metadata of the health check by which a rangecache finds out whether its endpoint serves, and its value: another rangecache
/// answers it for the members behind it.
pub const HEALTH: (&str, &[u8]) = ("rangecache-health", b"true");
/// Metadata of each quorum check that a rangecache makes itself, and its value: another rangecache answers it by one of its own. A
/// client may read the same key.
pub const CHECK: (&str, &[u8]) = ("rangecache-check", b"true");
/// Metadata of the quorum check that a rangecache makes periodically, for which no read of its clients waits, and its value: another
/// rangecache answers it by the next check that it makes for others, if it makes one within [`PROBE_WAIT`](super::hub::PROBE_WAIT).
pub const PROBE: (&str, &[u8]) = ("rangecache-probe", b"true");
/// Metadata with which a client asks what answered its read, and its value.
pub const EXPLAIN: (&str, &[u8]) = ("rangecache-explain", b"true");
/// Names of metadata that address rangecache, and are not forwarded.
pub(super) const OWN_METADATA: [&str; 8] = [
    BYPASS.0,
    CHECK.0,
    EXPLAIN.0,
    FEED.0,
    HEALTH.0,
    PROBE.0,
    MIN_REVISION,
    MAX_STALENESS,
];

/// Memory of a header field in addition to its name and value, in bytes: its entry in a table that may be half empty.
pub(super) const FIELD_BYTES: usize = 160;

/// Meaning of the header fields of a request. Where a field is repeated, its first value counts, but of the timeout the last one, as at
/// etcd.
#[derive(Clone, Copy, Debug)]
pub struct HeadFields {
    pub(super) content_type: ContentType,
    pub(super) timeout: Result<Option<Duration>, MalformedTimeout>,
    /// There is a token or another credential.
    pub has_credentials: bool,
    pub(super) require_leader: bool,
    /// There is metadata that addresses rangecache.
    pub(super) is_addressed: bool,
    /// Another rangecache has sent or forwarded the request, or this one.
    pub is_of_rangecache: bool,
    pub(super) bypass: bool,
    /// The client asks what answers its read.
    pub explains: bool,
    /// Meaning of a call that another rangecache makes itself.
    pub marks: Marks,
    /// There is something that etcd might treat in a way of its own.
    pub(super) is_unusual: bool,
    /// Memory of the fields, in bytes.
    pub bytes: u64,
}

/// Meaning of a call that another rangecache makes itself, as its metadata says.
#[derive(Clone, Copy, Debug, Default)]
pub struct Marks {
    /// A watch by which it follows this one ([`FEED`]).
    pub feed: bool,
    /// A check whether this one serves ([`HEALTH`]).
    pub health: bool,
    /// A quorum check ([`CHECK`]).
    pub check: bool,
    /// A quorum check for which no read of its clients waits ([`PROBE`]).
    pub probe: bool,
}

/// Content type of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ContentType {
    /// gRPC's, as clients of etcd send it.
    Known(&'static str),
    /// Another one of gRPC.
    Grpc,
    /// None, or another one.
    Other,
}

impl ContentType {
    fn of(value: &[u8]) -> ContentType {
        match value {
            b"application/grpc" => ContentType::Known("application/grpc"),
            b"application/grpc+proto" => ContentType::Known("application/grpc+proto"),
            _ if value.starts_with(b"application/grpc") => ContentType::Grpc,
            _ => ContentType::Other,
        }
    }
}

impl HeadFields {
    /// Reads the fields of `headers`.
    #[must_use]
    pub fn of(headers: &HeaderMap) -> HeadFields {
        let mut fields = HeadFields {
            content_type: ContentType::Other,
            timeout: Ok(None),
            has_credentials: false,
            require_leader: false,
            is_addressed: false,
            is_of_rangecache: false,
            bypass: false,
            explains: false,
            marks: Marks::default(),
            is_unusual: false,
            bytes: 0,
        };
        let mut bytes = 0;
        let mut before = None;
        for (name, value) in headers {
            let name = name.as_str();
            bytes += FIELD_BYTES + name.len() + value.len();
            if name.ends_with("-bin") {
                fields.is_unusual |= !is_base64(value.as_bytes());
            }
            // The values of one name follow each other.
            let is_repeated = before.replace(name) == Some(name);
            match name {
                "grpc-timeout" => fields.timeout = parse_timeout(value).map(Some),
                "grpc-encoding" => fields.is_unusual |= value.as_bytes() != b"identity",
                _ if is_repeated => {}
                "content-type" => fields.content_type = ContentType::of(value.as_bytes()),
                // etcd refuses a version that is not text.
                "client-api-version" => fields.is_unusual |= value.to_str().is_err(),
                "hasleader" => fields.require_leader = true,
                _ if CREDENTIALS.contains(&name) => fields.has_credentials = true,
                _ if name == INSTANCE.as_str() => fields.is_of_rangecache = true,
                _ if name.starts_with(OWN_PREFIX) => {
                    let field = (name, value.as_bytes());
                    fields.is_addressed = true;
                    fields.bypass |= field == BYPASS;
                    fields.explains |= field == EXPLAIN;
                    fields.marks.feed |= field == FEED;
                    fields.marks.health |= field == HEALTH;
                    fields.marks.check |= field == CHECK;
                    fields.marks.probe |= field == PROBE;
                }
                _ => {}
            }
        }
        fields.bytes = bytes as u64;
        fields
    }

    /// Whether the content type is gRPC's.
    #[must_use]
    pub fn is_grpc(&self) -> bool {
        self.content_type != ContentType::Other
    }

    /// The client's timeout; `None` without one, and for one that cannot be parsed.
    #[must_use]
    pub fn timeout(&self) -> Option<Duration> {
        self.timeout.ok().flatten()
    }
}

/// `grpc-timeout` is present but cannot be parsed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MalformedTimeout;

/// The client's timeout in the value of `grpc-timeout`.
fn parse_timeout(value: &HeaderValue) -> Result<Duration, MalformedTimeout> {
    let text = value.to_str().map_err(|_| MalformedTimeout)?;
    let (digits, unit) = text.split_at(text.len().saturating_sub(1));
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(MalformedTimeout);
    }
    let number: u64 = digits.parse().map_err(|_| MalformedTimeout)?;
    Ok(match unit {
        "H" => Duration::from_secs(number * 3600),
        "M" => Duration::from_secs(number * 60),
        "S" => Duration::from_secs(number),
        "m" => Duration::from_millis(number),
        "u" => Duration::from_micros(number),
        "n" => Duration::from_nanos(number),
        _ => return Err(MalformedTimeout),
    })
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

/// Metadata: lowest revision that suffices.
pub(super) const MIN_REVISION: &str = "rangecache-min-revision";
/// Metadata: longest time for which the response may have lacked a write.
pub(super) const MAX_STALENESS: &str = "rangecache-max-staleness";

/// A read's bounds. All of them must hold for an answer without a quorum check; without any, each read needs one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadBounds {
    /// From [`MIN_REVISION`].
    pub min_revision: Option<i64>,
    /// From [`MAX_STALENESS`].
    pub max_staleness: Option<Duration>,
}

/// Why bounds are not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBounds {
    /// Not a revision.
    #[error(
        "rangecache-min-revision must be a revision of etcd: one whole number from 1 to 9223372036854775807"
    )]
    MinRevision,
    /// Not a duration.
    #[error("rangecache-max-staleness must be one duration with its unit, such as 500ms, 2s or 1m")]
    MaxStaleness,
    /// The read is serializable, so that etcd may answer it with any older state.
    #[error(
        "rangecache-min-revision and rangecache-max-staleness are for linearizable reads: leave serializable out, or the \
         metadata"
    )]
    Serializable,
}

impl ReadBounds {
    /// Reads the metadata.
    ///
    /// # Errors
    /// [`InvalidBounds`] for a value that is malformed or given twice.
    pub fn from_headers(headers: &HeaderMap) -> Result<ReadBounds, InvalidBounds> {
        Ok(ReadBounds {
            min_revision: only(headers, MIN_REVISION, revision).ok_or(InvalidBounds::MinRevision)?,
            max_staleness: only(headers, MAX_STALENESS, duration).ok_or(InvalidBounds::MaxStaleness)?,
        })
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        *self == ReadBounds::default()
    }
}

/// The only value of `name`, parsed; `None` if it is invalid, `Some(None)` without one.
fn only<T>(headers: &HeaderMap, name: &str, parse: impl Fn(&str) -> Option<T>) -> Option<Option<T>> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else {
        return Some(None);
    };
    if values.next().is_some() {
        return None;
    }
    Some(Some(parse(value.to_str().ok()?)?))
}

fn revision(text: &str) -> Option<i64> {
    let is_digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    text.parse().ok().filter(|revision| is_digits && *revision > 0)
}

fn duration(text: &str) -> Option<Duration> {
    humantime::parse_duration(text).ok()
}

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
    use http::HeaderValue;

    use super::*;
    use crate::grpc::{CallMetadata, WATCH, method::RANGE};

    fn metadata(of: &[(&'static str, &'static str)]) -> Option<CallMetadata> {
        CallMetadata::from_headers(&headers(of))
    }

    fn fields(of: &[(&'static str, &'static str)]) -> HeadFields {
        HeadFields::of(&headers(of))
    }

    fn headers(of: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in of {
            headers.append(
                HeaderName::from_static(name),
                HeaderValue::from_bytes(value.as_bytes()).unwrap(),
            );
        }
        headers
    }

    #[test]
    fn content_type_decides_what_is_grpc_and_what_memory_may_answer() {
        for (value, is_grpc, may_answer) in [
            ("application/grpc", true, true),
            ("application/grpc+proto", true, true),
            ("application/grpc+json", true, false),
            ("application/json", false, false),
        ] {
            let of = [("content-type", value)];
            let metadata = metadata(&of);
            assert_eq!(
                (fields(&of).is_grpc(), metadata.is_some()),
                (is_grpc, may_answer),
                "{value}"
            );
            if let Some(metadata) = metadata {
                assert_eq!(metadata.content_type, value);
            }
        }
        assert!(!fields(&[]).is_grpc());
    }

    #[test]
    fn what_etcd_might_treat_in_its_own_way_is_unusual() {
        for (name, value, expected) in [
            ("grpc-encoding", "identity", false),
            ("grpc-encoding", "gzip", true),
            ("client-api-version", "3.7", false),
            ("client-api-version", "3.\u{e9}", true),
            ("x-data-bin", "AAAA", false),
            ("x-data-bin", "***", true),
            ("user-agent", "grpc-go/1.81.0", false),
        ] {
            let of = [("content-type", "application/grpc"), (name, value)];
            assert_eq!(fields(&of).is_unusual, expected, "{name}: {value}");
            assert_eq!(metadata(&of).is_none(), expected, "{name}: {value}");
        }
    }

    #[test]
    fn every_value_of_binary_metadata_the_last_timeout_and_the_first_of_others_count() {
        assert!(fields(&[("x-bin", "AAAA"), ("x-bin", "*")]).is_unusual);
        // etcd takes the last one, and refuses the call.
        assert!(fields(&[("grpc-encoding", "identity"), ("grpc-encoding", "gzip")]).is_unusual);
        let repeated = fields(&[
            ("grpc-timeout", "5S"),
            ("grpc-timeout", "1S"),
            ("rangecache-explain", "false"),
            ("rangecache-explain", "true"),
        ]);
        assert_eq!(repeated.timeout(), Some(Duration::from_secs(1)));
        assert!(!repeated.is_unusual && !repeated.explains && repeated.is_addressed);
    }

    #[test]
    fn credentials_leader_and_own_metadata_are_found() {
        for (name, value) in [("token", "t"), ("authorization", "a")] {
            assert!(fields(&[(name, value)]).has_credentials, "{name}");
        }
        let none = fields(&[("content-type", "application/grpc"), ("rangecaches", "x")]);
        assert!(
            !none.has_credentials && !none.require_leader && !none.is_addressed && !none.is_of_rangecache
        );
        assert!(fields(&[("hasleader", "true")]).require_leader);
        let of_another = fields(&[("rangecache-instance", "x")]);
        assert!(of_another.is_of_rangecache && !of_another.is_addressed);
        assert!(fields(&[("rangecache-bypass", "true")]).bypass);
        assert!(!fields(&[("rangecache-bypass", "yes")]).bypass);
        assert!(fields(&[("rangecache-explain", "true")]).explains);
    }

    #[test]
    fn malformed_timeout_is_none_and_leaves_the_call_to_etcd() {
        let of = [("content-type", "application/grpc"), ("grpc-timeout", "5x")];
        assert_eq!(fields(&of).timeout(), None);
        assert!(metadata(&of).is_none());
    }

    #[test]
    fn bytes_are_those_of_names_values_and_the_table() {
        let expected = 2 * FIELD_BYTES + "token".len() + "abc".len() + "te".len() + "trailers".len();
        assert_eq!(
            fields(&[("token", "abc"), ("te", "trailers")]).bytes,
            expected as u64
        );
    }

    #[test]
    fn timeouts_are_parsed_by_unit_and_malformed_ones_rejected() {
        let parse = |text| parse_timeout(&HeaderValue::from_static(text));
        assert_eq!(parse("5S"), Ok(Duration::from_secs(5)));
        assert_eq!(parse("99999999H"), Ok(Duration::from_secs(99_999_999 * 3600)));
        assert_eq!(parse("250m"), Ok(Duration::from_millis(250)));
        assert_eq!(parse("1n"), Ok(Duration::from_nanos(1)));
        for text in ["", "S", "5", "5x", "-5S", "123456789S", "5 S"] {
            assert_eq!(parse(text), Err(MalformedTimeout), "{text}");
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

    fn bounds(entries: &[(&'static str, &'static str)]) -> Result<ReadBounds, InvalidBounds> {
        let mut headers = HeaderMap::new();
        for (name, value) in entries {
            headers.append(*name, HeaderValue::from_static(value));
        }
        ReadBounds::from_headers(&headers)
    }

    #[test]
    fn bounds_are_a_revision_and_a_duration() {
        assert!(bounds(&[]).unwrap().is_empty());
        let both = bounds(&[(MIN_REVISION, "9223372036854775807"), (MAX_STALENESS, "500ms")]).unwrap();
        assert_eq!(both.min_revision, Some(i64::MAX));
        assert_eq!(both.max_staleness, Some(Duration::from_millis(500)));
        assert_eq!(
            bounds(&[(MAX_STALENESS, "0s")]).unwrap().max_staleness,
            Some(Duration::ZERO)
        );
    }

    #[test]
    fn invalid_bounds_are_refused() {
        for value in [
            "",
            "0",
            "-1",
            "+5",
            "1.5",
            "0x10",
            " 7",
            "9223372036854775808",
            "now",
        ] {
            assert_eq!(
                bounds(&[(MIN_REVISION, value)]),
                Err(InvalidBounds::MinRevision),
                "{value:?}"
            );
        }
        for value in ["", "5", "-1s", "soon", "500 parsecs"] {
            assert_eq!(
                bounds(&[(MAX_STALENESS, value)]),
                Err(InvalidBounds::MaxStaleness),
                "{value:?}"
            );
        }
        let twice = [(MIN_REVISION, "5"), (MIN_REVISION, "5")];
        assert_eq!(bounds(&twice), Err(InvalidBounds::MinRevision));
    }

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
