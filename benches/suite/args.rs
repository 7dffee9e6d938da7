//! Command line of the suite.

use std::path::PathBuf;

use clap::{Parser, Subcommand};

/// The cases of the table.
const CASES: [&str; 30] = [
    "P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P10", "P11", "P12", "P13", "P14", "P15", "P16",
    "P17", "P18", "P19", "P20", "P21", "P22", "P23", "P24", "P25", "P26", "P27", "STREAMS", "PAST", "JSON",
];

const EXAMPLES: &str = "\
Examples:
  cargo bench --bench suite                                  every case, about a quarter of an hour
  cargo bench --bench suite -- CASES=P1,P5 --rounds 7        two cases, seven rounds each
  cargo bench --bench suite -- --json out.json --svg docs    raw figures and drawings
  cargo bench --bench suite -- CASES=P5 --baseline ./old     what has a change brought?
  cargo bench --bench suite -- soak --seconds 600            does memory grow over time?
  cargo bench --bench suite -- churn --seconds 600           does the history's bound hold?
  cargo bench --bench suite -- scarce [--random]             what do reads cost if values do not fit?
  cargo bench --bench suite -- gap                           what does a reload after a compaction cost?
  cargo bench --bench suite -- writes                        what do writes to the leader save?
  cargo bench --bench suite -- watch-soak --minutes 10       does every watcher get every event?
  cargo bench --bench suite -- fleet                         1 to 32 rangecaches before one etcd, and behind a hub
  cargo bench --bench suite -- fleet-load                    16 rangecaches load at once
  cargo bench --bench suite -- tracing --rounds 15           what tracing costs a read from memory
  cargo bench --bench suite -- instructions --baseline ./old what does a change cost, whatever else runs here?

etcd is target/tools/etcd-3.7, built by `make tools`. The environment variable ETCD_3_7 names
another etcd, and RANGECACHE another rangecache.";

/// Benchmarks of rangecache against etcd, etcd's grpc-proxy and a replay server, which is the floor: no server can be faster.
#[derive(Clone, Debug, Parser)]
#[command(name = "suite", bin_name = "cargo bench --bench suite --", after_help = EXAMPLES, max_term_width = 110)]
pub(crate) struct Args {
    /// Measure something other than the cases.
    #[command(subcommand)]
    pub(crate) mode: Option<Mode>,
    /// Run only these cases, P1 to P27, STREAMS, PAST and JSON [default: all]
    #[arg(value_name = "CASES=P1,P5", value_parser = parse_cases_argument)]
    cases_argument: Option<CaseList>,
    /// Run only these cases, given as an option or by the environment
    #[arg(long = "cases", value_name = "LIST", env = "CASES", hide_short_help = true, value_parser = parse_cases)]
    cases: Option<CaseList>,
    /// Measure every target this many times, in turns
    #[arg(long, env = "ROUNDS", default_value = "5", value_parser = parse_rounds, global = true)]
    pub(crate) rounds: usize,
    /// Measure P1 to P8, P13 and P14 a second time, with this many watchers open
    #[arg(long = "watchers", value_name = "NUMBER", env = "WATCHERS", default_value = "0", value_parser = parse_watchers)]
    pub(crate) watchers_beside: usize,
    /// Write every number of every round to this file, too
    #[arg(long, value_name = "FILE", global = true)]
    pub(crate) json: Option<PathBuf>,
    /// Draw the ratios and the growth into this folder, too
    #[arg(long, value_name = "DIR", global = true)]
    pub(crate) svg: Option<PathBuf>,
    /// Start etcd with --unsafe-no-fsync, to separate the disk's share of a PUT
    #[arg(long, global = true)]
    pub(crate) no_fsync: bool,
    /// Start every rangecache with these flags, too, separated by spaces
    #[arg(
        long,
        value_name = "FLAGS",
        allow_hyphen_values = true,
        default_value = "",
        global = true
    )]
    pub(crate) rangecache_flags: String,
    /// Measure this other build of rangecache in the same rounds, too, in the cases that compare the targets in turns
    #[arg(long, value_name = "BINARY", global = true)]
    pub(crate) baseline: Option<PathBuf>,
    /// Added by cargo to every benchmark
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

