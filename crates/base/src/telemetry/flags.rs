//! Flags of the log, the access log and traces. OpenTelemetry's own variables set everything else about traces.

use std::io::IsTerminal;
use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};

use crate::flags::{Switch as _, parse_share};

/// Form and level of the log.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Log")]
pub struct LogConfig {
    /// Form of the log on standard error [default: text on a terminal, otherwise json]
    ///
    /// When to change it: a log collector needs the other format
    #[arg(long = "log-format", value_name = "FORMAT", value_enum)]
    pub format: Option<LogFormat>,

    /// Level of rangecache's own lines: error, warn, info, debug or trace, also per module: info,rangecache::mirror=debug.
    /// Libraries log warnings, and more only if they are named: info,h2=debug
    ///
    /// When to change it: `debug` logs the phases of each read, with its number (`id`), client and prefix, at a cost. A level alone
    /// means rangecache's own lines, with the warnings of libraries; lines of libraries only if they are named: `info,h2=debug`
    #[arg(long = "log-level", value_name = "LEVEL", default_value = "info")]
    pub level: String,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// JSON, one object per line
    Json,
}

impl LogConfig {
    /// Whether the log is JSON: the flag, otherwise unless standard error is a terminal.
    #[must_use]
    pub fn is_json(&self) -> bool {
        match self.format {
            Some(format) => format == LogFormat::Json,
            None => !std::io::stderr().is_terminal(),
        }
    }

    /// Whether `tracing` understands the level. It takes an unknown word for the name of a module, so that the word
    /// after each `=` is checked first.
    pub fn is_valid(&self) -> bool {
        let is_level = |part: &str| {
            let level = part.rsplit('=').next().unwrap_or_default().trim();
            ["off", "error", "warn", "info", "debug", "trace"].contains(&level.to_ascii_lowercase().as_str())
        };
        self.level.split(',').all(is_level) && self.level.parse::<tracing_subscriber::EnvFilter>().is_ok()
    }
}

/// Destination of the access log, and the share of the calls that are logged.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Log")]
pub struct AccessLogConfig {
    /// File that gets a line of JSON for each call, or - for standard output; opened again on SIGHUP [default: none]
    ///
    /// When to change it: a line per call is needed, in a file or, with `-`, on standard output: see
    /// docs/operations.md#access-log
    #[arg(long = "access-log", value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Share of the calls that are logged, from 0 to 1; calls of one trace are logged together
    ///
    /// When to change it: a log of all calls is too much
    #[arg(
        long = "access-log-sample",
        value_name = "SHARE",
        value_parser = parse_share,
        default_value = "1"
    )]
    pub sample: f64,

    /// Log the keys of reads, which may be secrets, instead of their prefix alone
    ///
    /// When to change it: keys explain a load; they may be secrets
    #[arg(long = "access-log-keys", switch())]
    pub keys: bool,
}

impl AccessLogConfig {
    /// The file, unless it is standard output.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.file.as_deref().filter(|file| *file != Path::new("-"))
    }
}

/// Sampling of traces.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Log")]
pub struct TraceConfig {
    /// Share of the traces that begin here, from 0 to 1; a caller's decision counts for its calls. Takes the place of
    /// OTEL_TRACES_SAMPLER, and changes without a restart [default: none]
    ///
    /// When to change it: the share of traces (docs/tracing.md) that begin here should change without a restart; it
    /// takes the place of `OTEL_TRACES_SAMPLER`
    #[arg(long = "trace-sample", value_name = "SHARE", value_parser = parse_share)]
    pub trace_sample: Option<f64>,
}
