//! Findings, their text, and those that both the page and `doctor` report.

use std::fmt::Write as _;

use serde::Serialize;

use super::format::bytes;
use super::ids::{FindingId, Severity};
use super::reasons;
use crate::output::Style;
use rangecache_base::telemetry::Reason;
use rangecache_upstream::gates::{GateState, VersionGate};
use rangecache_upstream::{ClusterOfEndpoint, UserProblem};

/// A fact that an operator should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Identity for scripts.
    pub id: FindingId,
    /// Severity of the finding.
    pub severity: Severity,
    /// Mirror, endpoint, flag or capability that the finding is about; empty if it is about the whole.
    pub subject: String,
    /// Title: one sentence, without a full stop.
    pub title: String,
    /// Consequence in whole sentences; may be empty.
    pub meaning: String,
    /// Remedy; empty if no action is needed.
    pub remedy: String,
}

impl Finding {
    /// Returns a finding with the usual severity and remedy of `id`, without a subject and a meaning.
    pub fn new(id: FindingId, title: impl Into<String>) -> Finding {
        Finding {
            id,
            severity: id.severity(),
            subject: String::new(),
            title: title.into(),
            meaning: String::new(),
            remedy: id.remedy().to_owned(),
        }
    }

    /// Returns a finding with the meaning that its id has, too.
    pub fn explained(id: FindingId, title: impl Into<String>) -> Finding {
        Finding::new(id, title).with_meaning(id.meaning().replace('`', ""))
    }

    /// Returns the finding about `subject`.
    #[must_use]
    pub fn about(mut self, subject: impl ToString) -> Finding {
        self.subject = subject.to_string();
        self
    }

    /// Returns the finding with a meaning.
    #[must_use]
    pub fn with_meaning(mut self, meaning: impl Into<String>) -> Finding {
        self.meaning = meaning.into();
        self
    }

    /// Returns the finding with a more precise remedy.
    #[must_use]
    pub fn with_remedy(mut self, remedy: impl Into<String>) -> Finding {
        self.remedy = remedy.into();
        self
    }

    /// Returns the finding with another of the severities of its id.
    #[must_use]
    pub fn with_severity(self, severity: Severity) -> Finding {
        debug_assert!(
            self.id.severities().contains(&severity),
            "{:?} is never {severity:?}",
            self.id
        );
        Finding { severity, ..self }
    }

    /// Title and meaning as one text: `title. meaning`, without the last full stop.
    #[must_use]
    pub fn text(&self) -> String {
        join(&self.title, &self.meaning)
    }
}

fn join(title: &str, meaning: &str) -> String {
    match meaning.trim_end_matches('.') {
        "" => title.to_owned(),
        meaning => format!("{title}. {meaning}"),
    }
}

/// Adds a finding to a report for people: a line with its mark, and one with its remedy.
pub fn write_finding(
    report: &mut String,
    style: Style,
    severity: Severity,
    [title, meaning, remedy]: [&str; 3],
) {
    let [good, note, warning, bad, arrow] = match style {
        Style::Symbols => ["✓", "·", "!", "✗", "  →"],
        Style::Ascii => ["ok  ", "note", "warn", "BAD ", "     ->"],
    };
    let mark = match severity {
        Severity::Good => good,
        Severity::Note => note,
        Severity::Warning => warning,
        Severity::Bad => bad,
    };
    // Writing into a String cannot fail.
    let _ = writeln!(report, "  {mark} {}", join(title, meaning));
    if !remedy.is_empty() {
        let _ = writeln!(report, "  {arrow} {remedy}");
    }
}

/// Finding for an etcd with auth on while `--user` is not set.
#[must_use]
pub fn no_own_user() -> Finding {
    Finding::new(
        FindingId::UserMissing,
        "etcd's auth is on and rangecache has no user of its own (--user)",
    )
    .with_meaning("Nothing can be mirrored, and every read is forwarded.")
}

/// Finding for a user of `--user` that etcd rejects, or that lacks a permission.
#[must_use]
pub fn user_problem(problem: &UserProblem) -> Finding {
    let (id, subject) = match problem {
        UserProblem::Rejected { user, .. } => (FindingId::UserRejected, user),
        UserProblem::NoPermission { scope, .. } => (FindingId::UserLacksPermission, scope),
    };
    Finding::new(id, problem.to_string())
        .about(subject)
        .with_meaning("Nothing that needs this user is mirrored, and those reads are forwarded.")
}

/// Finding for endpoints that lead to different clusters; `None` if `mixed` is empty.
#[must_use]
pub fn different_clusters(mixed: &[ClusterOfEndpoint]) -> Option<Finding> {
    if mixed.is_empty() {
        return None;
    }
    let list: Vec<_> = mixed.iter().map(ToString::to_string).collect();
    let finding = Finding::new(
        FindingId::DifferentClusters,
        "the endpoints lead to different clusters",
    );
    Some(finding.with_meaning(format!(
        "The one that most of them lead to is used, and the others are left out: {}.",
        list.join(", ")
    )))
}

