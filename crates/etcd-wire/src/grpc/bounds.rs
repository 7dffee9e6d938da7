//! Bounds that a client sets on the age of a linearizable read, in its metadata.

use std::time::Duration;

use http::HeaderMap;

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

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

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
}
