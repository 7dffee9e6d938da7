//! Versions of etcd, and version gates: capabilities of etcd that rangecache relies on only from certain versions on.
//!
//! [`ALL`] is the only list. The plan of a read and the mirrors check versions against a gate; the page, `/readyz` and
//! `doctor` print the state of every gate. A new gate is one more entry in that list.

use std::{fmt, str::FromStr};

/// A capability of etcd, and what rangecache does with and without it.
#[derive(Debug, PartialEq, Eq)]
pub struct VersionGate {
    /// Identifier in JSON and in `/readyz`, in snake case.
    pub name: &'static str,
    /// Name for people.
    pub title: &'static str,
    /// First version that has the capability in each release line (major.minor), ascending. Every later release line
    /// has it.
    since: &'static [Version],
    /// Endpoints that must have the capability.
    pub need: Need,
    /// Whether reads are forwarded while the gate is closed.
    pub forwards_reads: bool,
    /// Purpose for which rangecache uses the capability.
    pub meaning: &'static str,
    /// Effect of the closed gate on rangecache.
    pub without: &'static str,
    /// Flag that switches use of the capability off, without its dashes.
    pub flag: Option<&'static str>,
}

/// Endpoints that must have a capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// All of them: the lowest version decides.
    Every,
    /// Each for itself: the capability is used on the endpoints that have it.
    Each,
}

/// Facts about one endpoint by which a gate is assessed.
#[derive(Clone, Copy, Debug, Default)]
pub struct EndpointReport {
    /// Version that the endpoint reported last.
    pub version: Option<Version>,
    /// The endpoint answered that it does not have the capability, although its version does.
    pub is_unimplemented: bool,
}

/// State of a gate over all endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateState {
    /// No endpoint has reported its version yet.
    Unknown,
    /// Switched off by the gate's flag.
    Off,
    /// The capability is used on every endpoint; the lowest version is given.
    Open(Version),
    /// The capability is used on some endpoints.
    Partial {
        /// Endpoints that have it.
        open: usize,
        /// All endpoints.
        endpoints: usize,
    },
    /// The versions are too old; the lowest one is given.
    TooOld(Version),
    /// Every endpoint whose version has the capability answered that it is not implemented.
    Unimplemented,
}

