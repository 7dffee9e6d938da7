//! etcd's version, and what may be trusted from which version on.

use std::fmt;
use std::str::FromStr;

/// A released version, `major.minor.patch`; what follows the patch (`-rc.1`, `+git`) is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Patch.
    pub patch: u32,
}

/// A text that is no version.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a version like 3.7.3")]
pub struct NotAVersion(String);

impl Version {
    /// Shorthand for tests and tables.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Version {
        Version { major, minor, patch }
    }

    /// Whether a watch progress notification may be believed (etcd 15220: progress ahead of its events; etcd 17507: no
    /// answer on a quiet new watch): from 3.4.31, 3.5.13 and 3.6.0 on.
    #[must_use]
    pub fn progress_is_trusted(self) -> bool {
        match (self.major, self.minor) {
            (3, 4) => self.patch >= 31,
            (3, 5) => self.patch >= 13,
            _ => self >= Version::new(3, 6, 0),
        }
    }

    /// Whether the server has KV.RangeStream (KEP-5966).
    #[must_use]
    pub fn has_range_stream(self) -> bool {
        self >= Version::new(3, 7, 0)
    }
}

impl FromStr for Version {
    type Err = NotAVersion;

    fn from_str(text: &str) -> Result<Version, NotAVersion> {
        let refused = || NotAVersion(text.to_owned());
        let mut parts = text.trim_start_matches('v').splitn(3, '.');
        let mut number = |digits_only: bool| -> Option<u32> {
            let part = parts.next()?;
            let end = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
            if digits_only && end != part.len() {
                return None;
            }
            part[..end].parse().ok()
        };
        let major = number(true).ok_or_else(refused)?;
        let minor = number(true).ok_or_else(refused)?;
        let patch = number(false).ok_or_else(refused)?;
        Ok(Version { major, minor, patch })
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read() {
        assert_eq!("3.7.3".parse(), Ok(Version::new(3, 7, 3)));
        assert_eq!("v3.6.0-rc.4".parse(), Ok(Version::new(3, 6, 0)));
        assert_eq!("3.5.35+git".parse(), Ok(Version::new(3, 5, 35)));
        for text in ["", "3", "3.x.1", "3.5", "3.5.", "latest"] {
            assert!(text.parse::<Version>().is_err(), "{text}");
        }
    }

    #[test]
    fn the_gate_opens_where_progress_was_mended() {
        let trusted = |text: &str| text.parse::<Version>().unwrap().progress_is_trusted();
        for text in [
            "3.4.31", "3.4.40", "3.5.13", "3.5.35", "3.6.0", "3.6.16", "3.7.3", "4.0.0",
        ] {
            assert!(trusted(text), "{text}");
        }
        for text in ["3.3.99", "3.4.23", "3.4.30", "3.5.0", "3.5.12", "2.3.8"] {
            assert!(!trusted(text), "{text}");
        }
    }
}
