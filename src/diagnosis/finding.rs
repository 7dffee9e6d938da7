//! Findings and their severities.

use serde::Serialize;

/// Severity of a finding, ascending.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Severity {
    /// Expected state.
    Good,
    /// Temporary, or intended.
    Note,
    /// Responses are correct, but slower than they need to be.
    Warning,
    /// Calls fail, or an operator must act.
    Bad,
}

impl Severity {
    /// Name in JSON and in class names of the page.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Severity::Good => "good",
            Severity::Note => "note",
            Severity::Warning => "warning",
            Severity::Bad => "bad",
        }
    }
}

/// A fact that an operator should know.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Severity of the finding.
    pub severity: Severity,
    /// Title: one sentence, without a full stop.
    pub title: String,
    /// Consequence in whole sentences; may be empty.
    pub meaning: String,
    /// Remedy; empty if no action is needed.
    pub remedy: String,
}

impl Finding {
    /// Returns a finding with all of its texts.
    pub fn new(
        severity: Severity,
        title: impl Into<String>,
        meaning: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Finding {
        Finding {
            severity,
            title: title.into(),
            meaning: meaning.into(),
            remedy: remedy.into(),
        }
    }

    /// Returns the finding with another severity.
    #[must_use]
    pub fn with_severity(self, severity: Severity) -> Finding {
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
        let finding = Finding::new(Severity::Bad, "etcd is down", "No call succeeds.", "Start etcd.");
        assert_eq!(finding.text(), "etcd is down. No call succeeds");
        assert_eq!(Finding::new(Severity::Good, "fine", "", "").text(), "fine");
        assert!(Severity::Bad > Severity::Warning && Severity::Note > Severity::Good);
    }
}