/// Finding for mirrors that may take more, `budget_bytes`, than the memory limit; `None` if they may not.
#[must_use]
pub fn budget_above_memory(budget_bytes: u64, limit_bytes: u64) -> Option<Finding> {
    let finding = Finding::new(
        FindingId::BudgetAboveMemory,
        format!(
            "--cache-max-bytes is {}, and this machine or container has {}",
            bytes(budget_bytes),
            bytes(limit_bytes)
        ),
    );
    let meaning = "The process is ended for lack of memory before its mirrors reach their bound.";
    (budget_bytes > limit_bytes).then(|| finding.with_meaning(meaning))
}

/// Finding while no endpoint has reported its version.
#[must_use]
pub fn version_unknown() -> Finding {
    let explanation = reasons::explain_reason(Reason::VersionUnknown);
    Finding::new(
        FindingId::VersionUnknown,
        explanation.meaning.trim_end_matches('.'),
    )
    .with_meaning("Until then every read is forwarded.")
    .with_remedy(explanation.remedy)
}

/// State of `gate` in words, and the finding about it.
#[must_use]
pub fn judge_gate(gate: &VersionGate, state: GateState) -> (String, Finding) {
    let without = gate.without;
    let (id, state) = match state {
        GateState::Unknown => (FindingId::CapabilityUnknown, "not known yet".to_owned()),
        GateState::Off => {
            let flag = gate.flag.unwrap_or(gate.name);
            (FindingId::CapabilityOff, format!("off (--{flag}): {without}"))
        }
        GateState::Open(version) => {
            let state = format!("available (etcd {version})");
            (FindingId::CapabilityAvailable, state)
        }
        GateState::Partial { open, endpoints } => {
            let state = format!("available on {open} of {endpoints} endpoints");
            (FindingId::CapabilityPartial, state)
        }
        GateState::TooOld(version) => {
            let versions = gate.versions();
            let state = format!("not available in etcd {version} (needs {versions}): {without}");
            (FindingId::CapabilityTooOld, state)
        }
        GateState::Unimplemented => {
            let state = format!("not implemented by etcd, or by a proxy in front of it: {without}");
            (FindingId::CapabilityUnimplemented, state)
        }
    };
    let finding = Finding::new(id, format!("{}: {state}", gate.title))
        .about(gate.name)
        .with_meaning(gate.meaning);
    let is_closed = matches!(
        id,
        FindingId::CapabilityTooOld | FindingId::CapabilityUnimplemented
    );
    let finding = if is_closed && gate.forwards_reads {
        let remedy = format!("Upgrade every member of etcd to {}.", gate.versions());
        finding.with_severity(Severity::Warning).with_remedy(remedy)
    } else {
        finding.with_remedy("")
    };
    (state, finding)
}

#[cfg(test)]
mod tests {
    use super::*;
    use rangecache_upstream::Version;
    use rangecache_upstream::gates::{ALL, PROGRESS_NOTIFICATIONS, RANGE_STREAM};

    #[test]
    fn text_joins_title_and_meaning() {
        let finding =
            Finding::new(FindingId::EtcdUnreachable, "etcd is down").with_meaning("No call succeeds.");
        assert_eq!(finding.text(), "etcd is down. No call succeeds");
        assert_eq!(Finding::new(FindingId::Ready, "fine").text(), "fine");
        assert!(Severity::Bad > Severity::Warning && Severity::Note > Severity::Good);
    }

    #[test]
    fn user_problems_are_findings_with_a_remedy_in_whole_sentences() {
        let problem = UserProblem::Rejected {
            user: "mirror".to_owned(),
            message: "authentication failed".to_owned(),
        };
        let finding = user_problem(&problem);
        assert!(
            finding
                .title
                .contains("does not accept the user \"mirror\" of --user: authentication failed"),
            "{finding:?}"
        );
        assert!(
            finding.remedy.starts_with("Fix the user") && finding.remedy.ends_with('.'),
            "{finding:?}"
        );
    }

    #[test]
    fn closed_gate_that_forwards_reads_is_a_warning_with_the_versions_to_upgrade_to() {
        let (_, closed) = judge_gate(&PROGRESS_NOTIFICATIONS, GateState::TooOld(Version::new(3, 5, 0)));
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
        let (_, finding) = judge_gate(&RANGE_STREAM, closed);
        assert_eq!((finding.severity, &*finding.remedy), (Severity::Note, ""));
        let (text, finding) = judge_gate(&RANGE_STREAM, GateState::Off);
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
                assert!(!judge_gate(gate, state).0.is_empty());
            }
        }
    }
}
