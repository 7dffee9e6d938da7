//! Flags of reads that are forwarded to etcd, and of watches.

use std::time::Duration;

use clap::{Args, ValueEnum};
use rangecache_base::flags::{Live, parse_bytes, parse_duration};
use rangecache_base::memory;
use rangecache_edge::{limits::LimitsConfig, server::ListenConfig};
use rangecache_upstream::WritesTo;

/// Highest default of `--watch-max-bytes`.
const MAX_DEFAULT_WATCH_BYTES: u64 = 64 << 20;

/// Flags that the path of a request reads.
#[derive(Clone, Copy, Debug)]
pub struct ProxyFlags<'a> {
    /// Reads that are forwarded, as reloads leave them.
    pub forward: &'a Live<ForwardConfig>,
    /// Watches.
    pub watch: &'a WatchConfig,
    /// Connections and calls.
    pub limits: &'a LimitsConfig,
    /// Listening sockets.
    pub listen: &'a ListenConfig,
    /// `--writes-to`.
    pub writes_to: WritesTo,
    /// `--connect-timeout`.
    pub connect_timeout: Duration,
    /// Bound on buffered bytes.
    pub buffer_max_bytes: u64,
}

/// Bounds on reads that are forwarded to etcd.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Forwarded reads")]
pub struct ForwardConfig {
    /// Large Ranges in flight to etcd at once; more wait for their turn
    ///
    /// When to change it: fewer to protect etcd; more if etcd has capacity and reads queue
    #[arg(
        long = "forward-max-large",
        value_name = "N",
        default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_large: u32,

    /// Small reads, and watches that etcd has not created yet, in flight to etcd at once; more wait for their turn, until
    /// the client's deadline or for 30 s
    ///
    /// When to change it: fewer if etcd is small, or many rangecaches are in front of it; more if etcd is far away:
    /// 64 reads at once are 32,000 a second at 2 ms each, and 3,200 at 20 ms
    #[arg(
        long = "forward-max-small",
        value_name = "N",
        default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    pub max_small: u32,

    /// Calls that may wait for their turn, of large and of small ones each; more are refused with a retryable Unavailable
    ///
    /// When to change it: more if clients should wait instead of retrying
    #[arg(long = "forward-max-waiting", value_name = "N", default_value_t = 4096)]
    pub max_waiting: u32,

    /// Time limit for a read that waits for memory of --buffer-max-bytes, or for an identical read whose client does not
    /// read; after it a conversion is forwarded unchanged, a RangeStream is refused with ResourceExhausted, and the
    /// identical reads get the next call
    ///
    /// When to change it: reads of large ranges should fail or be forwarded sooner while buffers are full or
    /// another client reads slowly
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "10s")]
    pub stream_max_wait: Duration,

    /// Time that a RangeStream from etcd is kept open for the next page of a list
    ///
    /// When to change it: clients need longer between two pages
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "75s")]
    pub series_ttl: Duration,

    /// Answer to reads of a mirror that is loading, lost its watch or is too late: etcd's, or Unavailable at once
    ///
    /// When to change it: `fail` if etcd cannot carry what the mirrors carry: reads of a mirror that is loading,
    /// lost its watch or is too late end with `Unavailable` at once, with `RetryInfo` (1 s), as KEP-2340 has it
    #[arg(long, value_name = "WHAT", value_enum, default_value_t = WhenBehind::Forward)]
    pub when_behind: WhenBehind,
}

/// Answer to reads of a mirror that is behind etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WhenBehind {
    /// Forwarded, within the bounds
    Forward,
    /// Refused with Unavailable, so that etcd gets none of them
    Fail,
}

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
    ///
    /// When to change it: `off` to forward every watch: etcd then sends each event once per watcher
    #[arg(long = "watch-cache", value_name = "MODE", value_enum, default_value = "auto")]
    pub cache: WatchCache,

    /// Interval of the progress notifications of a watch that asked for them
    ///
    /// When to change it: clients rely on another interval; etcd's own default is 10 minutes
    #[arg(
        long = "watch-progress-notify-interval",
        value_name = "DURATION",
        value_parser = parse_duration,
        default_value = "5s"
    )]
    pub progress_notify_interval: Duration,

    /// Memory for watches served from memory: streams, watchers, and events on their way to slow clients; further
    /// streams are forwarded [default: 64MiB, at most a sixteenth of the memory limit]
    ///
    /// When to change it: more than about 10,500 watch streams, or clients that read large events slowly
    #[arg(long = "watch-max-bytes", value_name = "BYTES", value_parser = parse_bytes)]
    pub max_bytes: Option<u64>,
}

impl WatchConfig {
    /// Whether memory serves watches.
    #[must_use]
    pub fn is_from_memory(&self) -> bool {
        self.cache == WatchCache::Auto
    }

    /// Bound on the memory of watches from memory: the flag, otherwise 64 MiB, at most a sixteenth of the memory limit.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.max_bytes
            .unwrap_or_else(|| default_watch_bytes(memory::limit_bytes()))
    }
}

/// Default of `--watch-max-bytes` with a memory limit of `memory_bytes`.
pub fn default_watch_bytes(memory_bytes: u64) -> u64 {
    MAX_DEFAULT_WATCH_BYTES.min(memory_bytes / 16)
}
