//! Output of commands: text, and reports in two forms. A leaf.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::ValueEnum;
use serde_json::Value;

/// Form of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// For people
    Text,
    /// For scripts
    Json,
}

impl ReportFormat {
    /// Prints the report in this form.
    pub(crate) fn print(self, text: &str, json: &Value) -> ExitCode {
        print(|out| match self {
            ReportFormat::Text => out.write_all(text.as_bytes()),
            ReportFormat::Json => writeln!(out, "{json:#}"),
        })
    }
}

/// Prints to standard output. A reader that closes the pipe early is not an error.
#[must_use]
pub fn print(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> ExitCode {
    let mut text = Vec::new();
    match write(&mut text).and_then(|()| io::stdout().write_all(&text)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}
