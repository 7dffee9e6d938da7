//! Header fields of a request, as far as they decide how its call is handled. They are read in one pass: a call is decided by
//! a dozen of them, and each look-up by name costs more than the field.

use std::time::Duration;

use http::{HeaderMap, HeaderName, HeaderValue};

use super::bounds::{MAX_STALENESS, MIN_REVISION};

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::grpc::CallMetadata;

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
}
