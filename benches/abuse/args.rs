//! Command line of the abuse run.

use std::time::Duration;

use clap::{Args as ClapArgs, Parser, Subcommand, ValueEnum};

const EXAMPLES: &str = "\
Examples:
  make abuse                                             every behaviour for a minute, about 31 minutes
  make abuse SECONDS=10 BEHAVIOURS=ping-flood,unread-lists
  RANGECACHE=/path/to/binary make abuse                  another build of rangecache
  make abuse BEHAVIOURS=list-everything ABUSE_ARGS=--direct
                                                         what the clients of etcd itself notice

etcd is target/tools/etcd-3.7, built by `make tools`.";

/// Misbehaves towards rangecache in every known way, next to an honest client, and prints what it cost.
#[derive(Debug, Parser)]
#[command(name = "abuse", bin_name = "cargo bench --bench abuse --", after_help = EXAMPLES, max_term_width = 110)]
pub(crate) struct Args {
    #[command(subcommand)]
    pub(crate) mode: Option<Mode>,
    /// Duration of each behaviour in seconds
    #[arg(long, env = "SECONDS", default_value = "60", value_parser = parse_seconds)]
    pub(crate) seconds: Duration,
    /// Measure only these behaviours, separated by commas [default: all, and all together]
    #[arg(long, env = "BEHAVIOURS", value_delimiter = ',', value_parser = parse_behaviour)]
    pub(crate) behaviours: Vec<Option<Behaviour>>,
    /// Measure all behaviours together and none alone
    #[arg(long, conflicts_with = "behaviours")]
    pub(crate) together: bool,
    /// Connections that the misbehaving client opens, where the behaviour is not about their number
    #[arg(long, default_value_t = 25)]
    pub(crate) connections: usize,
    /// Memory cap of rangecache in MiB
    #[arg(long, default_value_t = 512)]
    pub(crate) memory_mib: u64,
    /// For comparison: all clients call etcd itself
    #[arg(long)]
    pub(crate) direct: bool,
    /// Added by cargo to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Mode {
    /// Misbehave until killed; started by the run itself, in a process of its own
    #[command(hide = true)]
    Attack(Attack),
}

/// Attacks of a misbehaving process, and their targets.
#[derive(Debug, ClapArgs)]
pub(crate) struct Attack {
    /// Behaviours, all at once
    #[arg(long, required = true, value_delimiter = ',')]
    pub(crate) behaviours: Vec<Behaviour>,
    /// Address of the plaintext client listener
    #[arg(long)]
    pub(crate) client: String,
    /// Address of the TLS client listener
    #[arg(long)]
    pub(crate) tls: String,
    /// Address of the admin listener
    #[arg(long)]
    pub(crate) admin: String,
    /// Connections of each behaviour
    #[arg(long)]
    pub(crate) connections: usize,
}

/// Misuse of a server by a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Behaviour {
    /// Calls held open with 12 KiB of headers each, sent as references of one byte to HPACK's table
    HeaderBlocks,
    /// Calls held open with 1 MiB of headers each, sent as references of one byte to HPACK's table
    HugeHeaderBlocks,
    /// Watches held open with 240 header fields each, sent as references of one byte to HPACK's table
    WatchHeaders,
    /// Ranges of which 64 KiB are sent and the end never
    UnfinishedRanges,
    /// Puts of which 64 KiB are sent and the end never
    UnfinishedPuts,
    /// Forwarded values of 1 MB of which nothing is read
    UnreadValues,
    /// Forwarded lists of which nothing is read
    UnreadLists,
    /// Forwarded RangeStreams of which nothing is read
    UnreadStreams,
    /// Lists of which two pages are read, and the third is never requested
    AbandonedPages,
    /// Lists from memory read at a kilobyte a second, while every value is overwritten
    SlowSnapshots,
    /// Watches of which nothing is read
    UnreadWatches,
    /// Watches that may send nothing and fill the receive windows of hundreds of connections
    StuckWindows,
    /// Calls reset as soon as they are sent
    ResetFlood,
    /// HTTP/2 pings
    PingFlood,
    /// HTTP/2 settings
    SettingsFlood,
    /// Filtered and sorted lists from memory of which nothing is read
    UnreadScans,
    /// Filtered and sorted reads of a hundred thousand keys from memory, fifteen at a time on each of sixteen connections
    Scans,
    /// Thousands of connections that send nothing
    SilentConnections,
    /// Thousands of TLS connections that send nothing
    MuteHandshakes,
    /// Thousands of TLS connections whose first message of 48 KB never ends
    HalfHellos,
    /// Thousands of HTTP/1 connections whose request's head of 60 KB never ends
    HalfHeads,
    /// HTTP/1 requests whose body never ends
    UnfinishedHttp1,
    /// A thousand WebSockets with a watch each
    WebSockets,
    /// Bursts of a thousand HTTP/1 requests to etcd's health page, one each second
    Http1Bursts,
    /// Unfinished requests to the admin port, and its pages requested without pause
    AdminPort,
    /// Requests to the admin port whose connections are closed before they are answered
    AbandonedAdmin,
    /// Pages of the admin port of which nothing is read
    UnreadAdmin,
    /// Lists of all keys, from memory and from etcd, without pause, by one client next to a hundred honest ones
    ListEverything,
}

/// An empty text, as `make` exports it, selects nothing.
fn parse_behaviour(text: &str) -> Result<Option<Behaviour>, String> {
    if text.is_empty() {
        return Ok(None);
    }
    Behaviour::from_str(text, true).map(Some)
}

/// An empty text counts as the default: `make abuse` exports its variables even if they are not set.
fn parse_seconds(text: &str) -> Result<Duration, String> {
    match text {
        "" => Ok(Duration::from_secs(60)),
        text => match text.parse() {
            Ok(0) | Err(_) => Err("expected a number of at least 1".to_owned()),
            Ok(seconds) => Ok(Duration::from_secs(seconds)),
        },
    }
}

impl Behaviour {
    /// The behaviour's name on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value()
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default()
    }
}
