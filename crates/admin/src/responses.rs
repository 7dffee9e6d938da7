//! Responses: their headers, and their compression: a scrape is a tenth as long with it.

use std::io::Write as _;

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use http::header::{self, HeaderName};
use http::{HeaderMap, HeaderValue, Response, StatusCode};
use http_body_util::Full;
use serde::Serialize;

use super::page;

/// Methods that are served.
const READS: &str = "GET, HEAD";
pub(super) const TEXT: &str = "text/plain; charset=utf-8";
pub(super) const HTML: &str = "text/html; charset=utf-8";
pub(super) const CSS: &str = "text/css; charset=utf-8";
pub(super) const JAVASCRIPT: &str = "text/javascript; charset=utf-8";
pub(super) const JSON: &str = "application/json";
/// Seconds after which a refused client may try again.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");
/// Length from which on a body is compressed, in bytes: a shorter one fits a packet.
const MIN_BYTES: usize = 1 << 10;

pub(super) fn busy() -> Response<Full<Bytes>> {
    let mut response = text(
        StatusCode::SERVICE_UNAVAILABLE,
        TEXT,
        "too many requests wait; try again later\n",
    );
    response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER);
    response
}

pub(super) fn not_allowed() -> Response<Full<Bytes>> {
    let body = format!("this listener serves {READS} alone\n");
    let mut response = text(StatusCode::METHOD_NOT_ALLOWED, TEXT, body);
    let allowed = HeaderValue::from_static(READS);
    response.headers_mut().insert(header::ALLOW, allowed);
    response
}

/// Status, content type and body of a response in JSON.
pub(super) fn json(value: &impl Serialize) -> (StatusCode, &'static str, String) {
    match serde_json::to_string(value) {
        Ok(json) => (StatusCode::OK, JSON, json),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("{error}\n")),
    }
}

pub(super) fn text(
    status: StatusCode,
    content_type: &'static str,
    body: impl Into<Bytes>,
) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body.into()));
    *response.status_mut() = status;
    let headers = [
        (header::CONTENT_TYPE, content_type),
        // Figures change, and so do the files with the next version.
        (header::CACHE_CONTROL, "no-store"),
        (header::CONTENT_SECURITY_POLICY, page::CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ];
    for (name, value) in headers {
        response
            .headers_mut()
            .insert(name, HeaderValue::from_static(value));
    }
    response
}

/// Whether the client takes gzip (RFC 9110, 12.5.3).
pub(super) fn takes_gzip(headers: &HeaderMap) -> bool {
    let values = headers.get_all(header::ACCEPT_ENCODING).iter();
    let codings = values
        .filter_map(|value| value.to_str().ok())
        .flat_map(|value| value.split(','));
    let mut any = None;
    for coding in codings {
        let mut parts = coding.split(';').map(str::trim);
        let name = parts.next().unwrap_or_default();
        let weight = parts.find_map(|part| part.strip_prefix("q="));
        let is_wanted = weight.is_none_or(|weight| weight.parse::<f32>().is_ok_and(|weight| weight > 0.0));
        if name.eq_ignore_ascii_case("gzip") {
            return is_wanted;
        }
        if name == "*" {
            any = Some(is_wanted);
        }
    }
    any.unwrap_or(false)
}

/// The body in gzip; `None` if that is not worth it.
pub(super) fn compressed(body: &str) -> Option<Vec<u8>> {
    if body.len() < MIN_BYTES {
        return None;
    }
    // The fastest: a scrape compresses to a tenth by any.
    let mut encoder = GzEncoder::new(Vec::with_capacity(body.len() / 8), Compression::fast());
    encoder.write_all(body.as_bytes()).ok()?;
    encoder.finish().ok()
}

/// Marks a response as compressed.
pub(super) fn mark_gzip(headers: &mut HeaderMap) {
    headers.insert(header::CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    headers.insert(header::VARY, HeaderValue::from_static("accept-encoding"));
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use flate2::read::GzDecoder;

    use super::*;

    #[test]
    fn gzip_is_accepted_by_name_or_by_any_unless_its_weight_is_zero() {
        for (value, expected) in [
            ("gzip", true),
            ("deflate, GZIP;q=0.5", true),
            ("br, *", true),
            ("gzip;q=0", false),
            ("gzip; q=0.0, *", false),
            ("*;q=0", false),
            ("identity", false),
            ("", false),
        ] {
            let mut headers = HeaderMap::new();
            headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(value));
            assert_eq!(takes_gzip(&headers), expected, "{value}");
        }
        assert!(!takes_gzip(&HeaderMap::new()));
    }

    #[test]
    fn long_body_is_compressed_and_comes_back() {
        assert_eq!(compressed(&"x".repeat(MIN_BYTES - 1)), None);
        let body = "rangecache_calls_total 1\n".repeat(1_000);
        let compressed = compressed(&body).unwrap();
        assert!(compressed.len() < body.len() / 10);
        let mut read = String::new();
        GzDecoder::new(&compressed[..]).read_to_string(&mut read).unwrap();
        assert_eq!(read, body);
    }
}
