//! Flags of watches.

use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::flags::{parse_bytes, parse_duration};
use crate::memory;

/// Highest default of `--watch-max-bytes`.
const MAX_DEFAULT_BYTES: u64 = 64 << 20;

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
    #[arg(long = "watch-cache", value_name = "MODE", value_enum, default_value = "auto")]
    pub cache: WatchCache,

    /// Interval of the progress notifications of a watch that asked for them
    #[arg(
        long = "watch-progress-notify-interval",
        value_name = "DURATION",
        value_parser = parse_duration,
        default_value = "5s"
    )]
    pub progress_notify_interval: Duration,

    /// Memory for watches served from memory: streams, watchers, and events on their way to slow clients; further
    /// streams are forwarded [default: 64MiB, at most a sixteenth of the memory limit]
    #[arg(long = "watch-max-bytes", value_name = "BYTES", value_parser = parse_bytes)]
    pub max_bytes: Option<u64>,
}

impl WatchConfig {
    /// Bound on the memory of watches from memory: the flag, otherwise 64 MiB, at most a sixteenth of the memory limit.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
            .unwrap_or_else(|| default_watch_bytes(memory::limit_bytes()))
    }
}

/// Default of `--watch-max-bytes` with a memory limit of `memory_bytes`.
pub(super) fn default_watch_bytes(memory_bytes: u64) -> u64 {
    MAX_DEFAULT_BYTES.min(memory_bytes / 16)
}
