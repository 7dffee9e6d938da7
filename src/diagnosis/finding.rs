//! Findings.

use serde::Serialize;

use super::ids::{FindingId, Severity};

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
    pub fn about(self, subject: impl ToString) -> Finding {
        Finding {
            subject: subject.to_string(),
            ..self
        }
    }

    /// Returns the finding with a meaning.
    #[must_use]
    pub fn with_meaning(self, meaning: impl Into<String>) -> Finding {
        Finding {
            meaning: meaning.into(),
            ..self
        }
    }

    /// Returns the finding with a more precise remedy.
    #[must_use]
    pub fn with_remedy(self, remedy: impl Into<String>) -> Finding {
        Finding {
            remedy: remedy.into(),
            ..self
        }
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
        match self.meaning.trim_end_matches('.') {
            "" => self.title.clone(),
            meaning => format!("{}. {meaning}", self.title),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_joins_title_and_meaning() {
        let finding =
            Finding::new(FindingId::EtcdUnreachable, "etcd is down").with_meaning("No call succeeds.");
        assert_eq!(finding.text(), "etcd is down. No call succeeds");
        assert_eq!(Finding::new(FindingId::Ready, "fine").text(), "fine");
        assert!(Severity::Bad > Severity::Warning && Severity::Note > Severity::Good);
    }
}