/// Defines one static per gate, and the list of all of them.
macro_rules! gates {
    ($($(#[$doc:meta])* $constant:ident = $gate:expr;)*) => {
        $($(#[$doc])* pub static $constant: VersionGate = $gate;)*
        /// Every gate, in the order in which they are shown.
        pub static ALL: &[&VersionGate] = &[$(&$constant),*];
    };
}

gates! {
    /// Watch progress notifications are correct. Before these versions a notification can be ahead of its events
    /// (etcd 15220), and a progress request on a new watch without events gets no response (etcd 17507).
    PROGRESS_NOTIFICATIONS = VersionGate {
        name: "progress_notifications",
        title: "Progress notifications",
        since: &[
            Version::new(3, 4, 31),
            Version::new(3, 5, 13),
            Version::new(3, 6, 0),
        ],
        need: Need::Every,
        forwards_reads: true,
        meaning: "Linearizable reads are answered from memory only if every member's watch progress notifications are correct.",
        without: "linearizable reads are forwarded",
        flag: None,
    };

    /// A watch that begins exactly at the compaction revision delivers the deletes of that revision. Before these
    /// versions compaction removes them (etcd 18089, 19179).
    DELETES_AT_COMPACTION = VersionGate {
        name: "deletes_at_compaction",
        title: "Deletes at the compaction revision",
        since: &[
            Version::new(3, 4, 36),
            Version::new(3, 5, 18),
            Version::new(3, 6, 0),
        ],
        need: Need::Each,
        forwards_reads: false,
        meaning: "A feed resumes at the last event of its mirror even if etcd has compacted up to exactly there.",
        without: "a mirror whose last event is a delete at the compaction revision is loaded again",
        flag: None,
    };

    /// KV.RangeStream (KEP-5966).
    RANGE_STREAM = VersionGate {
        name: "range_stream",
        title: "RangeStream",
        since: &[Version::new(3, 7, 0)],
        need: Need::Each,
        forwards_reads: false,
        meaning: "With RangeStream, loads and large forwarded reads need less memory in etcd. Clients may use it either way.",
        without: "mirrors load by pages, and large reads are forwarded unchanged",
        flag: Some("range-stream"),
    };

    /// A Range with a sort target that etcd does not know gets an error. Before 3.6 it crashes etcd.
    UNKNOWN_SORT_TARGETS = VersionGate {
        name: "unknown_sort_targets",
        title: "Unknown sort targets",
        since: &[Version::new(3, 6, 0)],
        need: Need::Every,
        forwards_reads: false,
        meaning: "A Range with an unknown sort target crashes etcd before 3.6; rangecache then refuses it itself.",
        without: "reads with an unknown sort target are refused",
        flag: None,
    };
}

impl VersionGate {
    /// Whether etcd of `version` has the capability.
    #[must_use]
    pub fn is_open(&self, version: Version) -> bool {
        let same_line = |first: &&Version| (first.major, first.minor) == (version.major, version.minor);
        match self.since.iter().find(same_line) {
            Some(first) => version >= *first,
            None => self.since.last().is_none_or(|last| version > *last),
        }
    }

    /// Versions that have the capability: `3.4.31, 3.5.13, 3.6.0 or later`.
    #[must_use]
    pub fn versions(&self) -> impl fmt::Display + use<> {
        let versions: Vec<_> = self.since.iter().map(ToString::to_string).collect();
        format!("{} or later", versions.join(", "))
    }

    /// State over `endpoints`, of which those that have not reported a version count only in the total; `is_off` if
    /// the gate's flag switches it off.
    #[must_use]
    pub fn assess(&self, is_off: bool, endpoints: &[EndpointReport]) -> GateState {
        let versions = endpoints.iter().filter_map(|endpoint| endpoint.version);
        let Some(lowest) = versions.min() else {
            return GateState::Unknown;
        };
        if is_off {
            return GateState::Off;
        }
        let by_version =
            |endpoint: &&EndpointReport| endpoint.version.is_none_or(|version| self.is_open(version));
        let capable: Vec<_> = endpoints.iter().filter(by_version).collect();
        let open = capable
            .iter()
            .filter(|endpoint| !endpoint.is_unimplemented)
            .count();
        match self.need {
            Need::Every if self.is_open(lowest) => GateState::Open(lowest),
            Need::Every => GateState::TooOld(lowest),
            Need::Each if open == endpoints.len() => GateState::Open(lowest),
            Need::Each if open > 0 => GateState::Partial {
                open,
                endpoints: endpoints.len(),
            },
            Need::Each if capable.is_empty() => GateState::TooOld(lowest),
            Need::Each => GateState::Unimplemented,
        }
    }
}

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

impl Version {
    /// Shorthand for tests and tables.
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Version {
        Version { major, minor, patch }
    }
}

impl FromStr for Version {
    type Err = String;

    fn from_str(text: &str) -> Result<Version, String> {
        let refused = || format!("{text:?} is not a version like 3.7.3");
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

    fn reports(versions: &[(&str, bool)]) -> Vec<EndpointReport> {
        versions
            .iter()
            .map(|(version, is_unimplemented)| EndpointReport {
                version: version.parse().ok(),
                is_unimplemented: *is_unimplemented,
            })
            .collect()
    }

    #[test]
    fn progress_gate_opens_at_the_fixed_releases() {
        let open = |text: &str| PROGRESS_NOTIFICATIONS.is_open(text.parse().unwrap());
        for text in [
            "3.4.31", "3.4.40", "3.5.13", "3.5.35", "3.6.0", "3.6.16", "3.7.3", "4.0.0",
        ] {
            assert!(open(text), "{text}");
        }
        for text in ["3.3.99", "3.4.23", "3.4.30", "3.5.0", "3.5.12", "2.3.8"] {
            assert!(!open(text), "{text}");
        }
        assert_eq!(
            PROGRESS_NOTIFICATIONS.versions().to_string(),
            "3.4.31, 3.5.13, 3.6.0 or later"
        );
        assert!(RANGE_STREAM.is_open(Version::new(3, 7, 0)));
        assert!(!RANGE_STREAM.is_open(Version::new(3, 6, 16)));
    }

    #[test]
    fn gate_of_deletes_at_the_compaction_revision_opens_at_the_fixed_releases() {
        let open = |text: &str| DELETES_AT_COMPACTION.is_open(text.parse().unwrap());
        for text in ["3.4.36", "3.5.18", "3.5.35", "3.6.0", "3.7.3"] {
            assert!(open(text), "{text}");
        }
        for text in ["3.3.99", "3.4.35", "3.5.0", "3.5.17"] {
            assert!(!open(text), "{text}");
        }
    }

    #[test]
    fn lowest_version_decides_a_gate_that_every_endpoint_needs() {
        let gate = &PROGRESS_NOTIFICATIONS;
        let lowest = Version::new(3, 5, 12);
        assert_eq!(gate.assess(false, &reports(&[("", false)])), GateState::Unknown);
        assert_eq!(
            gate.assess(false, &reports(&[("3.6.1", false), ("3.5.12", false)])),
            GateState::TooOld(lowest)
        );
        assert_eq!(
            gate.assess(false, &reports(&[("3.6.1", false), ("", false)])),
            GateState::Open(Version::new(3, 6, 1))
        );
    }

    #[test]
    fn optional_gate_is_partial_in_a_mixed_cluster() {
        let assess = |versions: &[(&str, bool)]| RANGE_STREAM.assess(false, &reports(versions));
        assert_eq!(
            assess(&[("3.7.0", false), ("3.6.1", false)]),
            GateState::Partial {
                open: 1,
                endpoints: 2
            }
        );
        assert_eq!(
            assess(&[("3.7.0", false)]),
            GateState::Open(Version::new(3, 7, 0))
        );
        assert_eq!(
            assess(&[("3.6.1", false)]),
            GateState::TooOld(Version::new(3, 6, 1))
        );
        assert_eq!(assess(&[("3.7.0", true)]), GateState::Unimplemented);
        assert_eq!(
            RANGE_STREAM.assess(true, &reports(&[("3.7.0", false)])),
            GateState::Off
        );
    }

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
