//! Builds of the library, and their errors.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use serde::Deserialize;

/// An error of the compiler.
pub(crate) struct BuildError {
    /// Files and lines, from 1, with the one where it is first.
    pub(crate) places: Vec<(PathBuf, usize)>,
    /// Text of the error, as the compiler writes it.
    pub(crate) text: String,
}

#[derive(Deserialize)]
struct Message {
    reason: String,
    message: Option<Diagnostic>,
}

#[derive(Deserialize)]
struct Diagnostic {
    level: String,
    rendered: Option<String>,
    spans: Vec<Span>,
}

#[derive(Deserialize)]
struct Span {
    file_name: PathBuf,
    line_start: usize,
    is_primary: bool,
}

/// Builds the library of a tree; the errors are empty if that succeeds.
pub(crate) fn library(tree: &Path) -> Result<Vec<BuildError>> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| OsString::from("cargo"));
    let output = Command::new(cargo)
        .args(["build", "--locked", "--lib", "--message-format=json"])
        .current_dir(tree)
        .stderr(Stdio::piped())
        .output()
        .context("cannot run cargo")?;
    let mut errors = Vec::new();
    for line in String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|line| line.starts_with('{'))
    {
        let message: Message = serde_json::from_str(line).context("not a message of cargo's")?;
        let Some(diagnostic) = message.message.filter(|_| message.reason == "compiler-message") else {
            continue;
        };
        // The last error counts the others, and has no place.
        if diagnostic.level != "error" || diagnostic.spans.is_empty() {
            continue;
        }
        let mut spans = diagnostic.spans;
        spans.sort_by_key(|span| !span.is_primary);
        errors.push(BuildError {
            places: spans
                .into_iter()
                .map(|span| (span.file_name, span.line_start))
                .collect(),
            text: diagnostic.rendered.unwrap_or_default(),
        });
    }
    if errors.is_empty() && !output.status.success() {
        bail!("cargo build failed:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    Ok(errors)
}
