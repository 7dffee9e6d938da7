//! States of the version gates in words, and the findings about them.

use super::finding::Finding;
use super::ids::{FindingId, Severity};
use rangecache_upstream::gates::{GateState, VersionGate};

/// State of `gate` in words, and the finding about it.
#[must_use]
pub fn judge(gate: &VersionGate, state: GateState) -> (String, Finding) {
    let closed = if gate.forwards_reads {
        Severity::Warning
    } else {
        Severity::Note
    };
    let (id, severity, state) = match state {
        GateState::Unknown => (
            FindingId::CapabilityUnknown,
            Severity::Note,
            "not known yet".to_owned(),
        ),
        GateState::Off => (
            FindingId::CapabilityOff,
            Severity::Note,
            format!("off (--{}): {}", gate.flag.unwrap_or(gate.name), gate.without),
        ),
        GateState::Open(version) => (
            FindingId::CapabilityAvailable,
            Severity::Good,
            format!("available (etcd {version})"),
        ),
        GateState::Partial { open, endpoints } => (
            FindingId::CapabilityPartial,
            Severity::Note,
            format!("available on {open} of {endpoints} endpoints"),
        ),
        GateState::TooOld(version) => (
            FindingId::CapabilityTooOld,
            closed,
            format!(
                "not available in etcd {version} (needs {}): {}",
                gate.versions(),
                gate.without
            ),
        ),
        GateState::Unimplemented => (
            FindingId::CapabilityUnimplemented,
            closed,
            format!(
                "not implemented by etcd, or by a proxy in front of it: {}",
                gate.without
            ),
        ),
    };
    let remedy = if severity >= Severity::Warning {
        format!("Upgrade every member of etcd to {}.", gate.versions())
    } else {
        String::new()
    };
    let finding = Finding::new(id, format!("{}: {state}", gate.title))
        .about(gate.name)
        .with_severity(severity)
        .with_meaning(gate.meaning)
        .with_remedy(remedy);
    (state, finding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rangecache_upstream::Version;
    use rangecache_upstream::gates::{ALL, PROGRESS_NOTIFICATIONS, RANGE_STREAM};

    #[test]
    fn closed_gate_that_forwards_reads_is_a_warning_with_the_versions_to_upgrade_to() {
        let (_, closed) = judge(&PROGRESS_NOTIFICATIONS, GateState::TooOld(Version::new(3, 5, 0)));
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
        let (_, finding) = judge(&RANGE_STREAM, closed);
        assert_eq!((finding.severity, &*finding.remedy), (Severity::Note, ""));
        let (text, finding) = judge(&RANGE_STREAM, GateState::Off);
        assert_eq!(finding.severity, Severity::Note);
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
                assert!(!judge(gate, state).0.is_empty());
            }
        }
    }
}
