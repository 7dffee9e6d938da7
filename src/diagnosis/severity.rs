//! Severities of findings.

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
