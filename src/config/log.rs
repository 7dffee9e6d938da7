//! Flags of the log.

use std::io::IsTerminal;

use clap::{Args, ValueEnum};

/// Form and level of the log.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Log")]
pub struct LogConfig {
    /// Form of the log on standard error [default: text on a terminal, otherwise json]
    #[arg(long = "log-format", value_name = "FORMAT", value_enum)]
    pub format: Option<LogFormat>,

    /// Level of rangecache's own lines: error, warn, info, debug or trace, also per module: info,rangecache::mirror=debug.
    /// Libraries log warnings, and more only if they are named: info,h2=debug
    #[arg(long = "log-level", value_name = "LEVEL", default_value = "info")]
    pub level: String,
}

/// Form of the log.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// Lines for people
    Text,
    /// One JSON object a line
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
    pub(super) fn is_valid(&self) -> bool {
        let is_level = |part: &str| {
            let level = part.rsplit('=').next().unwrap_or_default().trim();
            ["off", "error", "warn", "info", "debug", "trace"].contains(&level.to_ascii_lowercase().as_str())
        };
        self.level.split(',').all(is_level) && self.level.parse::<tracing_subscriber::EnvFilter>().is_ok()
    }
}
