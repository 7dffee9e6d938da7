//! Flags that bound connections, calls, buffered bytes and threads, and those about the clients of the proxy.

use std::{ops::RangeInclusive, time::Duration};

use clap::Args;
use rangecache_base::flags::{parse_bytes, parse_duration};
use rangecache_base::memory;

/// Memory for the program, its tasks, its metrics and the admin port, in bytes.
pub const FIXED_BYTES: u64 = 48 << 20;
/// Memory of one client connection that no budget counts, in bytes. Its state and that of TLS take 25 KiB, what has arrived
/// and was not taken, up to the smallest receive window, 80 KiB, a request's head that is not complete, up to 20 KiB, and
/// records of TLS that wait to be sent, up to 64 KiB.
const CONNECTION_BYTES: u64 = 192 << 10;
/// Part of the memory limit for them, in 32nds.
const CONNECTIONS_32NDS: u64 = 3;
/// Bounds of the default of `--max-connections`.
const CONNECTIONS: RangeInclusive<u64> = 64..=16_384;
/// Part of the memory limit for larger receive windows, and the most of it, in bytes.
const WINDOWS_DIVISOR: u64 = 32;
const MAX_WINDOWS_BYTES: u64 = 64 << 20;
/// Memory of a TLS handshake that is not complete, in bytes: the library holds messages of up to 64 KiB.
const HANDSHAKE_BYTES: u64 = 96 << 10;
/// Part of the memory limit for handshakes, and the bounds of their number.
const HANDSHAKES_DIVISOR: u64 = 32;
const HANDSHAKES: RangeInclusive<u64> = 32..=256;
/// Lowest default of `--buffer-max-bytes`.
pub const MIN_BUFFER_BYTES: u64 = 16 << 20;
/// Highest default of `--buffer-max-bytes`.
const MAX_BUFFER_BYTES: u64 = 2 << 30;

/// Bounds on connections, calls, buffered bytes and threads.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Limits")]
pub struct LimitsConfig {
    /// Client connections served at once; more wait to be accepted [default: as many as fit 3/32 of the memory limit at
    /// 192 KiB each: 256 with 512 MiB, 1024 with 2 GiB, at most 16384]
    ///
    /// When to change it: more clients, for each of which the memory limit needs 192 KiB more; the hard limit of
    /// file descriptors (`RLIMIT_NOFILE`) must be twice as high and 256 more, otherwise the bound is lowered
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub max_connections: Option<u32>,

    /// Client connections of one IP address (of one /64 network with IPv6); more are closed [default: half of
    /// --max-connections, without a bound for loopback addresses, which all clients of a sidecar share]
    ///
    /// When to change it: many clients share an address (NAT, a load balancer), or one host must not have more
    #[arg(
        long = "max-connections-per-address",
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_connections_per_address: Option<u32>,

    /// Calls in flight on one connection; its client delays more
    ///
    /// When to change it: one connection carries more watches and calls than this; etcd has no such bound
    #[arg(
        long,
        value_name = "N",
        default_value_t = 1_000,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_concurrent_streams: u32,

    /// Calls in flight on all connections, watches included; more are refused with a retryable Unavailable
    ///
    /// When to change it: more watches and waiting calls than this
    #[arg(
        long,
        value_name = "N",
        default_value_t = 65_536,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_calls: u32,

    /// Memory for requests, responses that wait for etcd or for their client, and conversions; calls over it are
    /// refused with ResourceExhausted [default: what mirrors, watches and connections leave of the memory limit,
    /// 16 MiB to 2 GiB]
    ///
    /// When to change it: many connections with calls in flight; or lists larger than a quarter of it that are not
    /// mirrored. All bounds together: docs/reference/flags.md#memory-in-all
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes)]
    pub buffer_max_bytes: Option<u64>,

    /// Time limit for a client to send a request message that it has begun
    ///
    /// When to change it: clients on slow networks send large writes
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "30s")]
    pub request_timeout: Duration,

    /// Threads that serve calls [default: half the cores, at least 1; etcd and the clients need the others]
    ///
    /// When to change it: rangecache has a machine or a CPU limit of its own
    #[arg(
        long = "worker-threads",
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    pub worker_threads: Option<u32>,

    /// Time that calls in flight get to complete when rangecache stops
    ///
    /// When to change it: calls take longer; `terminationGracePeriodSeconds` must be longer still
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "10s")]
    pub shutdown_timeout: Duration,
}

impl LimitsConfig {
    /// Client connections: the flag, otherwise as many as the memory limit permits.
    #[must_use]
    pub fn max_connections(&self) -> u32 {
        self.max_connections
            .unwrap_or_else(|| default_connections(memory::limit_bytes()))
    }

    /// Bytes of receive windows beyond those that each connection has. A received byte takes up to 4/3 of a byte.
    #[must_use]
    pub fn window_bytes(&self) -> u64 {
        windows_memory(memory::limit_bytes()) / 4 * 3
    }

    /// TLS handshakes that are not complete.
    #[must_use]
    pub fn handshakes(&self) -> u32 {
        default_handshakes(memory::limit_bytes())
    }

