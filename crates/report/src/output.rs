//! Output of commands: text, and reports in two forms. A leaf.

use std::io::{self, IsTerminal as _, Write};
use std::process::ExitCode;

use clap::ValueEnum;
use serde::Serialize;

/// Form of a report.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// For people
    Text,
    /// For scripts
    Json,
}

/// Character set of a report for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Style {
    /// Marks such as ✓ and ✗, for a terminal with a UTF-8 locale.
    Symbols,
    /// ASCII only.
    Ascii,
}

impl ReportFormat {
    /// Prints the report in this form; `code` is the exit code of a report that could be printed.
    pub fn print(self, code: u8, text: impl FnOnce(Style) -> String, report: &impl Serialize) -> ExitCode {
        let printed = print(|out| match self {
            ReportFormat::Text => out.write_all(text(Style::detect()).as_bytes()),
            ReportFormat::Json => {
                serde_json::to_writer_pretty(&mut *out, report)?;
                writeln!(out)
            }
        });
        if printed == ExitCode::SUCCESS {
            ExitCode::from(code)
        } else {
            printed
        }
    }
}

impl Style {
    /// Style for the locale of the environment, and whether standard output is a terminal.
    fn detect() -> Style {
        let mut names = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter();
        let locale = names.find_map(|name| std::env::var(name).ok().filter(|value| !value.is_empty()));
        let locale = locale.unwrap_or_default().to_ascii_lowercase();
        if io::stdout().is_terminal() && (locale.contains("utf-8") || locale.contains("utf8")) {
            Style::Symbols
        } else {
            Style::Ascii
        }
    }

    /// The text in this character set.
    pub fn encode(self, text: String) -> String {
        match self {
            Style::Symbols => text,
            Style::Ascii => text.replace('…', "...").replace('µ', "u"),
        }
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
