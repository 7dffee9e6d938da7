//! Flags that bound connections, calls and threads.

use std::time::Duration;

use clap::Args;

use super::units::parse_duration;

/// Bounds on connections, calls and threads.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Limits")]
pub struct LimitsConfig {
    /// Client connections served at once; more wait to be accepted
    #[arg(
        long,
        value_name = "N",
        default_value_t = 16_384,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_connections: u32,

    /// Calls in flight on one connection; its client delays more
    #[arg(
        long,
        value_name = "N",
        default_value_t = 16_384,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_concurrent_streams: u32,

    /// Calls in flight on all connections, watches included; more are refused with a retryable Unavailable
    #[arg(
        long,
        value_name = "N",
        default_value_t = 65_536,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_calls: u32,

    /// Threads that serve calls [default: half the cores, at least 1; etcd and the clients need the others]
    #[arg(
        long = "worker-threads",
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    pub worker_threads: Option<u32>,

    /// Time that calls in flight get to complete when rangecache stops
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "10s")]
    pub shutdown_timeout: Duration,
}

impl LimitsConfig {
    /// Number of threads that serve calls: the flag, otherwise half the cores, at least 1.
    #[must_use]
    pub fn worker_threads(&self) -> usize {
        let half = || std::thread::available_parallelism().map_or(1, |cores| cores.get() / 2);
        self.worker_threads
            .map_or_else(half, |threads| threads as usize)
            .max(1)
    }
}
