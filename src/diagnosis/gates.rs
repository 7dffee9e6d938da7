//! States of the version gates in words.

use super::finding::Finding;
use super::ids::FindingId;
use super::severity::Severity;
use rangecache_upstream::gates::{GateState, VersionGate};

/// State of `gate` in words, with its severity.
#[must_use]
pub fn describe(gate: &VersionGate, state: GateState) -> (Severity, String) {
    let closed = if gate.forwards_reads {
        Severity::Warning
    } else {
        Severity::Note
    };
    match state {
        GateState::Unknown => (Severity::Note, "not known yet".to_owned()),
        GateState::Off => (
            Severity::Note,
            format!("off (--{}): {}", gate.flag.unwrap_or(gate.name), gate.without),
        ),
        GateState::Open(version) => (Severity::Good, format!("available (etcd {version})")),
        GateState::Partial { open, endpoints } => (
            Severity::Note,
            format!("available on {open} of {endpoints} endpoints"),
        ),
        GateState::TooOld(version) => (
            closed,
            format!(
                "not available in etcd {version} (needs {}): {}",
                gate.versions(),
                gate.without
            ),
        ),
        GateState::Unimplemented => (
            closed,
            format!(
                "not implemented by etcd, or by a proxy in front of it: {}",
                gate.without
            ),
        ),
    }
}

/// Finding for the state of `gate`.
#[must_use]
pub fn finding(gate: &VersionGate, state: GateState) -> Finding {
    let id = match state {
        GateState::Unknown => FindingId::CapabilityUnknown,
        GateState::Off => FindingId::CapabilityOff,
        GateState::Open(_) => FindingId::CapabilityAvailable,
        GateState::Partial { .. } => FindingId::CapabilityPartial,
        GateState::TooOld(_) => FindingId::CapabilityTooOld,
        GateState::Unimplemented => FindingId::CapabilityUnimplemented,
    };
    let (severity, state) = describe(gate, state);
    let remedy = if severity >= Severity::Warning {
        format!("Upgrade every member of etcd to {}.", gate.versions())
    } else {
        String::new()
    };
    Finding::new(id, format!("{}: {state}", gate.title))
        .about(gate.name)
        .with_severity(severity)
        .with_meaning(gate.meaning)
        .with_remedy(remedy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rangecache_upstream::Version;
    use rangecache_upstream::gates::{ALL, PROGRESS_NOTIFICATIONS, RANGE_STREAM};

    #[test]
    fn closed_gate_that_forwards_reads_is_a_warning_with_the_versions_to_upgrade_to() {
        let closed = finding(&PROGRESS_NOTIFICATIONS, GateState::TooOld(Version::new(3, 5, 0)));
        assert_eq!(closed.severity, Severity::Warning);
        assert!(
            closed.title.contains("etcd 3.5.0") && closed.title.contains("linearizable reads are forwarded"),
            "{closed:?}"
        );
        assert!(
            closed.remedy.contains("3.4.31, 3.5.13, 3.6.0 or later"),
            "{closed:?}"
        );
    }

    #[test]
    fn optional_gate_is_at_most_a_note() {
        let closed = GateState::TooOld(Version::new(3, 6, 1));
        assert_eq!(describe(&RANGE_STREAM, closed).0, Severity::Note);
        assert_eq!(finding(&RANGE_STREAM, closed).remedy, "");
        let (severity, text) = describe(&RANGE_STREAM, GateState::Off);
        assert_eq!(severity, Severity::Note);
        assert!(text.starts_with("off (--range-stream)"), "{text}");
    }

    #[test]
    fn every_gate_has_words_for_every_state() {
        let version = Version::new(3, 5, 0);
        for gate in ALL {
            for state in [
                GateState::Unknown,
                GateState::Off,
                GateState::Open(version),
                GateState::Partial {
                    open: 1,
                    endpoints: 3,
                },
                GateState::TooOld(version),
                GateState::Unimplemented,
            ] {
                assert!(!describe(gate, state).1.is_empty());
            }
        }
    }
}
