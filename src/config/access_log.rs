//! Flags of the access log.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::flags::parse_share;

/// Where calls are logged, and how many of them.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Log")]
pub struct AccessLogConfig {
    /// File that gets a line of JSON for each call, or - for standard output; opened again on SIGHUP [default: none]
    #[arg(long = "access-log", value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// Share of the calls that are logged, from 0 to 1; calls of one trace are logged together
    #[arg(
        long = "access-log-sample",
        value_name = "SHARE",
        value_parser = parse_share,
        default_value = "1"
    )]
    pub sample: f64,

    /// Log the keys of reads, which may be secrets, instead of their prefix alone; `rangecache replay` needs them
    #[arg(
        long = "access-log-keys",
        value_name = "BOOL",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "true",
        default_value_t = false
    )]
    pub keys: bool,
}

impl AccessLogConfig {
    /// The file, unless it is standard output.
    #[must_use]
    pub fn path(&self) -> Option<&Path> {
        self.file.as_deref().filter(|file| *file != Path::new("-"))
    }
}
