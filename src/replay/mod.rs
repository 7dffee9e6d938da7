//! `rangecache replay`: plays the reads of an access log again, against any endpoint, and reports their latencies.
//!
//! | file | subject |
//! |---|---|
//! | `flags` | flags of the command |
//! | `line` | one line of an access log: a read, or why it is passed over |
//! | `recording` | all reads of an access log, in the order of their arrival |
//! | `player` | the calls, at the recorded pace or faster |
//! | `report` | latencies and errors, for people and for scripts |
//!
//! Nothing is ever written: lines of other calls are passed over and counted. This room imports `config`, `upstream`,
//! `tls`, `grpc` and `telemetry`; only `main` imports it.

mod flags;
mod line;
mod player;
mod recording;
mod report;

use std::fmt::Display;
use std::fs::File;
use std::io::{self, BufReader, Write as _};
use std::path::Path;
use std::process::ExitCode;

pub use flags::{ReplayConfig, Speed};
use recording::{ReadError, Recording};

/// Plays an access log, and prints the report. The flags are valid. Progress goes to standard error.
#[must_use]
pub fn run(options: &ReplayConfig) -> ExitCode {
    let file = &options.recording;
    let recording = if file == Path::new("-") {
        Recording::read(io::stdin().lock())
    } else {
        let opened = File::open(file).map_err(ReadError::from);
        opened.and_then(|file| Recording::read(BufReader::new(file)))
    };
    let fail = |error: &dyn Display| {
        let _ = writeln!(io::stderr(), "error: {error}");
        ExitCode::FAILURE
    };
    let recording = match recording {
        Ok(recording) => recording,
        Err(error) => return fail(&format_args!("{}: {error}", file.display())),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let tell = |line: &str| drop(writeln!(io::stderr(), "{line}"));
    let report = match runtime.block_on(player::play(options, recording, tell)) {
        Ok(report) => report,
        Err(error) => return fail(&error),
    };
    let printed = options.output.print(&report.to_text(), &report.to_json());
    if printed == ExitCode::SUCCESS && !report.is_clean() {
        return ExitCode::FAILURE;
    }
    printed
}
