//! Flags of the mirrors: which keys are kept in memory, and for how long.

use std::{path::PathBuf, time::Duration};

use clap::{Args, ValueEnum};
use rangecache_base::flags::{parse_bytes, parse_duration};
use rangecache_base::memory::{self, MemoryLimit};
use rangecache_base::net::Url;

/// Memory that the program, its connections and its buffers need in the smallest container, in bytes.
const OTHER_BYTES: u64 = 128 << 20;

/// Mirrored prefixes, memory and freshness.
#[derive(Args, Debug, Clone)]
#[command(next_help_heading = "Mirrors")]
pub struct MirrorConfig {
    /// Prefix of the keys to mirror; repeat for more than one [default: the whole keyspace]
    ///
    /// When to change it: to mirror only prefixes that are listed and read
    #[arg(long, value_name = "PREFIX", value_delimiter = ',')]
    pub cache_prefix: Vec<String>,

    /// Prefix of keys to leave out of the mirrors; repeat for more than one
    ///
    /// When to change it: to leave out large prefixes that are rarely read, such as `/registry/events/`
    #[arg(long, value_name = "PREFIX", value_delimiter = ',')]
    pub no_cache_prefix: Vec<String>,

    /// Memory for all mirrors and their history; what does not fit is packed, then values of whole prefixes are left to etcd
    /// [default: three quarters of the container's or unit's memory limit beyond 128 MiB, without a limit a quarter of the machine's
    /// memory]
    ///
    /// When to change it: other processes share the limit
    #[arg(long = "cache-max-bytes", value_name = "BYTES", value_parser = parse_bytes)]
    pub cache_max_bytes: Option<u64>,

    /// When values are compressed in memory: `auto`, from three quarters of `--cache-max-bytes` on, first those that are not
    /// read; `always`, as they are loaded, and again some time after they were written; or `never`, and a mirror that does not fit is
    /// disabled
    ///
    /// When to change it: `always` if memory is scarcer than CPU: objects that are text or protobuf take half of it or less,
    /// and each 16 KB that are read take some microseconds more (docs/operations.md#how-much-memory)
    #[arg(long = "cache-pack", value_name = "WHEN", value_enum, default_value_t = CachePack::Auto)]
    pub cache_pack: CachePack,

    /// Rangecaches that are asked for their keys at the start, which are compared with etcd before they are served: sidecars of the
    /// same etcd, or the process that this one replaces, such as `unix:///run/rangecache.sock`; TLS is as towards etcd
    ///
    /// When to change it: rarely, because the comparison costs etcd what a load costs
    /// (docs/operations.md#a-start-from-a-neighbour)
    #[arg(long, value_name = "URL,…", value_delimiter = ',')]
    pub warm_from: Vec<Url>,

    /// Folder for images of the mirrors, which this user alone may read: a start reads its keys from there, and from etcd what
    /// has changed since. Without it nothing is written to a disk
    ///
    /// When to change it: a start or an update should not read all of etcd, and the node has room for it
    /// (docs/operations.md#images-on-the-disk)
    #[arg(long, value_name = "FOLDER")]
    pub image_dir: Option<PathBuf>,

    /// Size of all images together, those that are being replaced included; a tenth of the disk stays free in any case
    ///
    /// When to change it: the disk has less room, or the mirrors are larger
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "32GiB")]
    pub image_max_bytes: u64,

    /// Rate at which an image is written as a whole
    ///
    /// When to change it: less if the disk is slow and etcd's own
    #[arg(long, value_name = "BYTES", value_parser = parse_rate, default_value = "64MiB")]
    pub image_max_bytes_per_second: u64,

    /// File whose first line has 64 hexadecimal digits, the key by which images are encrypted (AES-256-GCM)
    ///
    /// When to change it: what etcd holds must not be on the disk in plain text
    #[arg(long, value_name = "FILE")]
    pub image_key_file: Option<PathBuf>,

    /// Age up to which past revisions are answered from memory
    ///
    /// When to change it: paged lists take longer, or etcd compacts less often
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "10m")]
    pub history_max_age: Duration,

    /// Memory for past revisions, per mirror; the oldest are dropped first
    ///
    /// When to change it: less with little memory; more with many modifications and pages that must stay readable
    #[arg(long, value_name = "BYTES", value_parser = parse_bytes, default_value = "256MiB")]
    pub history_max_bytes: u64,

    /// Time limit for proving that memory is fresh; the read is forwarded after it (the caller's own timeout also
    /// applies)
    ///
    /// When to change it: shorter if a read should go to etcd instead of waiting for a mirror that lags
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "3s")]
    pub freshness_timeout: Duration,

    /// Age up to which serializable reads, and reads at a past revision that memory has, are answered from memory while no
    /// member of etcd answers; 0s disables it. The metadata rangecache-age-ms of such a response has the age
    ///
    /// When to change it: clients prefer old data, marked with their age, to errors while no member of etcd
    /// answers: what is served (docs/consistency.md#while-no-member-answers); `0s` disables it
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "0s")]
    pub serve_stale: Duration,

    /// Interval at which every mirror is compared with etcd in the background; 0s disables it
    ///
    /// When to change it: `0s` disables verification (docs/operations.md#verification)
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "10m")]
    pub verify_interval: Duration,

    /// Prefixes of two parts, such as /registry/pods/, with metrics of their own (rangecache_prefix_…), those that cost
    /// most; 0 for none, which also leaves them out of the status page
    ///
    /// When to change it: more prefixes of two parts, such as `/registry/pods/`, should have metrics and a row on
    /// the page; `0` for none, if not even prefixes of keys may be seen there
    #[arg(
        long = "prefix-metrics-top",
        value_name = "N",
        default_value_t = 20,
        value_parser = clap::value_parser!(u32).range(..=1_000)
    )]
    pub prefix_metrics_top: u32,
}

/// When values are compressed in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CachePack {
    /// From three quarters of `--cache-max-bytes` on.
    Auto,
    /// When they are loaded, and some time after they were written.
    Always,
    /// Never.
    Never,
}

/// Bytes per second, at least one.
fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        0 => Err("at least one byte per second is needed".to_owned()),
        bytes => Ok(bytes),
    }
}

impl MirrorConfig {
    /// Bound on all mirrors in bytes.
    #[must_use]
    pub fn max_bytes(&self) -> u64 {
        self.cache_max_bytes
            .unwrap_or_else(|| default_cache_bytes(memory::limit()))
    }
}

/// Default of `--cache-max-bytes`: three quarters of the limit beyond [`OTHER_BYTES`], and a quarter of a very small one. A quarter of a
/// machine, on which etcd may run, too.
pub fn default_cache_bytes(limit: MemoryLimit) -> u64 {
    match limit {
        MemoryLimit::Group(bytes) => (bytes.saturating_sub(OTHER_BYTES) / 4 * 3).max(bytes / 4),
        MemoryLimit::Machine(bytes) => bytes / 4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cache_takes_three_quarters_of_a_limit_and_a_quarter_of_a_machine() {
        for (limit, expected) in [
            (MemoryLimit::Group(2 << 30), 1_440 << 20),
            (MemoryLimit::Group(64 << 20), 16 << 20),
            (MemoryLimit::Machine(24 << 30), 6 << 30),
        ] {
            assert_eq!(default_cache_bytes(limit), expected, "{limit:?}");
        }
    }
}
