//! Flags that bound connections, calls, buffered bytes and threads.

use std::time::Duration;

use clap::Args;

use super::units::{parse_bytes, parse_duration};
use crate::memory;

/// Memory for the program, its tasks and its metrics, in bytes.
const FIXED_BYTES: u64 = 48 << 20;
/// Lowest default of `--buffer-max-bytes`.
const MIN_BUFFER_BYTES: u64 = 16 << 20;
/// Highest default of `--buffer-max-bytes`.
const MAX_BUFFER_BYTES: u64 = 2 << 30;

/// Bounds on connections, calls, buffered bytes and threads.
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

    /// Client connections of one IP address (of one /64 network with IPv6); more are closed [default: half of
    /// --max-connections, without a bound for loopback addresses, which all clients of a sidecar share]
    #[arg(
        long = "max-connections-per-address",
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_connections_per_address: Option<u32>,

    /// Calls in flight on one connection; its client delays more
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1_000,
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

    /// Memory for requests, responses that wait for etcd or for their client, and conversions; calls over it are
    /// refused with ResourceExhausted [default: half of what --cache-max-bytes leaves of the memory limit]
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub buffer_max_bytes: Option<u64>,

    /// Time limit for a client to send a request message that it has begun
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "30s")]
    pub request_timeout: Duration,

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
    /// Client connections of one address: the flag, otherwise half of all.
    #[must_use]
    pub fn connections_per_address(&self) -> u32 {
        let half = self.max_connections.div_ceil(2);
        self.max_connections_per_address.unwrap_or(half)
    }

    /// Number of threads that serve calls: the flag, otherwise half the cores, at least 1.
    #[must_use]
    pub fn worker_threads(&self) -> usize {
        let half = || std::thread::available_parallelism().map_or(1, |cores| cores.get() / 2);
        self.worker_threads
            .map_or_else(half, |threads| threads as usize)
            .max(1)
    }

    /// Bound on buffered bytes: the flag, otherwise half of what mirrors of `cache_max_bytes` and the program leave of
    /// the memory limit; the other half is for connections and the allocator. At least 16 MiB, at most 2 GiB.
    #[must_use]
    pub fn buffer_max_bytes(&self, cache_max_bytes: u64) -> u64 {
        self.buffer_max_bytes
            .unwrap_or_else(|| default_buffer_bytes(memory::limit_bytes(), cache_max_bytes))
    }
}

fn default_buffer_bytes(memory_bytes: u64, cache_max_bytes: u64) -> u64 {
    let left = memory_bytes.saturating_sub(cache_max_bytes.saturating_add(FIXED_BYTES));
    (left / 2).clamp(MIN_BUFFER_BYTES, MAX_BUFFER_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::mirror::default_cache_bytes;

    #[test]
    fn default_bounds_together_stay_below_the_memory_limit() {
        for mib in [128, 256, 512, 1024, 2048, 16_384, 262_144] {
            let memory = mib << 20;
            let cache = default_cache_bytes(memory);
            let buffers = default_buffer_bytes(memory, cache);
            assert!(cache + buffers + FIXED_BYTES <= memory, "{mib} MiB");
        }
        assert_eq!(default_buffer_bytes(1 << 30, 1 << 30), MIN_BUFFER_BYTES);
        assert_eq!(default_cache_bytes(512 << 20), 288 << 20);
        assert_eq!(default_buffer_bytes(512 << 20, 288 << 20), 88 << 20);
    }
}
