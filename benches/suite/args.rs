//! What the suite is asked to do, from its arguments and environment.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};

/// What `--help` prints.
pub(crate) const HELP: &str = "\
The benchmark suite: etcd, etcd's grpc-proxy, rangecache and a canned server (the floor), driven in turns.

  cargo bench --bench suite -- [CASES=P1,P5] [--rounds N] [--json FILE] [--svg DIR] [--no-fsync]
  cargo bench --bench suite -- soak  [--seconds N]
  cargo bench --bench suite -- fleet [--rounds N]
  cargo bench --bench suite -- tracing [--rounds N]

  CASES=…        only these cases (P1 to P9, P11 to P20, STREAMS), also from the environment; all by default
  --rounds N     rounds of every target in turn (default 5, also ROUNDS in the environment)
  --json FILE    also writes every number of every round to FILE
  --svg DIR      also draws the ratios and the growth into DIR
  --no-fsync     etcd runs with --unsafe-no-fsync, to tell the disk's share of a PUT
  --seconds N    how long the soak lasts (default 600)

etcd is target/tools/etcd-3.7, built by `make tools`; ETCD_3_7 names another one, RANGECACHE another rangecache.
";

/// Which part of the suite runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// The cases of the table.
    Cases,
    /// A long mixed load, watching memory and descriptors.
    Soak,
    /// Many rangecaches before one etcd.
    Fleet,
    /// What tracing costs a read from memory.
    Tracing,
    /// The canned server, started by the suite itself in a process of its own.
    Canned,
    /// Only say how to use it.
    Help,
}

/// The parsed arguments.
#[derive(Clone, Debug)]
pub(crate) struct Args {
    /// Which part runs.
    pub(crate) mode: Mode,
    /// The chosen cases in upper case; empty means all.
    pub(crate) cases: Vec<String>,
    /// How often every target is driven in turn.
    pub(crate) rounds: usize,
    /// How long the soak lasts.
    pub(crate) seconds: u64,
    /// Where the raw numbers go.
    pub(crate) json: Option<PathBuf>,
    /// Where the drawings go.
    pub(crate) svg: Option<PathBuf>,
    /// Whether etcd skips fsync.
    pub(crate) no_fsync: bool,
    /// The server that the canned server records from (its mode only).
    pub(crate) upstream: Option<String>,
}

/// The cases that there are.
const KNOWN: [&str; 20] = [
    "P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8", "P9", "P11", "P12", "P13", "P14", "P15", "P16", "P17",
    "P18", "P19", "P20", "STREAMS",
];

impl Args {
    /// Reads the process's arguments and the variables `CASES` and `ROUNDS`.
    pub(crate) fn from_process() -> Result<Self> {
        let mut args = Args {
            mode: Mode::Cases,
            cases: Vec::new(),
            rounds: 5,
            seconds: 600,
            json: None,
            svg: None,
            no_fsync: false,
            upstream: None,
        };
        if let Ok(cases) = std::env::var("CASES") {
            args.set_cases(&cases)?;
        }
        if let Ok(rounds) = std::env::var("ROUNDS")
            && !rounds.is_empty()
        {
            args.rounds = rounds.parse().context("ROUNDS is not a number")?;
        }
        let mut words = std::env::args().skip(1);
        while let Some(word) = words.next() {
            let mut value = || words.next().with_context(|| format!("{word} needs a value"));
            match word.as_str() {
                // Cargo adds this one to every benchmark.
                "--bench" => {}
                "soak" => args.mode = Mode::Soak,
                "fleet" => args.mode = Mode::Fleet,
                "tracing" => args.mode = Mode::Tracing,
                "canned" => args.mode = Mode::Canned,
                "--help" | "-h" => args.mode = Mode::Help,
                "--rounds" => args.rounds = value()?.parse().context("--rounds needs a number")?,
                "--seconds" => args.seconds = value()?.parse().context("--seconds needs a number")?,
                "--json" => args.json = Some(value()?.into()),
                "--svg" => args.svg = Some(value()?.into()),
                "--no-fsync" => args.no_fsync = true,
                "--upstream" => args.upstream = Some(value()?),
                other => match other.strip_prefix("CASES=") {
                    Some(cases) => args.set_cases(cases)?,
                    None => bail!("unknown argument {other}\n\n{HELP}"),
                },
            }
        }
        if args.rounds == 0 {
            bail!("--rounds must be at least 1");
        }
        Ok(args)
    }

    fn set_cases(&mut self, list: &str) -> Result<()> {
        self.cases = list
            .split([',', ' '])
            .filter(|case| !case.is_empty())
            .map(str::to_uppercase)
            .collect();
        for case in &self.cases {
            if !KNOWN.contains(&case.as_str()) {
                bail!("unknown case {case}; there are {}", KNOWN.join(", "));
            }
        }
        Ok(())
    }

    /// Whether any of these cases was asked for.
    pub(crate) fn wants(&self, cases: &[&str]) -> bool {
        self.cases.is_empty()
            || cases
                .iter()
                .any(|case| self.cases.iter().any(|wanted| wanted == case))
    }
}