/// Measurements other than the table of cases.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Mode {
    /// Send a long mixed load, and watch memory and file descriptors
    Soak {
        /// Duration of the load
        #[arg(long, default_value_t = 600)]
        seconds: u64,
    },
    /// Replace objects faster than the history's bound allows it to keep them, and watch memory
    Churn {
        /// Duration of the puts
        #[arg(long, default_value_t = 600)]
        seconds: u64,
    },
    /// Read objects that take several times the memory for them
    Scarce {
        /// Bytes of the objects, in millions
        #[arg(long, default_value_t = 2_000)]
        megabytes: usize,
        /// Values at random, which do not shrink by packing; one of five is read
        #[arg(long)]
        random: bool,
        /// Instead of several budgets: without a bound, and in a control group with this memory limit and the default budget
        #[arg(long, value_name = "MIB")]
        container_mib: Option<u64>,
    },
    /// Cut rangecache off while keys change and etcd compacts, and measure the reload
    Gap {
        /// Bytes of the values, in millions
        #[arg(long, default_value_t = 1_500)]
        megabytes: usize,
        /// Size of each value
        #[arg(long, default_value_t = 10_000)]
        value_bytes: usize,
    },
    /// Write to three members, directly and through rangecache with each value of --writes-to
    Writes {
        /// Rate of the writes
        #[arg(long, default_value_t = 1_000)]
        per_second: u32,
    },
    /// Open thousands of watchers while members, feeds and clients fail, and compare what each gets with etcd's history
    WatchSoak {
        /// Duration of the load
        #[arg(long, default_value_t = 10.0)]
        minutes: f64,
        /// Watchers, on 50 ranges; the client takes about as much CPU for each event as rangecache
        #[arg(long, default_value_t = 10_000)]
        watchers: usize,
    },
    /// Start 1, 4 and 16 rangecaches in front of one etcd
    Fleet,
    /// Start many rangecaches in front of one cluster at once, and measure its other clients while all of them load
    FleetLoad(FleetLoad),
    /// Measure what tracing costs a read from memory
    Tracing,
    /// Send the mix of calls from which the compiler learns (make pgo)
    Train,
    /// Count instructions of GETs, PUTs and LISTs (valgrind), and system calls of LISTs (strace): also beside other load
    Instructions,
    /// Run the replay server; the suite starts it itself, in a process of its own
    #[command(hide = true)]
    ReplayServer {
        /// Address of the server whose responses are recorded
        #[arg(long)]
        upstream: std::net::SocketAddr,
    },
}

/// Size of a fleet, and of what each of its rangecaches loads.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct FleetLoad {
    /// Rangecaches that start at once
    #[arg(long, default_value_t = 16)]
    pub(crate) sidecars: usize,
    /// Members of the cluster
    #[arg(long, default_value_t = 3)]
    pub(crate) members: usize,
    /// Bytes that each rangecache loads, in millions
    #[arg(long, default_value_t = 500)]
    pub(crate) megabytes: usize,
    /// Size of each value
    #[arg(long, default_value_t = 10_000)]
    pub(crate) value_bytes: usize,
    /// Reads of the other client, spread over the members
    #[arg(long, default_value_t = 500)]
    pub(crate) gets_per_second: u32,
    /// Sources of their keys; a neighbour and a hub run and are ready before
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = [LoadSource::Etcd, LoadSource::Neighbour, LoadSource::Hub])]
    pub(crate) from: Vec<LoadSource>,
}

/// Source of the keys of a fleet.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum LoadSource {
    /// The members.
    Etcd,
    /// A rangecache beside them, named by `--warm-from`.
    Neighbour,
    /// A rangecache, their only endpoint.
    Hub,
}

/// Names of cases in upper case; empty means all.
#[derive(Clone, Debug, Default)]
struct CaseList(Vec<String>);

fn parse_cases_argument(text: &str) -> Result<CaseList, String> {
    let list = text
        .strip_prefix("CASES=")
        .ok_or("expected CASES= and a list, such as CASES=P1,P5; --help lists the commands")?;
    parse_cases(list)
}

fn parse_cases(list: &str) -> Result<CaseList, String> {
    let cases: Vec<String> = list
        .split([',', ' '])
        .filter(|case| !case.is_empty())
        .map(str::to_uppercase)
        .collect();
    match cases.iter().find(|case| !CASES.contains(&case.as_str())) {
        Some(unknown) => Err(format!("unknown case {unknown}; there are {}", CASES.join(", "))),
        None => Ok(CaseList(cases)),
    }
}

/// An empty text counts as the default: `make bench` exports its variables even if they are not set.
fn parse_rounds(text: &str) -> Result<usize, String> {
    match text {
        "" => Ok(5),
        text => match text.parse() {
            Ok(0) | Err(_) => Err("expected a number of at least 1".to_owned()),
            Ok(rounds) => Ok(rounds),
        },
    }
}

/// An empty text counts as the default, as for rounds.
fn parse_watchers(text: &str) -> Result<usize, String> {
    match text {
        "" => Ok(0),
        text => text.parse().map_err(|_| "expected a number".to_owned()),
    }
}

impl Args {
    /// Whether any of these cases is to run.
    pub(crate) fn wants(&self, cases: &[&str]) -> bool {
        let list = self.cases_argument.as_ref().or(self.cases.as_ref());
        list.is_none_or(|list| {
            list.0.is_empty()
                || cases
                    .iter()
                    .any(|case| list.0.iter().any(|wanted| wanted == case))
        })
    }
}