    /// Client connections of one address: the flag, otherwise half of all.
    #[must_use]
    pub fn connections_per_address(&self) -> u32 {
        let half = self.max_connections().div_ceil(2);
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

    /// Bound on buffered bytes: the flag, otherwise eight ninths of what the program, its connections and those that have
    /// `other_max_bytes`, the mirrors and watches, leave of the memory limit; the last ninth is for calls that wait for
    /// room in the buffers. At least 16 MiB, at most 2 GiB.
    #[must_use]
    pub fn buffer_max_bytes(&self, other_max_bytes: u64) -> u64 {
        self.buffer_max_bytes
            .unwrap_or_else(|| default_buffer_bytes(memory::limit_bytes(), other_max_bytes))
    }
}

/// Default of `--max-connections` with this memory limit.
#[must_use]
pub fn default_connections(memory_bytes: u64) -> u32 {
    let (min, max) = CONNECTIONS.into_inner();
    let connections = memory_bytes / 32 * CONNECTIONS_32NDS / CONNECTION_BYTES;
    u32::try_from(connections.clamp(min, max)).unwrap_or(u32::MAX)
}

/// Memory of receive windows beyond those that each connection has.
fn windows_memory(memory_bytes: u64) -> u64 {
    (memory_bytes / WINDOWS_DIVISOR).min(MAX_WINDOWS_BYTES)
}

/// TLS handshakes that may be incomplete with this memory limit.
#[must_use]
pub fn default_handshakes(memory_bytes: u64) -> u32 {
    let (min, max) = HANDSHAKES.into_inner();
    let handshakes = memory_bytes / HANDSHAKES_DIVISOR / HANDSHAKE_BYTES;
    u32::try_from(handshakes.clamp(min, max)).unwrap_or(u32::MAX)
}

/// Memory of connections, and of handshakes.
#[must_use]
pub fn connections_memory(memory_bytes: u64) -> u64 {
    u64::from(default_connections(memory_bytes)) * CONNECTION_BYTES
        + windows_memory(memory_bytes)
        + u64::from(default_handshakes(memory_bytes)) * HANDSHAKE_BYTES
}

/// Default of `--buffer-max-bytes` with this memory limit, of which mirrors and watches have `other_max_bytes`.
#[must_use]
pub fn default_buffer_bytes(memory_bytes: u64, other_max_bytes: u64) -> u64 {
    let used = FIXED_BYTES + connections_memory(memory_bytes);
    let left = memory_bytes.saturating_sub(other_max_bytes.saturating_add(used));
    (left / 9 * 8).clamp(MIN_BUFFER_BYTES, MAX_BUFFER_BYTES)
}

/// Figures about clients.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Clients")]
pub struct ClientsConfig {
    /// Clients with metrics of their own (rangecache_client_…), those that cost most; 0 for none. /clients has all
    ///
    /// When to change it: more clients should have metrics of their own (`rangecache_client_…`); `0` for none, if
    /// their names must not reach Prometheus
    #[arg(
        long = "client-metrics-top",
        value_name = "N",
        default_value_t = 10,
        value_parser = clap::value_parser!(u32).range(..=1_000)
    )]
    pub metrics_top: u32,
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;

    #[derive(clap::Parser)]
    struct Flags {
        #[command(flatten)]
        limits: LimitsConfig,
    }

    fn limits(flags: &[&str]) -> LimitsConfig {
        Flags::try_parse_from(std::iter::once(&"rangecache").chain(flags))
            .unwrap()
            .limits
    }

    /// Memory limits from 1 MiB to 1 TiB.
    fn memory_limits() -> impl Iterator<Item = u64> {
        (0..=80).map(|step| (1 << (20 + step / 4)) / 4 * (4 + step % 4))
    }

    #[test]
    fn connections_are_as_many_as_the_help_text_says() {
        for (memory_mib, connections) in [(1, 64), (512, 256), (2048, 1024), (1 << 20, 16_384)] {
            assert_eq!(default_connections(memory_mib << 20), connections, "{memory_mib}");
        }
    }

    #[test]
    fn defaults_fit_the_memory_limit_unless_it_is_below_the_least_of_each() {
        for memory in memory_limits() {
            for others in [0, memory / 4, memory / 2] {
                let buffers = default_buffer_bytes(memory, others);
                // Calls that wait for room in the buffers take an eighth of them.
                let used = FIXED_BYTES + connections_memory(memory) + others + buffers + buffers / 8;
                assert!(
                    used <= memory || buffers == MIN_BUFFER_BYTES,
                    "{memory}: {others} {buffers}"
                );
            }
        }
        assert_eq!(
            default_buffer_bytes(1 << 30, u64::MAX),
            MIN_BUFFER_BYTES,
            "flags may ask for more than there is"
        );
    }

    #[test]
    fn more_memory_never_lowers_a_default() {
        let defaults = |memory| {
            [
                u64::from(default_connections(memory)),
                u64::from(default_handshakes(memory)),
                windows_memory(memory),
                default_buffer_bytes(memory, 0),
            ]
        };
        for (less, more) in memory_limits().zip(memory_limits().skip(1)) {
            let (before, after) = (defaults(less), defaults(more));
            let is_lower = before.iter().zip(after).any(|(before, after)| after < *before);
            assert!(!is_lower, "{less} {before:?}, {more} {after:?}");
        }
    }

    #[test]
    fn flag_takes_the_place_of_what_depends_on_the_machine() {
        let given = limits(&[
            "--max-connections=5",
            "--worker-threads=3",
            "--buffer-max-bytes=1MiB",
        ]);
        assert_eq!((given.max_connections(), given.worker_threads()), (5, 3));
        assert_eq!(given.buffer_max_bytes(u64::MAX), 1 << 20);
        assert!(limits(&[]).worker_threads() >= 1);
    }

    #[test]
    fn one_address_gets_half_of_the_connections_and_at_least_one() {
        for (all, of_one) in [(1, 1), (5, 3), (8, 4)] {
            let flags = [&*format!("--max-connections={all}")];
            assert_eq!(limits(&flags).connections_per_address(), of_one);
        }
        let flags = ["--max-connections=8", "--max-connections-per-address=7"];
        assert_eq!(limits(&flags).connections_per_address(), 7);
    }
}
