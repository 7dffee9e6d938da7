//! Flags of watches.

use std::time::Duration;

use clap::{Args, ValueEnum};

use super::units::parse_duration;

/// Whether watches are served from memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WatchCache {
    /// From memory where a mirror holds the keys; otherwise they are forwarded.
    Auto,
    /// Every watch is forwarded.
    Off,
}

/// Watches from memory.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Watches")]
pub struct WatchConfig {
    /// Whether watches are served from the mirrors (auto) or all forwarded (off)
    #[arg(long = "watch-cache", value_name = "MODE", value_enum, default_value = "off")]
    pub cache: WatchCache,

    /// Interval of the progress notifications of a watch that asked for them
    #[arg(
        long = "watch-progress-notify-interval",
        value_name = "DURATION",
        value_parser = parse_duration,
        default_value = "5s"
    )]
    pub progress_notify_interval: Duration,
}
