//! Flags about the clients of the proxy.

use clap::Args;

use rangecache_base::flags::parse_bytes;

/// Figures about clients, and bounds on single ones.
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

    /// Calls of one client in flight, apart from watches and other endless calls; more wait, up to 10 s and 256 of
    /// them, and are then refused with ResourceExhausted; 0 for no bound
    ///
    /// When to change it: one client has so many calls in flight that others wait; watches, keepalives and other
    /// endless calls do not count
    #[arg(long = "client-max-calls", value_name = "N", default_value_t = 0)]
    pub client_max_calls: u32,

    /// Bytes of responses to one client per second; further responses and calls wait, up to 10 s; at least 128KiB, or 0
    /// for no bound
    ///
    /// When to change it: one client takes the bandwidth or the CPU time of the others; at least 128 KiB
    #[arg(
        long = "client-max-bytes-per-second",
        value_name = "BYTES",
        value_parser = parse_rate,
        default_value = "0"
    )]
    pub client_max_bytes_per_second: u64,

    /// Reads of whole ranges of one client that etcd answers at once; more wait, up to 10 s and 256 of them, and are
    /// then refused with ResourceExhausted; 0 for no bound
    ///
    /// When to change it: one client's lists that memory cannot answer keep etcd busy
    #[arg(long = "client-max-forwarded-lists", value_name = "N", default_value_t = 0)]
    pub client_max_forwarded_lists: u32,

    /// Open Watch streams of one client; more are refused with ResourceExhausted; 0 for no bound
    ///
    /// When to change it: one client leaks Watch streams
    #[arg(long = "client-max-watches", value_name = "N", default_value_t = 0)]
    pub client_max_watches: u32,
}

/// Lowest bound on bytes per second: one piece of a response.
const MIN_BYTES_PER_SECOND: u64 = 128 << 10;

/// Parses a number of bytes per second, or 0.
fn parse_rate(text: &str) -> Result<u64, String> {
    match parse_bytes(text)? {
        rate if rate == 0 || rate >= MIN_BYTES_PER_SECOND => Ok(rate),
        _ => Err("write at least 128KiB, or 0 for no bound".to_owned()),
    }
}
