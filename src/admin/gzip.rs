//! Compression of pages and metrics: a scrape is a tenth as long with it.

use std::io::Write as _;

use flate2::Compression;
use flate2::write::GzEncoder;
use http::{HeaderMap, HeaderValue, header};

/// Length from which on a body is compressed, in bytes: a shorter one fits a packet.
const MIN_BYTES: usize = 1 << 10;

/// Whether the client takes gzip (RFC 9110, 12.5.3).
pub(super) fn is_accepted(headers: &HeaderMap) -> bool {
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
pub(super) fn mark(headers: &mut HeaderMap) {
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
            assert_eq!(is_accepted(&headers), expected, "{value}");
        }
        assert!(!is_accepted(&HeaderMap::new()));
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
