//! Flags of the access log.

use std::path::{Path, PathBuf};

use clap::Args;

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

/// Parses a number from 0 to 1.
fn parse_share(text: &str) -> Result<f64, String> {
    let share = text.parse::<f64>().ok();
    share
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| "write a number from 0 to 1, for example 0.01 for one call in a hundred".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_numbers_from_0_to_1() {
        for (text, share) in [
            ("0", Some(0.0)),
            ("1", Some(1.0)),
            ("0.25", Some(0.25)),
            ("1.1", None),
        ] {
            assert_eq!(parse_share(text).ok(), share, "{text}");
        }
        for text in ["-0.1", "NaN", "1%", ""] {
            assert!(parse_share(text).is_err(), "{text}");
        }
    }
}
