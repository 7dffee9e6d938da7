//! etcd's version.

use std::fmt;
use std::str::FromStr;

/// Released version, `major.minor.patch`; a suffix of the patch (`-rc.1`, `+git`) is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Patch.
    pub patch: u32,
}

/// Error for a text that is not a version.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a version like 3.7.3")]
pub struct NotAVersion(String);

impl Version {
    /// Shorthand for tests and tables.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Version {
        Version { major, minor, patch }
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
    fn versions_with_suffixes_are_parsed() {
        assert_eq!("3.7.3".parse(), Ok(Version::new(3, 7, 3)));
        assert_eq!("v3.6.0-rc.4".parse(), Ok(Version::new(3, 6, 0)));
        assert_eq!("3.5.35+git".parse(), Ok(Version::new(3, 5, 35)));
        for text in ["", "3", "3.x.1", "3.5", "3.5.", "latest"] {
            assert!(text.parse::<Version>().is_err(), "{text}");
        }
    }
}
