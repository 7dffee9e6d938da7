//! Flags of `rangecache replay`: those of the connection to etcd, and its own.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use crate::config::Config;
use crate::report::ReportFormat;
use rangecache_base::flags::parse_duration;

/// Flags of `rangecache replay`.
#[derive(Args, Debug, Clone)]
pub struct ReplayConfig {
    /// The flags of `serve`.
    #[command(flatten)]
    pub config: Config,

    /// Access log to play, recorded with --access-log-keys; - for standard input
    #[arg(value_name = "FILE", help_heading = "Replay")]
    pub recording: PathBuf,

    /// Pace: 1 as recorded, a number of times faster or slower, or max without pauses
    ///
    /// When to change it: reads are to be replayed faster or slower than recorded, or without pauses (`max`)
    #[arg(
        long,
        value_name = "1|N|max",
        value_parser = parse_speed,
        default_value = "1",
        help_heading = "Replay"
    )]
    pub speed: Speed,

    /// Calls in flight at once; more of them wait, which is reported
    ///
    /// When to change it: the report of a replay says that the pace was not kept
    #[arg(
        long,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=100_000),
        default_value = "256",
        help_heading = "Replay"
    )]
    pub concurrency: u32,

    /// Time limit of each call
    ///
    /// When to change it: slow calls of a replay are to fail earlier
    #[arg(
        long,
        value_name = "DURATION",
        value_parser = parse_duration,
        default_value = "30s",
        help_heading = "Replay"
    )]
    pub call_timeout: Duration,

    /// Form of the report
    ///
    /// When to change it: `json` for scripts
    #[arg(
        long,
        value_name = "FORMAT",
        value_enum,
        default_value = "text",
        help_heading = "Report"
    )]
    pub output: ReportFormat,
}

/// Pace of a replay.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Speed {
    /// This many times as fast as recorded.
    Times(f64),
    /// Without pauses.
    Max,
}

/// Parses `max` or a number above 0.
fn parse_speed(text: &str) -> Result<Speed, String> {
    if text == "max" {
        return Ok(Speed::Max);
    }
    let times = text.parse::<f64>().ok();
    times
        .filter(|times| times.is_finite() && *times >= 0.001)
        .map(Speed::Times)
        .ok_or_else(|| "write 1, a number of times faster such as 10 or 0.5, or max".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn speed_is_a_number_or_max() {
        assert_eq!(parse_speed("max"), Ok(Speed::Max));
        assert_eq!(parse_speed("0.5"), Ok(Speed::Times(0.5)));
        for text in ["0", "-1", "inf", "NaN", "fast"] {
            assert!(parse_speed(text).is_err(), "{text}");
        }
    }
}
